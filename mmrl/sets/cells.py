"""Cells of a set, computed from its runs: scores over seeds, before and after training, row against row.

Reads run directories only. A cell is blank where nothing was evaluated, and refused as an average where the configs of
its seeds differ.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import ClassVar, NamedTuple

import pandas

from mmrl.config.base import literal
from mmrl.errors import MmrlError
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import Difference, paired_difference, series, stratified_interval
from mmrl.sets.queue import CellRun, PlannedRun
from mmrl.sets.settings import VARYING, differing, seeds_text
from mmrl.sets.spec import SetSpec
from mmrl.store.rundir import EXAMPLES, RunDir
from mmrl.system.files import JsonObject

LEAST_ITEMS, LEAST_SEEDS, LEAST_GAIN = 200, 3, 0.05
""""Learns" asks for: evaluated items, seeds (all of them), after - before."""
Interval = tuple[float, float]


class Behaviour(NamedTuple):
    """Measure of how a program acts, apart from whether it is right."""

    label: str
    metric: str
    """Metric of items; `module/MODULE/FACT` of the calls of a module."""
    share: bool = False
    """True: the share of items above 0, instead of the mean."""
    training: str = ""
    """Metric of training steps that is drawn as a curve; empty: not drawn."""


COUNTS = {
    "rollouts": ("rollouts/count", "prompts/rollouts"),
    "calls": ("rollouts/calls", "rollouts/calls_again", "prompts/calls", "prompts/writer/requests"),
    "tokens sampled": ("rollouts/tokens", "prompts/completion_tokens", "prompts/writer/completion_tokens"),
    "tokens trained": ("train/tokens",),
    "seconds": ("time/step", "time/eval"),
    "USD": ("prompts/writer/cost",),
}
"""Costs of a run -> metrics of its steps that are summed; those of the model that writes instructions among them."""
MONEY = ("endpoint/cost", "endpoint/judge/cost", "endpoint/external/cost")
"""Counted since the process started, so the last value of each start is its cost."""
BEHAVIOUR = (
    Behaviour("calls the tool", "tool_calls", share=True, training="task/tool_calls"),
    Behaviour("searches at all", "searches", share=True, training="task/searches"),
    Behaviour("invalid selections", "module/reranker/invalid_selection", training="module/reranker/invalid_selection"),
    Behaviour("queries without form", "module/rewriter/unparsable"),
    Behaviour("all turns well formed", "format"),
    Behaviour("format reward", "xml_format"),
    Behaviour("answers", "answered"),
)
"""Measures in the order in which they are listed; the first that a run has with a curve is drawn."""


@dataclass(frozen=True)
class RunResult:
    """A run of a cell, finished or not."""

    seed: int
    metric: str
    """Metric that decides whether the run learned."""
    chain: Sequence[Overview]
    """Runs that it starts from, the first one first, and itself."""

    @property
    def overview(self) -> Overview:
        """Overview of the run."""
        return self.chain[-1]

    @property
    def measure(self) -> str:
        """The metric, with the metrics of the user's own that it may be made of."""
        own = (
            f"task.{key}={literal(value)}"
            for key in ("metric", "metric_weights")
            if (value := self.overview.get(f"task.{key}"))
        )
        return " ".join([self.metric, *own])

    @cached_property
    def costs(self) -> dict[str, float]:
        """Sums of `COUNTS` over all runs of the chain and all their starts."""
        totals = pandas.DataFrame([record for run in self.chain for record in run.history])
        totals = totals.select_dtypes("number").sum()
        costs = {name: float(sum(totals.get(key, 0.0) for key in keys)) for name, keys in COUNTS.items()}
        costs["USD"] += sum(_paid(run, key) for run in self.chain for key in MONEY)
        return costs

    @property
    def finished(self) -> bool:
        """True if the run ended with scores."""
        return bool(self.overview.summary)

    @cached_property
    def start(self) -> Overview:
        """The first run of the chain that was asked what the last one was: others' scores are of other items."""
        asked = asked_in(self.overview)
        return next(run for run in self.chain if run is self.overview or not conflict(asked_in(run), asked))

    @cached_property
    def before(self) -> pandas.DataFrame:
        """Scores before training; empty where nothing was evaluated."""
        steps = _evaluated(self.start)
        return scores_of(steps[min(steps)] if steps else [])

    @property
    def failed(self) -> dict[str, float]:
        """Words for an evaluation (" before", " after", "") -> share of its rollouts that failed from outside."""
        shares = {}
        for when, run, which in ((" before", self.start, min), (" after", self.overview, max)):
            key = f"eval/{run.split}/failed_share"
            steps = _evaluated(run)
            found = [
                record[key] for record in run.history if key in record and record["step"] == which(steps, default=None)
            ]
            shares[when] = float(found[-1]) if found else 0.0
        if self.overview.evaluates:
            shares = {"": float((self.overview.summary.get("metrics") or {}).get("failed_share", 0))}
        return {when: share for when, share in shares.items() if share}

    @cached_property
    def after(self) -> pandas.DataFrame:
        """Scores of the last evaluation; empty before there is a second one."""
        steps = _evaluated(self.overview)
        return scores_of(steps[max(steps)] if len(steps) > 1 else [])

    @property
    def latest(self) -> pandas.DataFrame:
        """Scores after training, or before it if there are none yet."""
        return self.before if self.after.empty else self.after

    @cached_property
    def gain(self) -> Difference | None:
        """Difference of the last evaluation to the one before training; None before there are two."""
        before, after = values_of(self.before, self.metric), values_of(self.after, self.metric)
        before = before[before.index.isin(after.index)]
        if before.empty:
            return None
        # The key of `compare_items`: the same interval as in the run's own report.
        key, resamples = (self.seed, "compare", self.metric), int(self.overview.get("eval.bootstrap", 1000))
        return paired_difference([*before], [*after[before.index]], key, resamples)

    @property
    def learned(self) -> bool | None:
        """True if this run meets the threshold; None while that cannot be decided."""
        if not self.finished or self.gain is None or self.gain.n < LEAST_ITEMS:
            return None
        # The small tolerance: 0.25 - 0.20 is a little below 0.05 in binary.
        return self.gain.difference >= LEAST_GAIN - 1e-9 and self.gain.low > 0


