"""Turns of rollouts and their advantages, each normalised over the rollouts of an example (MT-GRPO).

Second and third step of credit for MT-GRPO: what a turn is, which rollouts it is compared with, and its own advantage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.config.algo import TurnGroupConfig
from mmrl.credit.assemble import Compared, batch_std_of, normalise_as
from mmrl.credit.groups import Group, Member
from mmrl.credit.rewards import Reward, merged
from mmrl.credit.sequences import Track


@dataclass(frozen=True, slots=True)
class TurnRules:
    """How a rollout is cut into turns."""

    two_turns: bool
    """Everything up to the first tool result is turn 1, the rest turn 2; else every call is a turn."""
    missing: str
    """A rollout without turn l in that turn's statistics: `zero` (reward 0) or `exclude`."""
    combined: bool
    """A rollout without a tool result takes the merged advantage on all its tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one rollout: which calls, and what it was compared on."""

    positions: tuple[int, ...]
    """Places of its calls on the rollout's path."""
    reward: float
    parts: Mapping[str, float]
    compared: Compared
    advantage: float
    """Its own: later turns are not yet added."""
    outcome: bool
    """Whether it carries the outcome (its advantage has no turn coefficient)."""


@dataclass(frozen=True, slots=True)
class TurnGroup:
    """All rollouts of one example."""

    example: str
    turns: tuple[tuple[Turn, ...], ...]
    """Turns of each rollout."""
    compared: tuple[Compared, ...]
    vanished: bool
    """Under `zero_variance=drop` (or `refill`): no turn of any rollout has an advantage."""


@dataclass(frozen=True, slots=True)
class _Statistic:
    """One quantity compared over rollouts of an example: their indexes, rewards and result."""

    members: Mapping[int, int]
    """Rollout index -> place in the group."""
    compared: Compared

    def advantage(self, rollout: int) -> float:
        place = self.members.get(rollout)
        return 0.0 if place is None else self.compared.result.advantages[place]


def intermediate(track: Track, rules: TurnRules) -> list[tuple[tuple[int, ...], float | None]]:
    """Intermediate turns of a rollout: places of their calls, and their reward (None: they have none).

    With `two_turns` there is one (its reward is the sum of the rollout's turn rewards), or none without a tool result.
    """
    rewards = [call.turn_reward for call in track.path[:-1]]
    if not rules.two_turns:
        return [((position,), reward) for position, reward in enumerate(rewards)]
    first = next((position for position, reward in enumerate(rewards) if reward is not None), None)
    if first is None:
        return []
    return [(tuple(range(first + 1)), math.fsum(reward or 0.0 for reward in rewards))]


def normalise_turns(tracks: Mapping[str, Sequence[Track]], algo: TurnGroupConfig, rules: TurnRules) -> list[TurnGroup]:
    """Compare each turn index, the outcome and (two turns) the merged reward over the rollouts of each example."""
    cut = {example: [intermediate(track, rules) for track in own] for example, own in tracks.items()}
    columns = {example: _columns(own, cut[example], rules) for example, own in tracks.items()}
    names = dict.fromkeys(name for own in columns.values() for name in own)
    compared = {name: [list(own[name].values()) for own in columns.values() if name in own] for name in names}
    if "combined" in names:  # GRPO-MR's number: over the whole batch, not only examples where a rollout needs it
        compared["combined"] = [[merged(t.rollout, t.path).total for t in own] for own in tracks.values()]
    batch_std = {name: batch_std_of(rewards, algo) for name, rewards in compared.items()}
    found = []
    for example, own in tracks.items():
        statistics = {
            name: _statistic(f"{example}:{name}", own, column, algo, batch_std[name])
            for name, column in columns[example].items()
        }
        turns = tuple(_turns(index, track, cut[example][index], statistics, rules) for index, track in enumerate(own))
        flat = all(not any(item.compared.result.advantages) for item in statistics.values())
        vanished = algo.drops_constant and len(own) > 1 and flat
        found.append(TurnGroup(example, turns, tuple(s.compared for s in statistics.values()), vanished))
    return found


def discounted(own: Sequence[float], alpha: float) -> list[float]:
    """A_k = sum over l >= k of alpha^(l-k) · own_l."""
    found, running = [], 0.0
    for advantage in reversed(own):
        running = advantage + alpha * running
        found.append(running)
    return found[::-1]


def _columns(
    tracks: Sequence[Track], cut: Sequence[list[tuple[tuple[int, ...], float | None]]], rules: TurnRules
) -> dict[str, dict[int, float]]:
    """Statistic name -> rollout index -> reward, for everything that is compared within an example."""
    columns: dict[str, dict[int, float]] = {}
    for turn in range(max(map(len, cut), default=0)):
        rewards = {index: turns[turn][1] for index, turns in enumerate(cut) if turn < len(turns)}
        known = {index: reward for index, reward in rewards.items() if reward is not None}
        columns[f"turn{turn}"] = (
            {index: known.get(index, 0.0) for index in range(len(tracks))} if rules.missing == "zero" else known
        )
    columns["outcome"] = {index: track.reward for index, track in enumerate(tracks)}
    if rules.combined and any(not turns for turns in cut):
        columns["combined"] = {index: merged(t.rollout, t.path).total for index, t in enumerate(tracks)}
    return columns


def _statistic(
    name: str, tracks: Sequence[Track], column: Mapping[int, float], algo: TurnGroupConfig, batch_std: float | None
) -> _Statistic:
    members = tuple(Member(tracks[index].path[-1], Reward(reward)) for index, reward in column.items())
    result = normalise_as(algo, list(column.values()), batch_std)
    compared = Compared(Group(name, members), result, vanished=False)
    return _Statistic({index: place for place, index in enumerate(column)}, compared)


def _turns(
    index: int,
    track: Track,
    cut: Sequence[tuple[tuple[int, ...], float | None]],
    statistics: Mapping[str, _Statistic],
    rules: TurnRules,
) -> tuple[Turn, ...]:
    """Turns of one rollout: the intermediate ones, then the one with the outcome."""
    everything = tuple(range(len(track.path)))
    if not cut and rules.combined:
        reward = merged(track.rollout, track.path)
        statistic = statistics["combined"]
        return (Turn(everything, reward.total, reward.parts, statistic.compared, statistic.advantage(index), True),)
    turns = []
    for number, (positions, reward_or_none) in enumerate(cut):
        statistic = statistics[f"turn{number}"]
        reward_value = reward_or_none or 0.0
        turns.append(
            Turn(positions, reward_value, {"turn": reward_value}, statistic.compared, statistic.advantage(index), False)
        )
    rest = everything[cut[-1][0][-1] + 1 :] if cut else everything
    statistic = statistics["outcome"]
    outcome = {"outcome": track.reward}
    turns.append(Turn(rest, track.reward, outcome, statistic.compared, statistic.advantage(index), True))
    return tuple(turns)
