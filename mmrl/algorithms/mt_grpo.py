"""MT-GRPO (arXiv 2505.11821, Sec. 3): a turn's advantage is its own plus that of the turns after it.

    A_k = sum over l = k..K-1 of alpha^(l-k) · A^I_l  +  alpha^(K-k) · A^O
    A^I_l, A^O: turn rewards and outcome, each normalised over the rollouts of an example; weight = 1 / (B · G · |o|)

`mt_grpo` has the two-turn rules: everything sampled up to the first tool result is turn 1, the rest turn 2, and a
rollout without a tool result takes the merged advantage. `mt_grpo_variable` takes a call as a turn and any number of
them, an extension beyond the paper. There a rollout of n < K - 1 intermediate turns has ended for the others: they are
absent turns with reward 0, whose advantages its earlier turns get too (`missing_turn=absorb`),

    A_k = sum over l = k..K-2 of alpha^(l-k) · A^I_l  +  alpha^(n-k) · A^O

since a policy that decides when to stop would otherwise choose who is compared (docs/turn-rewards.md has the bias).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import MtGrpoConfig, MtGrpoVariableConfig, TurnGroupConfig
from mmrl.credit.backward import discounted
from mmrl.credit.entries import Credit, Entry, Group, Member, Reward
from mmrl.credit.groups import compare, weigh_rollouts
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.scored import ScoredRollout, by_example
from mmrl.records import Forest


class MtGrpo(Algorithm[TurnGroupConfig]):
    """Turn-level advantages over G independent chains: of two turns, or of any number."""

    needs_turn_rewards = True

    def __init__(self, name: str):
        self.name = name

    @override
    def credit(self, forest: Forest, algo: TurnGroupConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        # Turns are compared one by one, then added up along the rollout: comparing the sums would be GRPO-MR again.
        examples = compare_turns(by_example(forest), algo, turn_rules(algo))
        advantages = {name: example.advantages(algo) for name, example in examples.items()}
        weighed = weigh_rollouts({name: e.rollouts for name, e in examples.items()}, advantages, algo, minibatch)
        entries = [
            entry
            for example, group in zip(examples.values(), weighed, strict=True)
            for index, member in enumerate(group.members)
            for entry in example.entries(index, algo, member.weight)
        ]
        return Credit(
            algo=self.name,
            entries=tuple(entries),
            groups=tuple(group for example in examples.values() for group in example.columns.values()),
            metrics=zero_variance_shares(examples.values()),
        )


Cut = list[tuple[tuple[int, ...], float | None]]
"""Intermediate turns of a rollout: positions of their calls on its path, and their reward (None: they have none)."""


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Rules that cut a rollout into turns."""

    two_turns: bool
    """Everything up to the first tool result is turn 1, the rest turn 2; else every call is a turn."""
    missing: str
    """A rollout without turn l: in that turn's statistics with reward 0 (`zero`), and its earlier turns get the
    advantage of that 0 (`absorb`); or not at all (`exclude`)."""
    combined: bool
    """A rollout without a tool result takes the merged advantage on all its tokens."""


