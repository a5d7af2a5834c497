"""MHGPO's other samplers (arXiv 2506.02718, Sec. 3.2): where trees fork, and which calls are then compared.

`mhgpo_is` forks at every module afresh, for groups of identical prompts at the highest price; `mhgpo_rr` forks at a
drawn module and compares the single calls above the fork across the batch, the cheapest; `mhgpo_fof_os` adds G samples
of the last module per branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl import rng
from mmrl.algorithms.checks import probability_problems
from mmrl.algorithms.mhgpo import Mhgpo
from mmrl.config import AlgoConfig
from mmrl.config.algo import MhgpoConfig, MhgpoFofOsConfig, MhgpoRrConfig
from mmrl.credit.entries import Group, Reward
from mmrl.credit.slots import ForkView, by_chunks, by_fork, by_parent, by_slot
from mmrl.records import Call, Forest
from mmrl.rollout import plans


class MhgpoIs(Mhgpo):
    """Independent sampling: one tree per module; only the calls at its fork are compared and trained."""

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """One tree per module, forking there."""
        return plans.independent_sampling(modules, MhgpoConfig.of(algo).group_size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """Calls at the forks; the others only back their reward up."""
        # Before the fork a tree has one sample, after it each branch has another prompt: only siblings are compared.
        at_fork = ForkView(forest).at_fork
        return by_slot(forest, rewards, [call_id for call_id in rewards if call_id in at_fork])

    def trains(self, call: Call, algo: MhgpoConfig) -> bool:
        """A fork is at a module's first invocation, so only those are slots of Eq. 6."""
        return call.invocation == 0 and super().trains(call, algo)


class MhgpoRr(Mhgpo):
    """Round robin: fork at a drawn module; the single calls above it are compared across the batch."""

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """As MHGPO; and one fork probability per module."""
        return super().check(algo, modules, reward_sets) + probability_problems(MhgpoRrConfig.of(algo), modules)

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """One tree that forks at a module drawn for this example and step."""
        algo = MhgpoRrConfig.of(algo)
        # The paper's probabilities for rewriter, reranker, answerer; a fork early in the path trains more modules.
        default = (0.7, 0.1, 0.2) if len(modules) == 3 else (1.0 / len(modules),) * len(modules)
        return plans.round_robin(modules, algo.group_size, algo.fork_probs or default, key)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """As fork-on-first from the fork on; single calls are compared over the batch (`regroup`)."""
        algo = MhgpoRrConfig.of(algo)
        if algo.regroup == "by_agent_fork":
            return by_fork(forest, rewards, ForkView(forest).above_fork)
        return by_chunks(forest, rewards, algo.regroup == "alg3", algo.group_size, seed)


class MhgpoFofOs(Mhgpo):
    """Fork on first, the last module sampled G times on each branch."""

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """As MHGPO; and a last module that is not the first."""
        one = f"algo: {self.name} forks at the first and at the last module, the program has only '{modules[0]}'; "
        return super().check(algo, modules, reward_sets) + ([one + "use algo=mhgpo_fof"] if len(modules) < 2 else [])

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """One tree with two forks: G branches, G samples of the last module on each."""
        size = MhgpoConfig.of(algo).group_size
        return plans.fork_on_first(modules, size, last_width=size)

    def groups(self, forest: Forest, rewards: Mapping[str, Reward], algo: MhgpoConfig, seed: int) -> list[Group]:
        """All G² terminal calls of an example, or G per branch (`os_group`)."""
        per_branch = MhgpoFofOsConfig.of(algo).os_group == "parent"
        return by_parent(forest, rewards, forest.modules[-1]) if per_branch else by_slot(forest, rewards)
