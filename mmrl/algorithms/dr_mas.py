"""Dr.MAS (arXiv 2602.08847): advantages normalised by agent, over all calls that it made for an example.

    A = (R_i - mean_k) / (std_k + eps), mean and std over every call of module k in the G rollouts of an example
    R_i: outcome of the call's rollout;  token weight = 1 / (groups · calls of the group · |o|)

Use it where modules are called equally often and their prompts need not be told apart by invocation. It differs from
mmGRPO in that all invocations of a module are one group, so a rollout that calls it more often weighs more in mean and
std; with one call of one module a rollout it is GRPO.
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


class DrMas(Algorithm[GroupConfig]):
    """A group per example and module."""

    name = "dr_mas"

    @override
    def credit(self, forest: Forest, algo: GroupConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        groups: dict[tuple[str, str], list[Member]] = {}
        for example, rollouts in by_example(forest).items():
            for rollout in rollouts:
                for call in rollout.path:
                    groups.setdefault((example, call.module), []).append(Member((call,), rollout.outcome))
        compared = compare([Group(":".join(name), tuple(members)) for name, members in groups.items()], algo)
        weighed = weigh(compared, algo, minibatch)
        entries = tuple(entry for group in weighed for entry in group.entries())
        return Credit(algo=self.name, entries=entries, groups=tuple(weighed))
