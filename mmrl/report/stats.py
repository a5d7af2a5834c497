"""Numbers over steps and over items: metrics out of a history, smoothing, bootstrap intervals, numbers as text.

A history is what `RunDir.history` returns: one mapping per step with the key `step`. Intervals are percentile
bootstraps over items (B. Efron, 1979) with a generator keyed by what they are for: equal results, equal intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np

from mmrl import rng
from mmrl.system.files import JsonObject

WINDOW = 5
"""Steps that curves are averaged over, backwards."""
ROUNDING = 1e-6
"""Differences of at most this size are what rounding leaves of log-probabilities that are equal."""
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-~=+*#"

Metrics: TypeAlias = Mapping[str, object]
"""Numbers of one step by name; other values are passed over."""
History: TypeAlias = Sequence[JsonObject]
"""Steps in order; `step` is an integer in each."""


def number(value: object) -> float | None:
    """Return `value` as a finite float; None for anything else (missing, text, NaN, infinity)."""
    # True is an int in Python, but no measurement.
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if math.isfinite(value) else None


def series(history: History, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps (int64) and finite values (float64) of one metric, both of the same length, in order."""
    points = [(int(record["step"]), value) for record in history if (value := number(record.get(key))) is not None]
    steps = np.array([step for step, _ in points], dtype=np.int64)
    return steps, np.array([value for _, value in points], dtype=np.float64)


FAILED = "rollouts/failed/"


def rollout_count(metrics: Metrics) -> float | None:
    """Return the number of rollouts of a step, or of a trial of prompts."""
    return number(metrics.get("rollouts/count")) or number(metrics.get("prompts/items"))


def failure_shares(metrics: Metrics) -> dict[str, float]:
    """Return kind of failure -> share of a step's rollouts that ended so, the most frequent first."""
    count = rollout_count(metrics)
    counts = {key.removeprefix(FAILED): number(value) for key, value in metrics.items() if key.startswith(FAILED)}
    shares = {kind: value / count for kind, value in counts.items() if value and count}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def failed_text(shares: Mapping[str, float]) -> str:
    """Format failures: `failed 58% (length 50%, program 8%)`; empty where nothing failed."""
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    return f"failed {sum(shares.values()):.0%} ({kinds})" if kinds else ""


def learning(history: History) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the metric by which training gets on, its steps and values: the reward, or a supervised stage's loss."""
    steps, rewards = series(history, "reward/mean")
    # Of reinforcement learning the loss says nothing about success; only a supervised stage has this accuracy.
    if len(rewards) or not any("train/token_accuracy" in record for record in history):
        return "reward", steps, rewards
    return "loss", *series(history, "train/loss")


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean over the last `window` values at each place (fewer at the start); same length as `values`."""
    # One cumulative sum instead of a window per place: O(n) for runs of any length.
    total = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means: np.ndarray = (total[ends] - total[starts]) / (ends - starts)
    return means


def keys_in(history: Iterable[Metrics]) -> tuple[str, ...]:
    """Return all metric keys, in order of first appearance."""
    return tuple(dict.fromkeys(chain.from_iterable(history)))


def modules_in(history: Iterable[Metrics]) -> tuple[str, ...]:
    """Return the module names that occur in keys `module/<name>/…`, in order of first appearance."""
    # A module's name may hold slashes of its own: only the first and the last part are fixed.
    module_keys = (key for key in keys_in(history) if key.startswith("module/") and key.count("/") >= 2)
    return tuple(dict.fromkeys(key.split("/", 1)[1].rsplit("/", 1)[0] for key in module_keys))


def module_facts(history: Sequence[Metrics]) -> tuple[str, ...]:
    """Return facts of modules, in order of first appearance; without `penalty` where no module ever got one."""
    keys = [key for key in keys_in(history) if key.startswith("module/")]
    penalties = [key for key in keys if key.endswith("/penalty")]
    # Many tasks have no penalties; a column of zeros would only take room.
    never = not any(record.get(key) for record in history for key in penalties)
    facts = dict.fromkeys(key.rsplit("/", 1)[1] for key in keys)
    return tuple(fact for fact in facts if fact != "penalty" or not never)


def splits_in(history: Iterable[Metrics]) -> tuple[str, ...]:
    """Split names that occur in keys `eval/<split>/…`, in order of first appearance."""
    return tuple(dict.fromkeys(key.split("/")[1] for key in keys_in(history) if key.startswith("eval/")))


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Return a character per stretch of values, low to high, at most `width` of them; empty without values."""
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return ""
    marks = ASCII_BLOCKS if ascii_only else BLOCKS
    points = [float(np.mean(part)) for part in np.array_split(finite, min(width, len(finite)))]
    low, high = min(points), max(points)
    # A constant curve would else show its rounding as peaks.
    if high - low <= 1e-12 * max(abs(low), abs(high), 1.0):
        return marks[3] * len(points)
    return "".join(marks[min(int((point - low) / (high - low) * len(marks)), len(marks) - 1)] for point in points)


def counted(count: float, what: str) -> str:
    """Format a number of things: `1 step`, `12 steps`."""
    return f"{count:.0f} {what}{'s' * (count != 1)}"


def short(value: object) -> str:
    """Format a number in few characters: `0.412`, `12.3k`, `4.1G`, `1.2e-06`, `1.2e+15`; `-` if not finite.

    What is smaller than 1e-12 is what rounding leaves of a sum of zero, and shown as such.
    """
    finite = number(value)
    if finite is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10_000:
        return str(value)
    size = abs(finite)
    if size < 1e-12:
        return "0.000"
    if size >= 1e15 or size < 1e-3:
        return f"{finite:.1e}"
    for least, scale, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{finite / scale:.1f}{unit}"
    if size >= 100 or (finite == int(finite) and size >= 2):
        return f"{finite:.0f}"
    return f"{finite:.1f}" if size >= 10 else f"{finite:.3f}"


