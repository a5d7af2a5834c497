"""A row's gradient as a vector: against plain autograd of sum w · A · log pi, and the reference's entries."""

import math
from dataclasses import replace
from typing import cast

import pytest
import torch
from peft import PeftModel

from mmrl.audit.gradients import Reference, gradient, length_unit, reference_calls
from mmrl.config.algo import ALGO_SCHEMAS
from mmrl.trainer.adapters import Adapters
from tests.helpers.forests import Grow
from tests.helpers.trainer_cases import (
    LORA,
    changed,
    gradients,
    make_calls,
    make_trainer,
    sampled,
    tiny_model,
    train_entry,
    weights_of,
    with_changes,
    without_advantage,
)

TWO = Adapters(by_module={"a": "alpha", "b": "beta"}, rates={})


def stir(trainer):
    """Give adapters inner weights: at their start, half of all gradients are 0."""
    torch.manual_seed(3)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)


def uneven(calls):
    """Advantages and weights that differ from token to token, and a second entry of the first call."""
    found = []
    for number, train in enumerate(calls):
        tokens = len(train.call.completion_ids)
        advantages = tuple(math.sin(number + 3 * t) for t in range(tokens))
        weights = tuple(0.1 + 0.05 * ((number + t) % 4) for t in range(tokens))
        found.append(with_changes(train, entries=(train_entry(advantages, weights),)))
    return [with_changes(found[0], entries=found[0].entries * 2), *found[1:]]


def plain(trainer, calls, named, temperature=1.0):
    """The gradient of sum w · A · log pi in `named` weights, one forward for each call, nothing of the trainer's."""
    model = trainer.model.eval()
    total = torch.zeros(())
    for train in calls:
        call = train.call
        if trainer.adapters is not None:
            model.set_adapter(trainer.adapters.by_module[call.module])
            for weight in named:
                weight.requires_grad_(True)
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        rows = torch.log_softmax(model(input_ids=ids).logits[0].float() / temperature, dim=-1)
        start = len(call.prompt_ids)
        for entry in train.entries:
            for t, token in enumerate(call.completion_ids):
                total = total + entry.weights[t] * entry.advantages[t] * rows[start + t - 1, token]
    grads = torch.autograd.grad(total, named, allow_unused=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for w, g in zip(named, grads, strict=True)])