def _evaluated(overview: Overview) -> Mapping[int, Sequence[Item]]:
    """Return {step: items} of a training run, for steps whose evaluation is complete."""
    # An evaluation's items are written one by one; its metrics line comes last and marks it as complete.
    complete = {record["step"] for record in overview.history if f"eval/{overview.split}/n" in record}
    return {step: items for step, items in overview.items.get(overview.split, {}).items() if step in complete}


def asked_in(run: Overview) -> Mapping[str, JsonObject]:
    """Return id -> texts of the examples of a run's evaluations; none where they cannot be read."""
    file = run.run.path / EXAMPLES
    facts = file.stat() if file.is_file() else None
    return {} if facts is None else _read_asked(run.run, run.split, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=1024)
def _read_asked(run: RunDir, split: str, *_: int) -> Mapping[str, JsonObject]:
    # Read again where the file is another: the page of a set is drawn after each of its runs.
    with suppress(MmrlError):
        return {name: line for (of, name), line in run.examples.items() if of == split}
    return {}


def conflict(first: Mapping[str, JsonObject], second: Mapping[str, JsonObject]) -> str:
    """Return an id under which two runs were asked different records; empty: there is none."""
    return next((name for name, line in first.items() if second.get(name, line) != line), "")


def _conflict_of(runs: Sequence[Overview]) -> str:
    """Return in words which records of some runs differ under one id; empty: none do."""
    for run in runs[1:]:
        if name := conflict(asked_in(runs[0]), asked_in(run)):
            return f"{name} of {runs[0].run.path} and {run.run.path}"
    return ""


