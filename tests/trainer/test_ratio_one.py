"""`algo.ratio_one`: a ratio of 1 in every optimizer step, so nothing is clipped and no old policy is asked."""

import pytest
import torch

from mmrl.trainer.objective import token_loss
from tests.helpers.trainer_cases import make_trainer, tiny_model


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


def test_several_optimizer_steps_keep_the_ratio_at_one(tmp_path):
    seen = {}
    for name, options in (("one", {"ratio_one": True}), ("papers", {})):
        trainer = make_trainer(
            tmp_path / name,
            tiny_model(),
            algo={"epochs": 3, **options},
            lr=0.05,
            on_step_end=lambda step, metrics, name=name: seen.update({name: metrics}),
        )
        frozen = []
        freeze = trainer.forwards.freeze_old
        trainer.forwards.freeze_old = lambda packs, frozen=frozen, freeze=freeze: (frozen.append(1), freeze(packs))
        trainer.train()
        seen[f"{name} frozen"] = len(frozen)
    assert seen["one"]["train/ratio_mean"] == 1.0 and seen["one"]["train/clip_share"] == 0.0
    assert seen["papers"]["train/ratio_mean"] != 1.0 and seen["papers"]["train/clip_share"] > 0
    assert (seen["one frozen"], seen["papers frozen"]) == (0, 1), "no denominator is computed that nothing divides by"
