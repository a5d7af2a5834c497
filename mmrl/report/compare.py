"""Several runs side by side: which algorithm learned, by how much, and how it behaved, over seeds.

Part of `report`; reads run directories only, finished or not. Runs are grouped into one panel per task and split, and
in it by algorithm; runs of one algorithm whose configs differ are separate and named by what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from mmrl.config.base import flattened, of_stage
from mmrl.report.overview import Item, Overview
from mmrl.report.rundir import RunDir
from mmrl.report.stats import Difference, number, paired_difference, series, trailing_mean

LEAST_ITEMS, SEEDS, LEAST_GAIN = 200, 3, 0.05
"""What "learns" asks for: evaluated items, seeds (all of them), after - before."""
WINDOW = 5
"""Steps that a training curve is averaged over, backwards."""
NOT_VARIANTS = ("seed", "run.", "hardware.", "engine.", "plugins", "train.save_every", "train.keep")
"""Config paths that may differ between runs of one line: they do not change what is learned."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """A number that says how a program acts, apart from whether it is right."""

    label: str
    source: str
    """Key in an item's `metrics`, or `<module>/<fact>` in its `modules`."""
    share: bool = False
    """True: the share of items above 0, instead of the mean."""
    training: str | None = None
    """Metric of training steps that is drawn as a curve; None: not drawn."""
    axis: str = ""
    """Label of that curve's axis."""


BEHAVIOUR = (
    Behaviour("calls the tool", "tool_calls", True, "task/tool_calls", "tool calls per rollout"),
    Behaviour("searches", "searches", True, "task/searches", "searches per rollout"),
    Behaviour(
        "invalid selections",
        "reranker/invalid_selection",
        False,
        "module/reranker/invalid_selection",
        "invalid selections (share)",
    ),
    Behaviour("queries without form", "rewriter/unparsable"),
    Behaviour("all turns well formed", "format"),
    Behaviour("format reward", "xml_format"),
    Behaviour("answers", "answered"),
)
"""Shown where a run has them, in this order; the first with a curve is drawn."""


@dataclass(frozen=True)
class Line:
    """One run of a comparison."""

    seen: Overview
    metric: str

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.seen.get("seed", 0))

    @property
    def finished(self) -> bool:
        """Whether the run wrote its summary."""
        return bool(self.seen.summary)

    @property
    def evaluated(self) -> Mapping[int, Sequence[Item]]:
        """Step -> per-item results on the run's split; steps whose evaluation is complete."""
        # An evaluation's items are written one by one; its metrics line comes last and marks it as complete.
        complete = {record["step"] for record in self.seen.history if f"eval/{self.seen.split}/n" in record}
        return {step: items for step, items in self.seen.items.get(self.seen.split, {}).items() if step in complete}

    @cached_property
    def difference(self) -> Difference | None:
        """Last evaluation against the one before training; None before there are two."""
        steps = sorted(self.evaluated)
        if len(steps) < 2:
            return None
        first, last = self.evaluated[steps[0]], {item["id"]: item for item in self.evaluated[steps[-1]]}
        pairs = [(item["metrics"], last[item["id"]]["metrics"]) for item in first if item["id"] in last]
        # Only items that both evaluations scored can be paired.
        values = [(a[self.metric], b[self.metric]) for a, b in pairs if self.metric in a and self.metric in b]
        if not values:
            return None
        before, after = zip(*values, strict=True)
        # The key of `compare_items`: the same interval as in the run's own report.
        return paired_difference(
            before, after, (self.seed, "compare", self.metric), int(self.seen.get("eval.bootstrap", 1000))
        )

    @property
    def learned(self) -> bool | None:
        """Whether this run meets the threshold; None while that cannot be decided."""
        difference = self.difference
        if not self.finished or difference is None or difference.n < LEAST_ITEMS:
            return None
        # The small tolerance: 0.25 - 0.20 is a little below 0.05 in binary.
        return difference.difference >= LEAST_GAIN - 1e-9 and difference.low > 0

    @property
    def last_step(self) -> int:
        """Step of the last evaluation; 0 without."""
        return max(self.evaluated, default=0)

    @property
    def seconds(self) -> float:
        """Time of all steps and evaluations, over all of the run's starts."""
        times = (number(record.get(key)) for record in self.seen.history for key in ("time/step", "time/eval"))
        return sum(value for value in times if value is not None)

    def behaviour(self, of: Behaviour, step: int) -> float | None:
        """A behaviour in the evaluation at `step`; None where the task has none such."""
        values = []
        for item in self.evaluated.get(step, ()):
            value = number(item["metrics"].get(of.source, item.get("modules", {}).get(of.source)))
            if value is not None:
                values.append(float(value > 0) if of.share else value)
        return fmean(values) if values else None


