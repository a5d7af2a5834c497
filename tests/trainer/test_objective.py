from __future__ import annotations

from typing import Any

import pytest
import torch

from mmrl.errors import MmrlError
from mmrl.trainer.objective import TrainCall, active, token_loss
from tests.helpers.trainer_cases import train_call, train_entry

# Worked by hand: one group, three sequences of 2, 1 and 3 tokens.
LP = torch.tensor([-1, -0.5, -2, -0.3, -0.7, -0.2], dtype=torch.float64)
OLD = torch.tensor([-1.3, -0.5, -1.9, -0.3, -0.6, -0.5], dtype=torch.float64)
REF = torch.tensor([-1.1, -0.4, -2, -0.5, -0.7, -0.2], dtype=torch.float64)
ADVANTAGES = torch.tensor([1, 1, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)
SEQ = torch.tensor([1 / 6, 1 / 6, 1 / 3, 1 / 9, 1 / 9, 1 / 9], dtype=torch.float64)


def worked(weights: torch.Tensor, ref: torch.Tensor | None = REF, beta: float = 0.04) -> float:
    return float(token_loss(LP, OLD, ref, ADVANTAGES, weights, 0.2, None, beta).loss)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(SEQ, -0.034894), (torch.full_like(SEQ, 1 / 6), -0.019847), (torch.full_like(SEQ, 1 / 12), -0.009924)],
    ids=["seq", "token", "constant"],
)
def test_worked_losses(weights: torch.Tensor, expected: float) -> None:
    assert worked(weights) == pytest.approx(expected, abs=5e-7)


def test_worked_token_losses() -> None:
    expected = [-1.199807, -0.999793, 0.452419, 0.500749, 0.452419, 0.674929]
    found = [worked(torch.eye(6, dtype=torch.float64)[i]) for i in range(6)]
    assert found == pytest.approx(expected, abs=5e-7)


def test_without_beta_the_reference_only_reports() -> None:
    result = token_loss(LP, OLD, REF, ADVANTAGES, SEQ, 0.2, None, 0.0)
    assert float(result.loss) == worked(SEQ, ref=None, beta=0.0)
    assert result.kl is not None
    assert result.kl.tolist() == pytest.approx([0.00483742, 0.00517092, 0, 0.01873075, 0, 0], abs=1e-8)


@pytest.mark.parametrize(
    ("kind", "high", "clipped", "gradient"),
    [
        # d/dlp of -r A is -r A where the unclipped branch is active, and 0 elsewhere.
        ("clip", None, [True, False, False, True, False, False], [0, 1.3, -0.7, 0, -1.0, -1.1]),
        # Its own upper bound: 1.3 is within.
        ("clip", 0.35, [False, False, False, True, False, False], [-1.3, 1.3, -0.7, 0, -1.0, -1.1]),
        # A weight bounded from above takes away no gradient.
        ("cispo", 0.15, [True, True, False, False, False, False], [-1.15, 1.15, -0.7, 0.7, -1.0, -1.1]),
        ("cispo", None, [True, True, False, False, False, False], [-1.2, 1.2, -0.7, 0.7, -1.0, -1.1]),
    ],
)
def test_gradients_of_clipped_ratios(kind: str, high: float | None, clipped: list[bool], gradient: list[float]) -> None:
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.0, 1.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    logprobs, ones = ratio.log().requires_grad_(), torch.ones(6, dtype=torch.float64)
    result = token_loss(logprobs, torch.zeros(6), None, advantages, ones, 0.2, high, 0.0, kind=kind)
    result.loss.backward()
    assert result.clipped.tolist() == clipped
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient)


CALLS = torch.tensor([0, 0, 1, 2, 2, 2])


def test_gspo_has_one_ratio_for_a_call() -> None:
    result = token_loss(LP, OLD, None, ADVANTAGES, SEQ, 0.2, None, 0.0, kind="gspo", calls=CALLS)
    # mean differences 0.15, -0.1, 0.0667
    ratios = [1.161834, 1.161834, 0.904837, 1.068939, 1.068939, 1.068939]
    assert result.ratio.tolist() == pytest.approx(ratios, abs=5e-7)
    assert float(result.loss) == pytest.approx(-1.161834 / 3 + 0.5 * 0.904837 / 3 + 0.5 * 1.068939 / 3, abs=1e-6)
    clipped = token_loss(LP, OLD, None, ADVANTAGES, SEQ, 0.1, None, 0.0, kind="gspo", calls=CALLS).clipped
    assert clipped.tolist() == [True, True, False, False, False, False]


def test_gspo_on_calls_of_one_token_is_the_clipped_ratio() -> None:
    single = token_loss(LP, OLD, REF, ADVANTAGES, SEQ, 0.2, None, 0.04, kind="gspo", calls=torch.arange(6))
    assert float(single.loss) == pytest.approx(worked(SEQ), abs=1e-12)


@pytest.mark.parametrize("kind", ["cispo", "gspo"])
def test_at_a_ratio_of_one_all_losses_have_the_same_gradient(kind: str) -> None:
    found = []
    for name in ("clip", kind):
        logprobs = LP.clone().requires_grad_()
        token_loss(logprobs, LP, None, ADVANTAGES, SEQ, 0.2, None, 0.0, kind=name, calls=CALLS).loss.backward()
        assert logprobs.grad is not None
        found.append(logprobs.grad.tolist())
    assert found[0] == pytest.approx(found[1], abs=1e-12)


@pytest.mark.parametrize(
    ("advantages", "weights", "beta", "moves"),
    [
        ((0.0, 0.0), (0.5, 0.5), 0.0, False),
        ((0.0, 0.0), (0.5, 0.5), 0.01, True),
        ((1.0, 1.0), (0.0, 0.0), 0.01, False),
        ((0.0, 1.0), (0.5, 0.0), 0.0, False),
        ((0.0, 1.0), (0.0, 0.5), 0.0, True),
    ],
)
def test_entries_that_cannot_move_anything_are_known(
    advantages: tuple[float, ...], weights: tuple[float, ...], beta: float, moves: bool
) -> None:
    assert active(train_entry(advantages=advantages, weights=weights), beta) is moves


def test_calls_whose_lengths_disagree_are_refused_by_id() -> None:
    def call(**changes: Any) -> TrainCall:
        return train_call(**{"id": "q1/0#0", "module": "m", "prompt_ids": (1,), "completion_ids": (2, 3), **changes})

    with pytest.raises(MmrlError, match=r"call q1/0#0: logprobs has 1 values for 2 completion tokens"):
        call(logprobs=(-1.0,))
    with pytest.raises(MmrlError, match=r"call q1/0#0: entries\[0\].weights has 3 values for 2"):
        call(entries=(train_entry(advantages=(1.0, 1.0), weights=(1.0, 1.0, 1.0)),))
    with pytest.raises(MmrlError, match=r"call q1/0#0: has no prompt tokens"):
        call(prompt_ids=())