def _edited(runs: Sequence[Overview]) -> list[str]:
    """Return the files of the user's that were not the same in all starts of some runs: code, prompts, data."""
    digests: dict[str, set[str]] = {}
    for run in runs:
        for start in (run.environment, *(run.environment.get("resumed") or ())):
            for name, digest in {**(start.get("own_code") or {}), **(start.get("inputs") or {})}.items():
                digests.setdefault(name, set()).add(digest)
    return [name for name, found in digests.items() if len(found) > 1]


def scores_of(items: Sequence[Item]) -> pandas.DataFrame:
    """Return the (items, metrics) table of one evaluation; NaN where an item has not reached a module."""
    by_item = {
        item["id"]: item["metrics"] | {f"module/{name}": value for name, value in item.get("modules", {}).items()}
        for item in items
    }
    scores = pandas.DataFrame([*by_item.values()], index=[*by_item]).apply(pandas.to_numeric, errors="coerce")
    # A metric counts 0 where a rollout failed, as in the evaluation's own means.
    return scores.fillna({name: 0.0 for name in scores if not name.startswith("module/")})


def values_of(scores: pandas.DataFrame, metric: str) -> pandas.Series[float]:
    """Return item -> value, for the items that have one."""
    return scores[metric].dropna() if metric in scores else pandas.Series(dtype=float)


