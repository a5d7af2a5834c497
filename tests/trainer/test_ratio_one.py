"""`algo.ratio_one`: a ratio of 1 in every optimizer step, so nothing is clipped and no old policy is asked."""

import pytest
import torch

from mmrl.trainer.forwards import Forwards
from mmrl.trainer.objective import token_loss
from tests.helpers.trainer_cases import trained


def test_loss_and_gradient_are_those_of_the_plain_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-3.0, -1.0, -0.6], dtype=torch.float64)  # ratios far outside of the clip range
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    found = token_loss(logprobs, old, None, advantages, weights, 0.2, None, 0.0, ratio_one=True)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(-(0.5 * 1.0 + 0.25 * -2.0 + 0.25 * 0.5))
    assert logprobs.grad.tolist() == pytest.approx((-weights * advantages).tolist())
    assert found.ratio.tolist() == [1.0, 1.0, 1.0] and not found.clipped.any()


def test_several_optimizer_steps_keep_the_ratio_at_one(tmp_path, monkeypatch):
    frozen, freeze = [], Forwards.freeze_old
    monkeypatch.setattr(Forwards, "freeze_old", lambda self, packs: (frozen.append(packs), freeze(self, packs)))
    _, (one,) = trained(tmp_path / "one", algo={"epochs": 3, "ratio_one": True}, lr=0.05)
    assert one["train/ratio_mean"] == 1.0 and one["train/clip_share"] == 0.0
    assert not frozen, "no denominator is computed that nothing divides by"
    _, (papers,) = trained(tmp_path / "papers", algo={"epochs": 3}, lr=0.05)
    assert papers["train/ratio_mean"] != 1.0 and papers["train/clip_share"] > 0 and len(frozen) == 1
