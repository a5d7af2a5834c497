"""What an algorithm is: the choices that every one of them makes, with the common ones as defaults."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from mmrl import rng
from mmrl.config import AlgoConfig
from mmrl.config.algo import GroupConfig
from mmrl.credit.entries import Credit
from mmrl.records import Forest
from mmrl.rollout import plans


class Algorithm(Protocol):
    """Four named choices: plan, rewards, groups, advantages (and the weights of the loss mean).

    Stateless and pure: no torch, no engine. `plan` says who is sampled how; `credit` turns a forest into entries.
    """

    # Attributes of the algorithm, whatever its config says: checks and `mmrl plan` read them before anything is built.
    name: str
    needs_turn_rewards: bool = False
    needs_critic: bool = False

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Return problems of this algorithm with a program's modules and a task's reward sets, one sentence each."""
        return []

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Return the trees to sample for one example, here G independent rollouts.

        Args:
            key: (run seed, step, example id), the source of any draw.
        """
        return plans.independent(GroupConfig.narrow(algo).group_size)

    @abstractmethod
    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """Compute rewards -> groups -> advantages and weights.

        Args:
            minibatch: example id -> mini-batch index; weights are normalised within each. None: one mini-batch.
        """
        ...
