"""What the algorithm files share: their own config section, and checks against a program's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mmrl.config import AlgoConfig
from mmrl.config.algo import FACTOR, MhgpoConfig
from mmrl.errors import ConfigError, unknown

ConfigT = TypeVar("ConfigT", bound=AlgoConfig)

TURN_SETS = ("turn", "judge_turn")
"""Reward sets that give intermediate turns a reward."""


def section(algo: AlgoConfig, schema: type[ConfigT]) -> ConfigT:
    """`algo` as the schema that the algorithm needs.

    Raises:
        ConfigError: the section belongs to another algorithm.
    """
    if not isinstance(algo, schema):
        raise ConfigError(f"algo: got the section of '{algo.name}', expected one of type {schema.__name__}")
    return algo


def module_problems(algo: MhgpoConfig, modules: Sequence[str]) -> list[str]:
    """Module names that the program does not have, or no module left to train."""
    problems = []
    for key in ("train_modules", "freeze_modules"):
        for name in getattr(algo, key) or ():
            if name not in modules:
                problems.append(unknown(f"algo.{key}", name, modules))
    chosen = modules if algo.train_modules is None else algo.train_modules
    idle = [name for name in algo.freeze_modules if name in modules and name not in chosen]
    if idle:
        problems.append(
            f"algo.freeze_modules: got {', '.join(idle)}, which has no effect: algo.train_modules leaves it out already"
        )
    if not problems and not set(chosen) - set(algo.freeze_modules):
        problems.append(
            "algo.freeze_modules: no module is left to train; "
            f"expected at least one of {', '.join(modules)} outside of it"
        )
    return problems


def scale_problems(algo: AlgoConfig, modules: Sequence[str]) -> list[str]:
    """Factors of modules that the program does not have, or that are not finite."""
    problems = []
    for key in ("advantage_scale", "penalty_scale"):
        for name, factor in (getattr(algo, key, None) or {}).items():
            if name not in modules:
                problems.append(unknown(f"algo.{key}", name, modules))
            if not 0 <= factor <= FACTOR:  # NaN compares false
                problems.append(f"algo.{key}.{name}: got {factor}, expected a finite number from 0 to {FACTOR:g}")
            if key == "advantage_scale" and isinstance(algo, MhgpoConfig) and not algo.trains(name):
                problems.append(f"algo.{key}.{name}: got {factor}, which has no effect: the module is not trained")
    return problems


def turn_problems(name: str, instead: str, reward_sets: Sequence[str]) -> list[str]:
    """The one sentence for a task without turn rewards."""
    if any(reward_set in TURN_SETS for reward_set in reward_sets):
        return []
    return [
        f"algo: {name} needs a task with turn rewards, this one offers {', '.join(reward_sets)}; use algo={instead}, "
        "or give the task a reward set 'turn' that fills Score.turn_rewards"
    ]
