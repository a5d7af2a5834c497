"""MHGPO (arXiv 2506.02718): one policy, several agents, rewards backed up a tree, groups per agent.

    R_shared(leaf) = outcome;  R_shared(call) = Aggr over its successors (Eq. 4);  R = R_shared + R_spe(call)
    A = (R - mean) / (std + eps) within its group;  token weight = 1 / (B · n · G_k · |o|) (Eq. 6)

Here is what the samplers share, with `mhgpo_fof`, which forks at the first module (the default choice); the others,
in `mhgpo_samplers`, change the plan and the groups only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl import rng
from mmrl.algorithms.checks import module_problems
from mmrl.config import AlgoConfig
from mmrl.config.algo import MhgpoConfig
from mmrl.credit.backward import backward
from mmrl.credit.entries import Credit, Entry, Group, Reward
from mmrl.credit.groups import compare
from mmrl.credit.slots import by_slot, weigh_slots
from mmrl.records import Call, Forest
from mmrl.rollout import plans


class Mhgpo:
    """Fork on first; the base of the other samplers."""

    needs_turn_rewards = False
    needs_critic = False

    def __init__(self, name: str):
        self.name = name

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Unknown names in `train_modules` and `freeze_modules`, or nothing left to train."""
        return module_problems(MhgpoConfig.of(algo), modules)

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """One tree that forks at its first call."""
        return plans.fork_on_first(modules, MhgpoConfig.of(algo).group_size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """Which calls are compared; calls in no group are left out of the loss."""
        return by_slot(forest, rewards)

    def trains(self, call: Call, algo: MhgpoConfig) -> bool:
        """Whether the call's slot counts in n of Eq. 6."""
        return algo.trains(call.module) and call.completion_tokens > 0

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = MhgpoConfig.of(algo)
        # Over the whole forest first: a call's reward needs all branches below it, whichever groups they fall into.
        rewards = backward(forest, algo, seed)
        groups = compare(self.groups(forest, rewards, algo, seed), algo)
        rewarded = [forest.calls[call_id] for call_id in rewards]
        groups = weigh_slots(groups, rewarded, lambda call: self.trains(call, algo), algo, minibatch)
        # A call is in at most one group here, unlike in mmGRPO, where fillers repeat calls.
        compared = {entry.call: entry for group in groups for entry in group.entries()}
        # Every call with a reward has an entry, in the forest's order; one that no group compares has no weight.
        entries = tuple(compared.get(call.id) or _left_out(call, rewards[call.id]) for call in rewarded)
        return Credit(algo=self.name, entries=entries, groups=tuple(groups))


def _left_out(call: Call, reward: Reward) -> Entry:
    """The entry of a call that has a reward and no group: shown to people, weight 0."""
    zeros = (0.0,) * call.completion_tokens
    return Entry(call=call.id, reward=reward.total, parts=reward.parts, advantages=zeros, weights=zeros)
