"""Loss weights: which share of an optimizer step each sequence has, and how its tokens divide it.

Last step of credit (rewards -> groups -> advantages -> weights). A *unit* is what one |o| of a paper's formula counts:
an entry of one call (mmGRPO, MHGPO, MAPPO) or a whole rollout (GRPO, MT-GRPO, PPO).

Within an optimizer step the weights of all tokens sum to 1 for the `seq` and `token` means, less the shares of units
that are counted in a denominator but left out of the loss (groups of one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """One sequence of the loss."""

    example: str
    slot: Hashable
    """What it is averaged within: a group, or (Eq. 6) the slot of an example."""
    tokens: int
    """|o|: its trained tokens."""
    kept: bool = True
    """False: its share is counted and lost (a group of one)."""


Steps = Mapping[str, int] | None
"""Example id -> mini-batch index; None: all examples in one."""


def two_level(units: Sequence[Unit], steps: Steps = None) -> list[float]:
    """Shares 1 / (number of slots · units of the slot): mean over groups of the mean over their units (GRPO, mmGRPO).

    Units without a token take no share from the others. Returns one share per unit; 0 where it has no weight.
    """
    slots: dict[int, set[Hashable]] = {}
    for unit in units:
        if unit.tokens:
            slots.setdefault(step_of(unit.example, steps), set()).add(unit.slot)
    sizes = _sizes(units)
    return [
        1.0 / (len(slots[step_of(unit.example, steps)]) * sizes[unit.example, unit.slot]) if _counts(unit) else 0.0
        for unit in units
    ]


def three_level(units: Sequence[Unit], filled: Iterable[tuple[str, Hashable]], steps: Steps = None) -> list[float]:
    """Shares 1 / (B · n · G_k) of MHGPO's Eq. 6: mean over examples, over filled slots, over the slot's units.

    Args:
        filled: (example, slot) pairs that were sampled: they count in n (and B) even where no unit of theirs is kept.
    """
    slots: dict[str, set[Hashable]] = {}
    for example, slot in [*filled, *((unit.example, unit.slot) for unit in units if _counts(unit))]:
        slots.setdefault(example, set()).add(slot)
    examples = Counter(step_of(example, steps) for example in slots)
    sizes = _sizes(units)
    return [
        1.0 / (examples[step_of(unit.example, steps)] * len(slots[unit.example]) * sizes[unit.example, unit.slot])
        if _counts(unit)
        else 0.0
        for unit in units
    ]


def per_token(
    units: Sequence[Unit], shares: Sequence[float], loss_mean: str, loss_length: int | None, steps: Steps = None
) -> list[float]:
    """Weight of each token of each unit.

    Args:
        shares: one per unit, from `two_level` or `three_level`; only units with a positive share have weight.
        loss_mean: `seq` divides a share by |o|; `token` gives every token of the step the same weight;
            `constant` divides a share by `loss_length`.
        loss_length: L_max; None takes the longest unit.
    """
    if loss_mean == "token":
        totals: Counter[int] = Counter()
        for unit, share in zip(units, shares, strict=True):
            totals[step_of(unit.example, steps)] += unit.tokens if share else 0
        return [
            1.0 / totals[step_of(unit.example, steps)] if share else 0.0
            for unit, share in zip(units, shares, strict=True)
        ]
    longest = loss_length or max((unit.tokens for unit in units), default=1)
    return [
        share / (unit.tokens if loss_mean == "seq" else longest) if share else 0.0
        for unit, share in zip(units, shares, strict=True)
    ]


def step_of(example: str, steps: Steps) -> int:
    """Mini-batch of an example."""
    return 0 if steps is None else steps[example]


def _counts(unit: Unit) -> bool:
    return unit.kept and unit.tokens > 0


def _sizes(units: Sequence[Unit]) -> Counter[tuple[str, Hashable]]:
    """(example, slot) -> units that have weight."""
    return Counter((unit.example, unit.slot) for unit in units if _counts(unit))
