"""The critic: its loss, its three kinds, and that it and the policy leave each other alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import LoraConfig
from mmrl.config.algo import PpoConfig
from mmrl.errors import CheckpointError, ConfigError, MmrlError
from mmrl.store.policy import newest_checkpoint
from mmrl.trainer.objective import value_loss
from tests.helpers.trainer_cases import (
    LORA,
    changed,
    gradients,
    make_calls,
    make_trainer,
    resumable,
    sampled,
    tiny_model,
    weights_of,
    with_changes,
    with_targets,
    without_advantage,
)

KINDS = [("separate", None), ("separate", LORA), ("adapter", LORA), ("head", None), ("head", LORA)]
kinds = pytest.mark.parametrize(("kind", "lora"), KINDS)


def ppo_options(kind: str, algo: dict[str, Any]) -> dict[str, Any]:
    fields = {"name": "ppo", "beta": 0.0, "critic": kind, "critic_lr_factor": 10.0, "value_clip": 10.0, **algo}
    return {"algo": PpoConfig(**fields), "calls": lambda step: with_targets(make_calls(6, seed=step))}


def ppo_trainer(folder: Path, kind: str, lora: LoraConfig | None = None, algo: Any = None, **options: Any) -> Any:
    return make_trainer(folder, lora=lora, **{**ppo_options(kind, algo or {}), **options})


def policy_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if ".critic." not in n}


def critic_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.critic.named_parameters().items()}


def test_value_loss_takes_the_larger_square() -> None:
    values, old = torch.tensor([2.0, 0.2, -1.0]), torch.tensor([0.0, 0.0, 0.0])
    returns, weights = torch.tensor([2.0, 1.0, 1.0]), torch.tensor([0.5, 0.25, 0.25])
    result = value_loss(values, old, returns, weights, 0.5)
    # 0.5·(0.5-2)²; 0.5·(0.2-1)²; 0.5·max((-1-1)², (-0.5-1)²)
    assert float(result.loss) == pytest.approx(0.5 * 1.125 + 0.25 * 0.32 + 0.25 * 2.0)
    assert result.clipped.tolist() == [True, False, False]
    # Inside the bounds nothing is clipped, whatever old + (values - old) is rounded to.
    generator = torch.Generator().manual_seed(0)
    old, values = 0.3 * torch.rand(1000, generator=generator), -0.1 * torch.rand(1000, generator=generator)
    assert not value_loss(values, old, values - 0.1, torch.ones(1000), 0.5).clipped.any()


@kinds
def test_learns_its_targets_and_leaves_the_policy_alone(kind: str, lora: LoraConfig | None, tmp_path: Path) -> None:
    calls = with_targets(without_advantage(make_calls(6)))
    losses: list[float] = []
    trainer = ppo_trainer(
        tmp_path, kind, lora, calls=calls, steps=30, on_step_end=lambda s, m: losses.append(m["critic/loss"])
    )
    policy, critic = policy_weights(trainer), critic_weights(trainer)
    trainer.train()
    assert losses[-1] < 0.3 * losses[0]
    assert not changed(policy, policy_weights(trainer))
    assert changed(critic, critic_weights(trainer))
    means = [sum(v) / len(v) for v in trainer.forwards.values(sampled(calls))]
    assert all((mean > 0) == (call.call.module == "a") for mean, call in zip(means, calls, strict=True))


@kinds
def test_the_policys_gradients_do_not_know_of_the_critic(kind: str, lora: LoraConfig | None, tmp_path: Path) -> None:
    calls = make_calls(5)
    with_critic = ppo_trainer(tmp_path / "a", kind, lora)
    without = make_trainer(tmp_path / "b", lora=lora)
    loss, found = gradients(with_critic, with_targets(calls))
    expected_loss, expected = gradients(without, calls)
    assert loss == expected_loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(".critic." in name for name in found.keys() - expected.keys())


@kinds
def test_values_stand_where_tokens_are_predicted(kind: str, lora: LoraConfig | None, tmp_path: Path) -> None:
    """V_t knows the prompt and the tokens before t, not t itself."""
    call = next(call for call in make_calls(6) if len(call.call.completion_ids) >= 4)
    trainer = ppo_trainer(tmp_path, kind, lora)
    other = (call.call.completion_ids[1] + 1) % 30 + 2
    changed_call = with_changes(
        call, completion_ids=(call.call.completion_ids[0], other, *call.call.completion_ids[2:])
    )
    one, two = trainer.forwards.values(sampled([call, changed_call]))
    assert one[:2] == pytest.approx(two[:2], abs=1e-6)
    assert all(abs(a - b) > 1e-6 for a, b in zip(one[2:], two[2:], strict=True))


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_splitting_changes_nothing(kind: str, tmp_path: Path) -> None:
    calls = with_targets(make_calls(9, seed=8))
    trainer = ppo_trainer(tmp_path, kind, model=tiny_model("gpt2", dtype=torch.float64))
    found = []
    for budget in (16384, 64):
        gradients(trainer, calls, budget)
        found.append({n: p.grad.clone() for n, p in trainer.critic.named_parameters().items()})
    for name, gradient in found[0].items():
        assert torch.allclose(found[1][name], gradient, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(("kind", "lora"), [("separate", None), ("adapter", LORA), ("head", None)])
def test_resumes_bit_equal(kind: str, lora: LoraConfig | None, tmp_path: Path) -> None:
    options = ppo_options(kind, {"critic_warmup_steps": 3}) | {"lora": lora, "steps": 4, "save_every": 2}
    metrics, whole = resumable(tmp_path / "whole", **options)
    middle = tmp_path / "whole" / "checkpoint-2"
    if lora:
        assert not (middle / "critic").exists()
    resumed, again = resumable(tmp_path / "resumed", middle, **options)
    assert resumed == {step: metrics[step] for step in (3, 4)}
    assert not changed(weights_of(whole), weights_of(again))
    assert not changed(critic_weights(whole), critic_weights(again))


def test_learning_rates_and_warm_ups_are_its_own(tmp_path: Path) -> None:
    rates: list[tuple[float, float]] = []
    trainer = ppo_trainer(
        tmp_path,
        "separate",
        steps=2,
        lr=1e-3,
        schedule="linear",
        algo={"critic_lr_factor": 4.0, "critic_warmup_steps": 2, "epochs": 2},
    )
    step = trainer.training_step

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        rates.append((trainer.totals.lr, trainer.critic_lr))
        return result

    trainer.training_step = spy
    trainer.train()
    assert [rate for rate, _ in rates] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert [rate for _, rate in rates] == pytest.approx([0, 2e-3, 4e-3, 4e-3])


@kinds
def test_gradients_are_clipped_apart(kind: str, lora: LoraConfig | None, tmp_path: Path) -> None:
    trainer = ppo_trainer(tmp_path, kind, lora, grad_clip=1e-3)
    gradients(trainer, with_targets(make_calls(6)))
    trainer._clip_grad_norm(trainer.model)

    def norm(parameters: Any) -> float:
        return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())

    own = trainer.critic.named_parameters().values()
    ids = {id(p) for p in own}
    assert norm(own) == pytest.approx(1e-3, rel=1e-2)
    assert norm([p for p in trainer.model.parameters() if id(p) not in ids]) == pytest.approx(1e-3, rel=1e-2)


def test_kl_in_the_reward_is_not_in_the_loss_too(tmp_path: Path) -> None:
    calls = make_calls(4)
    plain, _ = gradients(ppo_trainer(tmp_path / "a", "head"), with_targets(calls))
    trainer = ppo_trainer(tmp_path / "b", "head", algo={"beta": 0.5})
    reference = trainer.forwards.policy_logprobs(sampled(calls), reference=True)
    known = [with_changes(c, ref_logprobs=tuple(x - 1 for x in r)) for c, r in zip(calls, reference, strict=True)]
    assert gradients(trainer, with_targets(known))[0] == plain
    assert trainer.totals.metrics(trainer.forwards.reduce)["train/kl"] == pytest.approx(2.718281828**-1, abs=1e-4)
    in_loss = ppo_trainer(tmp_path / "c", "head", algo={"beta": 0.5, "kl": "loss"})
    assert gradients(in_loss, with_targets(known))[0] > plain


def test_an_adapter_critic_needs_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo\.critic: got adapter, which has no effect without"):
        ppo_trainer(tmp_path, "adapter")


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    ppo_trainer(tmp_path, "separate").train()
    with pytest.raises(CheckpointError, match=r"another kind than algo\.critic=head"):
        ppo_trainer(tmp_path / "other", "head", resume_from=newest_checkpoint(tmp_path)).train()


def test_the_head_starts_from_the_seed_alone(tmp_path: Path) -> None:
    heads = []
    for number, (seed, noise) in enumerate(((5, 0), (5, 1), (6, 0))):
        model = tiny_model()
        torch.manual_seed(noise)
        heads.append(ppo_trainer(tmp_path / str(number), "head", model=model, seed=seed).critic.module.head.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_values_begin_at_zero_where_asked_and_move_from_there(kind: str, tmp_path: Path) -> None:
    trainer = ppo_trainer(tmp_path, kind, algo={"critic_init": "zero"})
    head = trainer.critic.module.head
    assert not head.weight.any() and not head.bias.any()
    trainer.train()
    assert head.weight.any() and head.bias.any()


@pytest.mark.parametrize("size", [1e39, 1e30])  # beyond float32; beyond it when squared
def test_a_critic_whose_loss_is_no_number_stops_before_its_weights_are_touched(size: float, tmp_path: Path) -> None:
    def calls(step: int) -> Any:
        found = with_targets(make_calls(6, seed=step))
        if step == 1:
            return found
        huge = [[replace(e, returns=tuple(size * value for value in e.returns)) for e in c.entries] for c in found]
        return [with_changes(call, entries=tuple(entries)) for call, entries in zip(found, huge, strict=True)]

    trainer = ppo_trainer(tmp_path, "separate", calls=calls, steps=2, save_every=1)
    saved: dict[str, torch.Tensor] = {}
    trainer.on_step_end = lambda step, metrics: saved.update(critic_weights(trainer) | policy_weights(trainer))
    with pytest.raises(MmrlError, match="step 2: the loss of the critic is inf"):
        trainer.train()
    assert saved and not changed(saved, critic_weights(trainer) | policy_weights(trainer))
    assert newest_checkpoint(tmp_path).name == "checkpoint-1"


@kinds
def test_a_critic_gradient_that_is_no_number_stops_before_the_step(
    kind: str, lora: LoraConfig | None, tmp_path: Path
) -> None:
    trainer = ppo_trainer(tmp_path, kind, lora, steps=1)
    train_on = trainer.critic.train_on

    def poisoned(*args: Any) -> None:
        train_on(*args)
        next(p for p in trainer.critic.named_parameters().values() if p.grad is not None).grad.fill_(float("inf"))

    trainer.critic.train_on = poisoned
    before = critic_weights(trainer) | policy_weights(trainer)
    with pytest.raises(MmrlError, match=r"step 1: the gradient norm of the critic is (inf|nan)"):
        trainer.train()
    assert not changed(before, critic_weights(trainer) | policy_weights(trainer))


@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_weights_that_are_not_finite_are_never_saved(whose: str, tmp_path: Path) -> None:
    def poison(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            critic = trainer.critic.named_parameters().values()
            some = next(iter(trainer.model.parameters())) if whose == "policy" else next(iter(critic))
            some.data.view(-1)[0] = float("nan")

    trainer = ppo_trainer(tmp_path, "separate", steps=2, save_every=1, on_step_end=poison)
    with pytest.raises(MmrlError, match="step 2: a weight is not finite, so nothing is saved"):
        trainer.train()
    assert newest_checkpoint(tmp_path).name == "checkpoint-1"
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-1"]
