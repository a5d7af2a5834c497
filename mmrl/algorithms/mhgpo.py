"""MHGPO (arXiv 2506.02718): one policy, several agents, rewards backed up a tree, groups per agent.

    R_shared(leaf) = outcome;  R_shared(call) = Aggr over its successors (Eq. 4);  R = R_shared + R_spe(call)
    A = (R - mean) / (std + eps) within its group;  token weight = 1 / (B · n · G_k · |o|) (Eq. 6)

The samplers (Sec. 3.2) differ in where trees fork and which calls are then compared: `mhgpo_fof` forks at the first
module (the default choice); `mhgpo_is` at every module afresh, for groups of identical prompts at the highest price;
`mhgpo_rr` at a drawn module, and compares the single calls above the fork across the batch, the cheapest;
`mhgpo_fof_os` adds G samples of the last module per branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from typing_extensions import override

from mmrl import rng
from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import MhgpoConfig, MhgpoFofOsConfig, MhgpoRrConfig
from mmrl.credit.backward import backward
from mmrl.credit.entries import Credit, Entry, Group, Reward
from mmrl.credit.groups import compare
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.slots import ForkView, by_chunks, by_fork, by_slot, weigh_slots
from mmrl.errors import unknown
from mmrl.records import Call, Forest
from mmrl.rollout import plans

MhgpoT = TypeVar("MhgpoT", bound=MhgpoConfig, contravariant=True)


class Mhgpo(Algorithm[MhgpoT]):
    """Fork on first, and what all samplers share."""

    def __init__(self, name: str):
        self.name = name

    def check(self, algo: MhgpoT, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Return unknown names in `train_modules` and `freeze_modules`, or nothing left to train."""
        problems = []
        for key, names in (("train_modules", algo.train_modules or ()), ("freeze_modules", algo.freeze_modules)):
            problems += [unknown(f"algo.{key}", name, modules) for name in names if name not in modules]
        # A module that both keys leave out is a contradiction that the user would like to know of, not a harmless
        # repeat.
        trained = modules if algo.train_modules is None else algo.train_modules
        idle = [name for name in algo.freeze_modules if name in modules and name not in trained]
        if idle:
            twice = f"got {', '.join(idle)}, which has no effect: algo.train_modules leaves it out already"
            problems.append(f"algo.freeze_modules: {twice}")
        if not problems and not set(trained) - set(algo.freeze_modules):
            problems.append(
                "algo.freeze_modules: no module is left to train; "
                f"expected at least one of {', '.join(modules)} outside of it"
            )
        return problems

    def plan(self, algo: MhgpoT, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan one tree that forks at its first call."""
        return plans.fork_on_first(modules, algo.group_size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoT, seed: int) -> list[Group]:
        """Return the groups of calls that are compared; calls in no group are left out of the loss."""
        return by_slot(forest, rewards)

    def trains(self, call: Call, algo: MhgpoT) -> bool:
        """Return True if the call's slot counts in n of Eq. 6."""
        return algo.trains(call.module) and call.completion_tokens > 0

    @override
    def credit(self, forest: Forest, algo: MhgpoT, seed: int, minibatch: Minibatches = None) -> Credit:
        # Over the whole forest first: a call's reward needs all branches below it, whichever groups they fall into.
        rewards = backward(forest, algo, seed)
        groups = compare(self.groups(forest, rewards, algo, seed), algo)
        rewarded = [forest.calls[call_id] for call_id in rewards]
        groups = weigh_slots(groups, rewarded, lambda call: self.trains(call, algo), algo, minibatch)
        # A call is in at most one group here, unlike in mmGRPO, where fillers repeat calls.
        compared = {entry.call: entry for group in groups for entry in group.entries()}
        # Every call with a reward has an entry, in the forest's order; one that no group compares has no weight.
        entries = tuple(compared.get(call.id) or _unweighted(call, rewards[call.id]) for call in rewarded)
        return Credit(algo=self.name, entries=entries, groups=tuple(groups))


class MhgpoIs(Mhgpo[MhgpoConfig]):
    """Independent sampling: one tree per module; only the calls at its fork are compared and trained."""

    def plan(self, algo: MhgpoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan a tree per module, forking there."""
        return plans.independent_sampling(modules, algo.group_size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """Return the calls at the forks; the others only back their reward up."""
        # Before the fork a tree has one sample, after it each branch has another prompt: only siblings are compared.
        at_fork = ForkView(forest).at_fork
        return by_slot(forest, rewards, [call_id for call_id in rewards if call_id in at_fork])

    def trains(self, call: Call, algo: MhgpoConfig) -> bool:
        """Return True at a module's first invocation: a fork is there, and only those are slots of Eq. 6."""
        return call.invocation == 0 and super().trains(call, algo)


class MhgpoRr(Mhgpo[MhgpoRrConfig]):
    """Round robin: fork at a drawn module; the single calls above it are compared across the batch."""

    def check(self, algo: MhgpoRrConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Check as MHGPO, and one fork probability per module."""
        problems = super().check(algo, modules, reward_sets)
        if algo.fork_probs is not None and len(algo.fork_probs) != len(modules):
            problems.append(
                f"algo.fork_probs: got {len(algo.fork_probs)} probabilities, expected {len(modules)}, "
                f"one per module of the program ({', '.join(modules)})"
            )
        return problems

    def plan(self, algo: MhgpoRrConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan one tree that forks at a module drawn for this example and step."""
        # The paper's probabilities for rewriter, reranker, answerer; a fork early in the path trains more modules.
        default = (0.7, 0.1, 0.2) if len(modules) == 3 else (1.0 / len(modules),) * len(modules)
        return plans.round_robin(modules, algo.group_size, algo.fork_probs or default, key)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoRrConfig, seed: int) -> list[Group]:
        """Group as fork-on-first from the fork on; single calls are compared over the batch (`regroup`)."""
        if algo.regroup == "by_agent_fork":
            return by_fork(forest, rewards, ForkView(forest).above_fork)
        return by_chunks(forest, rewards, algo.regroup == "alg3", algo.group_size, seed)


class MhgpoFofOs(Mhgpo[MhgpoFofOsConfig]):
    """Fork on first, the last module sampled G times on each branch."""

    def check(self, algo: MhgpoFofOsConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Check as MHGPO, and a last module that is not the first."""
        text = f"algo: {self.name} forks at the first and at the last module, the program has only '{modules[0]}'; "
        return super().check(algo, modules, reward_sets) + ([text + "use algo=mhgpo_fof"] if len(modules) < 2 else [])

    def plan(self, algo: MhgpoFofOsConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan one tree with two forks: G branches, G samples of the last module on each."""
        return plans.fork_on_first(modules, algo.group_size, last_width=algo.group_size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoFofOsConfig, seed: int) -> list[Group]:
        """Group all G² terminal calls of an example, or G per branch (`os_group`)."""
        # A parse retry or a loop may call the module again further down: only its first call is the over-sampled one.
        over = (forest.modules[-1], 0) if algo.os_group == "parent" else None
        return by_slot(forest, rewards, within_parent=lambda call: (call.module, call.invocation) == over)


def _unweighted(call: Call, reward: Reward) -> Entry:
    """Return the entry of a call that has a reward and no group: printed and recorded with weight 0."""
    zeros = (0.0,) * call.completion_tokens
    return Entry(call=call.id, reward=reward.total, parts=reward.parts, advantages=zeros, weights=zeros)
