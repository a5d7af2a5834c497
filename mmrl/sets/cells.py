"""The cells of a set as its runs fill them: scores over seeds, before and after training, row against row, claims.

Reads run directories only. A cell is blank where nothing was evaluated, and refused as an average where the configs of
its seeds differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import pandas

from mmrl.config.base import flattened
from mmrl.errors import MmrlError
from mmrl.report.overview import Item, Overview
from mmrl.report.rundir import RunDir
from mmrl.report.stats import (
    Difference,
    number,
    paired_difference,
    stratified_interval,
)
from mmrl.sets.queue import has_scores
from mmrl.sets.spec import Cell, Claim, SetSpec
from mmrl.system.files import JsonObject

VARYING = ("seed", "run.", "hardware.", "engine.", "plugins", "policy", "start.", "task.prompts", "model.")
"""Config paths in which runs of one row may differ: where weights and prompts lie, and the machine."""
SCALE_NOTES = {
    "": "",
    "paper": "paper: the papers' models, data and sizes",
    "mini": "mini: the mini world with the tiny models; values do not compare with the paper's, orders (claims) do",
    "real": "real: a small real model on real data; values do not compare with the paper's, orders (claims) do",
}
LEAST_ITEMS, LEAST_SEEDS, LEAST_GAIN = 200, 3, 0.05
""""Learns" asks for: evaluated items, seeds (all of them), after - before."""
Place = Cell | str
"""A cell, or the name of a mean."""
Interval = tuple[float, float]


class Behaviour(NamedTuple):
    """A number that says how a program acts, apart from whether it is right."""

    label: str
    source: str
    """Key in an item's `metrics`, or `<module>/<fact>` in its `modules`."""
    share: bool = False
    """True: the share of items above 0, instead of the mean."""
    training: str = ""
    """Metric of training steps that is drawn as a curve; empty: not drawn."""
    axis: str = ""
    """Label of that curve's axis."""


