"""MHGPO (arXiv 2506.02718): one policy, several agents, rewards backed up a tree, groups per agent.

    R_shared(leaf) = outcome;  R_shared(call) = Aggr over its successors (Eq. 4);  R = R_shared + R_spe(call)
    A = (R - mean) / (std + eps) within its group;  token weight = 1 / (B · n · G_k · |o|) (Eq. 6)

Samplers: `mhgpo_fof` forks at the first module (the default choice); `mhgpo_is` forks at every module afresh, for
groups of identical prompts at the highest price; `mhgpo_rr` forks at a drawn module and compares the single calls
above the fork across the batch, the cheapest; `mhgpo_fof_os` adds G samples of the last module per branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.algorithms.options import module_problems, section
from mmrl.config import AlgoConfig
from mmrl.config.algo import MhgpoConfig, MhgpoFofOsConfig, MhgpoRrConfig
from mmrl.credit.assemble import compare, entry, group_metrics, left_out
from mmrl.credit.entries import Credit, Entry
from mmrl.credit.groups import ForkView, Group, by_parent, by_slot, regroup_singles
from mmrl.credit.rewards import Reward, backward
from mmrl.credit.weights import Unit, per_token, three_level
from mmrl.records import Call, Forest
from mmrl.rollout import plans


class Mhgpo:
    """Fork on first; the base of the other samplers, which change the plan and the groups only."""

    needs_turn_rewards = False
    needs_critic = False

    def __init__(self, name: str):
        self.name = name

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Unknown names in `train_modules` and `freeze_modules`, or nothing left to train."""
        return module_problems(section(algo, MhgpoConfig), modules)

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """One tree that forks at its first call."""
        return plans.fork_on_first(modules, section(algo, MhgpoConfig).group_size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """Which calls are compared; calls in no group are left out of the loss."""
        return by_slot(forest, rewards)

    def trains(self, call: Call, algo: MhgpoConfig) -> bool:
        """Whether the call's slot counts in n of Eq. 6."""
        return algo.trains(call.module) and call.completion_tokens > 0

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = section(algo, MhgpoConfig)
        rewards = backward(
            forest,
            aggregate=algo.aggregate,
            propagate=algo.propagate,
            penalties=algo.penalties,
            penalty_scale=algo.penalty_scale,
            seed=seed,
        )
        compared = compare(self.groups(forest, rewards, algo, seed), algo)
        places = [(item, index, member) for item in compared for index, member in enumerate(item.group.members)]
        # What is frozen or vanished is no sequence of the loss: no tokens, so it sets no length for `constant` either.
        units = [
            Unit(
                member.call.example,
                (member.call.module, member.call.invocation),
                member.call.completion_tokens if self.trains(member.call, algo) and not item.vanished else 0,
                kept=item.kept,
            )
            for item, _, member in places
        ]
        vanished = {(unit.example, unit.slot) for unit, place in zip(units, places, strict=True) if place[0].vanished}
        filled = [
            (call.example, (call.module, call.invocation))
            for call in map(forest.calls.__getitem__, rewards)
            if self.trains(call, algo) and (call.example, (call.module, call.invocation)) not in vanished
        ]
        shares = three_level(units, filled, minibatch)
        weights = per_token(units, shares, algo.loss_mean, algo.loss_length, minibatch)
        entries: dict[str, Entry] = {
            member.call.id: entry(member, item, index, weight)
            for (item, index, member), weight in zip(places, weights, strict=True)
        }
        ordered = [entries.get(call_id) or left_out(forest.calls[call_id], rewards[call_id]) for call_id in rewards]
        return Credit(algo=self.name, entries=tuple(ordered), metrics=group_metrics(forest, compared))


class MhgpoIs(Mhgpo):
    """Independent sampling: one tree per module; only the calls at its fork are compared and trained."""

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """One tree per module, forking there."""
        return plans.independent_sampling(modules, section(algo, MhgpoConfig).group_size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """Calls at the forks; the others only back their reward up."""
        at_fork = ForkView(forest).at_fork
        return by_slot(forest, rewards, [call_id for call_id in rewards if call_id in at_fork])

    def trains(self, call: Call, algo: MhgpoConfig) -> bool:
        """A fork is at a module's first invocation, so only those are slots of Eq. 6."""
        return call.invocation == 0 and super().trains(call, algo)


class MhgpoRr(Mhgpo):
    """Round robin: fork at a drawn module; the single calls above it are compared across the batch."""

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """As MHGPO; and one fork probability per module."""
        algo = section(algo, MhgpoRrConfig)
        problems = module_problems(algo, modules)
        if algo.fork_probs is not None and len(algo.fork_probs) != len(modules):
            problems.append(
                f"algo.fork_probs: got {len(algo.fork_probs)} probabilities, expected {len(modules)}, "
                f"one per module of the program ({', '.join(modules)})"
            )
        return problems

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """One tree that forks at a module drawn for this example and step."""
        algo = section(algo, MhgpoRrConfig)
        default = (0.7, 0.1, 0.2) if len(modules) == 3 else (1.0 / len(modules),) * len(modules)
        return plans.round_robin(modules, algo.group_size, algo.fork_probs or default, key)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """Slots from the fork on, and the regrouped single calls above it."""
        above = ForkView(forest).above_fork
        below = by_slot(forest, rewards, [call_id for call_id in rewards if call_id not in above])
        regroup = section(algo, MhgpoRrConfig).regroup
        return below + regroup_singles(forest, rewards, above, regroup, algo.group_size, seed)


class MhgpoFofOs(Mhgpo):
    """Fork on first, the last module sampled G times on each branch."""

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """As MHGPO; and a last module that is not the first."""
        problems = super().check(algo, modules, reward_sets)
        if len(modules) < 2:
            problems.append(
                f"algo: {self.name} forks at the first and at the last module, the program has only "
                f"'{modules[0]}'; use algo=mhgpo_fof"
            )
        return problems

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """One tree with two forks: G branches, G samples of the last module on each."""
        size = section(algo, MhgpoConfig).group_size
        return plans.fork_on_first(modules, size, last_width=size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """All G² terminal calls of an example, or G per branch (`os_group`)."""
        if section(algo, MhgpoFofOsConfig).os_group == "parent":
            return by_parent(forest, rewards, forest.modules[-1])
        return by_slot(forest, rewards)
