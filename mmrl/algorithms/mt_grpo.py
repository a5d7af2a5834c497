"""MT-GRPO (arXiv 2505.11821, Sec. 3): a turn's advantage is its own plus that of the turns after it.

    A_k = sum over l = k..K-1 of alpha^(l-k) · A^I_l  +  alpha^(K-k) · A^O
    A^I_l, A^O: turn rewards and outcome, each normalised over the rollouts of an example; weight = 1 / (B · G · |o|)

`mt_grpo` has the two-turn rules: everything sampled up to the first tool result is turn 1, the rest turn 2, and a
rollout without a tool result takes the merged advantage. `mt_grpo_variable` takes a call as a turn and any number of
them. Its baseline compares turn l of rollouts that reached l: a policy that decides when to stop chooses who is in
that comparison, so the baseline is biased (docs/algorithms.md); it is an extension beyond the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl import rng
from mmrl.config import AlgoConfig
from mmrl.config.algo import MtGrpoConfig, MtGrpoVariableConfig, TurnGroupConfig
from mmrl.credit.entries import Credit, Group, Member
from mmrl.credit.groups import weigh
from mmrl.credit.scored import by_example
from mmrl.credit.turns import TurnRules, compare_turns, zero_variance_shares
from mmrl.records import Forest
from mmrl.rollout import plans


class MtGrpo:
    """Turn-level advantages over G independent chains."""

    needs_turn_rewards = True
    needs_critic = False

    def __init__(self, name: str):
        self.name = name

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Fits every program."""
        return []

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """G independent rollouts."""
        return plans.independent(TurnGroupConfig.of(algo).group_size)

    def rules(self, algo: AlgoConfig) -> TurnRules:
        """What a turn is, and what becomes of a missing one."""
        algo = MtGrpoConfig.of(algo)
        return TurnRules(two_turns=True, missing=algo.missing_turn, combined=algo.no_tool == "combined")

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        # Turns are compared on their own, then added up along the rollout: comparing the sums would be GRPO-MR again.
        algo = TurnGroupConfig.of(algo)
        examples = compare_turns(by_example(forest), algo, self.rules(algo))
        # Tokens are weighed by whole rollouts, as in GRPO; an example without any advantage may count as not sampled.
        rollouts = [
            Group(name, members, vanished=algo.drops_constant and len(members) > 1 and own.flat)
            for name, own in examples.items()
            for members in [tuple(Member(scored.path, scored.outcome) for scored in own.rollouts)]
        ]
        weighed = weigh(rollouts, algo, minibatch)
        entries = [
            entry
            for own, group in zip(examples.values(), weighed, strict=True)
            for index, member in enumerate(group.members)
            for entry in own.entries(index, algo, member.weight)
        ]
        return Credit(
            algo=self.name,
            entries=tuple(entries),
            groups=tuple(group for own in examples.values() for group in own.columns.values()),
            metrics=zero_variance_shares(examples.values()),
        )


class MtGrpoVariable(MtGrpo):
    """Any number of turns."""

    def rules(self, algo: AlgoConfig) -> TurnRules:
        """A call is a turn; a rollout's last one carries the outcome alone."""
        return TurnRules(two_turns=False, missing=MtGrpoVariableConfig.of(algo).missing_turn, combined=False)
