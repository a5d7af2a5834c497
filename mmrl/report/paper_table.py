"""A paper's table as our runs fill it: cells over seeds beside the reported values, claims, and what they rest on.

Reads run directories of evaluations only. A cell is blank where nothing was evaluated, and refused as an average where
the configs of its seeds differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

from mmrl.config.paper_tables import Cell, Claim, TableSpec
from mmrl.errors import MmrlError
from mmrl.report.compare import flattened
from mmrl.report.overview import Overview
from mmrl.report.paper_case import CaseStudy, case_study
from mmrl.report.rundir import RunDir
from mmrl.report.stats import over_seeds, paired_items, stratified_interval

VARYING = ("seed", "run.", "hardware.", "engine.", "plugins", "policy", "task.prompts", "model.")
"""Config paths in which evaluations of one row may differ: where its weights and prompts lie, and the machine."""
WORDS = {
    "paper": "the papers' models, data and sizes",
    "mini": "the mini world with the tiny models; values do not compare with the paper's, orders (claims) do",
    "real": "a small real model on real data; values do not compare with the paper's, orders (claims) do",
}
Place = Cell | str
"""A cell, or the name of a mean."""


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One evaluation that a cell needs."""

    seed: int
    path: Path
    command: str
    """What makes it."""
    trouble: str = ""
    """Why it is not there; empty where it is, or was not tried."""
    trained: Path | None = None
    """The training run whose policy it evaluates; None for one that this table does not train."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a finished evaluation holds of one row on one column."""

    seed: int
    items: Mapping[str, Mapping[str, float]]
    """Item -> metric -> value."""
    overview: Overview

    @property
    def questions(self) -> tuple[object, ...]:
        """Equal for evaluations of the same items."""
        return self.overview.get("task.name"), self.overview.get("task.dataset"), frozenset(self.items)

    @classmethod
    def read(cls, run: SeedRun, metrics: Iterable[str]) -> Evaluation | None:
        """None where it has not ended.

        Raises:
            MmrlError: a file of it is damaged.
        """
        if not (run.path / "config.yaml").is_file():
            return None
        directory = RunDir.read(run.path)
        if not directory.finished or not has_scores(directory):
            return None
        seen = Overview.of(directory)
        items = [item for steps in seen.items.values() for listed in steps.values() for item in listed]
        names = list(metrics)
        return cls(run.seed, {item["id"]: {name: _value(item, name) for name in names} for item in items}, seen)


def has_scores(evaluation: RunDir) -> bool:
    """Whether an evaluation that has ended has scores: none where too many of its rollouts failed from outside."""
    return any(name.endswith("_low") for name in evaluation.summary.get("metrics", {}))


