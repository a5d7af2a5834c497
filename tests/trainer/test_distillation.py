"""Distillation in the trainer: the gradient beside a slow reference and TRL's, without KL term and critic."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer.utils import selective_log_softmax

from mmrl.algorithms import assign_credit
from mmrl.config.algo import DistillConfig, PpoConfig
from mmrl.records import Forest, Rollout
from mmrl.stages.collect import train_calls
from mmrl.trainer.objective import TrainCall
from tests.helpers.trainer_cases import (
    assert_close,
    exact_model,
    gradients,
    make_calls,
    make_trainer,
    sampled,
    tiny_model,
    train_entry,
    with_changes,
    with_targets,
)

loss_utils = pytest.importorskip("trl.experimental.sdpo.loss_utils")  # a part of TRL that may move


def distilled(calls: list[TrainCall], gaps: list[tuple[float, ...]], coefficient: float = 1.0) -> list[TrainCall]:
    """Further entries, as `credit.distillation` makes them for calls of one module."""
    return [
        replace(
            call,
            entries=(
                *call.entries,
                replace(
                    train_entry(gap, (coefficient / (len(calls) * len(gap)),) * len(gap)),
                    distilled=True,
                ),
            ),
        )
        for call, gap in zip(calls, gaps, strict=True)
    ]


def gaps_of(trainer: Any, teacher: Any, calls: list[TrainCall]) -> list[tuple[float, ...]]:
    ours = trainer.forwards.policy_logprobs(sampled(calls))
    found = trainer.forwards.logprobs_of(teacher, sampled(calls), tries=False)
    return [tuple(t - s for t, s in zip(a, b, strict=True)) for a, b in zip(found, ours, strict=True)]


def trl_gradient(model: Any, teacher: Any, calls: list[TrainCall]) -> dict[str, torch.Tensor]:
    """TRL's sampled-token loss, a row at a time: mean over calls of the mean over tokens."""
    total = torch.zeros((), dtype=model.dtype)
    for call in sampled(calls):
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        start, targets = len(call.prompt_ids) - 1, torch.tensor([call.completion_ids])
        logits = model(ids).logits[:, start:-1]
        with torch.no_grad():
            theirs = teacher(ids).logits[:, start:-1]
        loss = loss_utils.compute_sampled_token_self_distillation_loss(logits, theirs, targets, distillation_alpha=1.0)
        total = total + loss.mean() / len(calls)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", ["trie", "padded"])
def test_the_gradient_of_one_module_is_that_of_trls_sampled_token_loss(packing: str, tmp_path: Path) -> None:
    model, teacher = exact_model(), exact_model(seed=5)
    twin = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, model, algo={"beta": 0.0}, packing=packing)
    calls = [replace(call, entries=()) for call in make_calls(6, modules=("a",))]
    current = trainer.forwards.policy_logprobs(sampled(calls))
    calls = [with_changes(call, logprobs=now) for call, now in zip(calls, current, strict=True)]
    _, found = gradients(trainer, distilled(calls, gaps_of(trainer, teacher, calls)))
    assert_close(found, trl_gradient(twin, teacher, calls))