def assert_same(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert float(expected.norm()) > 0.01
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("packing", ["trie", "padded"])
@pytest.mark.parametrize("weights", ["full", "lora", "modules"])
def test_gradient_is_that_of_the_weighted_log_likelihood(weights, packing, tmp_path):
    """KL term, clipping, truncated importance sampling and what the sampler recorded have no part in it."""
    trainer = make_trainer(
        tmp_path,
        lora=None if weights == "full" else LORA,
        adapters=TWO if weights == "modules" else None,
        algo={"beta": 0.2, "clip": 0.01, "temperature": 0.7},
        packing=packing,
        tis=1.1,
        old_logprobs="recompute",
    )
    trainer.forwards.budget = trainer.forwards.max_tokens = 32  # several packs
    stir(trainer)
    calls = uneven(make_calls(6))
    before = weights_of(trainer)
    found = gradient(trainer.forwards, calls)
    assert all(weight.grad is None for weight in trainer.model.parameters()) and not trainer.model.training
    assert not changed(before, weights_of(trainer))
    if weights == "modules":
        named = [w for name in ("alpha", "beta") for w in TWO.parameters(cast(PeftModel, trainer.model), name).values()]
    else:
        named = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert_same(found, plain(trainer, calls, named, 0.7))
    assert torch.equal(gradient(trainer.forwards, calls), found), "deterministic"


def test_shared_beginnings_are_no_different_from_rows_of_their_own(tmp_path):
    """Turns that go on from one another and equal calls of several rollouts lie in one trie."""
    first, second = make_calls(2)
    longer = with_changes(second, prompt_ids=first.call.prompt_ids + first.call.completion_ids + (5, 6), id="longer")
    calls = uneven([first, with_changes(first, id="again"), longer])
    trainer = make_trainer(tmp_path)
    whole = gradient(trainer.forwards, calls)
    assert_same(whole, sum(gradient(trainer.forwards, [train]) for train in calls))


@pytest.mark.parametrize("kind", ["clip", "cispo", "gspo"])
def test_gradient_is_minus_the_updates_where_its_ratio_is_one(kind, tmp_path):
    trainer = make_trainer(tmp_path, algo={"loss": kind})
    calls = [with_changes(train, logprobs=None) for train in uneven(make_calls(6))]
    found = gradient(trainer.forwards, calls)
    _, update = gradients(trainer, calls)
    assert_same(found, -torch.cat([part.flatten() for part in update.values()]), 1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_adapters_is_off_and_checkpointing_changes_nothing(checkpointing, tmp_path):
    noisy = make_trainer(tmp_path / "noisy", lora=LORA.model_copy(update={"dropout": 0.5}), checkpointing=checkpointing)
    still = make_trainer(tmp_path / "still", lora=LORA)
    for trainer in (noisy, still):
        stir(trainer)
    calls = make_calls(4)
    assert_same(gradient(noisy.forwards, calls), gradient(still.forwards, calls))


def test_checkpointing_keeps_less(tmp_path):
    """Layers are computed again in the backward pass: each is called twice."""
    seen = []
    for checkpointing in (False, True):
        trainer = make_trainer(tmp_path / str(checkpointing), tiny_model("llama"), checkpointing=checkpointing)
        trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda module, _: seen.append(module))
        gradient(trainer.forwards, make_calls(1))
        assert seen.count(trainer.model.model.layers[0].mlp) == 1 + checkpointing


@pytest.mark.parametrize("critic", ["separate", "adapter", "head"])
def test_a_critic_has_no_part(critic, tmp_path):
    algo = ALGO_SCHEMAS["ppo"].model_validate({"name": "ppo", "critic": critic, "beta": 0.0})
    trainer = make_trainer(tmp_path / "critic", lora=LORA, algo=algo)
    alone = make_trainer(tmp_path / "alone", lora=LORA)
    calls = make_calls(4)
    trainer.forwards.values(sampled(calls))  # makes its adapter the active one for a while
    assert torch.equal(gradient(trainer.forwards, calls), gradient(alone.forwards, calls))


def test_frozen_adapters_are_no_part_of_the_vector(tmp_path):
    frozen = replace(TWO, frozen=frozenset({"beta"}))
    trainer = make_trainer(tmp_path, lora=LORA, adapters=frozen)
    assert isinstance(trainer.model, PeftModel)
    size = sum(weight.numel() for weight in TWO.parameters(trainer.model, "alpha").values())
    calls = [train for train in make_calls(6) if train.call.module == "a"]
    found = gradient(trainer.forwards, calls)
    assert len(found) == size and float(found.norm()) > 0.01


def test_calls_without_advantage_have_gradient_0(tmp_path):
    trainer = make_trainer(tmp_path)
    for calls in (without_advantage(make_calls(3)), []):
        found = gradient(trainer.forwards, calls)
        assert len(found) == sum(weight.numel() for weight in trainer.model.parameters()) and not found.any()


def rollouts(outcomes, modules=("a", "b")):
    """A rollout of all modules for each outcome of each example, and the outcomes by rollout id."""
    grow = Grow(modules)
    for example, values in outcomes.items():
        for number, outcome in enumerate(values):
            parent = None
            for position, module in enumerate(modules):
                parent = grow.call(
                    f"{example}/{number}#{position}", parent, module, 2, completion_ids=(2, 3), prompt_ids=(4,)
                )
            grow.end(parent, outcome, id=f"{example}/{number}")
    return grow.forest, {r.id: r.reward for r in grow.forest.rollouts if r.reward is not None}


def test_reference_weighs_a_rollouts_tokens_alike_and_compares_it_with_the_others():
    """(1, 0, 0): 1 less the mean of 0 and 0; 0 less that of 1 and 0, twice. Weights: 1/3 of the example's 1/2."""
    forest, outcomes = rollouts({"q0": (1.0, 0.0, 0.0), "q1": (0.5, 0.25), "q2": (1.0, None)})
    found = {train.call.id: train.entries[0] for train in reference_calls(forest, outcomes)}
    expected = {"q0/0": (1.0, 1 / 6), "q0/1": (-0.5, 1 / 6), "q0/2": (-0.5, 1 / 6)}
    expected |= {"q1/0": (0.25, 1 / 4), "q1/1": (-0.25, 1 / 4)}
    assert {(name, entry.advantages, entry.weights) for name, entry in found.items()} == {
        (f"{rollout}#{position}", (a, a), (w, w)) for rollout, (a, w) in expected.items() for position in (0, 1)
    }, "q2 has a single outcome: nothing to compare it with"
    assert {train.call.module for train in reference_calls(forest, outcomes, {"b"})} == {"a"}


def test_a_rollout_that_never_called_still_counts_as_one():
    forest, outcomes = rollouts({"q0": (1.0, 0.0)})
    never = replace(forest.rollouts[1], id="q0/2", leaf=None, reward=0.0)
    forest = replace(forest, rollouts=(*forest.rollouts, never))
    found = {train.call.id: train.entries[0] for train in reference_calls(forest, {**outcomes, "q0/2": 0.0})}
    assert found["q0/0#0"].advantages == (1.0, 1.0) and found["q0/0#0"].weights == (1 / 3, 1 / 3)
    assert found["q0/1#0"].advantages == (-0.5, -0.5)


def test_reference_keeps_blocks_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.audit.gradients._CHUNK", 3)
    torch.manual_seed(0)
    vectors, g = torch.randn(4, 8), torch.randn(8)
    reference = Reference(tmp_path / "reference", 4)
    for block in (2, 0, 3, 1):
        reference.put(block, vectors[block])
    again = Reference(tmp_path / "reference", 4)
    double = vectors.double()
    assert torch.allclose(torch.tensor(again.gram(), dtype=torch.float64), double @ double.T, rtol=1e-12)
    found = again.project(g)
    assert found.norm2 == pytest.approx(float(g.double() @ g.double()), rel=1e-12)
    assert found.products == pytest.approx((double @ g.double()).tolist(), rel=1e-12)


def test_lengths_compare_where_nothing_divides_them():
    def unit(name, **keys):
        return length_unit(ALGO_SCHEMAS[name].model_validate({"name": name, **keys}))

    constant = {"loss_mean": "constant", "loss_length": 7}
    assert unit("grpo", scale=False, **constant) == 7.0
    assert unit("ppo", whiten="none", **constant) == 7.0
    assert unit("grpo", **constant) is None, "a deviation"
    assert unit("ppo", **constant) is None, "whitening"
    assert unit("grpo", scale=False) is None, "each sequence's own length"
    assert unit("grpo", scale=False, loss_mean="constant") is None, "the longest sequence of a batch"
