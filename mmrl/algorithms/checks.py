"""Problems of an algorithm's config with a program's modules or a task's reward sets, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config import AlgoConfig
from mmrl.config.algo import FACTOR
from mmrl.config.tasks import PRIVILEGED
from mmrl.errors import unknown

TURN_SETS = ("turn", "judge_turn", "gain", PRIVILEGED)
"""Reward sets that give intermediate turns a reward."""


def scale_problems(algo: AlgoConfig, modules: Sequence[str]) -> list[str]:
    """Return factors of modules that the program does not have, or that are not finite."""
    problems = []
    # Only the algorithms that back rewards up know penalties of modules.
    penalty_scale = getattr(algo, "penalty_scale", None)
    for key, factors in (("advantage_scale", algo.advantage_scale), ("penalty_scale", penalty_scale)):
        for name, factor in (factors or {}).items():
            if name not in modules:
                problems.append(unknown(f"algo.{key}", name, modules))
            if not 0 <= factor <= FACTOR:  # NaN compares false
                problems.append(f"algo.{key}.{name}: got {factor}, expected a finite number from 0 to {FACTOR:g}")
            if key == "advantage_scale" and not algo.trains(name):
                problems.append(f"algo.{key}.{name}: got {factor}, which has no effect: the module is not trained")
    return problems


def turn_problems(name: str, instead: str, reward_sets: Sequence[str]) -> list[str]:
    """Return the problem of a task without turn rewards, for an algorithm that needs them."""
    if any(reward_set in TURN_SETS for reward_set in reward_sets):
        return []
    return [
        f"algo: {name} needs a task with turn rewards, this one offers {', '.join(reward_sets)}; use algo={instead}, "
        "or give the task turn rewards: task=environment by `_turn_reward` in the class, or task.step_rewards=sum with "
        "openenv:…; a task of your own by a reward set 'turn' that fills Score.turn_rewards"
    ]
