"""The numbers of an audit, from what was played: truth of decisions, fidelity, right sign, signal, influence. Pure.

Formulas and a worked number: docs/audit.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import TypeAlias, TypeVar

import numpy as np

RESAMPLES = 1000
Pair: TypeAlias = tuple[float, float]


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


@dataclass(frozen=True, slots=True)
class Judged:
    """A decision beside a row's credit of it."""

    example: str
    module: str
    difference: float
    """D."""
    clear: bool
    """D is more than 2 standard errors from 0."""
    credited: Credited


def judged(decisions: Sequence[Decision], credits: Mapping[str, Credited]) -> list[Judged]:
    """Put a row's credit, by call, beside the truth."""
    span = outcome_range(decisions)
    found = []
    for decision in decisions:
        difference, error = decision.truth.difference, decision.truth.error(*span)
        clear = abs(difference) > 2 * error
        found.append(Judged(decision.example, decision.module, difference, clear, credits[decision.call]))
    return found


def outcome_range(decisions: Sequence[Decision]) -> Pair:
    """Return the lowest and the highest outcome of all samples."""
    every = [x for d in decisions for x in (*d.truth.continued, *(one for pair in d.truth.others for one in pair))]
    return min(every), max(every)


def fidelity(row: Sequence[Judged]) -> float | None:
    """Return the rank correlation of credit and D over the credited decisions."""
    credited = [(judged.credited.credit, judged.difference) for judged in row if judged.credited.credit is not None]
    return spearman([credit for credit, _ in credited], [difference for _, difference in credited])


def right_sign(row: Sequence[Judged]) -> float | None:
    """Return the share of clear decisions whose credit has D's sign; zero and no credit have none."""
    signs = [(one.credited.credit or 0.0) * one.difference > 0 for one in row if one.clear]
    return fmean(signs) if signs else None


def signal(row: Sequence[Judged]) -> float | None:
    """Return the share of the push that is spent on clear decisions."""
    total = math.fsum(abs(one.credited.push) for one in row)
    return math.fsum(abs(one.credited.push) for one in row if one.clear) / total if total else None


Measured: TypeAlias = tuple[float | None, Pair | None]
"""A number and its 95 % interval; None where it is not defined, or rarely in resamples."""


One = TypeVar("One", Decision, Judged)


def over_examples(every: Sequence[One], measure: Callable[[Sequence[One]], float | None], seed: int) -> Measured:
    """Return a measure, with its interval by the bootstrap over examples."""
    if not every:
        return None, None
    parts = list(_by_example(every).values())
    resampled = (measure([one for index in draw for one in parts[index]]) for draw in _draws(len(parts), seed))
    return measure(every), _percentiles([value for value in resampled if value is not None])


def within_examples(row: Sequence[Judged], seed: int) -> Measured:
    """Return the mean over examples of the fidelity within each, with its interval.

    Groups that are divided by their deviation have another scale in each example, for which pooling alone blames them.
    """
    values = np.array([r for part in _by_example(row).values() if (r := fidelity(part)) is not None])
    if not len(values):
        return None, None
    return float(values.mean()), _percentiles(values[_draws(len(values), seed)].mean(1).tolist())


def _by_example(every: Sequence[One]) -> dict[str, list[One]]:
    parts: dict[str, list[One]] = {}
    for one in every:
        parts.setdefault(one.example, []).append(one)
    return parts


def _draws(count: int, seed: int) -> np.ndarray:
    """Draw resamples of `count` things, (RESAMPLES, count)."""
    draws: np.ndarray = np.random.Generator(np.random.Philox(key=seed)).integers(count, size=(RESAMPLES, count))
    return draws


def _percentiles(values: Sequence[float]) -> Pair | None:
    """Return the middle 95 % of resampled values; None where fewer than half of them are defined."""
    if len(values) < RESAMPLES / 2:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Recorded paths that the decisions were drawn from."""

    examples: Sequence[str]
    """Of each path."""
    calls: Mapping[str, int]
    """Module -> its calls on all of them."""


def influence(
    decisions: Sequence[Decision], paths: Paths, outcomes: Mapping[str, Sequence[float]], seed: int
) -> dict[str, Measured]:
    """Return, for each module, the share of the outcome's variance that its replies decide.

    E[sum over its calls on a path of Var_o Q] / E[Var(R | example)]: a ratio of means over examples.

    Args:
        outcomes: example -> outcomes of independent rollouts.
    """
    examples = [example for example in outcomes if len(outcomes[example]) > 1]
    total = np.array([variance(outcomes[example]) for example in examples])
    count = np.array([paths.examples.count(example) for example in examples], dtype=float)
    draws = _draws(len(examples), seed)
    found: dict[str, Measured] = {}
    for module, calls in paths.calls.items():
        drawn = [decision for decision in decisions if decision.module == module]
        if not drawn or not total.any():
            found[module] = None, None
            continue
        # Each call of the module was drawn with the same chance, so a drawn one stands for so many.
        scale = calls / len(drawn)
        summed = np.array([scale * math.fsum(d.truth.spread for d in drawn if d.example == e) for e in examples])
        value = summed.sum() / count.sum() / total.mean()
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = summed[draws].sum(1) / count[draws].sum(1) / total[draws].mean(1)
        found[module] = float(value), _percentiles(resampled[np.isfinite(resampled)].tolist())
    return found
