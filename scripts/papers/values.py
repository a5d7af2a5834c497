"""Values of a table beside the paper's, and the verdicts of its runs on the paper's claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import NormalDist, fmean, stdev
from typing import ClassVar, cast

import pandas

from mmrl.report.stats import stratified_interval
from mmrl.sets.cells import LEAST_SEEDS, Interval, RunResult, SetResult, Value, item_means, scores_of
from mmrl.sets.queue import PlannedRun, has_scores
from scripts.papers.cost import cost_text
from scripts.papers.spec import SCALES, Cell, Claim, Table

CellOrMean = Cell | str


@dataclass(frozen=True)
class Evaluated(RunResult):
    """An evaluation of a cell, finished or not."""

    @property
    def finished(self) -> bool:
        """True if the evaluation ended with scores."""
        return self.overview.run.finished and has_scores(self.overview.run)

    @cached_property
    def after(self) -> pandas.DataFrame:
        """Scores of the items."""
        evaluated = self.overview.items.values()
        return scores_of([item for steps in evaluated for items in steps.values() for item in items])

    @property
    def questions(self) -> tuple[object, ...]:
        """Task, data and item ids: equal for evaluations of the same items."""
        return self.overview.get("task.name"), self.overview.get("task.dataset"), frozenset(self.after.index)

    @property
    def items(self) -> frozenset[tuple[object, object]]:
        """Where the items come from, and their ids: tasks may draw from one file."""
        source = self.overview.get(f"task.data.{self.overview.split}")
        return frozenset((source, item) for item in self.after.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableValue(Value):
    """A value of a row, in one column or as a mean; in the table's unit."""

    label: str
    """Short name of the cell, or the name of the mean."""
    column: str | None
    score: str | None
    """None: a mean of cells."""
    paper: float | None
    paper_std: float | None
    agrees: bool | None
    """True if our value agrees with the paper's; None: no value to compare, another scale, or other settings."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of our runs on a claim."""

    claim: Claim
    verdict: str
    """`held`, `not held`, `undecided` (perhaps with the reason), `not run`, or `not comparable at mini`."""
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
class TableResult(SetResult):
    """Results of a table at a scale, finished or not."""

    spec: Table
    scale: str = "paper"
    result_type: ClassVar[type[RunResult]] = Evaluated

    @property
    def decimals(self) -> int:
        """Digits after the point, as the paper prints them."""
        return self.spec.source.decimals

    @property
    def about(self) -> Mapping[str, str]:
        """Facts of the table itself."""
        source = self.spec.source
        return {"paper": f"arXiv {source.arxiv}, {source.at}: {self.spec.shows}", "scale": SCALES[self.scale]}

    def opening(self, missing: Sequence[PlannedRun]) -> str:
        """Return what is about to run, and at the scales of real models its cost."""
        where = f"set {self.name} (arXiv {self.spec.source.arxiv}, {self.spec.source.at}) at scale {self.scale}"
        line = f"{where}: {len(self.queue)} runs, {len(missing)} missing"
        return f"{line}\n\n{cost_text(self.spec, missing)}" if missing and self.scale != "mini" else line

    def finished(self, row: str, column: str) -> list[Evaluated]:
        """Return the evaluations of a cell that have ended with scores, by seed."""
        return cast("list[Evaluated]", super().finished(row, column))  # of `result_type`

    # --- values

    @cached_property
    def values(self) -> list[TableValue]:
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
        return [self._value_of(row, key, cells) for row in self.rows for key, cells in cells_of.items()]

    @property
    def done(self) -> int:
        """Number of cells with all their seeds; means are not counted."""
        return sum(value.score is not None and 0 < value.wanted == len(value.seeds) for value in self.values)

    @property
    def total(self) -> int:
        """Number of cells."""
        return len(self.spec.scores) * len(self.runs)

    def _value_of(self, row: str, key: CellOrMean, cells: Sequence[Cell]) -> TableValue:
        spec, cell = self.spec, key if isinstance(key, Cell) else None
        (strata,), weights = self._strata([row], cells)
        unit = 100.0 if spec.source.percent and not (cell and cell.score in spec.counts) else 1.0
        means = unit * _seed_means(strata, weights)
        items = {column: item_means(block.loc[means.index]) for column, block in strata.items()} if len(means) else {}
        interval = stratified_interval({c: unit * m for c, m in items.items()}, weights, (row, str(key)))
        paper, paper_std = spec.reported(row).get(key, (None, None))
        agrees, other = None, any(self.made_otherwise(row, cell.column) for cell in cells)
        if self.scale == "paper" and not other and paper is not None and interval is not None:
            agrees = bool(abs(means.mean() - paper) <= spec.agree or interval[0] <= paper <= interval[1])
        return TableValue(
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
            blocks = {column: self._mean_block(row, group) for column, group in groups.items()}
            strata.append(blocks if not any(block.empty for block in blocks.values()) else {})
        return strata, {column: len(group) / len(cells) for column, group in groups.items()}

    def _mean_block(self, row: str, cells: Sequence[Cell]) -> pandas.DataFrame:
        """Return (seeds, items), the mean of some cells."""
        blocks = [self.block(row, column, self.spec.scores[score]) for column, score in cells]
        seeds = sorted(set.intersection(*(set(block.index) for block in blocks)))
        first, *rest = (block.loc[seeds] for block in blocks)
        return sum(rest, first) / len(blocks)

    @cached_property
    def shared(self) -> dict[tuple[str, str], int]:
        """Pairs of columns that ask some of the same questions, and are not one block -> how many.

        On the mini world tasks draw from one list of questions: columns are then no independent samples.
        """
        runs = {c: [run for row in self.rows for run in self.finished(row, c)] for c in sorted(self.columns)}
        items = {column: frozenset().union(*(run.items for run in asked)) for column, asked in runs.items()}
        blocks = {column: {run.questions for run in asked} for column, asked in runs.items()}
        pairs = [(one, other) for one, other in combinations(runs, 2) if blocks[one] != blocks[other]]
        return {(one, other): n for one, other in pairs if (n := len(items[one] & items[other]))}

    # --- claims

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
        if any(pair in self.shared for pair in combinations(sorted(weights), 2)):
            return replace(verdict, verdict="undecided (its columns share questions)")
        rests = []
        if verdict.verdict == "held" and len(pairs) > 1:
            for omitted in pairs:
                remaining = {column: weight for column, weight in weights.items() if column != omitted}
                shares = {column: weight / sum(remaining.values()) for column, weight in remaining.items()}
                rests += [omitted] if judged(shares).verdict != "held" else []
        return replace(verdict, rests_on=tuple(rests))

    # --- notes

    @cached_property
    def notes(self) -> list[str]:
        """Notes below the tables: those of any set, shared questions, and rules of checkpoints."""
        notes = [*super().notes]
        if self.shared:
            texts = [f"{one} and {other} share {count}" for (one, other), count in self.shared.items()]
            notes.append(
                f"columns that ask some of the same questions are no independent samples ({', '.join(texts)}): "
                "intervals of means over them are too narrow, and a claim over them is not decided"
            )
        rule = "before the evaluations of training collapse (half of the best, and no return)"
        collapsing = [name for name in self.rows if self.spec.rows[name].checkpoint == "before_collapse"]
        return [*notes, *(f"{name}: the last checkpoint {rule}" for name in collapsing)]


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


def _paired(higher: pandas.DataFrame, lower: pandas.DataFrame, alone: bool) -> pandas.Series[float]:
    """Return the differences per item, of means over the seeds that both have; `alone`: of all, one row has one run."""
    seeds = higher.index.intersection(lower.index)
    if len(seeds) and not alone:
        higher, lower = higher.loc[seeds], lower.loc[seeds]
    return (item_means(higher) - item_means(lower)).dropna()


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
    half = student_t(len(values) - 1) * float(values.std(ddof=1)) / len(values) ** 0.5
    return len(values), (float(values.mean() - half), float(values.mean() + half))


def student_t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    exact = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
    if freedom <= len(exact):
        return exact[freedom - 1]
    # Fisher's expansion in 1/freedom, from here on right to four digits.
    z = NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / float(freedom**power) for power, term in enumerate(terms, start=1))
