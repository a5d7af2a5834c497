"""Advantages from rewards that are compared with each other: group normalisation and its variants.

Third step of credit (rewards -> groups -> advantages -> weights).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Normalised:
    """A group's statistics and advantages, aligned with its rewards."""

    mean: float | None
    std: float | None
    """As divided by (without eps); None for a group of one and with `scale=False`."""
    advantages: tuple[float, ...]
    constant: bool
    """All rewards are equal: every advantage is 0."""
    dropped: bool
    """Fewer than two rewards: no advantage is defined, the group stays out of the loss."""


def normalise(
    rewards: Sequence[float],
    *,
    eps: float,
    ddof: int = 1,
    scale: bool = True,
    baseline: str = "mean",
    batch_std: float | None = None,
) -> Normalised:
    """A_i = (r_i - baseline) / (std + eps) over one group.

    Args:
        rewards: G numbers.
        eps: added to the standard deviation.
        ddof: 1 is the sample standard deviation, 0 the population's.
        scale: False leaves the division out (Dr.GRPO).
        baseline: `mean` of the group, or `leave_one_out`: the mean of the other G - 1 (RLOO).
        batch_std: divide by this instead of the group's own standard deviation.
    """
    size = len(rewards)
    if size < 2:
        return Normalised(rewards[0] if rewards else None, None, (0.0,) * size, False, True)
    mean = math.fsum(rewards) / size
    std = std_of(rewards, ddof) if batch_std is None else batch_std
    if is_constant(rewards):
        return Normalised(mean, std if scale else None, (0.0,) * size, True, False)
    factor = size / (size - 1) if baseline == "leave_one_out" else 1.0
    if scale:
        factor /= std + eps
    return Normalised(mean, std if scale else None, tuple((r - mean) * factor for r in rewards), False, False)


def std_of(rewards: Sequence[float], ddof: int) -> float:
    """Standard deviation; 0 for equal numbers and where fewer than ddof + 1 are given."""
    if len(rewards) <= ddof or is_constant(rewards):
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - ddof))


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, up to the rounding of averages."""
    spread = max(rewards) - min(rewards)
    # Backed-up means of equal outcomes may differ in their last bits; eps = 0 would blow that up to +-1.
    return spread <= 1e-12 * max(1.0, abs(max(rewards)), abs(min(rewards)))