def behaviour_in(scores: pandas.DataFrame, behaviour: Behaviour) -> float | None:
    """Return the value of a behaviour in an evaluation; None where the task does not have it."""
    values = values_of(scores, behaviour.metric)
    return fmean(values > 0 if behaviour.share else values) if len(values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of a row after training."""

    row: str
    label: str
    """Name of the column."""
    seeds: Mapping[int, float]
    """Seed -> value."""
    mean: float | None
    """None without an evaluation."""
    std: float | None
    """Sample standard deviation over seeds; None for fewer than two."""
    wanted: int
    """Number of seeds of the row."""
    interval: Interval | None
    items: int
    other: bool
    """True: runs of it were made with other settings than the set's."""


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """Results of a set, finished or not."""

    name: str
    spec: SetSpec
    rows: Sequence[str]
    columns: Sequence[str]
    runs: Mapping[tuple[str, str], Sequence[CellRun]]
    """(row, column) -> the runs with its scores, one per seed."""
    queue: Sequence[PlannedRun] = ()
    """Runs in the order in which they start, each once; none where they are only looked at."""
    extra_notes: Sequence[str] = ()
    command: Sequence[str] = ()
    """Words of the command that makes this page again; none of a page that no command makes by itself."""
    settings: Sequence[str] = ()
    """Settings of every run, as typed."""
    result_type: ClassVar[type[RunResult]] = RunResult

    @property
    def decimals(self) -> int:
        """Digits of scores after the point."""
        return 3

    @property
    def about(self) -> Mapping[str, str]:
        """Facts of the set itself, the first ones above the tables."""
        return {"shows": self.spec.shows}

    def opening(self, missing: Sequence[PlannedRun]) -> str:
        """Return what is about to run."""
        return f"set {self.name}: {len(self.queue)} runs, {len(missing)} missing"

    @cached_property
    def overviews(self) -> dict[Path, Overview | MmrlError]:
        """Overview of each started run, and of the runs that it starts from; or the error of reading it."""
        overviews: dict[Path, Overview | MmrlError] = {}
        for path in dict.fromkeys(link.path for runs in self.runs.values() for run in runs for link in run.chain):
            if (path / "config.yaml").is_file():
                try:
                    overviews[path] = Overview.from_run(RunDir.read(path))
                except MmrlError as error:
                    overviews[path] = error
        return overviews

    def overview(self, path: Path | None) -> Overview | None:
        """Return the overview of a run; None where there is none, or it cannot be read."""
        overview = self.overviews.get(path) if path is not None else None
        return overview if isinstance(overview, Overview) else None

    @cached_property
    def read(self) -> tuple[dict[tuple[str, str], list[RunResult]], list[str]]:
        """Started runs by (row, column), in the order of seeds; and the problems, as sentences."""
        started: dict[tuple[str, str], list[RunResult]] = {}
        problems: list[str] = []
        for pair, runs in self.runs.items():
            cell_runs: list[RunResult] = []
            missing = []
            for run in runs:
                scored, problem = self._run_result(pair, run)
                cell_runs += [scored] if scored is not None else []
                if problem:
                    problems.append(f"{self._pair_name(pair)}, seed {run.seed}: {problem}")
                elif scored is None or not scored.finished:
                    missing.append(run.seed)
            finished = [scored.overview for scored in cell_runs if scored.finished]
            if missing and finished:
                problems.append(f"{self._pair_name(pair)}: seeds {', '.join(map(str, missing))} are missing")
            if different := differing(finished, VARYING):
                problems.append(f"{self._pair_name(pair)}: not averaged, its seeds differ in {', '.join(different)}")
                cell_runs = []
            elif other := _conflict_of(finished):
                problems.append(f"{self._pair_name(pair)}: not averaged, its seeds were asked other records: {other}")
                cell_runs = []
            started[pair] = sorted(cell_runs, key=lambda scored: scored.seed)
        for column in self.columns:
            ended = {row: [run for run in started.get((row, column), ()) if run.finished] for row in self.rows}
            finished = [run.overview for runs in ended.values() for run in runs]
            name = f"{column}: " if column else ""
            measures = {row: runs[0].measure for row, runs in ended.items() if runs}
            if len({*measures.values()}) > 1:
                listed = "; ".join(f"{row} has {measure}" for row, measure in measures.items())
                problems.append(f"{name}rows with other metrics are not compared: {listed}")
            seeds = {row: {run.seed for run in runs if len(run.after)} for row, runs in ended.items()}
            pairs = combinations([row for row in seeds if seeds[row]], 2)
            if apart := [f"{one} and {other}" for one, other in pairs if not seeds[one] & seeds[other]]:
                problems.append(f"{name}not compared, no seed in common: {', '.join(apart)}")
            if other := _conflict_of(finished):
                problems.append(f"{name}rows that were asked other records are not compared: {other}")
            if edited := _edited(finished):
                problems.append(f"{name}runs were made with other code or files of yours: {', '.join(edited)}")
        return started, problems

    def _run_result(self, pair: tuple[str, str], run: CellRun) -> tuple[RunResult | None, str]:
        """Return a run if it has started and can be read, else None; and its problem."""
        chain: list[Overview] = []
        for overview in (self.overviews.get(link.path) for link in run.chain):
            if isinstance(overview, MmrlError):
                return None, str(overview)
            chain += [overview] if overview is not None else []
        if run.path not in self.overviews:
            return None, run.failure()
        scored = self.result_type(run.seed, self.metric(*pair), chain)
        failed = " and ".join(f"{share:.1%} of the rollouts{when}" for when, share in scored.failed.items())
        partly = f"{failed} failed from outside and count 0" if failed and scored.finished else ""
        if scored.start is not chain[0]:
            partly = f"before is that of {scored.start.run.path}, the runs before it were asked other records; {partly}"
        extended = [link.run for link in chain if self.queue and link.run.segments]
        longer = ", ".join(f"{run.path} was extended to {run.segments[-1]['steps']} steps" for run in extended)
        return scored, run.failure() or partly.removesuffix("; ") or longer

    def started(self, row: str, column: str) -> list[RunResult]:
        """Return the started runs of a cell, by seed."""
        return self.read[0].get((row, column), [])

    def finished(self, row: str, column: str) -> Sequence[RunResult]:
        """Return the runs of a cell that have ended with scores, by seed."""
        return [scored for scored in self.started(row, column) if scored.finished]

    def started_in(self, column: str) -> dict[str, list[RunResult]]:
        """Return row -> its started runs, for the rows of a column that have any."""
        return {row: runs for row in self.rows if (runs := self.started(row, column))}

    def metric(self, row: str, column: str) -> str:
        """Return the metric of a cell: the task's main one, which programs of the user's may choose by run."""
        runs = self.runs[row, column]
        overviews = (overview for run in runs if (overview := self.overview(run.path)) is not None)
        return next((name for overview in overviews if (name := overview.recorded_metric)), runs[0].metric)

    def made_otherwise(self, row: str, column: str) -> bool:
        """True if runs of a cell have other settings than the set's."""
        return any(run.other for run in self.runs.get((row, column), ()))

    def _pair_name(self, pair: tuple[str, str]) -> str:
        row, column = pair
        return f"{row} on {column}" if column else row

    # --- scores

    @cached_property
    def values(self) -> Sequence[Value]:
        """Values of every cell, row by row."""
        return [self._value(row, column) for row in self.rows for column in self.columns]

    @property
    def done(self) -> int:
        """Number of cells with all their seeds."""
        return sum(0 < value.wanted == len(value.seeds) for value in self.values)

    @property
    def total(self) -> int:
        """Number of cells."""
        return len(self.runs)

    def _value(self, row: str, column: str) -> Value:
        block = self.block(row, column)
        means, items = block.dropna(axis=1).mean(axis=1).dropna(), item_means(block)
        return Value(
            row=row,
            label=column or "score",
            seeds={int(seed): float(mean) for seed, mean in means.items()},
            mean=fmean(means) if len(means) else None,
            std=stdev(means) if len(means) > 1 else None,
            wanted=len(self.runs.get((row, column), ())),
            interval=stratified_interval({column: items}, {column: 1.0}, (row, column)),
            items=len(items),
            other=self.made_otherwise(row, column),
        )

    def block(self, row: str, column: str, metric: str | None = None) -> pandas.DataFrame:
        """Return (seeds, items) after training; NaN where an item lacks a module.

        Args:
            metric: None: the cell's.
        """
        runs = self.finished(row, column)
        values = {run.seed: values_of(run.after, metric or run.metric).to_dict() for run in runs}
        return pandas.DataFrame.from_dict(values, orient="index", dtype=float).dropna(how="all")

    # --- row against row

    def against(self, first: str, second: str, column: str) -> Difference | None:
        """Return the difference after training, `first` minus `second` on the same items.

        An item's score is its mean over the seeds that both finished; the interval is over items. None without a seed
        or an item in common, and where the scores are of other metrics or other records.
        """
        runs = [run for row in (first, second) for run in self.finished(row, column)]
        if len({run.measure for run in runs}) > 1 or _conflict_of([run.overview for run in runs]):
            return None
        blocks = [self.block(row, column) for row in (first, second)]
        seeds = sorted(set(blocks[0].index) & set(blocks[1].index))
        first_means, second_means = (item_means(block.loc[seeds]) for block in blocks)
        shared = sorted(first_means.index.intersection(second_means.index))
        if not shared:
            return None
        # Sorted names: swapping the rows gives the same draws, so the intervals mirror each other.
        return paired_difference(second_means[shared], first_means[shared], (0, "compare", *sorted((first, second))))

    # --- what the numbers rest on

    @cached_property
    def models(self) -> dict[tuple[str, str], str]:
        """Model before training by (row, column)."""
        first = {pair: runs[0].chain[0] for pair in self.runs if (runs := self.started(*pair))}
        return {pair: str(run.get("policy" if run.evaluates else "model.path")) for pair, run in first.items()}

    @cached_property
    def head(self) -> dict[str, str]:
        """Facts above the tables: set, state, and the runs' machines and engines."""
        overviews = [scored.overview for runs in self.read[0].values() for scored in runs]

        def listed(read: Callable[[Overview], object]) -> str:
            return "; ".join(dict.fromkeys(str(text) for run in overviews if (text := read(run))))

        own, marked = self.spec.seeds if self.queue else (), "; what is marked * was not made with the set's own"
        facts = {
            **self.about,
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "cells": f"{self.done} of {self.total}",
            "command": shlex.join(self.command),
            "settings": shlex.join(self.settings) + marked * any(run.other for run in self.queue),
            "seeds": seeds_text({row: [run.seed for run in runs] for (row, _), runs in self.runs.items()}, own),
            "commit": listed(lambda run: str((run.environment.get("mmrl_git") or {}).get("commit", "-"))[:10]),
            "machine": listed(lambda run: run.environment.get("cpu", "-")),
            "engine": listed(lambda run: run.get("engine.name", "-")),
            "prompts": listed(lambda run: Path(str(run.get("task.prompts") or "mmrl's own")).name),
            "retriever": listed(_retriever),
            "judge": listed(lambda run: (run.summary.get("facts") or {}).get("judge")),
        }
        return {name: text for name, text in facts.items() if text}

    @cached_property
    def notes(self) -> list[str]:
        """Notes below the tables: problems, shared runs, models, starts, and the set's own."""
        sharing: dict[tuple[Path, ...], list[str]] = {}
        for (row, column), runs in self.runs.items():
            name = row if len(self.columns) == 1 else self._pair_name((row, column))
            sharing.setdefault(tuple(run.path for run in runs), []).append(name)
        groups = [", ".join(names) for names in sharing.values() if len(names) > 1]
        notes = [*self.read[1], *self.extra_notes]
        # Joined to a single note: where columns share their data at this scale there are a dozen of them.
        notes += [f"the same runs: {'; '.join(groups)}"] if groups else []
        models = dict.fromkeys(f"{row} is {model}" for (row, _), model in self.models.items())
        if len(names := {*self.models.values()}) == 1:
            models = {f"every row is {names.pop()}": None}
        notes += [f"before training {', '.join(models)}"] if models else []
        started_from = {method.from_ for method in self.spec.rows.values()}
        for name in self.rows:
            if not (start := self.spec.rows[name].from_):
                continue
            text = f"{name}: starts from the policy of {start}"
            trained = [scored.overview for column in self.columns for scored in self.finished(name, column)]
            if trained and name not in started_from and not any(run.evaluates for run in trained):
                paths = ", ".join(str(run.run.path) for run in trained)
                text += f"; its own, for mmrl eval and serve (policy=) and mmrl export: {paths}"
            notes.append(text)
        return [*notes, *self.spec.notes]


def _paid(run: Overview, key: str) -> float:
    """Return the sum over process starts of a counter that restarts at 0 with each process."""
    steps, values = series(run.history, key)
    points = [*zip(steps.tolist(), values.tolist(), strict=True), (inf, 0.0)]
    # Where a start is not recorded, as in runs of earlier versions, a counter that fell tells of it.
    starts = [start["step"] for start in run.environment.get("resumed") or () if "step" in start]
    ends = (
        value
        for (step, value), (later, following) in pairwise(points)
        if following < value or any(step <= start < later for start in starts)
    )
    return float(sum(ends))


def item_means(block: pandas.DataFrame) -> pandas.Series[float]:
    """Return item -> mean over the seeds, for the items that all seeds have."""
    return block.mean(skipna=False).dropna().sort_index()


def _retriever(overview: Overview) -> str:
    name = overview.get("task.retriever.name")
    facts = overview.summary.get("facts") or {}
    more = [str(facts[key]) for key in ("corpus", "partial corpus", "corpus coverage") if key in facts]
    return ", ".join([str(name), *more]) if name is not None else ""
