"""The exact divergence from a teacher (`algo.distill_kl=exact`): beside TRL's, its laws, and what is held in memory."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3ForCausalLM

from mmrl.errors import ConfigError
from mmrl.records import Call
from mmrl.trainer import logprobs
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.teaching import require_own_logits, teach
from mmrl.trainer.trl_trainer import MmrlTrainer
from tests.helpers.trainer_cases import (
    LORA,
    SIZES,
    VOCAB,
    assert_close,
    exact_model,
    gradients,
    make_calls,
    make_trainer,
    tiny_model,
    trained,
    with_changes,
)
from tests.trainer.test_distillation import distilled

loss_utils = pytest.importorskip("trl.experimental.sdpo.loss_utils")  # parts of TRL that may move
distillation_trainer = pytest.importorskip("trl.trainer.distillation_trainer")
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits of student and teacher, (T, V) -> (T,)."""


def reverse_kl(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    size = min(ours.shape[-1], theirs.shape[-1])
    found: torch.Tensor = loss_utils.compute_full_logit_self_distillation_loss(
        ours[:, :size], theirs[:, :size], distillation_alpha=1.0
    )
    return found


def taught(calls: list[TrainCall], privileged: int = 0, coefficient: float = 1.0) -> list[TrainCall]:
    """The calls with distilled entries whose teacher reads `privileged` more tokens at the prompt's beginning.

    What the sampled tokens have gained has no part in it, so it may be anything.
    """
    draw = random.Random(3)
    gaps = [tuple(draw.uniform(-1, 1) for _ in train.call.completion_ids) for train in calls]
    more = tuple(draw.randrange(2, VOCAB) for _ in range(privileged))
    return [
        replace(train, view=replace(train.call, prompt_ids=more + train.call.prompt_ids, logprobs=None))
        for train in distilled(calls, gaps, coefficient)
    ]


def exact_trainer(folder: Path, model: Any, teacher: Any, modules: str = "a", **options: Any) -> MmrlTrainer:
    """A trainer of exact divergences, whose trained weights are no longer those that it began with."""
    algo = {"distill": dict.fromkeys(modules, teacher if isinstance(teacher, str) else "other")}
    options["algo"] = {**algo, "distill_kl": "exact", **options.get("algo", {})}
    trainer = make_trainer(folder, model, **options)
    trainer.forwards.teachers["other"] = lambda module: (teacher, False)
    move(trainer)
    return trainer


def twin_of(trainer: MmrlTrainer) -> Any:
    """A copy of the policy as it is now."""
    twin = copy.deepcopy(trainer.model)
    for part in twin.modules():
        part.__dict__.pop("forward", None)  # of an instance's own it is the original's still
    return twin


def move(trainer: MmrlTrainer, size: float = 0.1) -> None:
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.add_(size * torch.randn_like(weight))


def found(trainer: MmrlTrainer, calls: list[TrainCall]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of one update."""
    step_packs = trainer.step_packs

    def with_teachers(batch: Any) -> Any:
        minibatches = step_packs(batch)
        teach(trainer.forwards, [pack for packs in minibatches for pack in packs])
        return minibatches

    trainer.step_packs = with_teachers
    try:
        return gradients(trainer, calls)
    finally:
        trainer.step_packs = step_packs


def slow(
    model: Any, teacher: Any, calls: list[TrainCall], loss: Loss = reverse_kl, temperature: float = 1.0
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients a row at a time, the whole vocabulary at once; mean over calls of the mean over tokens."""

    def logits(part: Any, call: Call) -> torch.Tensor:
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        rows: torch.Tensor = part(ids).logits[0, len(call.prompt_ids) - 1 : -1] / temperature
        return rows

    model.zero_grad()
    total = torch.zeros((), dtype=model.dtype)
    for train in calls:
        assert train.view is not None
        with torch.no_grad():
            theirs = logits(teacher, train.view)
        total = total + loss(logits(model, train.call), theirs).mean() / len(calls)
    total.backward()
    return float(total.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("teacher", ["policy", "initial", "other"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("packing", ["trie", "padded"])
def test_loss_and_gradient_are_trls_over_the_full_vocabulary(
    packing: str, lora: Any, teacher: str, tmp_path: Path
) -> None:
    model, other = exact_model(), exact_model(seed=5)
    start = copy.deepcopy(model)
    name: Any = other if teacher == "other" else teacher
    trainer = exact_trainer(
        tmp_path, model, name, lora=lora, packing=packing, algo={"temperature": 0.7}, microbatch_tokens=64
    )
    calls = taught(make_calls(6, modules=("a",)), privileged=3)
    calls = [replace(call, entries=call.entries[1:]) for call in calls]
    twin = twin_of(trainer)
    theirs = {"policy": twin_of(trainer), "initial": start, "other": other}[teacher]
    expected, of_trl = slow(twin, theirs, calls, temperature=0.7)
    loss, ours = found(trainer, calls)
    assert loss == pytest.approx(expected, rel=1e-10) and loss > 0.01
    assert_close(ours, of_trl)
    metrics = trainer.totals.metrics(trainer.forwards.reduce)
    assert metrics["module/a/teacher_kl"] > 0.01 and "train/clip_share" not in metrics


def test_the_gradient_is_that_of_trls_distillation_trainer(tmp_path: Path) -> None:
    model, other = tiny_model(), tiny_model(seed=5)
    trainer = exact_trainer(tmp_path, model, other, algo={"temperature": 0.7, "loss_mean": "token"})
    calls = [replace(call, entries=call.entries[1:]) for call in taught(make_calls(5, modules=("a",)))]
    tokens = sum(len(call.call.completion_ids) for call in calls)
    calls = [
        with_changes(c, entries=(replace(e, weights=(1 / tokens,) * len(e.weights)),)) for c in calls for e in c.entries
    ]
    twin = twin_of(trainer)
    rows = [torch.tensor([call.call.prompt_ids + call.call.completion_ids]) for call in calls]

    def states(part: Any) -> torch.Tensor:
        kept = [part.model(ids)[0][0, len(c.call.prompt_ids) - 1 : -1] for ids, c in zip(rows, calls, strict=True)]
        return torch.cat(kept)[None]

    with torch.no_grad():
        theirs = states(other)
    heads = twin.lm_head.weight, other.lm_head.weight
    loss, *_ = distillation_trainer._chunked_divergence_loss(
        states(twin), theirs, *heads, torch.ones(1, tokens), beta=1.0, temperature=0.7
    )
    loss.backward()
    value, ours = found(trainer, calls)
    assert value == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_close(ours, {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}, 1e-5)


def test_the_exact_gradient_is_the_expectation_of_the_sampled_one(tmp_path: Path) -> None:
    """Every token that one call could have sampled, by its probability: an identity, for any two models."""
    model, other = exact_model(), exact_model(seed=5)
    prompt = (5, 9, 2)
    with torch.no_grad():
        ours, theirs = (m(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for m in (model, other))
    (base,) = make_calls(1, modules=("a",))
    each = [
        with_changes(base, id=f"c{v}", prompt_ids=prompt, completion_ids=(v,), logprobs=(float(ours[v]),), entries=())
        for v in range(VOCAB)
    ]
    sampled = distilled(each, [(float(theirs[v] - ours[v]),) for v in range(VOCAB)])
    weighted = [
        replace(call, entries=(replace(call.entries[0], weights=(float(ours[v].exp()),)),))
        for v, call in enumerate(sampled)
    ]
    plain = make_trainer(tmp_path / "sampled", copy.deepcopy(model), algo={"distill": {"a": "other"}})
    one = exact_trainer(tmp_path / "exact", model, other)
    one.model.load_state_dict(plain.model.state_dict())
    loss, exact = found(one, taught(each[:1]))
    assert_close(exact, gradients(plain, weighted)[1])
    assert loss == pytest.approx(float((ours.exp() * (ours - theirs)).sum()), rel=1e-10)


def test_worked_numbers_of_three_tokens_and_what_pads_a_vocabulary() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL = ln 2 / 4, and p (ln p/q - KL) of each token."""
    for more, of_teacher in (([], []), ([9.0], []), ([], [9.0, 2.0])):
        logits = torch.tensor([[math.log(2) + 3, 3.0, 3.0, *more]], dtype=torch.float64, requires_grad=True)
        theirs = torch.tensor([[0.0, 0.0, math.log(2), *of_teacher]], dtype=torch.float64)
        kl = logprobs.ReverseKl.apply(logits, theirs)
        assert kl.tolist() == pytest.approx([math.log(2) / 4])
        (2 * kl.sum()).backward()
        assert logits.grad is not None
        expected = [2 * math.log(2) * part for part in (0.375, -0.0625, -0.3125)]
        assert logits.grad[0].tolist() == pytest.approx([*expected, *[0.0] * len(more)])


@pytest.mark.parametrize("packing", ["trie", "padded"])
def test_vocabularies_that_are_padded_to_different_sizes(packing: str, tmp_path: Path) -> None:
    for number, (mine, theirs) in enumerate(((48, VOCAB), (VOCAB, 48))):
        model, other = exact_model(), exact_model(seed=5)
        for part, size in ((model, mine), (other, theirs)):
            part.resize_token_embeddings(size, mean_resizing=False)
        calls = [replace(call, entries=call.entries[1:]) for call in taught(make_calls(4, modules=("a",)))]
        trainer = exact_trainer(tmp_path / str(number), model, other, packing=packing)
        expected = slow(twin_of(trainer), other, calls)
        loss, ours = found(trainer, calls)
        assert loss == pytest.approx(expected[0])
        assert_close(ours, expected[1])


def test_a_teacher_that_is_the_student_teaches_nothing_within_rounding(tmp_path: Path) -> None:
    """By other matrix products, so not to the bit; the divergence itself is 0 where logits are equal."""
    logits = torch.randn(4, VOCAB, requires_grad=True)
    kl = logprobs.ReverseKl.apply(logits, logits.detach().clone())
    kl.sum().backward()
    assert logits.grad is not None and not kl.any() and not logits.grad.any()
    calls = [replace(call, entries=call.entries[1:]) for call in taught(make_calls(6, modules=("a",)))]
    for made, bound in ((exact_model, 1e-12), (tiny_model, 1e-5)):
        trainer = exact_trainer(tmp_path / made.__name__, made(), "policy")
        loss, ours = found(trainer, calls)
        assert abs(loss) < bound and all(float(g.abs().max()) < bound for g in ours.values())


@pytest.mark.parametrize("coefficient", [0.0, 0.6])
def test_it_adds_to_what_rewards_make_and_with_coefficient_0_changes_no_bit(coefficient: float, tmp_path: Path) -> None:
    plain = [with_changes(c, ref_logprobs=(-3.0,) * len(c.call.completion_ids)) for c in make_calls(6)]
    both = taught(plain, 2, coefficient)
    only = [replace(call, entries=call.entries[1:]) for call in both]

    def result(name: str, calls: list[TrainCall]) -> Any:
        options: dict[str, Any] = {"modules": "ab", "algo": {"beta": 0.2}}
        return found(exact_trainer(tmp_path / name, exact_model(), exact_model(seed=5), **options), calls)

    alone, together = result("r", plain), result("b", both)
    if coefficient:
        teacher = result("t", only)
        assert together[0] == pytest.approx(alone[0] + teacher[0])
        assert_close(together[1], {name: alone[1][name] + teacher[1][name] for name in alone[1]})
    else:
        assert together[0] == alone[0]
        assert all(torch.equal(together[1][name], value) for name, value in alone[1].items())


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # tied to the embeddings, or not
def test_the_policy_teaches_by_its_weights_before_the_first_of_several_updates(kind: str, tmp_path: Path) -> None:
    calls = [replace(call, entries=call.entries[1:]) for call in taught(make_calls(5, modules=("a",)), 3)]
    trainer = exact_trainer(tmp_path, exact_model(kind), "policy", algo={"epochs": 2}, calls=calls, selfcheck=False)
    before = twin_of(trainer)
    trainer.create_optimizer_and_scheduler(2)
    packs = []
    for item in trainer.updates():
        packs += item["update"].packs
        trainer.model.zero_grad()
        trainer.training_step(trainer.model, item)
        ours = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
        assert_close(ours, slow(twin_of(trainer), before, calls)[1])
        move(trainer, 0.02)
    assert len(packs) == 2 and not any(pack.taught for pack in packs), "none is held while the next batch is sampled"


class Widths(TorchDispatchMode):
    """Rows of every tensor over the vocabulary, whatever makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, torch.Tensor) and part.ndim and part.shape[-1] == VOCAB:
                self.rows.add(part.numel() // VOCAB)
        return result


@pytest.mark.parametrize("packing", ["trie", "padded"])
def test_no_more_logits_than_a_chunks_exist_at_once(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = taught(make_calls(12, modules=("a", "b")), 2)
    # Module b has the policy's own numbers of rewards alone: its rows stand between those of a.
    calls = [call if call.call.module == "a" else replace(call, entries=call.entries[:1], view=None) for call in calls]
    results, rows = [], []
    for size in (512, 3):
        monkeypatch.setattr(logprobs, "KL_CHUNK", size)
        trainer = exact_trainer(tmp_path / str(size), exact_model(), "policy", packing=packing)
        with Widths() as seen:
            results.append(found(trainer, calls))
        # 32: the head's weights, (VOCAB, 32), transposed.
        rows.append(max(seen.rows - {32}))
    positions = sum(len(call.call.completion_ids) for call in calls)
    assert rows == [positions, 3] and positions > 40
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    assert_close(results[1][1], results[0][1], 1e-12)


def capped() -> Any:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8, pad_token_id=0)
    ).eval()


@pytest.mark.parametrize("made", [capped, lambda: tiny_model("bloom")], ids=["capped", "never packed"])
def test_the_models_own_cap_and_layers_that_share_no_prefix(made: Any, tmp_path: Path) -> None:
    calls = [replace(call, entries=call.entries[1:]) for call in taught(make_calls(5, modules=("a",)), 3)]
    trainer = exact_trainer(tmp_path, made(), "policy")
    expected = slow(twin_of(trainer), twin_of(trainer), calls)
    loss, ours = found(trainer, calls)
    assert loss == pytest.approx(expected[0], rel=1e-4)
    assert_close(ours, expected[1], 1e-4)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_in_bfloat16_the_gradient_is_near_that_in_float32(lora: Any, tmp_path: Path) -> None:
    """Of the head, too, which makes the teacher's logits without gradient under the same autocast."""
    calls = [replace(call, entries=call.entries[1:]) for call in taught(make_calls(5, modules=("a",)), 3)]
    model = tiny_model("llama")
    trainer = exact_trainer(tmp_path, model.to(torch.bfloat16), "policy", lora=lora)
    assert trainer.accelerator.mixed_precision == "bf16"
    _, expected = slow(twin_of(trainer).float(), twin_of(trainer).float(), calls)
    _, ours = found(trainer, calls)
    assert ours.keys() == expected.keys() and ("lm_head.weight" in ours) == (lora is None)
    for name in ours:
        assert torch.cosine_similarity(ours[name].flatten(), expected[name].flatten(), dim=0) > 0.97, name


def test_dropout_is_none_of_the_teachers_and_a_run_has_the_metric(tmp_path: Path) -> None:
    calls = taught(make_calls(6), 2)
    options: dict[str, Any] = {
        "calls": calls,
        "algo": {"distill": {"a": "initial", "b": "policy"}, "distill_kl": "exact"},
    }
    first, second = (
        trained(tmp_path / name, lora=LORA.model_copy(update={"dropout": dropout}), steps=2, **options)[1][1]
        for name, dropout in (("none", 0.0), ("half", 0.5))
    )
    for metrics in (first, second):
        assert metrics["module/a/teacher_kl"] > 0 and metrics["module/b/teacher_kl"] > 0
        assert metrics["train/clip_share"] >= 0, "of rewards"
    assert first["module/a/teacher_kl"] != second["module/a/teacher_kl"]


class Otherwise(Qwen3ForCausalLM):
    """Logits of more than the head's input."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids=input_ids, **options)
        output.logits = output.logits + input_ids[..., None]
        return output


def test_logits_of_more_than_the_heads_input_are_refused(tmp_path: Path) -> None:
    model, forwards = tiny_model(), make_trainer(tmp_path).forwards
    require_own_logits(forwards, model)
    model.__class__ = Otherwise
    with pytest.raises(ConfigError, match="Otherwise computes its logits of more than"):
        require_own_logits(forwards, model)