def turn_rules(algo: TurnGroupConfig) -> TurnRules:
    """Return the rules of an algorithm's config."""
    if isinstance(algo, MtGrpoConfig):
        return TurnRules(two_turns=True, missing=algo.missing_turn, combined=algo.no_tool == "combined")
    assert isinstance(algo, MtGrpoVariableConfig)
    return TurnRules(two_turns=False, missing=algo.missing_turn, combined=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a rollout: its calls, and the comparison of its reward."""

    positions: tuple[int, ...]
    """Positions of its calls on the rollout's path."""
    reward: Reward
    group: Group
    """Group in which `reward` was compared."""
    advantage: float
    """Advantage of this turn alone: later turns are not yet added."""
    outcome: bool
    """True for the turn with the outcome (its advantage has no turn coefficient)."""
    absent: tuple[float, ...] = ()
    """With `absorb`, on a rollout's last turn: advantages of the turns that others of its example have after it."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A quantity over those rollouts of an example that have it, and their comparison."""

    rewards: Mapping[int, float]
    """Index of the rollout -> reward."""
    group: Group

    def advantage(self, rollout: int) -> float:
        """Return the advantage of one of the example's rollouts; 0 for those that were not compared."""
        positions = {index: position for position, index in enumerate(self.rewards)}
        return self.group.members[positions[rollout]].advantage if rollout in positions else 0.0


@dataclass(frozen=True, slots=True)
class TurnGroup:
    """Rollouts of an example, with their turns compared."""

    rollouts: tuple[ScoredRollout, ...]
    turns: tuple[tuple[Turn, ...], ...]
    """Turns of each rollout."""
    columns: Mapping[str | int, Group]
    """Quantity that was compared (number of a turn, `outcome`, `combined`) -> its group."""

    def advantages(self, algo: TurnGroupConfig) -> list[float]:
        """Return the advantage of every turn, with those of the turns after it."""
        return [total for turns in self.turns for *_, total in _totals(turns, algo)]

    def entries(self, index: int, algo: TurnGroupConfig, weight: float) -> list[Entry]:
        """Make entries for the `index`-th rollout's calls, with the advantages of their turn and of those after it."""
        path, entries = self.rollouts[index].path, []
        for turn, advantage, after, total in _totals(self.turns[index], algo):
            later = {"absent_turns": after} if turn.absent else {}
            reward = replace(turn.reward, parts={**turn.reward.parts, "own_advantage": advantage, **later})
            entries += [turn.group.entry(path[position], reward, total, weight) for position in turn.positions]
        return entries


def _totals(turns: Sequence[Turn], algo: TurnGroupConfig) -> list[tuple[Turn, float, float, float]]:
    """Return each turn of a rollout with its own advantage, that of absent turns, and all that reaches it, added up."""
    single = [turn.advantage if turn.outcome else algo.turn_coef * turn.advantage for turn in turns]
    # The first absent turn stands at the last turn's position, l = n, so both reach turn k with alpha^(n-k).
    absent = [algo.turn_coef * sum(discounted(turn.absent, algo.alpha)[:1]) for turn in turns]
    totals = discounted([a + b for a, b in zip(single, absent, strict=True)], algo.alpha)
    return list(zip(turns, single, absent, totals, strict=True))


def compare_turns(
    rollouts: Mapping[str, Sequence[ScoredRollout]], algo: TurnGroupConfig, rules: TurnRules
) -> dict[str, TurnGroup]:
    """Compare each turn index, the outcome and (two turns) the merged reward over the rollouts of each example."""
    cuts = {example: [_cut(scored, rules) for scored in samples] for example, samples in rollouts.items()}
    columns: dict[str, dict[str | int, _Column]] = {example: {} for example in rollouts}
    rewards = {example: _rewards(samples, cuts[example], rules) for example, samples in rollouts.items()}
    for name in dict.fromkeys(name for columns_of in rewards.values() for name in columns_of):
        label = f"turn{name}" if isinstance(name, int) else name
        groups = {}
        for example, samples in rollouts.items():
            # `std_over=batch` pools a quantity over the batch. The merged reward is GRPO-MR's number there: of every
            # example, not only of those in which a rollout without a tool result needs it.
            pooled = {i: scored.merged.total for i, scored in enumerate(samples)} if name == "combined" else {}
            if of_name := rewards[example].get(name, pooled):
                members = tuple(Member(samples[i].path[-1:], Reward(reward)) for i, reward in of_name.items())
                groups[example] = Group(f"{example}:{label}", members)
            elif name in rewards[example]:
                groups[example] = Group(f"{example}:{label}", ())
        for example, group in zip(groups, compare(groups.values(), algo), strict=True):
            if name in rewards[example]:
                columns[example][name] = _Column(rewards[example][name], group)
    return {
        example: TurnGroup(
            tuple(samples),
            tuple(_turns(i, scored, cuts[example][i], columns[example], rules) for i, scored in enumerate(samples)),
            {name: column.group for name, column in columns[example].items()},
        )
        for example, samples in rollouts.items()
    }


def zero_variance_shares(groups: Iterable[TurnGroup]) -> dict[str, float]:
    """Return the share of the examples in which all rewards of a turn are equal, for each turn that is compared."""
    flags: dict[int, list[bool]] = {}
    for example in groups:
        for name, group in example.columns.items():
            if isinstance(name, int) and not group.is_singleton:
                flags.setdefault(name, []).append(group.constant)
    return {f"turn/{turn}/zero_variance_share": sum(flat) / len(flat) for turn, flat in sorted(flags.items())}


def _cut(scored: ScoredRollout, rules: TurnRules) -> Cut:
    """Cut into one intermediate turn (the sum of all turn rewards) with `two_turns`, none without a tool result."""
    rewards = [call.turn_reward for call in scored.path[:-1]]
    if not rules.two_turns:
        return [((position,), reward) for position, reward in enumerate(rewards)]
    # A turn reward is given for a tool result, so the first call that has one ends turn 1.
    first = next((position for position, reward in enumerate(rewards) if reward is not None), None)
    if first is None:
        return []
    return [(tuple(range(first + 1)), math.fsum(reward or 0.0 for reward in rewards))]


def _rewards(
    rollouts: Sequence[ScoredRollout], cuts: Sequence[Cut], rules: TurnRules
) -> dict[str | int, dict[int, float]]:
    """Return column -> index of the rollout -> reward, for all quantities compared within an example."""
    columns: dict[str | int, dict[int, float]] = {}
    for turn in range(max(map(len, cuts), default=0)):
        # `zero` and `absorb` compare all G rollouts, the missing ones as if their tool had brought nothing; `exclude`
        # compares those that reached the turn, whose number then varies.
        rewards = {index: turns[turn][1] for index, turns in enumerate(cuts) if turn < len(turns)}
        rewarded = {index: reward for index, reward in rewards.items() if reward is not None}
        columns[turn] = (
            rewarded
            if rules.missing == "exclude"
            else {index: rewarded.get(index, 0.0) for index in range(len(rollouts))}
        )
    columns["outcome"] = {index: scored.reward for index, scored in enumerate(rollouts)}
    if rules.combined and any(not turns for turns in cuts):
        columns["combined"] = {index: scored.merged.total for index, scored in enumerate(rollouts)}
    return columns


def _turns(
    index: int, scored: ScoredRollout, cut: Cut, columns: Mapping[str | int, _Column], rules: TurnRules
) -> tuple[Turn, ...]:
    """Return the turns of one rollout: the intermediate ones, then the one with the outcome."""
    # Calls of a turn share its advantage: within a turn nothing says which of them mattered.
    everything = tuple(range(len(scored.path)))
    if not cut and rules.combined:
        column = columns["combined"]
        return (Turn(everything, scored.merged, column.group, column.advantage(index), True),)
    turns = []
    for number, (positions, reward) in enumerate(cut):
        column = columns[number]
        turn_reward = Reward(reward or 0.0, {"turn": reward or 0.0})
        turns.append(Turn(positions, turn_reward, column.group, column.advantage(index), False))
    last = everything[cut[-1][0][-1] + 1 :] if cut else everything
    column = columns["outcome"]
    longest = sum(isinstance(name, int) for name in columns) if rules.missing == "absorb" else 0
    absent = tuple(columns[turn].advantage(index) for turn in range(len(cut), longest))
    turns.append(Turn(last, scored.outcome, column.group, column.advantage(index), True, absent))
    return tuple(turns)
