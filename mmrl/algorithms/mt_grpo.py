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
from typing import Any

from mmrl.algorithms.options import section, turn_problems
from mmrl.config import AlgoConfig
from mmrl.config.algo import MtGrpoConfig, MtGrpoVariableConfig, TurnGroupConfig
from mmrl.credit.assemble import group_metrics
from mmrl.credit.entries import Credit, Entry
from mmrl.credit.sequences import Track, track_weights, tracks_by_example
from mmrl.credit.turns import Turn, TurnGroup, TurnRules, discounted, normalise_turns
from mmrl.records import Forest
from mmrl.rollout import plans


class MtGrpo:
    """Turn-level advantages over G independent chains."""

    needs_turn_rewards = True
    needs_critic = False

    def __init__(self, name: str):
        self.name = name

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Needs turn rewards."""
        return turn_problems(self.name, "grpo", reward_sets)

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """G independent rollouts."""
        return plans.independent(section(algo, TurnGroupConfig).group_size)

    def rules(self, algo: AlgoConfig) -> TurnRules:
        """What a turn is, and what becomes of a missing one."""
        algo = section(algo, MtGrpoConfig)
        return TurnRules(two_turns=True, missing=algo.missing_turn, combined=algo.no_tool == "combined")

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = section(algo, TurnGroupConfig)
        tracks = tracks_by_example(forest)
        groups = normalise_turns(tracks, algo, self.rules(algo))
        vanished = [group.example for group in groups if group.vanished]
        weights = track_weights(tracks, algo, minibatch, vanished)
        entries = [
            entry
            for group in groups
            for track, turns in zip(tracks[group.example], group.turns, strict=True)
            for entry in _entries(track, turns, algo, weights[track.rollout.id])
        ]
        return Credit(
            algo=self.name,
            entries=tuple(entries),
            metrics=group_metrics(forest, [item for group in groups for item in group.compared]) | turn_shares(groups),
        )


class MtGrpoVariable(MtGrpo):
    """Any number of turns."""

    def rules(self, algo: AlgoConfig) -> TurnRules:
        """A call is a turn; a rollout's last one carries the outcome alone."""
        return TurnRules(two_turns=False, missing=section(algo, MtGrpoVariableConfig).missing_turn, combined=False)


def turn_shares(groups: Sequence[TurnGroup]) -> dict[str, float]:
    """Share of the examples in which all rewards of a turn are equal, for each turn that is compared."""
    found: dict[str, list[bool]] = {}
    for group in groups:
        for item in group.compared:
            name = item.group.id.removeprefix(f"{group.example}:")
            if name.startswith("turn") and not item.result.dropped:
                found.setdefault(name.removeprefix("turn"), []).append(item.result.constant)
    return {f"turn/{turn}/zero_variance_share": sum(flags) / len(flags) for turn, flags in sorted(found.items())}


def _entries(track: Track, turns: Sequence[Turn], algo: TurnGroupConfig, weight: float) -> list[Entry]:
    """Entries of a rollout's calls, each with the advantage of its turn."""
    own = [turn.advantage if turn.outcome else algo.turn_coef * turn.advantage for turn in turns]
    advantages = discounted(own, algo.alpha)
    return [
        Entry(
            call=track.path[position].id,
            reward=turn.reward,
            parts={**turn.parts, "own_advantage": own[index]},
            group=turn.compared.group.id,
            group_size=len(turn.compared.group.members),
            mean=turn.compared.result.mean,
            std=turn.compared.result.std,
            advantages=(advantages[index],) * track.path[position].completion_tokens,
            weights=(weight,) * track.path[position].completion_tokens,
        )
        for index, turn in enumerate(turns)
        for position in turn.positions
    ]