COUNTS = {
    "rollouts": ("rollouts/count", "prompts/rollouts"),
    "calls": ("rollouts/calls", "prompts/calls", "prompts/writer/requests"),
    "tokens sampled": ("rollouts/tokens", "prompts/completion_tokens", "prompts/writer/completion_tokens"),
    "tokens trained": ("train/tokens",),
    "seconds": ("time/step", "time/eval"),
}
"""What a run costs -> metrics of its steps that are summed; those of the model that writes instructions among them."""
MONEY = ("endpoint/cost", "endpoint/judge/cost", "endpoint/external/cost")
"""Counted since the process started, so the last value of each start is its cost."""
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
"""Listed where a run has them, in this order; the first with a curve is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRun:
    """The run with the scores of a cell: an evaluation, or in a set without scores the training itself."""

    seed: int
    path: Path
    command: str = ""
    """What makes it."""
    trouble: str = ""
    """Why it is not there; empty where it is, or was not tried."""
    trained: Path | None = None
    """The training run whose policy it is about; None for a policy that this set does not train."""
    chain: tuple[Path, ...] = ()
    """The runs that it comes from, the first one first, and itself."""


@dataclass(frozen=True)
class Scored:
    """What a run has of a cell so far."""

    seed: int
    overview: Overview
    first: Overview
    """Of the run that the chain began with, which is mostly the same."""
    costs: Mapping[str, float]
    """Of all runs of the chain, over all their starts: `COUNTS`, seconds and USD."""

    @property
    def finished(self) -> bool:
        """Whether it has ended with scores."""
        if self.overview.evaluates:
            return self.overview.run.finished and has_scores(self.overview.run)
        return bool(self.overview.summary)

    @property
    def before(self) -> Sequence[Item]:
        """Items before training; empty for an evaluation, and where nothing was evaluated."""
        steps = _evaluated(self.first)
        return [] if self.overview.evaluates or not steps else steps[min(steps)]

    @property
    def after(self) -> Sequence[Item]:
        """Items of the last evaluation; empty before there is a second one."""
        if self.overview.evaluates:
            evaluated = self.overview.items.values()
            return [item for steps in evaluated for listed in steps.values() for item in listed]
        steps = _evaluated(self.overview)
        return steps[max(steps)] if len(steps) > 1 else []

    @property
    def questions(self) -> tuple[object, ...]:
        """Equal for evaluations of the same items."""
        items = frozenset(item["id"] for item in self.after)
        return self.overview.get("task.name"), self.overview.get("task.dataset"), items

    def gain(self, metric: str) -> Difference | None:
        """Last evaluation against the one before training; None before there are two."""
        before, after = self.values(self.before, metric), self.values(self.after, metric)
        shared = [item for item in before if item in after]
        if not shared:
            return None
        # The key of `compare_items`: the same interval as in the run's own report.
        key, resamples = (self.seed, "compare", metric), int(self.overview.get("eval.bootstrap", 1000))
        return paired_difference([before[i] for i in shared], [after[i] for i in shared], key, resamples)

    def learned(self, metric: str) -> bool | None:
        """Whether this run meets the threshold; None while that cannot be decided."""
        gain = self.gain(metric)
        if not self.finished or gain is None or gain.n < LEAST_ITEMS:
            return None
        # The small tolerance: 0.25 - 0.20 is a little below 0.05 in binary.
        return gain.difference >= LEAST_GAIN - 1e-9 and gain.low > 0

    def values(self, items: Sequence[Item], metric: str) -> dict[str, float]:
        """Item -> value, of items that have one.

        In an `mmrl eval` a metric counts 0 where a rollout failed, as in its own means; a module that was not called
        has none.
        """
        group, name = (
            ("modules", metric.removeprefix("module/")) if metric.startswith("module/") else ("metrics", metric)
        )
        absent = 0.0 if self.overview.evaluates and group == "metrics" else None
        values = {item["id"]: item.get(group, {}).get(name, absent) for item in items}
        return {item: float(value) for item, value in values.items() if value is not None}

    def behaviour(self, of: Behaviour, items: Sequence[Item]) -> float | None:
        """A behaviour in an evaluation; None where the task has none such."""
        values = [number(item["metrics"].get(of.source, item.get("modules", {}).get(of.source))) for item in items]
        known = [float(value > 0) if of.share else value for value in values if value is not None]
        return fmean(known) if known else None


def _evaluated(overview: Overview) -> Mapping[int, Sequence[Item]]:
    """Step -> items of a training run; steps whose evaluation is complete."""
    # An evaluation's items are written one by one; its metrics line comes last and marks it as complete.
    complete = {record["step"] for record in overview.history if f"eval/{overview.split}/n" in record}
    return {step: items for step, items in overview.items.get(overview.split, {}).items() if step in complete}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One place of a row."""

    row: str
    place: Place
    label: str
    seeds: Mapping[int, float]
    """Seed -> value, in the table's unit."""
    wanted: int
    """Seeds in all."""
    interval: Interval | None
    items: int
    paper: float | None
    paper_std: float | None
    agrees: bool | None
    """None: nothing to compare, or not at this scale."""

    @property
    def mean(self) -> float | None:
        """Over seeds; None where nothing was evaluated."""
        return fmean(self.seeds.values()) if self.seeds else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return stdev(self.seeds.values()) if len(self.seeds) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, judged by our runs."""

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
    """Of a claim over several tasks those without which it would not be held."""


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """A set as far as it has been run."""

    name: str
    spec: SetSpec
    scale: str
    rows: Sequence[str]
    columns: Sequence[str]
    metrics: Mapping[tuple[str, str], Mapping[str, str]]
    """(row, column) -> score -> metric."""
    runs: Mapping[tuple[str, str], Sequence[CellRun]]
    """(row, column) -> the runs with its scores, one per seed."""
    made: datetime = field(default_factory=lambda: datetime.now(UTC))
    more_notes: Sequence[str] = ()

    @cached_property
    def read(self) -> tuple[dict[tuple[str, str], dict[int, Scored]], list[str]]:
        """(row, column) -> seed -> what a run that has begun has, and what is wrong or missing, in words."""
        begun: dict[tuple[str, str], dict[int, Scored]] = {}
        troubles: list[str] = []
        overviews: dict[Path, Overview] = {}

        def overview(path: Path) -> Overview | None:
            if path not in overviews and (path / "config.yaml").is_file():
                overviews[path] = Overview.of(RunDir.read(path))
            return overviews.get(path)

        for place, runs in self.runs.items():
            where = self._named(place)
            here: dict[int, Scored] = {}
            missing = []
            for run in runs:
                try:
                    chain = [one for path in run.chain or (run.path,) if (one := overview(path)) is not None]
                    scored = Scored(run.seed, chain[-1], chain[0], _costs(chain)) if overview(run.path) else None
                except MmrlError as error:
                    troubles.append(f"{where}, seed {run.seed}: {error}")
                    continue
                if scored is not None:
                    here[run.seed] = scored
                if run.trouble:
                    troubles.append(f"{where}, seed {run.seed}: {run.trouble}")
                elif scored is None or not scored.finished:
                    missing.append(run.seed)
                elif failed := (scored.overview.summary.get("metrics") or {}).get("failed_share", 0):
                    what = f"{failed:.1%} of the rollouts failed from outside and count 0"
                    troubles.append(f"{where}, seed {run.seed}: {what}")
            if missing and any(scored.finished for scored in here.values()):
                troubles.append(f"{where}: seeds {', '.join(map(str, missing))} are missing")
            if different := _differing([one.overview for one in here.values() if one.finished]):
                troubles.append(f"{where}: not averaged, its seeds differ in {', '.join(different)}")
                here = {}
            begun[place] = here
        return begun, troubles

    def begun(self, row: str, column: str) -> list[Scored]:
        """The runs of a cell that have begun, by seed."""
        return [scored for _, scored in sorted(self.read[0].get((row, column), {}).items())]

    def finished(self, row: str, column: str) -> dict[int, Scored]:
        """Seed -> a finished run of a cell."""
        return {scored.seed: scored for scored in self.begun(row, column) if scored.finished}

    def rows_of(self, column: str) -> list[str]:
        """Rows with a cell in a column."""
        return [row for row in self.rows if (row, column) in self.runs]

    def metric(self, row: str, column: str) -> str:
        """The metric of a cell of a set without scores of its own."""
        return next(iter(self.metrics[row, column].values()))

    def _named(self, place: tuple[str, str]) -> str:
        row, column = place
        return f"{row} on {column}" if column else row

    # --- scores

    @cached_property
    def values(self) -> list[Value]:
        """Every place of every row."""
        columns = set(self.columns)
        places: list[Place] = [cell for cell in self.spec.cells if cell.column in columns]
        # An average of fewer columns than the paper's would be another number under its name.
        places += [
            name for name, of in self.spec.means.items() if {c.column for c in self.spec.selected(of)} <= columns
        ]
        return [self._value(row, place) for row in self.rows for place in places]

    @property
    def seeds_done(self) -> dict[str, list[int]]:
        """`ROW on COLUMN` -> seeds that have been evaluated."""
        return {self._named(place): sorted(self.finished(*place)) for place in self.runs}

    @property
    def done(self) -> int:
        """Cells with all their seeds; means are not counted."""
        return sum(isinstance(v.place, Cell) and 0 < v.wanted == len(v.seeds) for v in self.values)

    @property
    def total(self) -> int:
        """Cells in all."""
        return len(self.spec.measured) * len(self.runs)

    def _value(self, row: str, place: Place) -> Value:
        spec = self.spec
        cells = [place] if isinstance(place, Cell) else spec.selected(spec.means[place])
        together = self._together([row], cells)
        strata = self._strata(row, together)
        percent = spec.source is not None and spec.source.percent
        unit = 100.0 if percent and not (isinstance(place, Cell) and place.score in spec.counts) else 1.0
        weights = {column: len(group) / len(cells) for column, group in together.items()}
        means = unit * _seed_means(strata, weights)
        items = {column: _item_means(block.loc[means.index]) for column, block in strata.items()} if len(means) else {}
        interval = stratified_interval({c: unit * m for c, m in items.items()}, weights, (row, str(place)))
        paper = spec.reported(row).get(place)
        agrees = None
        if self.scale == "paper" and paper is not None and interval is not None:
            near = abs(means.mean() - paper) <= spec.agree
            agrees = bool(near or interval[0] <= paper <= interval[1])
        return Value(
            row=row,
            place=place,
            label=spec.label(place) if isinstance(place, Cell) else place,
            seeds={int(seed): float(mean) for seed, mean in means.items()},
            wanted=len(next((self.runs[row, cell.column] for cell in cells if (row, cell.column) in self.runs), ())),
            interval=interval,
            items=sum(map(len, items.values())),
            paper=paper,
            paper_std=spec.deviations(row).get(place),
            agrees=agrees,
        )

    def _together(self, rows: Sequence[str], cells: Sequence[Cell]) -> dict[str, list[Cell]]:
        """The cells of each set of items, by its first column.

        Several columns may ask the same questions, of one policy (on the mini world) or of several: an item counts
        once, with the mean of its cells, or an interval over them would come out too narrow.
        """
        first: dict[object, str] = {}
        together: dict[str, list[Cell]] = {}
        for cell in sorted(cells):
            asked = frozenset(one.questions for row in rows for one in self.finished(row, cell.column).values())
            together.setdefault(first.setdefault(asked or cell.column, cell.column), []).append(cell)
        return together

    def _block(self, row: str, column: str, metric: str) -> pandas.DataFrame:
        """(seeds, items) of a cell after training; NaN where a module was not called on an item."""
        finished = self.finished(row, column)
        return pandas.DataFrame.from_dict(
            {seed: one.values(one.after, metric) for seed, one in finished.items()}, orient="index", dtype=float
        )

    def _strata(self, row: str, together: Mapping[str, Sequence[Cell]]) -> dict[str, pandas.DataFrame]:
        """Column -> (seeds, items), the mean of its cells' scores; empty where a column has no evaluation."""
        strata: dict[str, pandas.DataFrame] = {}
        for column, group in together.items():
            blocks = [
                self._block(row, cell.column, self.metrics[row, cell.column][cell.score])
                for cell in group
                if self.finished(row, cell.column)
            ]
            seeds = sorted(set.intersection(*(set(block.index) for block in blocks))) if blocks else []
            if not seeds or len(blocks) < len(group):
                return {}
            first, *others = (block.loc[seeds] for block in blocks)
            strata[column] = sum(others, first) / len(blocks)
        return strata

    # --- row against row

    def against(self, first: str, second: str, column: str) -> Difference | None:
        """After training, `first` minus `second` on the same items.

        An item's score is its mean over the seeds that both finished; the interval is over items. None without a seed
        or an item in common.
        """
        blocks = [self._block(row, column, self.metric(row, column)) for row in (first, second)]
        seeds = sorted(set(blocks[0].index) & set(blocks[1].index))
        mine, others = (_item_means(block.loc[seeds]) for block in blocks)
        shared = sorted(mine.index.intersection(others.index))
        if not shared:
            return None
        # The same draws either way round, so that one interval is the other's mirror image.
        return paired_difference(others[shared], mine[shared], (0, "compare", *sorted((first, second))))

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Every claim whose rows are shown."""
        shown = [claim for claim in self.spec.claims if claim.more in self.rows and claim.than in self.rows]
        return [self._judged(claim) for claim in shown]

    def _judged(self, claim: Claim) -> Verdict:
        cells = [cell for cell in self.spec.selected(claim.cells) if cell.column in self.columns]
        models = [{self.models.get((row, cell.column)) for cell in cells} for row in (claim.more, claim.than)]
        together = self._together([claim.more, claim.than], cells)
        more, than = self._strata(claim.more, together), self._strata(claim.than, together)
        if not more or not than:
            return Verdict(claim, "not run")
        weights = {column: len(group) / len(cells) for column, group in together.items()}
        pairs = {column: _paired(more[column], than[column]) for column in more}
        if any(not len(values) for values in pairs.values()):
            return Verdict(claim, "not run")
        difference = float(sum(weight * pairs[column].mean() for column, weight in weights.items()))
        interval = stratified_interval(pairs, weights, (claim.more, claim.than, *claim.cells))
        assert interval is not None
        seeds, between = _between_seeds(more, than, weights)
        if self.scale == "mini" and models[0] != models[1]:
            verdict = "not comparable at mini"
        else:
            verdict = _verdict(interval, between, seeds)
        rests: list[str] = []
        for left_out in pairs if verdict == "held" and len(pairs) > 1 else ():
            rest = {column: values for column, values in pairs.items() if column != left_out}
            total = sum(weights[column] for column in rest)
            shares = {column: weights[column] / total for column in rest}
            some = {column: more[column] for column in rest}, {column: than[column] for column in rest}
            of_items = stratified_interval(rest, shares, (claim.more, claim.than, *claim.cells))
            if of_items is None or _verdict(of_items, _between_seeds(*some, shares)[1], seeds) != "held":
                rests.append(left_out)
        items = sum(map(len, pairs.values()))
        return Verdict(claim, verdict, difference, interval, between, items, seeds, tuple(rests))

    # --- what the numbers rest on

    @cached_property
    def models(self) -> dict[tuple[str, str], str]:
        """(row, column) -> the model that plays the row, before training."""
        played = {}
        for place in self.runs:
            for scored in self.begun(*place)[:1]:
                start = scored.first
                played[place] = str(start.get("policy") if start.evaluates else start.get("model.path"))
        return played

    @cached_property
    def head(self) -> dict[str, str]:
        """What the numbers rest on."""
        begun, _ = self.read
        known = [one.overview for by_seed in begun.values() for one in by_seed.values()]
        prompts = [Path(str(path)).name if (path := one.get("task.prompts")) else "mmrl's own" for one in known]
        commits = [str((one.environment.get("mmrl_git") or {}).get("commit", "-"))[:10] for one in known]
        judges = [str((one.summary.get("facts") or {}).get("judge", "")) for one in known]
        source = self.spec.source
        every = {
            "paper": f"arXiv {source.arxiv}, {source.at}: {self.spec.shows}" if source else "",
            "shows": "" if source else self.spec.shows,
            "scale": SCALE_NOTES[self.scale],
            "date": f"{self.made:%Y-%m-%d %H:%M} UTC",
            "cells": f"{self.done} of {self.total}",
            "commit": _listed(commits),
            "machine": _listed(str(one.environment.get("cpu", "-")) for one in known),
            "engine": _listed(str(one.get("engine.name", "-")) for one in known),
            "prompts": _listed(prompts),
            "retriever": _listed(filter(None, map(_retriever, known))),
            "judge": _listed(filter(None, judges)),
        }
        return {name: text for name, text in every.items() if text}

    @cached_property
    def notes(self) -> list[str]:
        """Below the tables: shared runs, what is missing or wrong, the rows' notes and the set's."""
        _, troubles = self.read
        places: dict[tuple[Path, ...], list[str]] = {}
        for (row, column), runs in self.runs.items():
            paths = tuple(run.path for run in runs)
            places.setdefault(paths, []).append(row if len(self.columns) == 1 else self._named((row, column)))
        groups = [", ".join(names) for names in places.values() if len(names) > 1]
        # One note: a table whose columns name the same data at this scale has a dozen of these.
        shared = [f"the same runs: {'; '.join(groups)}"] if groups else []
        rows = {row: self.spec.rows[row] for row in self.rows}
        starts = [f"{name}: starts from the policy of {row.from_}" for name, row in rows.items() if row.from_]
        rules = [
            f"{name}: the last checkpoint before the evaluations of training collapse (half of the best, and no return)"
            for name, row in rows.items()
            if row.checkpoint == "before_collapse"
        ]
        return [*troubles, *self.more_notes, *shared, *starts, *rules, *self.spec.notes]


def _costs(chain: Sequence[Overview]) -> dict[str, float]:
    def total(records: Sequence[JsonObject], keys: Sequence[str]) -> float:
        return sum(value for record in records for key in keys if (value := number(record.get(key))) is not None)

    records = [record for one in chain for record in one.history]
    paid = sum(_paid([number(record.get(key)) for record in one.history]) for one in chain for key in MONEY)
    return {
        **{name: total(records, keys) for name, keys in COUNTS.items()},
        "USD": paid + total(records, ["prompts/writer/cost"]),
    }


def _paid(values: Sequence[float | None]) -> float:
    """The sum over process starts of a count that each start begins anew."""
    paid, last = 0.0, 0.0
    for value in values:
        if value is not None:
            # It is less than before where a process started again.
            paid, last = paid + (last if value < last else 0.0), value
    return paid + last


def _verdict(items: Interval, seeds: Interval | None, count: int) -> str:
    """Held where both intervals lie above 0, with three seeds or more; not held where both lie below."""
    if seeds is None or count < LEAST_SEEDS:
        return "undecided"
    if items[0] > 0 and seeds[0] > 0:
        return "held"
    return "not held" if items[1] < 0 and seeds[1] < 0 else "undecided"


def _seed_means(strata: Mapping[str, pandas.DataFrame], weights: Mapping[str, float]) -> pandas.Series[float]:
    """Seed -> weighted mean over the strata, of seeds that all of them have."""
    means = [weights[column] * block.mean(axis=1) for column, block in strata.items()]
    return pandas.concat(means, axis=1).sum(axis=1, skipna=False).dropna() if means else pandas.Series(dtype=float)


def _item_means(block: pandas.DataFrame) -> pandas.Series[float]:
    """Item -> mean over the seeds, of items that all of them have."""
    return block.mean(skipna=False).dropna().sort_index()


def _paired(more: pandas.DataFrame, than: pandas.DataFrame) -> pandas.Series[float]:
    """Differences per item, of means over the seeds that both have."""
    seeds = more.index.intersection(than.index)
    # Rows that are not trained have one seed, which stands for all.
    if len(seeds) and 1 not in (len(more), len(than)):
        more, than = more.loc[seeds], than.loc[seeds]
    return (_item_means(more) - _item_means(than)).dropna()


def _between_seeds(
    more: Mapping[str, pandas.DataFrame], than: Mapping[str, pandas.DataFrame], weights: Mapping[str, float]
) -> tuple[int, Interval | None]:
    """How many seeds, and the 95 % t interval of the mean over their differences; None for fewer than two.

    A row that is not trained has one seed, which is compared with each of the other row's.
    """
    first, second = _seed_means(more, weights), _seed_means(than, weights)
    if 1 in (len(first), len(second)):
        values = (first - second.iloc[0] if len(second) == 1 else first.iloc[0] - second).to_numpy()
    else:
        values = (first - second).dropna().to_numpy()
    if len(values) < 2:
        return len(values), None
    half = student_t(len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return len(values), (float(values.mean() - half), float(values.mean() + half))


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    exact = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(exact):
        return exact[freedom - 1]
    # Fisher's expansion in 1/freedom, from here on right to four digits.
    z = NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _differing(known: Sequence[Overview]) -> list[str]:
    """Config paths in which runs of one cell differ and must not."""
    flat = [
        {path: value for path, value in flattened(one.config).items() if not path.startswith(VARYING)} for one in known
    ]
    paths = dict.fromkeys(path for values in flat for path in values)
    return [path for path in paths if len({repr(values.get(path)) for values in flat}) > 1]


def _retriever(overview: Overview) -> str:
    name = overview.get("task.retriever.name")
    facts = overview.summary.get("facts") or {}
    more = [str(facts[key]) for key in ("corpus", "partial corpus", "corpus coverage") if key in facts]
    return ", ".join([str(name), *more]) if name is not None else ""


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


# --- runs that are there


def found_set(
    name: str, paths: Sequence[Path], main_metrics: Mapping[str, str], shows: str = "runs side by side"
) -> SetResult:
    """A set of runs that exist: a row per algorithm (and config), a column per task and split.

    Args:
        main_metrics: task -> its main metric, for runs whose summary is not written yet.

    Raises:
        CheckpointError, DataError: a damaged run.
    """
    from mmrl.sets.spec import Column, Row

    known = [Overview.of(RunDir.read(path)) for path in paths]
    # Scores are comparable only on the same task and split, so each pair is a column.
    tasks: dict[tuple[str, str], list[Overview]] = {}
    for one in known:
        tasks.setdefault((str(one.get("task.name", "?")), one.split), []).append(one)
    notes: list[str] = []
    runs: dict[tuple[str, str], list[CellRun]] = {}
    metrics: dict[tuple[str, str], dict[str, str]] = {}
    splits = {split for _, split in tasks}
    for (task, split), members in tasks.items():
        column = task if len(splits) == 1 else f"{task} ({split})"
        recorded = next((str(metric) for one in members if (metric := one.summary.get("main_metric"))), "")
        metric = recorded or main_metrics.get(task) or members[0].main_metric or ""
        by_row: dict[str, list[Overview]] = {}
        for one, row in zip(members, _labels(members), strict=True):
            by_row.setdefault(row, []).append(one)
        for row, same in by_row.items():
            runs[row, column] = [
                CellRun(
                    seed=int(one.get("seed", 0)), path=one.run.path, trained=one.run.path, chain=_chain(one.run.path)
                )
                for one in _one_per_seed(row, same, notes)
            ]
            metrics[row, column] = {"score": metric}
    columns = {name: Column(rows=tuple(row for row, at in runs if at == name)) for _, name in runs}
    spec = SetSpec(shows=shows, rows={row: Row() for row, _ in runs}, columns=columns)
    return SetResult(
        name=name,
        spec=spec,
        scale="",
        rows=[*spec.rows],
        columns=[*columns],
        metrics=metrics,
        runs=runs,
        more_notes=tuple(notes),
    )


NOT_VARIANTS = ("seed", "run.", "hardware.", "engine.", "plugins", "train.save_every", "train.keep", "start")
"""Config paths that may differ between runs of one row: they do not change what is learned."""


def _chain(path: Path) -> tuple[Path, ...]:
    """The runs that a run comes from, the first one first, and itself; those that are there."""
    start = RunDir.read(path).config.get("start")
    if start is None:
        return (path,)
    run = Path(start["run"])
    # A folder with both may have been moved as a whole.
    before = next((place for place in (run, path.parent / run.name) if (place / "config.yaml").is_file()), None)
    return (*_chain(before), path) if before is not None else (path,)


def _labels(members: Sequence[Overview]) -> Iterator[str]:
    """The algorithm's name, with the config values in which its runs differ."""
    names = ["+".join(str(RunDir.read(run).config["algo"]["name"]) for run in _chain(one.run.path)) for one in members]
    started = (*NOT_VARIANTS, "model.path", "model.revision", "task.prompts")
    flat = [
        {
            path: value
            for path, value in flattened(one.config).items()
            if not path.startswith(started if one.get("start") else NOT_VARIANTS)
        }
        for one in members
    ]
    for name, values in zip(names, flat, strict=True):
        same = [other for other_name, other in zip(names, flat, strict=True) if other_name == name]
        paths = [path for path in values if len({other[path] for other in same if path in other}) > 1]
        yield " ".join([name, *(f"{path}={_text(values[path])}" for path in paths)])


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _one_per_seed(row: str, runs: Sequence[Overview], notes: list[str]) -> list[Overview]:
    """One run per seed, in the order of seeds: of runs that repeat each other, the one that went furthest."""
    best: dict[int, Overview] = {}
    for one in runs:
        seed = int(one.get("seed", 0))
        # A finished run first, then the one with more steps.
        furthest, *others = sorted(filter(None, (best.get(seed), one)), key=lambda o: (not o.summary, -o.done))
        best[seed] = furthest
        notes += [f"{o.run.path}: left out, {furthest.run.path} is {row} with seed {seed} too" for o in others]
    return [best[seed] for seed in sorted(best)]
