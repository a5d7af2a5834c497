"""The calls of a batch with estimated advantages -> entries: whitening, returns, weights (PPO family).

Last step of credit for algorithms with a critic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.credit.entries import Credit, Entry
from mmrl.credit.gae import whitening
from mmrl.records import Call


@dataclass(frozen=True, slots=True)
class Segment:
    """One call's tokens in an estimation: sampled tokens first, then its observation tokens where those take part."""

    call: Call
    parts: Mapping[str, float]
    rewards: tuple[float, ...]
    values: tuple[float, ...]
    advantages: tuple[float, ...]
    weight: float
    """Of each sampled token."""


def segment_credit(name: str, segments: Sequence[Segment], whiten: str) -> Credit:
    """Entries of all calls.

    Args:
        whiten: `trained` (over sampled tokens), `all` (observation tokens too) or `none`. Returns always use the
            advantages before whitening.
    """
    raw = [a for s in segments for a in (s.advantages if whiten == "all" else s.advantages[: s.call.completion_tokens])]
    mean, factor = (0.0, 1.0) if whiten == "none" else whitening(raw)
    entries = []
    for segment in segments:
        tokens = segment.call.completion_tokens
        advantages = segment.advantages[:tokens]
        entries.append(
            Entry(
                call=segment.call.id,
                reward=math.fsum(segment.rewards),
                parts=segment.parts,
                advantages=tuple((advantage - mean) * factor for advantage in advantages),
                weights=(segment.weight,) * tokens,
                returns=tuple(a + v for a, v in zip(advantages, segment.values[:tokens], strict=True)),
                raw_advantages=advantages,
                token_rewards=segment.rewards[:tokens],
            )
        )
    return Credit(algo=name, entries=tuple(entries), metrics=_explained(entries))


def _explained(entries: Sequence[Entry]) -> dict[str, float]:
    """Share of the returns' variance that the critic's values explain: 1 is a perfect critic, 0 a constant one."""
    returns = [r for entry in entries for r in entry.returns or ()]
    errors = [a for entry in entries for a in entry.raw_advantages or ()]
    spread = _variance(returns)
    return {"credit/explained_variance": 1.0 - _variance(errors) / spread} if spread > 1e-12 else {}


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / max(len(values), 1)
    return math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1)