def _value(item: Mapping[str, object], metric: str) -> float:
    group, name = ("modules", metric.removeprefix("module/")) if metric.startswith("module/") else ("metrics", metric)
    values = item.get(group)
    value = values.get(name) if isinstance(values, Mapping) else None
    # A metric counts 0 where a rollout failed, as in the evaluation's own means; a module that was not called has none.
    return float(value) if isinstance(value, int | float) else (0.0 if group == "metrics" else float("nan"))


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
    interval: tuple[float, float] | None
    items: int
    paper: float | None
    paper_std: float | None
    agrees: bool | None
    """None: nothing to compare, or not at this scale."""
    command: str

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
    """A claim of the paper, judged by our runs."""

    claim: Claim
    verdict: str
    """`held`, `not held`, `undecided` (the interval holds 0), or `not run`."""
    difference: float | None = None
    interval: tuple[float, float] | None = None
    items: int = 0


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table as far as it has been run."""

    name: str
    spec: TableSpec
    scale: str
    rows: Sequence[str]
    columns: Sequence[str]
    metrics: Mapping[tuple[str, str], Mapping[str, str]]
    """(row, column) -> score -> metric."""
    runs: Mapping[tuple[str, str], Sequence[SeedRun]]
    """(row, column) -> its evaluations, one per seed."""
    made: datetime = field(default_factory=lambda: datetime.now(UTC))

    @cached_property
    def read(self) -> tuple[dict[tuple[str, str], dict[int, Evaluation]], list[str]]:
        """(row, column) -> seed -> evaluation, and what is wrong or missing, in words."""
        evaluations: dict[tuple[str, str], dict[int, Evaluation]] = {}
        troubles: list[str] = []
        by_path: dict[Path, Evaluation | None] = {}
        # Of all rows and columns: several may share an evaluation.
        metrics = {metric for scores in self.metrics.values() for metric in scores.values()}
        for (row, column), runs in self.runs.items():
            made: dict[int, Evaluation] = {}
            missing = []
            for run in runs:
                try:
                    if run.path not in by_path:
                        by_path[run.path] = Evaluation.read(run, metrics)
                    one = by_path[run.path]
                except MmrlError as error:
                    troubles.append(f"{row} on {column}, seed {run.seed}: {error}")
                    continue
                if one is not None:
                    made[run.seed] = one
                    failed = one.overview.summary["metrics"].get("failed_share", 0)
                    if failed:
                        what = f"{failed:.1%} of the rollouts failed from outside and count 0"
                        troubles.append(f"{row} on {column}, seed {run.seed}: {what}")
                elif run.trouble:
                    troubles.append(f"{row} on {column}, seed {run.seed}: {run.trouble}")
                else:
                    missing.append(run.seed)
            if missing and made:
                troubles.append(f"{row} on {column}: seeds {', '.join(map(str, missing))} are missing")
            if different := _differing([one.overview for one in made.values()]):
                troubles.append(f"{row} on {column}: not averaged, its seeds differ in {', '.join(different)}")
                made = {}
            evaluations[row, column] = made
        return evaluations, troubles

    @cached_property
    def values(self) -> list[Value]:
        """Every place of every row."""
        columns = set(self.columns)
        cells = [cell for cell in self.spec.cells if cell.column in columns]
        places: list[Place] = [*cells]
        # An average of fewer columns than the paper's would be another number under its name.
        places += [
            name for name, of in self.spec.means.items() if {c.column for c in self.spec.selected(of)} <= columns
        ]
        return [self._value(row, place) for row in self.rows for place in places]

    @property
    def seeds_done(self) -> dict[str, list[int]]:
        """`ROW on COLUMN` -> seeds that have been evaluated."""
        evaluations, _ = self.read
        return {f"{row} on {column}": sorted(by_seed) for (row, column), by_seed in evaluations.items()}

    @property
    def done(self) -> int:
        """Cells with all their seeds; means are not counted."""
        return sum(isinstance(value.place, Cell) and len(value.seeds) == value.wanted for value in self.values)

    @property
    def total(self) -> int:
        """Cells in all."""
        return sum(isinstance(value.place, Cell) for value in self.values)

    def _value(self, row: str, place: Place) -> Value:
        spec = self.spec
        cells = [place] if isinstance(place, Cell) else spec.selected(spec.means[place])
        together = self._together([row], cells)
        strata = self._strata(row, together)
        # Seeds that every cell of a mean has.
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in strata.values()))) if strata else []
        unit = 1.0 if isinstance(place, Cell) and place.score in spec.counts else 100.0 if spec.source.percent else 1.0
        weights = {column: len(group) / len(cells) for column, group in together.items()}
        values = {
            seed: unit * sum(weight * _mean(strata[column][seed].values()) for column, weight in weights.items())
            for seed in seeds
        }
        arrays = {column: over_seeds([strata[column][seed] for seed in seeds]) for column in strata} if seeds else {}
        interval = stratified_interval({c: a[1] * unit for c, a in arrays.items()}, weights, (row, str(place)))
        paper = spec.reported(row).get(place)
        deviation = spec.deviations(row).get(place)
        agrees = None
        if self.scale == "paper" and paper is not None and values and interval is not None:
            near = abs(fmean(values.values()) - paper) <= spec.agree.within
            agrees = near or (spec.agree.interval and interval[0] <= paper <= interval[1])
        column = f" columns='{place.column}'" if isinstance(place, Cell) and len(spec.columns) > 1 else ""
        return Value(
            row=row,
            place=place,
            label=spec.label(place) if isinstance(place, Cell) else place,
            seeds=values,
            wanted=len(next((self.runs[row, cell.column] for cell in cells), ())),
            interval=interval,
            items=sum(len(array[0]) for array in arrays.values()),
            paper=paper,
            paper_std=deviation,
            agrees=agrees,
            command=f"mmrl table {self.name} rows='{row}'{column} scale={self.scale}",
        )

    def _together(self, rows: Sequence[str], cells: Sequence[Cell]) -> dict[str, list[Cell]]:
        """The cells of each set of items, by its first column.

        Several columns may ask the same questions, of one policy (on the mini world) or of several: an item counts
        once, with the mean of its cells, or an interval over them would come out too narrow.
        """
        evaluations, _ = self.read
        first: dict[object, str] = {}
        together: dict[str, list[Cell]] = {}
        for cell in sorted(cells):
            asked = frozenset(one.questions for row in rows for one in evaluations.get((row, cell.column), {}).values())
            together.setdefault(first.setdefault(asked or cell.column, cell.column), []).append(cell)
        return together

    def _strata(self, row: str, together: Mapping[str, Sequence[Cell]]) -> dict[str, dict[int, dict[str, float]]]:
        """Column -> seed -> item -> mean of its cells' scores; empty where a column has no evaluation."""
        evaluations, _ = self.read
        strata: dict[str, dict[int, dict[str, float]]] = {}
        for column, group in together.items():
            made = [
                (evaluations.get((row, cell.column), {}), self.metrics[row, cell.column][cell.score]) for cell in group
            ]
            seeds = sorted(set.intersection(*(set(by_seed) for by_seed, _ in made)))
            if not seeds:
                return {}
            strata[column] = {
                seed: {
                    item: fmean(by_seed[seed].items[item][metric] for by_seed, metric in made)
                    for item in sorted(set.intersection(*(set(by_seed[seed].items) for by_seed, _ in made)))
                }
                for seed in seeds
            }
        return strata

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Every claim whose rows are shown."""
        shown = [claim for claim in self.spec.claims if claim.more in self.rows and claim.than in self.rows]
        return [self._judged(claim) for claim in shown]

    def _judged(self, claim: Claim) -> Verdict:
        cells = [cell for cell in self.spec.selected(claim.cells) if cell.column in self.columns]
        together = self._together([claim.more, claim.than], cells)
        more, than = self._strata(claim.more, together), self._strata(claim.than, together)
        if not more or not than:
            return Verdict(claim, "not run")
        pairs = {column: paired_items(more[column], than[column]) for column in more}
        if any(not len(values) for values in pairs.values()):
            return Verdict(claim, "not run")
        weights = {column: len(group) / len(cells) for column, group in together.items()}
        difference = float(sum(weight * pairs[column].mean() for column, weight in weights.items()))
        interval = stratified_interval(pairs, weights, (claim.more, claim.than, *claim.cells))
        assert interval is not None
        verdict = "held" if interval[0] > 0 else "not held" if interval[1] < 0 else "undecided"
        return Verdict(claim, verdict, difference, interval, sum(map(len, pairs.values())))

    @cached_property
    def head(self) -> dict[str, str]:
        """What the numbers rest on."""
        evaluations, _ = self.read
        seen = [one.overview for by_seed in evaluations.values() for one in by_seed.values()]
        prompts = [
            (one.get("task.prompts") and f"{Path(str(one.get('task.prompts'))).name}") or "mmrl's own" for one in seen
        ]
        retrievers = [_retriever(one) for one in seen]
        commits = [str((one.environment.get("mmrl_git") or {}).get("commit", "-"))[:10] for one in seen]
        judges = [str((one.summary.get("facts") or {}).get("judge", "")) for one in seen]
        every = {
            "paper": f"arXiv {self.spec.source.arxiv}, {self.spec.source.at}: {self.spec.shows}",
            "scale": f"{self.scale}: {WORDS[self.scale]}",
            "date": f"{self.made:%Y-%m-%d %H:%M} UTC",
            "cells": f"{self.done} of {self.total}",
            "commit": _listed(commits),
            "machine": _listed(str(one.environment.get("cpu", "-")) for one in seen),
            "engine": _listed(str(one.get("engine.name", "-")) for one in seen),
            "prompts": _listed(prompts),
            "retriever": _listed(filter(None, retrievers)),
            "judge": _listed(filter(None, judges)),
        }
        return {name: text for name, text in every.items() if text}

    @cached_property
    def case(self) -> CaseStudy | None:
        """One question early and late, where the table shows one."""
        return case_study(self.spec, (run for runs in self.runs.values() for run in runs))

    @cached_property
    def notes(self) -> list[str]:
        """Below the table: shared runs, what is missing or wrong, the rows' notes and the table's."""
        _, troubles = self.read
        places: dict[tuple[Path, ...], list[str]] = {}
        for (row, column), runs in self.runs.items():
            places.setdefault(tuple(run.path for run in runs), []).append(
                row if len(self.columns) == 1 else f"{row} on {column}"
            )
        groups = [", ".join(names) for names in places.values() if len(names) > 1]
        # One note: a table whose columns name the same data at this scale has a dozen of these.
        shared = [f"the same runs: {'; '.join(groups)}"] if groups else []
        rows = [f"{row}: {self.spec.rows[row].note}" for row in self.rows if self.spec.rows[row].note]
        rules = [
            f"{row}: the last checkpoint before the evaluations of training collapse (half of the best, and no return)"
            for row in self.rows
            if self.spec.rows[row].checkpoint == "before_collapse"
        ]
        return [*troubles, *shared, *rules, *rows, *self.spec.notes]

    def number(self, value: float | None) -> str:
        """As the paper prints it; empty for None."""
        return "" if value is None else f"{value:.{self.spec.source.decimals}f}"


def _mean(values: Iterable[float]) -> float:
    """Over items; what a module that was not called says of an item is left out."""
    known = [value for value in values if value == value]
    return fmean(known) if known else 0.0


def _differing(seen: Sequence[Overview]) -> list[str]:
    """Config paths in which evaluations of one cell differ and must not."""
    flat = [
        {path: value for path, value in flattened(one.config).items() if not path.startswith(VARYING)} for one in seen
    ]
    paths = dict.fromkeys(path for values in flat for path in values)
    return [path for path in paths if len({repr(values.get(path)) for values in flat}) > 1]


def _retriever(seen: Overview) -> str:
    name = seen.get("task.retriever.name")
    if name is None:
        return ""
    facts = seen.summary.get("facts") or {}
    more = [str(facts[key]) for key in ("corpus", "partial corpus", "corpus coverage") if key in facts]
    return ", ".join([str(name), *more])


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))
