"""What credit hands to the trainer and to people: one entry per place that a call takes in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmrl.records import EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One loss entry of one call. Per-token tuples have the call's `completion_tokens` (T) as length."""

    call: str
    """Call id."""
    reward: float
    """R of the call as compared within its group (PPO family: sum of its token rewards)."""
    parts: Mapping[str, float] = EMPTY
    """How `reward` is made up (`shared`, `penalty`, `turn`, `outcome`, ...)."""
    group: str | None = None
    """Group id; None for the PPO family and for calls without a group."""
    group_size: int = 0
    mean: float | None = None
    """Mean reward of the group."""
    std: float | None = None
    """Standard deviation of the group, as divided by."""
    advantages: tuple[float, ...]
    """What the trainer receives, length T."""
    weights: tuple[float, ...]
    """Loss weight per token, length T; 0 for an entry that is left out of the loss."""
    filler_of: str | None = None
    """For a repeated entry: id of the call whose entry it repeats (its own id)."""
    returns: tuple[float, ...] | None = None
    """Critic targets (PPO family), length T."""
    raw_advantages: tuple[float, ...] | None = None
    """Advantages before whitening (PPO family), length T."""
    token_rewards: tuple[float, ...] | None = None
    """Reward per token (PPO family), length T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Result of an algorithm's `credit` over one forest."""

    algo: str
    entries: tuple[Entry, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Credit metrics (share of zero-variance groups, dropped calls, ...), keys as in docs/metrics.md."""
