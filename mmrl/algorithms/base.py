"""An algorithm is four named choices: plan, rewards, groups, advantages (and the weights of its loss mean).

Pure: no torch, no engine. `plan` says who is sampled how; `credit` turns a forest into entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mmrl import rng
from mmrl.config import AlgoConfig
from mmrl.credit.entries import Credit
from mmrl.records import Forest
from mmrl.rollout.plans import Fork, Tree

__all__ = ["Algorithm", "Fork", "Tree"]


class Algorithm(Protocol):
    """One training algorithm, stateless. Listed in `mmrl.algorithms.ALGORITHMS`."""

    # Attributes of the algorithm, whatever its config says: checks and `mmrl plan` read them before anything is built.
    name: str
    needs_turn_rewards: bool
    needs_critic: bool

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Problems of this algorithm with a program's modules and a task's reward sets, one sentence each."""
        ...

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[Tree, ...]:
        """Trees to sample for one example. `key` = (run seed, step, example id): the source of any draw."""
        ...

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """Rewards -> groups -> advantages and weights.

        Args:
            minibatch: example id -> mini-batch index; weights are normalised within each. None: one mini-batch.
        """
        ...
