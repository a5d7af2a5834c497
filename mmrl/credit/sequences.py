"""Rollouts as sequences: what the algorithms that normalise or estimate over whole rollouts share.

A rollout's calls in order are one sequence (semantics: Slots); |o| counts the trained tokens of all its calls. A call
that several rollouts share enters once per rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.config.algo import AlgoConfig, GroupConfig
from mmrl.credit.rewards import scored
from mmrl.credit.weights import Steps, Unit, per_token, two_level
from mmrl.records import Call, Forest, Rollout


@dataclass(frozen=True, slots=True)
class Track:
    """A scored rollout with its calls, root first."""

    rollout: Rollout
    path: tuple[Call, ...]

    @property
    def tokens(self) -> int:
        """|o|: trained tokens of all calls."""
        return sum(call.completion_tokens for call in self.path)

    @property
    def reward(self) -> float:
        """Outcome reward."""
        assert self.rollout.reward is not None
        return self.rollout.reward


def tracks_by_example(forest: Forest) -> dict[str, list[Track]]:
    """Scored rollouts of each example, in order."""
    found: dict[str, list[Track]] = {}
    for rollout in scored(forest):
        found.setdefault(rollout.example, []).append(Track(rollout, forest.path(rollout)))
    return found


def track_weights(
    groups: Mapping[str, Sequence[Track]],
    algo: AlgoConfig,
    steps: Steps = None,
    vanished: Sequence[str] = (),
) -> dict[str, float]:
    """Weight per token of each rollout: 1 / (B · G · |o|), or as `algo.loss_mean` says.

    Args:
        groups: example -> its rollouts; a single rollout is compared with nothing and has weight only in algorithms
            with a critic.
        vanished: examples treated as if they had not been sampled.

    Returns:
        Rollout id -> weight.
    """
    tracks = [track for example, own in groups.items() if example not in vanished for track in own]
    compared = isinstance(algo, GroupConfig)
    units = [
        Unit(t.rollout.example, t.rollout.example, t.tokens, kept=not compared or len(groups[t.rollout.example]) > 1)
        for t in tracks
    ]
    weights = per_token(units, two_level(units, steps), algo.loss_mean, algo.loss_length, steps)
    found = {track.rollout.id: 0.0 for own in groups.values() for track in own}
    return found | {track.rollout.id: weight for track, weight in zip(tracks, weights, strict=True)}
