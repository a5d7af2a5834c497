"""Statistics of alignment: how much of a row's gradient goes uphill, out of inner products alone.

Part of `audit`. The reference gradient G has noise of its own. Its blocks b have independent noise, so that the mean
product of two different blocks is |G|² without bias, where the product of a mean with itself is too large. It is
<G1, G2> of two halves of the blocks, averaged over all ways to halve them: one way alone, as the first half against the
second, has half of these products and an error to match. For gradients g that are independent of all blocks,

    cosine = <g, mean b> / (|g| · √<G1, G2>),   length = <g, mean b> / <G1, G2>

"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mmrl.audit.gradients import Projection

ERRORS = 2.0
"""Standard errors that a squared length must be above 0."""
# Student's t, 97.5 %, for 1 to 30 degrees of freedom; beyond them 1.96 + 2.4 / df is within 0.002.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Strength:
    """Squared length of the reference gradient."""

    product: float
    """<G1, G2>, over all halves."""
    error: float
    """Its standard error, by the jackknife over blocks."""

    @property
    def measurable(self) -> bool:
        """True if it is above 0 by more than chance: without that there is no direction to compare with."""
        return self.product > ERRORS * self.error

    @property
    def needed(self) -> float | None:
        """How many times as many rollouts would mostly make it measurable; None within one error of 0."""
        # Twice the margin, since both numbers are guesses; errors fall at least with the root of the number.
        return (2 * ERRORS * self.error / self.product) ** 2 if self.product > self.error else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over batches and its 95 % interval, which counts the batches' spread and the reference's own error."""

    mean: float
    low: float | None
    """None for a single batch."""
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """A row's gradients at one budget against the reference."""

    batches: int
    zero: int
    """Batches without any gradient; their cosine counts as 0."""
    cosine: Estimate | None
    """None where the reference is not measurable."""
    length: Estimate | None
    """1 of an unbiased gradient; None too where lengths do not compare (`gradients.length_unit`)."""


def strength(gram: Sequence[Sequence[float]]) -> Strength:
    """Return <G1, G2> and its error.

    Args:
        gram: inner products of the reference's blocks.
    """
    products = np.array(gram)
    everything = np.ones(len(products), bool)
    return Strength(_squared(products, everything), _jackknife(partial(_squared, products), len(products)))


def alignment(
    projections: Sequence[Projection], gram: Sequence[Sequence[float]], unit: float | None = None
) -> Alignment:
    """Compare a row's gradients, at least one, with the reference.

    Args:
        gram: inner products of the reference's blocks.
        unit: `gradients.length_unit` of the row.
    """
    blocks = np.array(gram)
    products = np.array([projection.products for projection in projections])  # (batches, blocks)
    norms = np.sqrt([projection.norm2 for projection in projections])  # (batches,)
    directions = np.divide(products, norms[:, None], out=np.zeros_like(products), where=norms[:, None] > 0)

    def cosines(kept: np.ndarray) -> np.ndarray:
        values: np.ndarray = directions[:, kept].mean(axis=1) / math.sqrt(_squared(blocks, kept))
        return values

    def lengths(kept: np.ndarray) -> np.ndarray:
        values: np.ndarray = (unit or 0.0) * products[:, kept].mean(axis=1) / _squared(blocks, kept)
        return values

    measurable = strength(gram).measurable
    return Alignment(
        batches=len(projections),
        zero=int((norms == 0).sum()),
        cosine=_estimate(cosines, len(blocks)) if measurable else None,
        length=_estimate(lengths, len(blocks)) if measurable and unit is not None else None,
    )


def _squared(products: np.ndarray, kept: np.ndarray) -> float:
    """Return the mean product of two different blocks, of those that are kept; (blocks,) bool."""
    among, count = products[np.ix_(kept, kept)], int(kept.sum())
    return float(among.sum() - among.trace()) / (count * (count - 1))


def _jackknife(statistic: Callable[[np.ndarray], float], blocks: int) -> float:
    """Return the standard error of a statistic of the kept blocks, each left out in turn (B. Efron, 1982).

    Of products of noise it makes too much rather than too little: up to √2 where there is no gradient at all.
    """
    values = [statistic(np.arange(blocks) != block) for block in range(blocks)]
    return math.sqrt((blocks - 1) * float(np.var(values)))


def _estimate(statistic: Callable[[np.ndarray], np.ndarray], blocks: int) -> Estimate:
    values = statistic(np.ones(blocks, bool))
    mean, count = float(values.mean()), len(values)
    if count == 1:
        return Estimate(mean=mean, low=None, high=None)
    spread = _t(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    # All batches are compared with one reference, whose error does not average out over them.
    reference = _t(blocks - 1) * _jackknife(lambda kept: float(statistic(kept).mean()), blocks)
    width = math.hypot(spread, reference)
    return Estimate(mean=mean, low=mean - width, high=mean + width)


def _t(freedom: int) -> float:
    return _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom
