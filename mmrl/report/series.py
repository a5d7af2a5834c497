"""Numbers over steps: reading a metric out of a history, smoothing it, drawing it in one line of text.

Part of `report`; pure. A history is what `RunDir.history` returns: one mapping per step with the key `step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-~=+*#"

History = Sequence[Mapping[str, Any]]


def number(value: Any) -> float | None:
    """`value` as a finite float; None for anything else (missing, text, NaN, infinity)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if math.isfinite(value) else None


def series(history: History, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (int64) and finite values (float64) of one metric, both of the same length, in order."""
    found = [(int(record["step"]), value) for record in history if (value := number(record.get(key))) is not None]
    steps = np.array([step for step, _ in found], dtype=np.int64)
    return steps, np.array([value for _, value in found], dtype=np.float64)


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values at each place (fewer at the start); same length as `values`."""
    if not len(values):
        return values
    total = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def keys_in(history: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """All metric keys, in order of first appearance."""
    return tuple(dict.fromkeys(chain.from_iterable(history)))


def modules_in(history: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Module names that occur in keys `module/<name>/…`, in order of first appearance."""
    module_keys = (key for key in keys_in(history) if key.startswith("module/") and key.count("/") >= 2)
    return tuple(dict.fromkeys(key.split("/", 1)[1].rsplit("/", 1)[0] for key in module_keys))


def module_facts(history: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Facts that modules have, in order of first appearance; without `penalty` where no module ever got one."""
    records = list(history)
    keys = [key for key in keys_in(records) if key.startswith("module/")]
    penalties = [key for key in keys if key.endswith("/penalty")]
    never = not any(record.get(key) for record in records for key in penalties)
    facts = dict.fromkeys(key.rsplit("/", 1)[1] for key in keys)
    return tuple(fact for fact in facts if fact != "penalty" or not never)


def splits_in(history: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Split names that occur in keys `eval/<split>/…`, in order of first appearance."""
    return tuple(dict.fromkeys(key.split("/")[1] for key in keys_in(history) if key.startswith("eval/")))


def binned(values: Sequence[float], width: int) -> list[float]:
    """At most `width` numbers: means of equal stretches of `values`."""
    if len(values) <= width:
        return [float(value) for value in values]
    return [float(np.mean(part)) for part in np.array_split(np.asarray(values, dtype=np.float64), width)]


def sparkline(values: Sequence[float], width: int = 24, *, ascii_only: bool = False) -> str:
    """One character per stretch of values, low to high; empty without values."""
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    marks = ASCII_BLOCKS if ascii_only else BLOCKS
    points = binned(finite, width)
    low, high = min(points), max(points)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1.0):
        return marks[3] * len(points)
    return "".join(marks[min(int((point - low) / (high - low) * len(marks)), len(marks) - 1)] for point in points)


def short(value: Any, digits: int = 3) -> str:
    """A number in few characters: `0.412`, `12.3k`, `1.2e-06`; `-` for what is not a finite number.

    What is smaller than 1e-12 is what rounding leaves of a sum of zero, and shown as such.
    """
    finite = number(value)
    if finite is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10_000:
        return str(value)
    size = abs(finite)
    if size < 1e-12:
        return f"{0.0:.{digits}f}"
    if size >= 1e6:
        return f"{finite / 1e6:.1f}M"
    if size >= 1e4:
        return f"{finite / 1e3:.1f}k"
    if finite == int(finite) and size >= 2:
        return str(int(finite))
    if size >= 100:
        return f"{finite:.0f}"
    if size >= 10:
        return f"{finite:.1f}"
    if size < 10**-digits:
        return f"{finite:.1e}"
    return f"{finite:.{digits}f}"


def duration(seconds: float) -> str:
    """`48 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