@dataclass(frozen=True)
class SeedGroup:
    """The runs of one algorithm (and one config) on one task, one per seed."""

    label: str
    lines: Sequence[Line]

    @property
    def finished(self) -> list[Line]:
        """Runs that are done."""
        return [line for line in self.lines if line.finished]

    @property
    def drawn(self) -> Sequence[Line]:
        """Runs that stand for the group in means and curves: finished ones, else all."""
        return self.finished or self.lines

    @property
    def measured(self) -> list[tuple[Line, Difference]]:
        """Drawn runs with two evaluations."""
        return [(line, difference) for line in self.drawn if (difference := line.difference) is not None]

    @property
    def verdict(self) -> str:
        """`yes`, `no` or `undecided`, with what it rests on."""
        decided = [line.learned for line in self.lines if line.learned is not None]
        # One seed below the threshold decides: all seeds have to learn.
        yes, counted = sum(decided), f"{sum(decided)} of {len(decided)} seeds"
        if yes < len(decided):
            return f"no ({counted})"
        if len(decided) >= SEEDS and len(decided) == len(self.lines):
            return f"yes ({counted})"
        # From here on it is open; say what is missing most.
        items = [difference.n for line in self.finished if (difference := line.difference) is not None]
        if items and min(items) < LEAST_ITEMS:
            return f"undecided ({min(items)} items, {LEAST_ITEMS} are needed)"
        if not any(line.evaluated for line in self.lines):
            return "undecided (no evaluation)"
        return f"undecided ({len(decided)} of {max(SEEDS, len(self.lines))} seeds)"


@dataclass(frozen=True)
class Panel:
    """One task's groups."""

    task: str
    split: str
    metric: str
    groups: Sequence[SeedGroup]

    @property
    def lines(self) -> list[Line]:
        """All runs."""
        return [line for group in self.groups for line in group.lines]

    @property
    def behaviours(self) -> list[Behaviour]:
        """Those that some run of the panel has."""
        return [of for of in BEHAVIOUR if any(line.behaviour(of, line.last_step) is not None for line in self.lines)]

    def against(self, first: SeedGroup, second: SeedGroup) -> Difference | None:
        """Last evaluations of finished runs compared on the same items, `first` minus `second`.

        An item's score is its mean over the seeds that both groups finished; the interval is over items, so it says
        nothing of how other seeds would have come out. None without a seed or an item in common.
        """
        ours, theirs = ({line.seed: line for line in group.finished} for group in (first, second))
        seeds = sorted(ours.keys() & theirs.keys())
        scores = [[_scores(group[seed]) for seed in seeds] for group in (ours, theirs)]
        shared = sorted(set.intersection(*(set(by_item) for side in scores for by_item in side))) if seeds else []
        if not shared:
            return None
        mine, others = ([fmean(by_item[item] for by_item in side) for item in shared] for side in scores)
        # The same draws either way round, so that one interval is the other's mirror image.
        return paired_difference(others, mine, (0, "compare", *sorted((first.label, second.label))))


@dataclass(frozen=True)
class Comparison:
    """Everything that is shown of several runs."""

    name: str
    panels: Sequence[Panel]
    notes: Sequence[str] = field(default=())
    """What a reader should know: runs left out, and why."""

    @property
    def lines(self) -> list[Line]:
        """All runs."""
        return [line for panel in self.panels for line in panel.lines]


