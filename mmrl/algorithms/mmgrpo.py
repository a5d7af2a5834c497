"""mmGRPO (arXiv 2508.04660): a group per module and invocation, over independent rollouts of a program.

    group (example, module, k): the k-th call of the module in each rollout, all with their rollout's reward
    A = (r - mean) / (std + eps) within the group;  token weight = 1 / (groups · G · |o|)

Works for any program, also when rollouts call a module different numbers of times (shorter lists are filled up or all
cut), when rollouts come from several teacher programs, and when parsing fails (only the failing call is then trained,
on a format reward). Use it for programs whose modules have prompts of their own and no penalties per module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl import rng
from mmrl.config import AlgoConfig
from mmrl.config.algo import MmgrpoConfig
from mmrl.config.teacher import STUDENT
from mmrl.credit.entries import Credit
from mmrl.credit.groups import compare, weigh
from mmrl.credit.padding import module_groups
from mmrl.records import Forest
from mmrl.rollout import plans


class Mmgrpo:
    """Module-level groups."""

    name = "mmgrpo"
    needs_turn_rewards = False
    needs_critic = False

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Fits every program."""
        return []

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """R independent rollouts, teachers one after the other."""
        # Teacher-major order is part of the rollouts' ids, and with them of every sampling seed.
        shares = MmgrpoConfig.of(algo).shares()
        return tuple(
            plans.Tree(teacher=None if name == STUDENT else name)
            for name, count in shares.items()
            for _ in range(count)
        )

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = MmgrpoConfig.of(algo)
        groups = weigh(compare(module_groups(forest, algo, seed), algo), algo, minibatch)
        # Groups that count as not sampled come last (the sort is stable): shown to people, without weight.
        entries = tuple(entry for group in sorted(groups, key=lambda g: g.vanished) for entry in group.entries())
        return Credit(algo=self.name, entries=entries, groups=tuple(groups))
