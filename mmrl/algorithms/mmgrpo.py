"""mmGRPO (arXiv 2508.04660): a group per module and invocation, over independent rollouts of a program.

    group (example, module, k): the k-th call of the module in each rollout, all with their rollout's reward
    A = (r - mean) / (std + eps) within the group;  token weight = 1 / (groups · G · |o|)

Works for any program, also when rollouts call a module different numbers of times (shorter lists are filled up or all
cut), when rollouts come from several teacher programs, and when parsing fails (only the failing call is then trained,
on a format reward). Use it for programs whose modules have prompts of their own and no penalties per module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.algorithms.options import section
from mmrl.config import AlgoConfig
from mmrl.config.algo import MmgrpoConfig
from mmrl.config.teachers import STUDENT
from mmrl.credit.assemble import compare, entry, group_metrics
from mmrl.credit.entries import Credit
from mmrl.credit.padding import module_groups
from mmrl.credit.weights import Unit, per_token, two_level
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

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """R independent rollouts, teachers one after the other."""
        shares = section(algo, MmgrpoConfig).shares()
        return tuple(
            plans.Tree(teacher=None if name == STUDENT else name)
            for name, count in shares.items()
            for _ in range(count)
        )

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = section(algo, MmgrpoConfig)
        compared = compare(module_groups(forest, algo, seed), algo)
        places = [(item, index) for item in compared if not item.vanished for index in range(len(item.group.members))]
        units = [
            Unit(member.call.example, item.group.id, member.call.completion_tokens, kept=item.kept)
            for item, index in places
            for member in [item.group.members[index]]
        ]
        weights = per_token(units, two_level(units, minibatch), algo.loss_mean, algo.loss_length, minibatch)
        entries = [
            entry(item.group.members[index], item, index, weight)
            for (item, index), weight in zip(places, weights, strict=True)
        ]
        entries += [
            entry(member, item, index, 0.0)
            for item in compared
            if item.vanished
            for index, member in enumerate(item.group.members)
        ]
        return Credit(algo=self.name, entries=tuple(entries), metrics=group_metrics(forest, compared))
