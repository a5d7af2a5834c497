"""Rewards of calls: from the outcome of rollouts, module penalties and turn rewards to one number per call.

First step of credit (rewards -> groups -> advantages -> weights). Plain numbers in, plain numbers out.

Who has a reward: a rollout without one (outside-caused failure) passes nothing on, so a call none of whose
descendants is scored has no reward either and is left out of everything that follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mmrl import rng
from mmrl.errors import DataError
from mmrl.records import EMPTY, LARGEST, Call, Forest, Rollout


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one call, and what it is the sum of."""

    total: float
    parts: Mapping[str, float] = EMPTY


def scored(forest: Forest) -> tuple[Rollout, ...]:
    """Rollouts that are credited: those with a reward and at least one call.

    Raises:
        DataError: a reward, penalty or turn reward is NaN, infinite or beyond `LARGEST`; names the record.
    """
    for rollout in forest.rollouts:
        _finite(rollout.reward, f"rollout '{rollout.id}': reward")
    for call in forest.calls.values():
        _finite(call.penalty, f"call '{call.id}': penalty")
        _finite(call.turn_reward, f"call '{call.id}': turn_reward")
    return tuple(rollout for rollout in forest.rollouts if rollout.reward is not None and rollout.leaf is not None)


def backward(
    forest: Forest,
    *,
    aggregate: str = "mean",
    propagate: str = "shared",
    penalties: bool = True,
    penalty_scale: Mapping[str, float] | None = None,
    seed: int = 0,
) -> dict[str, Reward]:
    """Backward propagation over trees (MHGPO, arXiv 2506.02718, Eq. 4): R = Aggr over successors + c · R_spe.

    A call's successors are its child calls and the rollouts that end at it.

    Args:
        aggregate: `mean`, `max`, `min` or `random` (one successor, drawn by a key of the call) over the successors
            that have a reward.
        propagate: `shared` leaves a penalty with its own call; `full` passes it on to the calls before.
        penalties: False sets every R_spe to 0 (final reward only).
        penalty_scale: module -> c, the factor of its penalties; 1 for the others.
        seed: run seed, for `random`.

    Returns:
        Call id -> reward, with parts `shared` and `penalty`; in the order of the forest's calls.
    """
    ending: dict[str, list[float]] = {}
    for rollout in scored(forest):
        assert rollout.leaf is not None and rollout.reward is not None
        ending.setdefault(rollout.leaf, []).append(rollout.reward)
    passed: dict[str, float] = {}
    found: dict[str, Reward] = {}
    for call in reversed(list(forest.calls.values())):
        successors = ending.get(call.id, []) + [passed[child] for child in forest.children[call.id] if child in passed]
        if not successors:
            continue
        shared = _aggregate(successors, aggregate, (seed, forest.step, "aggregate", call.id))
        own = (penalty_scale or {}).get(call.module, 1.0) * call.penalty if penalties else 0.0
        found[call.id] = Reward(shared + own, {"shared": shared, "penalty": own})
        passed[call.id] = shared + own if propagate == "full" else shared
    return {call_id: found[call_id] for call_id in forest.calls if call_id in found}


def outcome(rollout: Rollout) -> Reward:
    """Outcome reward alone (GRPO-OR, PPO)."""
    assert rollout.reward is not None
    return Reward(rollout.reward, {"outcome": rollout.reward})


def merged(rollout: Rollout, path: Sequence[Call]) -> Reward:
    """Outcome plus the reward of every intermediate turn (GRPO-MR)."""
    assert rollout.reward is not None
    turns = math.fsum(call.turn_reward or 0.0 for call in path[:-1])
    return Reward(rollout.reward + turns, {"outcome": rollout.reward, "turn": turns})


def _aggregate(values: Sequence[float], how: str, key: rng.Key) -> float:
    if len(values) == 1:
        return values[0]
    if how == "random":
        return rng.stream(*key).choice(values)
    aggregates: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "max": max, "min": min}
    return aggregates[how](values)


def _finite(value: float | None, what: str) -> None:
    if value is not None and not abs(value) <= LARGEST:  # NaN compares false
        raise DataError(f"{what}: got {value}, expected a finite number of at most {LARGEST:g} in size")
