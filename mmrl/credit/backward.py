"""Rewards of calls backed up a tree: from the outcome of rollouts and module penalties to one number per call.

First step of credit for programs of several modules (MHGPO, MAPPO). A rollout without a reward (it failed for reasons
outside the policy) passes nothing on, so a call none of whose descendants is scored has no reward either and is left
out of everything that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from mmrl import rng
from mmrl.config.algo import MappoConfig, MhgpoConfig
from mmrl.credit.entries import Reward
from mmrl.credit.scored import scored_rollouts
from mmrl.records import Forest


def backward(forest: Forest, algo: MhgpoConfig | MappoConfig, seed: int = 0) -> dict[str, Reward]:
    """Backward propagation over trees (MHGPO, arXiv 2506.02718, Eq. 4): R = Aggr over successors + c · R_spe.

    A call's successors are its child calls and the rollouts that end at it. c is `algo.penalty_scale` (0 for
    `algo.penalties=false`). `algo.propagate=shared` leaves a penalty with its own call; `full` passes it on to the
    calls before. MAPPO's rollouts share nothing, so each of their calls has one successor.

    Args:
        seed: run seed, for `algo.aggregate=random`.

    Returns:
        Call id -> reward, with parts `shared` and `penalty`; in the order of the forest's calls.
    """
    aggregate, propagate = (algo.aggregate, algo.propagate) if isinstance(algo, MhgpoConfig) else ("mean", "shared")
    ending: dict[str, list[float]] = {}
    for scored in scored_rollouts(forest):
        ending.setdefault(scored.path[-1].id, []).append(scored.reward)
    passed: dict[str, float] = {}
    rewards: dict[str, Reward] = {}
    # Parents come first in a forest, so the reverse order sees every successor before the calls above it.
    for call in reversed(list(forest.calls.values())):
        successors = ending.get(call.id, []) + [passed[child] for child in forest.children[call.id] if child in passed]
        # Every rollout through this call was dropped: there is nothing to back up.
        if not successors:
            continue
        shared = _aggregate(successors, aggregate, (seed, forest.step, "aggregate", call.id))
        # A penalty belongs to the call that earned it. `full` charges the calls before as well, which led up to it.
        own = (algo.penalty_scale or {}).get(call.module, 1.0) * call.penalty if algo.penalties else 0.0
        rewards[call.id] = Reward(shared + own, {"shared": shared, "penalty": own})
        passed[call.id] = shared + own if propagate == "full" else shared
    return {call_id: rewards[call_id] for call_id in forest.calls if call_id in rewards}


def _aggregate(values: Sequence[float], how: str, key: rng.Key) -> float:
    """`mean`, `max`, `min` or `random`: one of the successors that have a reward, drawn by a key of the call."""
    # Also with `random`: nothing is drawn, so a single successor never depends on the seed.
    if len(values) == 1:
        return values[0]
    if how == "random":
        return rng.stream(*key).choice(values)
    aggregates: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "max": max, "min": min}
    return aggregates[how](values)