def fixed(value: float, digits: int = 3) -> str:
    """Format a score with so many digits after the point, `0.412`; one of 1e15 and more as `1.2e+15`."""
    return format(value, f".{digits}f" if abs(value) < 1e15 else ".1e")


def signed(value: float) -> str:
    """Format a difference of scores, `+0.041`."""
    return format(value, "+.3f" if abs(value) < 1e15 else "+.1e")


def duration(seconds: float) -> str:
    """Format a duration: `48 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


# --- intervals over items

LEVEL = 0.95
FIRST = ("accuracy", "em", "f1")
"""Metrics of answers, listed before those of behaviour."""
RISING = {
    *(*FIRST, "reward", "score", "answered", "format", "retrieval", "gold_retrieved", "gold_selected"),
    *("recall", "all_titles", "quality", "finished", "won", "judge", "judge_right"),
}
"""Metrics of tasks that are better the higher they are."""
LEAST_ITEMS, LEAST_SHARE = 20, 0.05
"""`lost`: items of which an interval says something, and the share of a metric whose loss is worth a word."""
LOST = "lost/"
"""Beginning of the names that say by how much at least a metric of `RISING` fell in training."""
_CELLS = 2_000_000
"""Resampled values held in memory at once."""


def bootstrap_means(values: np.ndarray, key: rng.Key, resamples: int) -> np.ndarray:
    """Return means of `resamples` draws with replacement from `values` (length n >= 1); float64 (resamples,)."""
    n = len(values)
    # Counter-based: the draws depend on the key alone, not on what was drawn before.
    uniforms = np.random.Generator(np.random.Philox(key=rng.digest(*key, "bootstrap")))
    means = np.empty(resamples)
    # In pieces: (resamples, n) at once would be gigabytes for large evaluations.
    rows = max(1, _CELLS // n)
    for start in range(0, resamples, rows):
        stop = min(start + rows, resamples)
        indices = (uniforms.random((stop - start, n)) * n).astype(np.int64)
        means[start:stop] = values[indices].mean(axis=1)
    return means


def bootstrap_interval(values: Sequence[float], key: rng.Key, resamples: int = 1000) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of `values`; (nan, nan) without values.

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
    """Difference between two sets of results on the same items."""

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
        """True if the interval excludes 0; of few items it is far too narrow, and of one it is a point."""
        return self.n >= LEAST_ITEMS and (self.low > 0 or self.high < 0)

    @property
    def verdict(self) -> str:
        """Remark beside the numbers; empty for a certain difference."""
        if self.certain:
            return ""
        if self.n < LEAST_ITEMS and (self.low > 0 or self.high < 0):
            return "few items"
        return "unchanged" if self.low == self.high == 0 else "may be chance"


def stratified_interval(
    strata: Mapping[str, np.ndarray], weights: Mapping[str, float], key: Sequence[str]
) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the weighted mean over strata, items resampled within each, or None.

    Args:
        strata: name -> (n,) values.
        weights: name -> weight of its mean.
        key: of the random numbers, with the stratum's name.
    """
    if not strata or any(not len(values) for values in strata.values()):
        return None
    means = sum(
        weights[name] * bootstrap_means(np.asarray(values), (0, "table", *key, name), 1000)
        for name, values in strata.items()
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def paired_difference(
    before: Sequence[float], after: Sequence[float], key: rng.Key, resamples: int = 1000
) -> Difference:
    """Compare two results of the same items, at least one, resampling items."""
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    # The difference per item is resampled, so that both values of an item stay together.
    low, high = bootstrap_interval((second - first).tolist(), key, resamples)
    old, new, gain = (float(values.mean()) for values in (first, second, second - first))
    return Difference(n=len(first), before=old, after=new, difference=gain, low=low, high=high)


def compare_items(
    before: Sequence[JsonObject],
    after: Sequence[JsonObject],
    seed: int,
    resamples: int = 1000,
    main_metric: str | None = None,
) -> dict[str, Difference]:
    """Compare two evaluations: metric -> difference, for every metric of both; items are matched by id.

    Args:
        before, after: items with `id` and `metrics` (name -> number), as in `eval/*.jsonl`.
        main_metric: put first.
    """
    # Matched by id, not by position: a resumed evaluation may have written its items in another order.
    later = {item["id"]: item["metrics"] for item in after}
    pairs = [(item["metrics"], later[item["id"]]) for item in before if item["id"] in later]
    if not pairs:
        return {}
    names = {name for first, _ in pairs for name in first} & {name for _, second in pairs for name in second}
    differences = {}
    # The main metric, then answers, then behaviour; reward last, since training changes it by design.
    for name in sorted(names, key=lambda name: (name != main_metric, name not in FIRST, name == "reward", name)):
        # An item without it counts 0, as in the evaluation's own mean: all rollouts of its part of the items failed.
        old, new = zip(*((first.get(name, 0.0), second.get(name, 0.0)) for first, second in pairs), strict=True)
        differences[name] = paired_difference(old, new, (seed, "compare", name), resamples)
    return differences


def lost(
    before: Sequence[JsonObject], after: Sequence[JsonObject], seed: int, resamples: int, main_metric: str
) -> dict[str, float]:
    """Return `lost/<metric>`, the end of the paired interval next to 0, of metrics that fell by a twentieth or more."""
    return {
        f"{LOST}{name}": -difference.high
        for name, difference in compare_items(before, after, seed, resamples).items()
        if name in RISING | {main_metric} and difference.n >= LEAST_ITEMS
        if difference.high < min(0.0, -LEAST_SHARE * difference.before)
    }