def test_with_gspo_each_token_is_pushed_by_its_own_number(tmp_path: Path) -> None:
    """A ratio of the whole call alone would give every token the mean over the call: here nothing."""
    calls = [replace(call, entries=()) for call in make_calls(3, modules=("a",))]
    gaps = [tuple((-1.0) ** t * (1 if t < len(c.call.completion_ids) // 2 * 2 else 0)
                  for t in range(len(c.call.completion_ids))) for c in calls]  # fmt: skip
    assert all(abs(sum(gap)) < 1e-12 for gap in gaps) and any(map(any, gaps))
    found = []
    for kind in ("clip", "gspo"):
        trainer = make_trainer(tmp_path / kind, exact_model(), algo={"beta": 0.0, "loss": kind})
        current = trainer.forwards.policy_logprobs(sampled(calls))
        own = [with_changes(call, logprobs=now) for call, now in zip(calls, current, strict=True)]
        found.append(gradients(trainer, distilled(own, gaps))[1])
    assert max(float(value.abs().max()) for value in found[0].values()) > 1e-3
    assert_close(found[1], found[0])


def test_trls_log_softmax_is_at_temperature_1_and_ours_at_the_runs(tmp_path: Path) -> None:
    teacher = tiny_model(seed=5)
    trainer = make_trainer(tmp_path, algo={"temperature": 0.5})
    (call, *_) = sampled(make_calls(1))
    ids = torch.tensor([call.prompt_ids + call.completion_ids])
    logits = teacher(ids).logits[:, len(call.prompt_ids) - 1 : -1] / 0.5
    expected = selective_log_softmax(logits, torch.tensor([call.completion_ids]))[0]
    (found,) = trainer.forwards.logprobs_of(teacher, [call], tries=False)
    assert found == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_coefficient_of_0_and_a_teacher_that_says_the_same_change_no_bit(tmp_path: Path) -> None:
    plain = make_calls(6)
    zero = [(0.0,) * len(call.call.completion_ids) for call in plain]
    odd = [(0.7,) * len(call.call.completion_ids) for call in plain]
    alone = gradients(make_trainer(tmp_path / "a", algo={"beta": 0.1}), plain)
    for name, calls in (("b", distilled(plain, odd, 0.0)), ("c", distilled(plain, zero))):
        loss, found = gradients(make_trainer(tmp_path / name, algo={"beta": 0.1}), calls)
        assert loss == alone[0]
        assert all(torch.equal(found[key], value) for key, value in alone[1].items())


def test_rewards_and_teachers_add_up_and_the_kl_term_counts_once(tmp_path: Path) -> None:
    plain = make_calls(6, noise=0.0)
    gaps = [tuple(0.1 * t - 0.3 for t in range(len(call.call.completion_ids))) for call in plain]
    with_both = distilled(plain, gaps, 0.6)
    only = [replace(call, entries=call.entries[1:]) for call in with_both]

    def found(name: str, calls: list[TrainCall], beta: float) -> dict[str, torch.Tensor]:
        # Not the reference itself, where the KL term has no gradient.
        calls = [with_changes(call, ref_logprobs=(-3.0,) * len(call.call.completion_ids)) for call in calls]
        return gradients(make_trainer(tmp_path / name, exact_model(), algo={"beta": beta, "ratio_one": True}), calls)[1]

    rewards, teacher, both = found("r", plain, 0.2), found("t", only, 0.2), found("b", with_both, 0.2)
    assert_close(both, {name: rewards[name] + teacher[name] for name in both})
    assert_close(teacher, found("w", only, 0.0))


def test_the_critic_learns_from_rewards_alone(tmp_path: Path) -> None:
    plain = with_targets(make_calls(6))
    gaps = [(0.4,) * len(call.call.completion_ids) for call in plain]

    def found(name: str, calls: list[TrainCall]) -> tuple[dict[str, torch.Tensor], float]:
        trainer = make_trainer(tmp_path / name, algo=PpoConfig(name="ppo", critic="separate", beta=0.0))
        gradients(trainer, calls)
        grads = {n: p.grad.clone() for n, p in trainer.critic.named_parameters().items() if p.grad is not None}
        return grads, trainer.critic.metrics(trainer.forwards.reduce)["critic/loss"]

    (alone, loss), (both, loss_of_both) = found("a", plain), found("b", distilled(plain, gaps))
    assert loss_of_both == pytest.approx(loss)
    assert_close(both, alone, 1e-6)


def test_a_forest_becomes_the_same_step(tmp_path: Path) -> None:
    """From credit to gradient: a forest's calls with gaps are the calls of the tests above."""
    model, teacher = exact_model(), exact_model(seed=5)
    twin = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, model, algo={"beta": 0.0})
    calls = sampled(make_calls(4, modules=("a",)))
    gaps = gaps_of(trainer, teacher, [TrainCall(call=call) for call in calls])
    known = trainer.forwards.policy_logprobs(calls)
    forest = Forest(
        calls={
            c.id: replace(c, example=c.id, distillation=gap, logprobs=now)
            for c, gap, now in zip(calls, gaps, known, strict=True)
        },
        rollouts=tuple(Rollout(id=f"{c.id}/0", example=c.id, leaf=c.id, reward=0.0) for c in calls),
        modules=("a",),
    )
    result = assign_credit(forest, DistillConfig(name="distill", distill={"a": "policy"}), 0)
    steps = train_calls(forest, result, dict.fromkeys(forest.examples, 0))
    assert_close(gradients(trainer, steps)[1], trl_gradient(twin, teacher, [TrainCall(call=c) for c in calls]))
