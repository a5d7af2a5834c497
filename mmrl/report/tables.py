"""Intervals and plain-text tables: what was measured before and after, and how sure one can be of it.

Part of `report`; pure. Intervals are percentile bootstraps over items (B. Efron, 1979), drawn from a counter-based key,
so the same results always give the same interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl import rng
from mmrl.report.series import short

LEVEL = 0.95
FIRST = ("accuracy", "em", "f1")
"""Metrics of answers, listed before those of behaviour."""
_CELLS = 2_000_000
"""Resampled values held in memory at once."""


def bootstrap_means(values: np.ndarray, key: rng.Key, resamples: int) -> np.ndarray:
    """Means of `resamples` draws with replacement from `values` (length n >= 1); shape (resamples,), float64."""
    n = len(values)
    uniforms = np.random.Generator(np.random.Philox(key=rng.digest(*key, "bootstrap")))
    means = np.empty(resamples)
    rows = max(1, _CELLS // n)
    for start in range(0, resamples, rows):
        stop = min(start + rows, resamples)
        chosen = (uniforms.random((stop - start, n)) * n).astype(np.int64)
        means[start:stop] = values[chosen].mean(axis=1)
    return means


def bootstrap_interval(values: Sequence[float], key: rng.Key, resamples: int = 1000) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean of `values`; (nan, nan) without values.

    Args:
        key: what the draw is for, as `(seed, "eval", "em")`.
    """
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        return float("nan"), float("nan")
    low, high = np.quantile(bootstrap_means(data, key, resamples), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two sets of results on the same items, compared."""

    n: int
    before: float
    after: float
    difference: float
    """Mean of after - before over items."""
    low: float
    high: float
    """95 % paired bootstrap interval of the difference."""

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        """What a reader should know beside the numbers; empty for a certain difference."""
        if self.certain:
            return ""
        return "unchanged" if self.low == self.high == 0 else "may be chance"


def paired_difference(
    before: Sequence[float], after: Sequence[float], key: rng.Key, resamples: int = 1000
) -> Difference:
    """Compare two results per item, resampling items (so both values of an item stay together).

    Raises:
        ValueError: lengths differ, or there are no items.
    """
    if len(before) != len(after) or not len(before):
        raise ValueError(f"got {len(before)} and {len(after)} results, expected as many of both, at least one")
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    low, high = bootstrap_interval((second - first).tolist(), key, resamples)
    return Difference(
        n=len(first),
        before=float(first.mean()),
        after=float(second.mean()),
        difference=float((second - first).mean()),
        low=low,
        high=high,
    )


def compare_items(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    seed: int,
    resamples: int = 1000,
    main_metric: str | None = None,
) -> dict[str, Difference]:
    """Metric -> difference, for every metric that both evaluations have; items are matched by id.

    Args:
        before, after: items with `id` and `metrics` (name -> number), as in `eval/*.jsonl`.
        main_metric: put first.
    """
    later = {item["id"]: item["metrics"] for item in after}
    pairs = [(item["metrics"], later[item["id"]]) for item in before if item["id"] in later]
    if not pairs:
        return {}
    names = sorted(set().union(*(first.keys() & second.keys() for first, second in pairs)))
    names.sort(key=lambda name: (name != main_metric, name not in FIRST, name == "reward", name))
    found = {}
    for name in names:
        shared = [(first[name], second[name]) for first, second in pairs if name in first and name in second]
        old, new = zip(*shared, strict=True)
        found[name] = paired_difference(old, new, (seed, "compare", name), resamples)
    return found


def before_after_table(differences: Mapping[str, Difference], split: str) -> str:
    """The table at the end of a run, as plain text."""
    if not differences:
        return f"no items of the {split} split were evaluated both before and after"
    rows = [["", "before", "after", "difference", "95 % interval", ""]]
    for name, found in differences.items():
        interval = f"[{found.low:+.3f}, {found.high:+.3f}]"
        numbers = (f"{found.before:.3f}", f"{found.after:.3f}", f"{found.difference:+.3f}")
        rows.append([name, *numbers, interval, found.verdict])
    items = sorted({found.n for found in differences.values()})
    counted = f"{items[0]}" if len(items) == 1 else f"{items[0]}–{items[-1]}"
    return f"{split} ({counted} items)\n{align(rows)}"


def align(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Rows of text in columns: the first column to the left, all others to the right, except a last one of words."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        cells += [row[-1]] if len(row) > 1 else []
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def facts_table(facts: Mapping[str, Any], indent: str = "  ") -> str:
    """Names and values, one per line."""
    if not facts:
        return ""
    width = max(len(name) for name in facts)
    values = {
        name: short(value) if isinstance(value, float) and not isinstance(value, bool) else str(value)
        for name, value in facts.items()
    }
    return "\n".join(f"{indent}{name.ljust(width)}  {value}" for name, value in values.items())
