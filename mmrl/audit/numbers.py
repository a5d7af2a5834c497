"""The numbers of an audit, from what was played: truth of decisions, fidelity, right sign, signal, influence. Pure.

Formulas and a worked number: docs/audit.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import TypeAlias

import numpy as np

RESAMPLES = 1000
Pair: TypeAlias = tuple[float, float]
Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a decision was worth, from samples that no credit has seen."""

    continued: Sequence[float]
    """Outcomes of what follows the decision, sampled anew: m of them."""
    others: Sequence[Pair]
    """Outcomes after n other replies in its place, two for each."""

    @property
    def difference(self) -> float:
        """D = Q - V."""
        return fmean(self.continued) - fmean(self.replies)

    @property
    def replies(self) -> list[float]:
        """Mean outcome of each other reply."""
        return [(a + b) / 2 for a, b in self.others]

    def error(self, lowest: float, highest: float) -> float:
        """Return the standard error of D; see `add_one_variance`."""
        of_q = add_one_variance(self.continued, lowest, highest) / len(self.continued)
        return math.sqrt(of_q + add_one_variance(self.replies, lowest, highest) / len(self.others))

    @property
    def halves(self) -> Pair:
        """D from each half of both kinds of samples."""
        m, n = len(self.continued) // 2, len(self.others) // 2
        first = Truth(continued=self.continued[:m], others=self.others[:n])
        return first.difference, Truth(continued=self.continued[m:], others=self.others[n:]).difference

    @property
    def spread(self) -> float:
        """Variance of Q over replies at this place, by one-way analysis over the pairs: unbiased, may be below 0."""
        within = fmean((a - b) ** 2 / 2 for a, b in self.others)
        return variance(self.replies) - within / 2


def add_one_variance(values: Sequence[float], lowest: float, highest: float) -> float:
    """Return the variance of outcomes beside one more at each end of their range.

    Of k successes among m it is p(1 - p) with p = (k + 1) / (m + 2): equal outcomes do not mean certainty.
    """
    return float(np.var([*values, lowest, highest]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An audited call with its truth."""

    example: str
    call: str
    module: str
    truth: Truth


@dataclass(frozen=True, slots=True)
class Credited:
    """A row's credit of a decision; None: it had no weight."""

    credit: float | None
    """Mean advantage: sum of w A / sum of w over its entries and tokens."""
    push: float
    """Sum of w A: what its gradient is multiplied by."""


def ranks(values: Sequence[float]) -> np.ndarray:
    """Rank values from 0; equal ones have the mean of theirs."""
    _, where, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    means: np.ndarray = np.cumsum(counts) - (counts + 1) / 2
    return means[where]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the rank correlation; None where one of the two does not vary, or of fewer than 3."""
    if len(first) < 3:
        return None
    a, b = (ranks(values) - (len(values) - 1) / 2 for values in (first, second))
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm > 0 else None


def ceiling(decisions: Sequence[Decision]) -> float | None:
    """Return the highest correlation that perfect credit could have with D: the root of D's reliability.

    Two halves of the samples correlate by r; of all of them together 2r / (1 + r) is true (Spearman and Brown).
    """
    halves = [decision.truth.halves for decision in decisions]
    r = spearman([first for first, _ in halves], [second for _, second in halves])
    return None if r is None else math.sqrt(max(0.0, 2 * r / (1 + r))) if r > 0 else 0.0


Rows: TypeAlias = Sequence[tuple[Decision, Credited]]


def pooled(rows: Rows) -> float | None:
    """Return the rank correlation of credit and D over all credited decisions."""
    credited = [(c.credit, d.truth.difference) for d, c in rows if c.credit is not None]
    return spearman([credit for credit, _ in credited], [difference for _, difference in credited])


def within(rows: Rows) -> float | None:
    """Return the mean over examples of the rank correlation within each."""
    found = [r for part in by_example(rows).values() if (r := pooled(part)) is not None]
    return fmean(found) if found else None


def by_example(rows: Rows) -> dict[str, list[tuple[Decision, Credited]]]:
    """Split decisions by their example."""
    parts: dict[str, list[tuple[Decision, Credited]]] = {}
    for decision, credited in rows:
        parts.setdefault(decision.example, []).append((decision, credited))
    return parts


def bootstrap(rows: Rows, measure: Callable[[Rows], float | None], seed: int) -> Interval | None:
    """Return the 95 % interval of a measure over resampled examples; None where it is rarely defined."""
    parts = list(by_example(rows).values())
    draws = np.random.Generator(np.random.Philox(key=seed)).integers(len(parts), size=(RESAMPLES, len(parts)))
    values = [measure([row for index in draw for row in parts[index]]) for draw in draws]
    return percentiles([value for value in values if value is not None])


def percentiles(values: Sequence[float]) -> Interval | None:
    """Return the middle 95 % of resampled values; None where fewer than half of them are defined."""
    if len(values) < RESAMPLES / 2:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def outcome_range(decisions: Sequence[Decision]) -> Interval:
    """Return the lowest and the highest outcome of all samples."""
    every = [x for d in decisions for x in (*d.truth.continued, *(one for pair in d.truth.others for one in pair))]
    return min(every), max(every)


def clear(decision: Decision, span: Interval) -> bool:
    """True if D is more than 2 standard errors from 0."""
    return abs(decision.truth.difference) > 2 * decision.truth.error(*span)


def right_sign(rows: Rows, span: Interval) -> float | None:
    """Return the share of clear decisions whose credit has D's sign; zero and no credit have none."""
    signs = [c.credit is not None and c.credit * d.truth.difference > 0 for d, c in rows if clear(d, span)]
    return fmean(signs) if signs else None


def signal(rows: Rows, span: Interval) -> float | None:
    """Return the share of the push that is spent on clear decisions."""
    total = math.fsum(abs(c.push) for _, c in rows)
    return math.fsum(abs(c.push) for d, c in rows if clear(d, span)) / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Recorded paths that the decisions were drawn from."""

    examples: Sequence[str]
    """Of each path."""
    calls: Mapping[str, int]
    """Module -> its calls on all of them."""


def influence(
    decisions: Sequence[Decision], paths: Paths, outcomes: Mapping[str, Sequence[float]], seed: int
) -> dict[str, tuple[float, Interval | None]]:
    """Return, for each module, the share of the outcome's variance that its replies decide, with its interval.

    E[sum over its calls on a path of Var_o Q] / E[Var(R | example)]: a ratio of means over examples.

    Args:
        outcomes: example -> outcomes of independent rollouts.
    """
    examples = [example for example in outcomes if len(outcomes[example]) > 1]
    total = np.array([variance(outcomes[example]) for example in examples])
    count = np.array([paths.examples.count(example) for example in examples], dtype=float)
    draws = np.random.Generator(np.random.Philox(key=seed)).integers(len(examples), size=(RESAMPLES, len(examples)))
    found = {}
    for module, calls in paths.calls.items():
        drawn = [decision for decision in decisions if decision.module == module]
        if not drawn:
            continue
        # Each call of the module was drawn with the same chance, so a drawn one stands for so many.
        scale = calls / len(drawn)
        summed = np.array([scale * math.fsum(d.truth.spread for d in drawn if d.example == e) for e in examples])
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(summed.sum() / count.sum() / total.mean())
            resampled = summed[draws].sum(1) / count[draws].sum(1) / total[draws].mean(1)
        found[module] = (value, percentiles([float(r) for r in resampled if np.isfinite(r)]))
    return found
