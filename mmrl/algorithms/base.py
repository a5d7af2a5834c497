"""An algorithm is four named choices: plan, rewards, groups, advantages (and the weights of its loss mean).

Pure: no torch, no engine. `plan` says who is sampled how; `credit` turns a forest into entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mmrl.config import AlgoConfig
from mmrl.credit.entries import Credit
from mmrl.records import Forest


@dataclass(frozen=True, slots=True)
class Fork:
    """Sample `width` continuations at the first call of `module` on a path (None: the path's very first call)."""

    module: str | None
    width: int


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree of rollouts of an example: its forks, outermost first. No forks: a single independent rollout."""

    forks: tuple[Fork, ...] = ()
    fork_name: str | None = None
    """Recorded as `Rollout.fork` (the module at which an RR or IS tree forked)."""
    teacher: str | None = None


class Algorithm(Protocol):
    """One training algorithm, stateless. Listed in `mmrl.algorithms.ALGORITHMS`."""

    name: str
    needs_turn_rewards: bool
    needs_critic: bool

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Problems of this algorithm with a program's modules and a task's reward sets, one sentence each."""
        ...

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[Tree, ...]:
        """Trees to sample for one example. `key` = (run seed, step, example id): the source of any draw."""
        ...

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """Rewards -> groups -> advantages and weights.

        Args:
            minibatch: example id -> mini-batch index; weights are normalised within each. None: one mini-batch.
        """
        ...
