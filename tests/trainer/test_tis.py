"""Truncated importance sampling (`train.tis`): worked numbers, laws, what is logged, what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.trainer.objective import token_loss, truncated_weights
from tests.helpers.trainer_cases import agreeing, gradients, make_trainer, tiny_model, trained
from tests.trainer.test_objective import ADVANTAGES, LP, OLD, REF, SEQ

# The group of the worked example, as a sampler of other numerics would report it.
SAMPLED = torch.tensor([-1.3, -1.0, -1.9, float("nan"), -0.5, -1.5], dtype=torch.float64)
CAP = 1.5
# exp(OLD - SAMPLED): 1, e^0.5 = 1.6487, 1, unknown, e^-0.1, e^1 = 2.7183; two of six are above the cap.
CAPPED = [1.0, 1.5, 1.0, 1.0, 0.904837, 1.5]


def test_worked_weights() -> None:
    found = truncated_weights(OLD, SAMPLED, CAP)
    assert found.weights.tolist() == pytest.approx(CAPPED, abs=5e-7)
    assert found.truncated.tolist() == [False, True, False, False, False, True]


def test_worked_token_losses() -> None:
    """Policy terms -1.2, -1, .452419, .5, .452419, .674929 times the weights; 0.04 k3 on top, not multiplied."""
    correction = truncated_weights(OLD, SAMPLED, CAP)
    expected = [-1.199807, -1.499793, 0.452419, 0.500749, 0.409365, 1.012394]
    for token, value in enumerate(expected):
        weights = torch.eye(6, dtype=torch.float64)[token]
        found = token_loss(LP, OLD, REF, ADVANTAGES, weights, 0.2, None, 0.04, correction=correction)
        assert float(found.loss) == pytest.approx(value, abs=5e-7)
    whole = token_loss(LP, OLD, REF, ADVANTAGES, SEQ, 0.2, None, 0.04, correction=correction)
    assert float(whole.loss) == pytest.approx(-0.085515, abs=5e-7)


def test_no_gradient_flows_through_the_weights() -> None:
    logprobs = LP.clone().requires_grad_()
    correction = truncated_weights(logprobs, SAMPLED, CAP)
    token_loss(logprobs, LP, None, ADVANTAGES, SEQ, 0.2, None, 0.0, correction=correction).loss.backward()
    # With a ratio of 1 the gradient of -w r A is -w A, times the constant weight.
    assert logprobs.grad is not None
    plain = truncated_weights(LP, SAMPLED, CAP).weights
    assert logprobs.grad.tolist() == pytest.approx((-SEQ * ADVANTAGES * plain).tolist())


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=8), st.floats(1, 10))
def test_law_weights_lie_between_0_and_the_cap_and_are_exact_below_it(pairs: Any, cap: float) -> None:
    before, sampled = torch.tensor(pairs, dtype=torch.float64).T
    found = truncated_weights(before, sampled, cap)
    plain = torch.exp(before - sampled)
    assert bool((found.weights > 0).all()) and bool((found.weights <= cap).all())
    assert torch.equal(found.weights[~found.truncated], plain[~found.truncated])
    assert torch.equal(found.truncated, plain > cap)


@pytest.mark.parametrize("algo", [{}, {"epochs": 2}], ids=["one_update", "two"])
def test_law_without_a_gap_the_option_changes_nothing(algo: dict[str, Any], tmp_path: Path) -> None:
    losses, weights = [], []
    tis: dict[str, Any]
    for name, tis in (("off", {}), ("on", {"tis": 2.0})):
        options = tis | {"algo": {"beta": 0.05, **algo}, "old_logprobs": "recompute", "steps": 2}
        trainer, seen = trained(tmp_path / name, tiny_model(dtype=torch.float64), agreeing, **options)
        losses.append([metrics["train/loss"] for metrics in seen])
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        assert ("train/tis_mean" in seen[0]) is (name == "on")
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, abs=1e-7)
    assert torch.allclose(weights[0], weights[1], atol=1e-6)


@pytest.mark.parametrize(("shift", "weight", "share"), [(0.5, 1.648721, 0.0), (-0.5, 0.606531, 0.0), (1.0, 2.0, 1.0)])
def test_a_gap_scales_the_policy_gradient_and_is_logged(
    shift: float, weight: float, share: float, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, tiny_model("gpt2", dtype=torch.float64), tis=2.0, old_logprobs="recompute")
    plain_loss, plain = gradients(trainer, agreeing(trainer))
    loss, found = gradients(trainer, agreeing(trainer, shift))
    assert loss == pytest.approx(weight * plain_loss, rel=1e-5)
    for name, gradient in plain.items():
        assert torch.allclose(found[name], weight * gradient, rtol=1e-5, atol=1e-9), name
    metrics = trainer.totals.metrics(trainer.forwards.reduce)
    assert metrics["train/tis_mean"] == pytest.approx(weight, rel=1e-6)
    assert metrics["train/tis_clip_share"] == share
    assert metrics["module/a/tis_clip_share"] == metrics["module/b/tis_clip_share"] == share


def test_several_updates_are_corrected_by_the_weights_before_the_first(tmp_path: Path) -> None:
    """With a large learning rate the second epoch is far from the sampler; its correction stays the first one's."""
    options = {"algo": {"epochs": 3}, "lr": 1e-2, "tis": 4.0, "old_logprobs": "recompute"}
    _, (metrics,) = trained(tmp_path, calls_of=partial(agreeing, shift=0.5), **options)
    assert metrics["train/tis_mean"] == pytest.approx(1.648721, rel=1e-4)
    assert abs(metrics["train/ratio_mean"] - 1) > 1e-3


@pytest.mark.parametrize(
    ("algo", "says"),
    [
        ({}, "with train.old_logprobs=sampler, whose ratio is against the sampler already"),
        ({"ratio_one": True}, "train.tis: got 2.0, which has no effect with algo.ratio_one=true"),
    ],
)
def test_what_would_correct_twice_or_nothing_is_refused(algo: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        make_trainer(tmp_path, algo=algo, tis=2.0)


def test_a_cap_below_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        make_trainer(tmp_path, tis=0.5, old_logprobs="recompute")
