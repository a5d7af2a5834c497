"""GRPO over whole rollouts: outcome only (`grpo`, GRPO-OR) or outcome plus turn rewards (`grpo_mr`, GRPO-MR).

    A_i = (R_i - mean) / (std + eps) over the G rollouts of an example; every token of rollout i has A_i
    token weight = 1 / (B · G · |o_i|)

DeepSeekMath's GRPO, in the two forms that arXiv 2505.11821 (Sec. 3) compares with. Use `grpo` as the plain baseline
on any task; `grpo_mr` where a task has turn rewards but credit per turn is not wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.algorithms.options import section, turn_problems
from mmrl.config import AlgoConfig
from mmrl.config.algo import GroupConfig
from mmrl.credit.assemble import Compared, compare, group_metrics
from mmrl.credit.entries import Credit, Entry
from mmrl.credit.groups import Group, Member
from mmrl.credit.rewards import merged, outcome
from mmrl.credit.sequences import Track, track_weights, tracks_by_example
from mmrl.records import Forest
from mmrl.rollout import plans


class Grpo:
    """One advantage per rollout."""

    needs_critic = False

    def __init__(self, name: str, merge: bool):
        self.name = name
        self.merge = merge
        self.needs_turn_rewards = merge

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """GRPO-MR needs turn rewards."""
        return turn_problems(self.name, "grpo", reward_sets) if self.merge else []

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """G independent rollouts."""
        return plans.independent(section(algo, GroupConfig).group_size)

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = section(algo, GroupConfig)
        tracks = tracks_by_example(forest)
        compared = compare((self._group(example, own) for example, own in tracks.items()), algo)
        vanished = [item.group.id for item in compared if item.vanished]
        weights = track_weights(tracks, algo, minibatch, vanished)
        entries = [
            entry
            for item, own in zip(compared, tracks.values(), strict=True)
            for index, track in enumerate(own)
            for entry in rollout_entries(track, item, index, weights[track.rollout.id])
        ]
        return Credit(algo=self.name, entries=tuple(entries), metrics=group_metrics(forest, compared))

    def _group(self, example: str, tracks: Sequence[Track]) -> Group:
        """One member per rollout, standing for all its calls."""
        rewards = [merged(t.rollout, t.path) if self.merge else outcome(t.rollout) for t in tracks]
        return Group(example, tuple(Member(t.path[-1], r) for t, r in zip(tracks, rewards, strict=True)))


def rollout_entries(track: Track, compared: Compared, index: int, weight: float) -> list[Entry]:
    """Entries of a rollout's calls, all with the rollout's advantage."""
    reward = compared.group.members[index].reward
    return [
        Entry(
            call=call.id,
            reward=reward.total,
            parts=reward.parts,
            group=compared.group.id,
            group_size=len(compared.group.members),
            mean=compared.result.mean,
            std=compared.result.std,
            advantages=(compared.result.advantages[index],) * call.completion_tokens,
            weights=(weight,) * call.completion_tokens,
        )
        for call in track.path
    ]