def compare_runs(runs: Sequence[Path], name: str, main_metrics: Mapping[str, str]) -> Comparison:
    """Read and group runs.

    Args:
        runs: run directories.
        name: title.
        main_metrics: task -> its main metric, for runs whose summary is not written yet.

    Raises:
        CheckpointError, DataError: a damaged run.
    """
    seen = [Overview.of(RunDir.read(path)) for path in runs]
    # Scores are comparable only on the same task and split, so each pair has a panel.
    tasks: dict[tuple[str, str], list[Overview]] = {}
    for one in seen:
        tasks.setdefault((str(one.get("task.name", "?")), one.split), []).append(one)
    notes: list[str] = []
    panels = []
    for (task, split), members in tasks.items():
        recorded = (one.summary.get("main_metric") for one in members)
        metric = next(
            (str(metric) for metric in recorded if metric), main_metrics.get(task) or members[0].main_metric or ""
        )
        by_label: dict[str, list[Line]] = {}
        for one, label in zip(members, _labels(members), strict=True):
            by_label.setdefault(label, []).append(Line(one, metric))
        groups = [SeedGroup(label, _one_per_seed(label, lines, notes)) for label, lines in by_label.items()]
        panels.append(Panel(task, split, metric, groups))
    return Comparison(name, panels, tuple(notes))


def _scores(line: Line) -> dict[str, float]:
    items = line.evaluated.get(line.last_step, ())
    return {item["id"]: item["metrics"][line.metric] for item in items if line.metric in item["metrics"]}


def _labels(members: Sequence[Overview]) -> list[str]:
    """The algorithm's name, with the config values in which its runs differ."""
    names = [str(one.get("algo.name", "?")) for one in members]
    # Values that do not change what is learned (seed, paths, machine) do not make a variant.
    flat = [
        {path: value for path, value in flattened(one.config).items() if not of_stage(path).startswith(NOT_VARIANTS)}
        for one in members
    ]
    labels = []
    for name, values in zip(names, flat, strict=True):
        same = [other for other_name, other in zip(names, flat, strict=True) if other_name == name]
        paths = [path for path in values if len({other[path] for other in same if path in other}) > 1]
        labels.append(" ".join([name, *(f"{path}={_typed(values[path])}" for path in paths)]))
    return labels


def _typed(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _one_per_seed(label: str, lines: Sequence[Line], notes: list[str]) -> list[Line]:
    """One run per seed, in the order of seeds: of runs that repeat each other, the one that went furthest."""
    best: dict[int, Line] = {}
    for line in lines:
        other = best.get(line.seed)
        if other is None:
            best[line.seed] = line
            continue
        # A finished run first, then the one with more steps.
        furthest, other = sorted((other, line), key=lambda one: (not one.finished, -one.seen.done))
        best[line.seed] = furthest
        notes.append(f"{other.seen.run.path}: left out, {furthest.seen.run.path} is {label} with seed {line.seed} too")
    return [best[seed] for seed in sorted(best)]


# --- curves over seeds


class Band(NamedTuple):
    """A curve over seeds."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def evaluation_band(group: SeedGroup, metric: str) -> Band | None:
    """Mean over seeds of an evaluation metric, lowest to highest; the items' interval where there is one seed."""
    curves = [points for line in group.drawn if (points := _evaluations(line, metric))]
    # One seed has no range over seeds; the interval over items says how sure its points are.
    if len(curves) == 1:
        steps = sorted(curves[0])
        value, low, high = (np.array([curves[0][step][place] for step in steps]) for place in range(3))
        return Band(np.array(steps), value, low, high)
    return _band([{step: values[0] for step, values in points.items()} for points in curves])


def training_band(group: SeedGroup, key: str) -> Band | None:
    """Trailing mean of a training metric, mean over seeds, lowest to highest."""
    curves = []
    for line in group.drawn:
        steps, values = series(line.seen.training, key)
        if len(steps):
            curves.append(dict(zip(steps.tolist(), trailing_mean(values, WINDOW).tolist(), strict=True)))
    return _band(curves)


def _band(curves: Sequence[Mapping[int, float]]) -> Band | None:
    steps, values = on_common_steps(curves)
    return Band(steps, values.mean(axis=0), values.min(axis=0), values.max(axis=0)) if len(steps) else None


def on_common_steps(curves: Sequence[Mapping[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that every seed has, and the values there, (seeds, steps).

    A mean over fewer seeds from some step on would jump there.
    """
    steps = sorted(set.intersection(*(set(points) for points in curves))) if curves else []
    return np.array(steps, dtype=np.int64), np.array([[points[step] for step in steps] for points in curves])


def _evaluations(line: Line, metric: str) -> dict[int, tuple[float, float, float]]:
    points = line.seen.evaluations(line.seen.split, metric)
    return {
        step: (value, value if low is None else low, value if high is None else high)
        for step, value, low, high in points
    }
