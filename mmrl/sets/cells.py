"""Cells of a set, computed from its runs: scores over seeds, before and after training, row against row, claims.

Reads run directories only. A cell is blank where nothing was evaluated, and refused as an average where the configs of
its seeds differ.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import pandas

from mmrl.errors import MmrlError
from mmrl.report.overview import Item, Overview
from mmrl.report.rundir import RunDir
from mmrl.report.stats import Difference, paired_difference, series, stratified_interval
from mmrl.sets.queue import Run, SetRun, has_scores
from mmrl.sets.settings import VARYING, differing, seeds_text, settings_text
from mmrl.sets.spec import MAIN, SCALES, Cell, Claim, SetSpec

LEAST_ITEMS, LEAST_SEEDS, LEAST_GAIN = 200, 3, 0.05
""""Learns" asks for: evaluated items, seeds (all of them), after - before."""
CellOrMean = Cell | str
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
    Behaviour("searches", "searches", share=True, training="task/searches"),
    Behaviour("invalid selections", "module/reranker/invalid_selection", training="module/reranker/invalid_selection"),
    Behaviour("queries without form", "module/rewriter/unparsable"),
    Behaviour("all turns well formed", "format"),
    Behaviour("format reward", "xml_format"),
    Behaviour("answers", "answered"),
)
"""Measures in the order in which they are listed; the first that a run has with a curve is drawn."""


@dataclass(frozen=True)
class Scored:
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

    @cached_property
    def costs(self) -> dict[str, float]:
        """Sums of `COUNTS` over all runs of the chain and all their starts."""
        totals = pandas.DataFrame([record for run in self.chain for record in run.history])
        totals = totals.select_dtypes("number").sum()
        costs = {name: float(sum(totals.get(key, 0.0) for key in keys)) for name, keys in COUNTS.items()}
        costs["USD"] += sum(_paid(series(run.history, key)[1].tolist()) for run in self.chain for key in MONEY)
        return costs

    @property
    def finished(self) -> bool:
        """True if the run ended with scores."""
        if self.overview.evaluates:
            return self.overview.run.finished and has_scores(self.overview.run)
        return bool(self.overview.summary)

    @cached_property
    def before(self) -> pandas.DataFrame:
        """Scores before training; empty for an evaluation, and where nothing was evaluated."""
        steps = {} if self.overview.evaluates else _evaluated(self.chain[0])
        return _scores(steps[min(steps)] if steps else [])

    @cached_property
    def after(self) -> pandas.DataFrame:
        """Scores of the last evaluation; empty before there is a second one."""
        if self.overview.evaluates:
            evaluated = self.overview.items.values()
            return _scores([item for steps in evaluated for items in steps.values() for item in items])
        steps = _evaluated(self.overview)
        return _scores(steps[max(steps)] if len(steps) > 1 else [])

    @property
    def questions(self) -> tuple[object, ...]:
        """Task, data and item ids: equal for evaluations of the same items."""
        return self.overview.get("task.name"), self.overview.get("task.dataset"), frozenset(self.after.index)

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


def _scores(items: Sequence[Item]) -> pandas.DataFrame:
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
    """A value of a row, in one column or as a mean."""

    row: str
    label: str
    """Short name of the cell, or the name of the mean."""
    column: str | None
    score: str | None
    """None: a mean of cells."""
    seeds: Mapping[int, float]
    """Seed -> value, in the table's unit."""
    mean: float | None
    """None without an evaluation."""
    std: float | None
    """Sample standard deviation over seeds; None for fewer than two."""
    wanted: int
    """Number of seeds of the row."""
    interval: Interval | None
    items: int
    paper: float | None
    paper_std: float | None
    agrees: bool | None
    """True if our value agrees with the paper's; None: no value to compare, another scale, or other settings."""
    other: bool
    """True: runs of it were made with other settings than the set's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of our runs on a claim."""

    claim: Claim
    verdict: str
    """`held`, `not held`, `undecided`, `not run`, or `not comparable at mini`."""
    difference: float | None = None
    interval: Interval | None = None
    """95 % over items."""
    over_seeds: Interval | None = None
    """95 % over the seeds' means (t distribution); None for fewer than two seeds."""
    items: int = 0
    seeds: int = 0
    rests_on: tuple[str, ...] = ()
    """Tasks without which a claim over several would not be held."""


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """Results of a set, finished or not."""

    name: str
    spec: SetSpec
    scale: str
    rows: Sequence[str]
    columns: Sequence[str]
    runs: Mapping[tuple[str, str], Sequence[Run]]
    """(row, column) -> the runs with its scores, one per seed: evaluations, or in a set without scores trainings."""
    queue: Sequence[SetRun] = ()
    """Runs in the order in which they start, each once; none where they are only looked at."""
    extra_notes: Sequence[str] = ()
    command: Sequence[str] = ()
    """Words of the command that makes this page again; none of a page that no command makes by itself."""
    settings: Sequence[str] = ()
    """Settings of every run, as typed."""

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

    @cached_property
    def read(self) -> tuple[dict[tuple[str, str], list[Scored]], list[str]]:
        """Started runs by (row, column), in the order of seeds; and the problems, as sentences."""
        started: dict[tuple[str, str], list[Scored]] = {}
        problems: list[str] = []
        for pair, runs in self.runs.items():
            cell_runs: list[Scored] = []
            missing = []
            for run in runs:
                scored, problem = self._scored(pair, run)
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
            started[pair] = sorted(cell_runs, key=lambda scored: scored.seed)
        return started, problems

    def _scored(self, pair: tuple[str, str], run: Run) -> tuple[Scored | None, str]:
        """Return a run if it has started and can be read, else None; and its problem."""
        chain: list[Overview] = []
        for overview in (self.overviews.get(link.path) for link in run.chain):
            if isinstance(overview, MmrlError):
                return None, str(overview)
            chain += [overview] if overview is not None else []
        if run.path not in self.overviews:
            return None, run.failure()
        scored = Scored(run.seed, self.metric(*pair), chain)
        failed = (scored.overview.summary.get("metrics") or {}).get("failed_share", 0)
        partly = f"{failed:.1%} of the rollouts failed from outside and count 0" if failed and scored.finished else ""
        extended = [link.run for link in chain if self.queue and link.run.segments]
        longer = ", ".join(f"{run.path} was extended to {run.segments[-1]['steps']} steps" for run in extended)
        return scored, run.failure() or partly or longer

    def started(self, row: str, column: str) -> list[Scored]:
        """Return the started runs of a cell, by seed."""
        return self.read[0].get((row, column), [])

    def finished(self, row: str, column: str) -> list[Scored]:
        """Return the runs of a cell that have ended with scores, by seed."""
        return [scored for scored in self.started(row, column) if scored.finished]

    def started_in(self, column: str) -> dict[str, list[Scored]]:
        """Return row -> its started runs, for the rows of a column that have any."""
        return {row: runs for row in self.rows if (runs := self.started(row, column))}

    def metric(self, row: str, column: str, score: str | None = None) -> str:
        """Return the metric of a score (None: the first one) on a cell."""
        measured = self.spec.measured
        metric = measured[score or next(iter(measured))]
        return self.runs[row, column][0].metric if metric == MAIN else metric

    def made_otherwise(self, row: str, column: str) -> bool:
        """True if runs of a cell have other settings than the set's."""
        return any(run.other for run in self.runs.get((row, column), ()))

    def _pair_name(self, pair: tuple[str, str]) -> str:
        row, column = pair
        return f"{row} on {column}" if column else row

    # --- scores

    @cached_property
    def values(self) -> list[Value]:
        """Values of every cell and mean, row by row."""
        columns = set(self.columns)
        cells_of: dict[CellOrMean, Sequence[Cell]] = {
            cell: [cell] for cell in self.spec.cells if cell.column in columns
        }
        for name, averaged in self.spec.means.items():
            cells = self.spec.selected(averaged)
            # Averaging fewer columns than the paper does would give a different number under the same name.
            if {cell.column for cell in cells} <= columns:
                cells_of[name] = cells
        return [self._value(row, key, cells) for row in self.rows for key, cells in cells_of.items()]

    @property
    def done(self) -> int:
        """Number of cells with all their seeds; means are not counted."""
        return sum(value.score is not None and 0 < value.wanted == len(value.seeds) for value in self.values)

    @property
    def total(self) -> int:
        """Number of cells."""
        return len(self.spec.measured) * len(self.runs)

    def _value(self, row: str, key: CellOrMean, cells: Sequence[Cell]) -> Value:
        spec, cell = self.spec, key if isinstance(key, Cell) else None
        (strata,), weights = self._strata([row], cells)
        percent = spec.source is not None and spec.source.percent
        unit = 100.0 if percent and not (cell and cell.score in spec.counts) else 1.0
        means = unit * _seed_means(strata, weights)
        items = {column: _item_means(block.loc[means.index]) for column, block in strata.items()} if len(means) else {}
        interval = stratified_interval({c: unit * m for c, m in items.items()}, weights, (row, str(key)))
        paper, paper_std = spec.reported(row).get(key, (None, None))
        agrees, other = None, any(self.made_otherwise(row, cell.column) for cell in cells)
        if self.scale == "paper" and not other and paper is not None and interval is not None:
            agrees = bool(abs(means.mean() - paper) <= spec.agree or interval[0] <= paper <= interval[1])
        return Value(
            row=row,
            label=spec.label(cell) if cell else str(key),
            column=cell.column if cell else None,
            score=cell.score if cell else None,
            seeds={int(seed): float(mean) for seed, mean in means.items()},
            mean=fmean(means) if len(means) else None,
            std=stdev(means) if len(means) > 1 else None,
            wanted=max((len(self.runs.get((row, cell.column), ())) for cell in cells), default=0),
            interval=interval,
            items=sum(map(len, items.values())),
            paper=paper,
            paper_std=paper_std,
            agrees=agrees,
            other=other,
        )

    def _strata(
        self, rows: Sequence[str], cells: Sequence[Cell]
    ) -> tuple[list[dict[str, pandas.DataFrame]], dict[str, float]]:
        """Return the blocks of each row by column, none where a cell has no evaluation; and the weight of each column.

        Several columns may ask the same questions, of one policy (on the mini world) or of several: they are one block,
        named by the first of them, where an item counts once with the mean of its cells. Else an interval over them
        would come out too narrow.
        """
        first: dict[object, str] = {}
        groups: dict[str, list[Cell]] = {}
        for cell in sorted(cells):
            questions = frozenset(run.questions for row in rows for run in self.finished(row, cell.column))
            groups.setdefault(first.setdefault(questions or cell.column, cell.column), []).append(cell)
        strata = []
        for row in rows:
            blocks = {column: self._block(row, group) for column, group in groups.items()}
            strata.append(blocks if not any(block.empty for block in blocks.values()) else {})
        return strata, {column: len(group) / len(cells) for column, group in groups.items()}

    def _block(self, row: str, cells: Sequence[Cell]) -> pandas.DataFrame:
        """Return (seeds, items) after training, the mean of some cells; NaN where an item lacks a module."""
        blocks = []
        for column, score in cells:
            runs = self.finished(row, column)
            values = {run.seed: values_of(run.after, self.metric(row, column, score)).to_dict() for run in runs}
            blocks.append(pandas.DataFrame.from_dict(values, orient="index", dtype=float).dropna(how="all"))
        seeds = sorted(set.intersection(*(set(block.index) for block in blocks)))
        first, *rest = (block.loc[seeds] for block in blocks)
        return sum(rest, first) / len(blocks)

    # --- row against row

    def against(self, first: str, second: str, column: str) -> Difference | None:
        """Return the difference after training, `first` minus `second` on the same items.

        An item's score is its mean over the seeds that both finished; the interval is over items. None without a seed
        or an item in common.
        """
        (cell,) = (Cell(column, score) for score in self.spec.measured)
        blocks = [self._block(row, [cell]) for row in (first, second)]
        seeds = sorted(set(blocks[0].index) & set(blocks[1].index))
        first_means, second_means = (_item_means(block.loc[seeds]) for block in blocks)
        shared = sorted(first_means.index.intersection(second_means.index))
        if not shared:
            return None
        # Sorted names: swapping the rows gives the same draws, so the intervals mirror each other.
        return paired_difference(second_means[shared], first_means[shared], (0, "compare", *sorted((first, second))))

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the claims whose rows are shown."""
        claims = [claim for claim in self.spec.claims if {claim.more, claim.than} <= {*self.rows}]
        return [self._judge(claim) for claim in claims]

    def _judge(self, claim: Claim) -> Verdict:
        rows = (claim.more, claim.than)
        cells = [cell for cell in self.spec.selected(claim.cells) if cell.column in self.columns]
        (higher, lower), weights = self._strata(rows, cells)
        # A row that is not trained has one run, which stands for all seeds; of another, one that finished does not.
        alone = any(all(len(self.runs[row, cell.column]) == 1 for cell in cells) for row in rows)
        pairs = {column: _paired(higher[column], lower[column], alone) for column in higher if lower}
        if not pairs or any(pair.empty for pair in pairs.values()):
            return Verdict(claim, "not run")
        higher, lower = (
            {column: block.loc[:, block.columns.isin(pairs[column].index)] for column, block in blocks.items()}
            for blocks in (higher, lower)
        )

        def judged(weights: Mapping[str, float]) -> Verdict:
            strata = {column: pairs[column] for column in weights}
            interval = stratified_interval(strata, weights, (*rows, *claim.cells))
            seeds, over_seeds = _between_seeds(higher, lower, weights, alone)
            difference = float(sum(weight * strata[column].mean() for column, weight in weights.items()))
            verdict = _verdict(interval, over_seeds, seeds)
            return Verdict(claim, verdict, difference, interval, over_seeds, sum(map(len, strata.values())), seeds)

        verdict = judged(weights)
        models = [{self.models.get((row, cell.column)) for cell in cells} for row in rows]
        if self.scale == "mini" and models[0] != models[1]:
            return replace(verdict, verdict="not comparable at mini")
        rests = []
        if verdict.verdict == "held" and len(pairs) > 1:
            for omitted in pairs:
                remaining = {column: weight for column, weight in weights.items() if column != omitted}
                shares = {column: weight / sum(remaining.values()) for column, weight in remaining.items()}
                rests += [omitted] if judged(shares).verdict != "held" else []
        return replace(verdict, rests_on=tuple(rests))

    # --- what the numbers rest on

    @cached_property
    def models(self) -> dict[tuple[str, str], str]:
        """Model before training by (row, column)."""
        first = {pair: runs[0].chain[0] for pair in self.runs if (runs := self.started(*pair))}
        return {pair: str(run.get("policy" if run.evaluates else "model.path")) for pair, run in first.items()}

    @cached_property
    def head(self) -> dict[str, str]:
        """Facts above the tables: set, scale, state, and the runs' machines and engines."""
        overviews = [scored.overview for runs in self.read[0].values() for scored in runs]

        def listed(read: Callable[[Overview], object]) -> str:
            return "; ".join(dict.fromkeys(str(text) for run in overviews if (text := read(run))))

        source, own = self.spec.source, self.spec.seeds if self.queue else ()
        facts = {
            "paper": f"arXiv {source.arxiv}, {source.at}: {self.spec.shows}" if source else "",
            "shows": "" if source else self.spec.shows,
            "scale": SCALES.get(self.scale, ""),
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "cells": f"{self.done} of {self.total}",
            "command": shlex.join(self.command),
            "settings": settings_text(self.settings, any(run.other for run in self.queue)),
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
        """Notes below the tables: shared runs, problems, the rows' notes and the set's."""
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
            method = self.spec.rows[name]
            if method.from_:
                text = f"{name}: starts from the policy of {method.from_}"
                finished = [run for column in self.columns for run in self.finished(name, column)]
                if finished and name not in started_from and not self.spec.scores:
                    paths = ", ".join(str(scored.overview.run.path) for scored in finished)
                    text += f"; its own, for mmrl eval and serve (policy=) and mmrl export: {paths}"
                notes.append(text)
            if method.checkpoint == "before_collapse":
                rule = "before the evaluations of training collapse (half of the best, and no return)"
                notes.append(f"{name}: the last checkpoint {rule}")
        return [*notes, *self.spec.notes]


def _paid(values: Sequence[float]) -> float:
    """Return the sum over process starts of a counter that restarts at 0 with each process."""
    return sum(value for value, following in pairwise([*values, 0.0]) if following < value)


def _verdict(items: Interval | None, seeds: Interval | None, count: int) -> str:
    """Return "held" where both intervals lie above 0 with three seeds or more, "not held" where both lie below."""
    if items is not None and seeds is not None and count >= LEAST_SEEDS:
        if min(items[0], seeds[0]) > 0:
            return "held"
        if max(items[1], seeds[1]) < 0:
            return "not held"
    return "undecided"


def _seed_means(strata: Mapping[str, pandas.DataFrame], weights: Mapping[str, float]) -> pandas.Series[float]:
    """Return seed -> weighted mean over the strata, for the seeds that all strata have, on items that all have."""
    means = [w * strata[column].dropna(axis=1).mean(axis=1) for column, w in weights.items() if column in strata]
    return pandas.concat(means, axis=1).sum(axis=1, skipna=False).dropna() if means else pandas.Series(dtype=float)


def _item_means(block: pandas.DataFrame) -> pandas.Series[float]:
    """Return item -> mean over the seeds, for the items that all seeds have."""
    return block.mean(skipna=False).dropna().sort_index()


def _paired(higher: pandas.DataFrame, lower: pandas.DataFrame, alone: bool) -> pandas.Series[float]:
    """Return the differences per item, of means over the seeds that both have; `alone`: of all, one row has one run."""
    seeds = higher.index.intersection(lower.index)
    if len(seeds) and not alone:
        higher, lower = higher.loc[seeds], lower.loc[seeds]
    return (_item_means(higher) - _item_means(lower)).dropna()


def _between_seeds(
    higher: Mapping[str, pandas.DataFrame],
    lower: Mapping[str, pandas.DataFrame],
    weights: Mapping[str, float],
    alone: bool,
) -> tuple[int, Interval | None]:
    """Return the number of seeds, and the 95 % t interval of their mean difference; None for fewer than two.

    Args:
        alone: one row has a single run, which is compared with each of the other row's.
    """
    first, second = _seed_means(higher, weights), _seed_means(lower, weights)
    if alone and 1 in (len(first), len(second)):
        values = (first - second.iloc[0] if len(second) == 1 else first.iloc[0] - second).to_numpy()
    else:
        values = (first - second).dropna().to_numpy()
    if len(values) < 2:
        return len(values), None
    half = student_t(len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return len(values), (float(values.mean() - half), float(values.mean() + half))


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    exact = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(exact):
        return exact[freedom - 1]
    # Fisher's expansion in 1/freedom, from here on right to four digits.
    z = NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return float(z + sum(term / freedom**power for power, term in enumerate(terms, start=1)))


def _retriever(overview: Overview) -> str:
    name = overview.get("task.retriever.name")
    facts = overview.summary.get("facts") or {}
    more = [str(facts[key]) for key in ("corpus", "partial corpus", "corpus coverage") if key in facts]
    return ", ".join([str(name), *more]) if name is not None else ""
