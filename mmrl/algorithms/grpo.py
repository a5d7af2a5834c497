"""GRPO over whole rollouts: outcome only (`grpo`, GRPO-OR) or outcome plus turn rewards (`grpo_mr`, GRPO-MR).

    A_i = (R_i - mean) / (std + eps) over the G rollouts of an example; every token of rollout i has A_i
    token weight = 1 / (B · G · |o_i|)

DeepSeekMath's GRPO, in the two forms that arXiv 2505.11821 (Sec. 3) compares with. Use `grpo` as the plain baseline
on any task; `grpo_mr` where a task has turn rewards but credit per turn is not needed.
"""

from __future__ import annotations

from typing_extensions import override

from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import GroupConfig
from mmrl.credit.entries import Credit, Group, Member
from mmrl.credit.groups import compare, weigh
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.scored import by_example
from mmrl.records import Forest


class Grpo(Algorithm[GroupConfig]):
    """Group-relative advantage per rollout; `merge` adds turn rewards to the outcome."""

    def __init__(self, name: str, merge: bool):
        self.name = name
        self.merge = merge
        self.needs_turn_rewards = merge

    @override
    def credit(self, forest: Forest, algo: GroupConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        groups = [
            # A rollout stands for all its calls: they are one sequence of the loss.
            Group(example, tuple(Member(r.path, r.merged if self.merge else r.outcome) for r in rollouts))
            for example, rollouts in by_example(forest).items()
        ]
        groups = weigh(compare(groups, algo), algo, minibatch)
        entries = tuple(entry for group in groups for entry in group.entries())
        return Credit(algo=self.name, entries=entries, groups=tuple(groups))
