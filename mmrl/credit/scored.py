"""Scored rollouts, from which credit starts. A rollout without a reward, or without a call, is not credited.

First step of credit (rewards -> groups -> advantages -> weights).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmrl.credit.entries import Reward
from mmrl.errors import DataError
from mmrl.records import LARGEST, Call, Forest, Rollout


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout that has a reward, with its calls, root first: a sequence whose |o| counts all trained tokens.

    A call that several rollouts share is part of each of them.
    """

    rollout: Rollout
    reward: float
    """Outcome reward."""
    path: tuple[Call, ...]

    @property
    def tree(self) -> str:
        """Number of the tree that it is a leaf of, among those of its example."""
        return self.rollout.id.removeprefix(f"{self.rollout.example}/").partition(".")[0]

    @property
    def outcome(self) -> Reward:
        """Reward of the outcome alone (GRPO-OR, PPO)."""
        return Reward(self.reward, {"outcome": self.reward})

    @property
    def merged(self) -> Reward:
        """Outcome plus the reward of every intermediate turn (GRPO-MR)."""
        turns = math.fsum(call.turn_reward or 0.0 for call in self.path[:-1])
        return Reward(self.reward + turns, {"outcome": self.reward, "turn": turns})


def scored_rollouts(forest: Forest) -> list[ScoredRollout]:
    """Return rollouts with a reward and at least one call, in order.

    Raises:
        DataError: a reward, penalty or turn reward is NaN, infinite or beyond `LARGEST`; names the record.
    """
    # NaN would spread over a whole group unseen, and a huge number overflows once it is squared.
    for rollout in forest.rollouts:
        _require_finite(rollout.reward, f"rollout '{rollout.id}': reward")
    for call in forest.calls.values():
        _require_finite(call.penalty, f"call '{call.id}': penalty")
        _require_finite(call.turn_reward, f"call '{call.id}': turn_reward")
    return [
        ScoredRollout(rollout, rollout.reward, forest.path(rollout))
        for rollout in forest.rollouts
        if rollout.reward is not None and rollout.leaf is not None
    ]


def by_example(forest: Forest) -> dict[str, list[ScoredRollout]]:
    """Return scored rollouts of each example, in order."""
    rollouts: dict[str, list[ScoredRollout]] = {}
    for scored in scored_rollouts(forest):
        rollouts.setdefault(scored.rollout.example, []).append(scored)
    return rollouts


def _require_finite(value: float | None, name: str) -> None:
    if value is not None and not abs(value) <= LARGEST:  # NaN compares false
        raise DataError(f"{name}: got {value}, expected a finite number of at most {LARGEST:g} in size")
