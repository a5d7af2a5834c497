"""Tree-GRPO (arXiv 2509.21240): trees of agent steps, and leaves that are compared within their tree and over all.

    A_l = (R_l - mean_tree) / (std_tree + eps) + (R_l - mean_example) / (std_example + eps)
    every sampled token of leaf l's path has A_l;  token weight = 1 / (B · leaves of the example · |o|)

Each of M trees begins as one rollout. In each of L rounds N calls are drawn in it, with replacement, and the program
goes on anew from each; then K leaves of the tree are kept. A prefix that several leaves share is sampled once and
trained once per leaf. Use it for agents of several turns where sampling is dear: leaves of one tree differ only after
their fork, so the first term compares turns with the outcome alone. With one leaf a tree it is GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from mmrl import rng
from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import TreeGrpoConfig
from mmrl.credit.entries import Credit, Group, Member, Reward
from mmrl.credit.groups import compare, weigh
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.scored import by_example
from mmrl.records import Forest
from mmrl.rollout import plans


class TreeGrpo(Algorithm[TreeGrpoConfig]):
    """Leaves compared twice."""

    name = "tree_grpo"

    def plan(self, algo: TreeGrpoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan M trees that grow."""
        growth = plans.Growth(algo.rounds, algo.nodes, algo.group_size, key)
        return (plans.Tree(growth=growth),) * algo.trees

    @override
    def credit(self, forest: Forest, algo: TreeGrpoConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        examples, trees = [], dict[str, list[Member]]()
        for example, rollouts in by_example(forest).items():
            members = tuple(Member(rollout.path, rollout.outcome) for rollout in rollouts)
            examples.append(Group(example, members))
            for rollout, member in zip(rollouts, members, strict=True):
                trees.setdefault(f"{example}/{rollout.tree}", []).append(member)
        within = compare([Group(name, tuple(members)) for name, members in trees.items()], algo)
        advantages = {id(old): new.advantage for g in within for old, new in zip(trees[g.id], g.members, strict=True)}
        groups = []
        for group, compared in zip(examples, compare(examples, algo), strict=True):
            summed = [
                replace(new, reward=_reward(new, advantages[id(old)]), advantage=advantages[id(old)] + new.advantage)
                for old, new in zip(group.members, compared.members, strict=True)
            ]
            groups.append(replace(compared, members=tuple(summed)))
        groups = weigh(groups, algo, minibatch)
        entries = tuple(entry for group in groups for entry in group.entries())
        return Credit(algo=self.name, entries=entries, groups=(*groups, *within))


def _reward(leaf: Member, within: float) -> Reward:
    """Return the leaf's reward, with the two advantages that are added."""
    return replace(leaf.reward, parts={**leaf.reward.parts, "in_tree": within, "in_example": leaf.advantage})
