"""A paper's table as data: `conf/table/<name>.yaml`, and what all runs of a paper share, `conf/table/base/<name>.yaml`.

A table has rows (methods), columns (what is evaluated on) and scores. A cell is one row's score on one column. Settings
are overrides as on the command line; of the paper's setup, the mini world's, and so on: each is a scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mmrl.config.base import Section
from mmrl.errors import unknown

SCALES = ("paper", "mini", "real")
"""The papers' models and data; the mini world with the tiny models; a small real model on real data."""
TRAINING_ALONE = (
    *("train", "algo", "stages", "stage", "eval.every", "model.lora", "model.gradient_checkpointing"),
    *(
        "hardware.sharding",
        "hardware.cpu_offload",
        "hardware.rollout_devices",
        "run.doctor",
        "run.progress",
        "run.name",
    ),
    *("run.report_to", "run.report_calls", "run.wandb_project", "run.group", "run.tags"),
)
"""Sections and keys that an evaluation does not take."""
Command = Literal["train", "eval"]


class Cell(NamedTuple):
    """A place of a row."""

    column: str
    score: str


class Words(Section):
    """Overrides; a plain list is short for `set`."""

    set: tuple[str, ...] = Field((), description="of training and evaluation")
    train: tuple[str, ...] = Field((), description="of training alone")
    eval: tuple[str, ...] = Field((), description="of evaluation alone")

    @field_validator("set", "train", "eval")
    @classmethod
    def _overrides(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [word for word in words if not word.partition("=")[0].strip() or "=" not in word]:
            raise ValueError(f"got {', '.join(wrong)}, expected KEY=VALUE")
        return words

    def of(self, command: Command) -> list[str]:
        """Those of one command."""
        return [*self.set, *(self.train if command == "train" else self.eval)]


def _short(raw: object) -> object:
    return {"set": raw} if isinstance(raw, tuple | list) else raw


ShortWords = Annotated[Words, BeforeValidator(_short)]


class Settings(Words):
    """Overrides at every scale, and further ones at each."""

    paper: ShortWords = Words()
    mini: ShortWords = Words()
    real: ShortWords = Words()

    def at(self, scale: str, command: Command) -> list[str]:
        """All of one command at one scale."""
        own: Words = {"paper": self.paper, "mini": self.mini, "real": self.real}[scale]
        return [*self.of(command), *own.of(command)]


class Layer(Settings):
    """Settings, and further ones of the runs of an algorithm."""

    algos: dict[str, Settings] = Field({}, description="by algo=")

    def of_algo(self, algo: str, scale: str, command: Command) -> list[str]:
        """What holds for one algorithm alone."""
        return self.algos[algo].at(scale, command) if algo in self.algos else []


class Base(Layer):
    """`conf/table/base/<name>.yaml`: what all runs of a paper share."""

    @property
    def scales(self) -> list[str]:
        """Those that it has settings for."""
        return [scale for scale in SCALES if {"paper": self.paper, "mini": self.mini, "real": self.real}[scale].set]


class Column(Layer):
    """What rows are evaluated on."""

    items: int | None = Field(None, ge=1, description="evaluated by the paper")


Numbers = float | tuple[float, ...]


class Row(Settings):
    """A method. It is trained, unless its settings say `policy=`."""

    values: dict[str, Numbers] | tuple[float, ...] = Field(
        (), description="as printed: in the order of columns, scores in each, then means; or by their names"
    )
    std: dict[str, Numbers] | tuple[float, ...] = Field((), description="standard deviations as printed, likewise")
    without: tuple[str, ...] = Field((), description="keys of base and column that do not hold for this row")
    stages: tuple[Settings, ...] = Field((), description="further runs, each from the weights of the one before")
    checkpoint: Literal["last", "before_collapse"] = Field("last", description="which one of training is evaluated")
    seeds: tuple[int, ...] = Field((), description="of this row; empty: the table's")
    note: str = ""


class Source(Section):
    """Where a table stands."""

    arxiv: str
    at: str = Field(description="Table 1")
    percent: bool = Field(False, description="values are per cent")
    decimals: int = Field(ge=0, le=6, description="digits after the point as printed")


class Agreement(Section):
    """When our value agrees with the paper's."""

    within: float = Field(ge=0, description="difference at most, in the table's own unit")
    interval: bool = Field(True, description="or the paper's value lies in our 95 % interval")


class Claim(Section):
    """An order that the paper claims: the mean over some cells of one row is above that of another."""

    more: str = Field(description="a row")
    than: str = Field(description="a row")
    cells: tuple[str, ...] = Field((), description="columns, scores, means or COLUMN/SCORE; empty: all")


class Diagram(Section):
    """One part of a figure: a metric of training by step, a line for each row."""

    metric: str | tuple[str, ...] = Field(
        description="of metrics.jsonl; eval/METRIC: of evaluations during training; of several the first that is there"
    )
    label: str = Field(description="what its axis is called")
    column: str = Field("", description="whose training runs; empty: of each column that is trained apart")

    @property
    def metrics(self) -> tuple[str, ...]:
        """In the order in which they are looked for."""
        return (self.metric,) if isinstance(self.metric, str) else self.metric


class Figure(Section):
    """What is drawn of the training runs."""

    kind: Literal["curves", "bars"] = Field("curves", description="bars: means over the first steps")
    diagrams: tuple[Diagram, ...] = Field(min_length=1)
    band: Literal["std", "range"] = Field("std", description="around the mean over seeds: a deviation, or all seeds")
    smooth: float = Field(0.0, ge=0, lt=1, description="weight of the value before in a moving average; 0: none")
    scaled: bool = Field(False, description="each line from its least to its greatest value, which the legend says")
    first: int = Field(50, ge=1, description="steps that bars are means of")


class Case(Section):
    """One item, early and late in a training run."""

    early: int = Field(ge=1, description="steps; the first evaluation of training after so many")
    item: str = Field("", description="its id; empty: the first one whose last score rises the most")


class TableSpec(Section):
    """`conf/table/<name>.yaml`."""

    source: Source
    shows: str = Field(description="one line")
    base: str = Field(description="file of conf/table/base")
    seeds: tuple[int, ...] = Field(min_length=1)
    all: Settings = Field(Settings(), description="of every run of this table")
    columns: dict[str, Column] = Field(min_length=1)
    scores: dict[str, str] = Field(min_length=1, description="name in the table -> metric of an evaluation")
    counts: tuple[str, ...] = Field((), description="scores that are no shares, so never per cent")
    order: Literal["columns", "scores"] = Field("columns", description="what the paper's table groups values by")
    means: dict[str, tuple[str, ...]] = Field({}, description="printed averages -> columns, scores or COLUMN/SCORE")
    rows: dict[str, Row] = Field(min_length=1)
    agree: Agreement
    claims: tuple[Claim, ...] = ()
    figure: Figure | None = None
    case: Case | None = None
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> list[Cell]:
        """In the order of the paper's table."""
        if self.order == "columns":
            return [Cell(column, score) for column in self.columns for score in self.scores]
        return [Cell(column, score) for score in self.scores for column in self.columns]

    def label(self, cell: Cell) -> str:
        """What a cell's place is called, without what is the same everywhere."""
        if len(self.scores) == 1:
            return cell.column
        return cell.score if len(self.columns) == 1 else f"{cell.column} {cell.score}"

    def selected(self, names: Sequence[str]) -> list[Cell]:
        """The cells that columns, scores, means and COLUMN/SCORE stand for; all for none."""
        if not names:
            return self.cells
        chosen: dict[Cell, None] = {}
        for name in names:
            inner = self.selected(self.means[name]) if name in self.means else self.cells
            for cell in inner:
                if name in self.means or name in (cell.column, cell.score, f"{cell.column}/{cell.score}"):
                    chosen[cell] = None
        return list(chosen)

    def reported(self, row: str) -> dict[Cell | str, float]:
        """The paper's values of a row, by cell and by the name of a mean."""
        return self._placed(self.rows[row].values)

    def deviations(self, row: str) -> dict[Cell | str, float]:
        """The paper's standard deviations of a row."""
        return self._placed(self.rows[row].std)

    def seeds_of(self, row: str) -> tuple[int, ...]:
        """The seeds of a row."""
        return self.rows[row].seeds or self.seeds

    def _placed(self, values: Mapping[str, Numbers] | tuple[float, ...]) -> dict[Cell | str, float]:
        places: list[Cell | str] = [*self.cells, *self.means]
        if not isinstance(values, Mapping):
            return dict(zip(places, values, strict=False))
        placed: dict[Cell | str, float] = {}
        for name, given in values.items():
            under: list[Cell | str] = [name] if name in self.means else [*self.selected([name])]
            placed |= zip(under, given if isinstance(given, tuple) else (given,), strict=True)
        return placed

    @model_validator(mode="after")
    def _fits(self) -> Self:
        problems = [*self._name_problems()]
        if not problems:
            problems = [*self._number_problems(), *self._claim_problems()]
        if problems:
            raise ValueError(*problems)
        return self

    def _name_problems(self) -> list[str]:
        """Names that stand for nothing, or for two things."""
        every = [*self.columns, *self.scores, *self.means]
        problems = [unknown("counts", name, [*self.scores]) for name in self.counts if name not in self.scores]
        twice = [name for name in dict.fromkeys(every) if every.count(name) > 1]
        problems += [f"columns, scores, means: {name} is the name of two of them" for name in twice]
        known = [*self.columns, *self.scores, *(f"{cell.column}/{cell.score}" for cell in self.cells)]
        problems += [
            unknown(f"means.{mean}", name, known)
            for mean, names in self.means.items()
            for name in names
            if name not in known
        ]
        for number, claim in enumerate(self.claims, 1):
            problems += [
                unknown(f"claims.{number}.{key}", name, [*self.rows])
                for key, name in (("more", claim.more), ("than", claim.than))
                if name not in self.rows
            ]
            problems += [
                unknown(f"claims.{number}.cells", name, [*known, *self.means])
                for name in claim.cells
                if name not in known and name not in self.means
            ]
        diagrams = self.figure.diagrams if self.figure is not None else ()
        problems += [
            unknown(f"figure.diagrams.{number}.column", diagram.column, [*self.columns])
            for number, diagram in enumerate(diagrams, 1)
            if diagram.column and diagram.column not in self.columns
        ]
        for row, settings in self.rows.items():
            for key, values in (("values", settings.values), ("std", settings.std)):
                if isinstance(values, Mapping):
                    problems += self._mapping_problems(f"rows.{row}.{key}", values, known)
        return problems

    def _mapping_problems(self, where: str, values: Mapping[str, Numbers], known: Collection[str]) -> list[str]:
        problems = []
        for name, given in values.items():
            if name not in known and name not in self.means:
                problems.append(unknown(where, name, [*known, *self.means]))
                continue
            expected = 1 if name in self.means else len(self.selected([name]))
            got = len(given) if isinstance(given, tuple) else 1
            if got != expected:
                problems.append(f"{where}.{name}: got {got} numbers, expected {expected}")
        return problems

    def _number_problems(self) -> list[str]:
        """Rows with some values only, and printed averages that their numbers do not give."""
        problems, every = [], len(self.cells) + len(self.means)
        # A paper averages before it rounds: half a digit from the numbers, half from the average.
        room = 1.5 * 10**-self.source.decimals
        for row, settings in self.rows.items():
            reported = self.reported(row)
            counts = len(settings.values) if isinstance(settings.values, tuple) else len(reported)
            if counts not in (0, every):
                problems.append(f"rows.{row}.values: got {counts} numbers, expected {every} or none")
                continue
            for mean, names in self.means.items() if reported else ():
                inner = fmean(reported[cell] for cell in self.selected(names))
                if abs(inner - reported[mean]) > room:
                    problems.append(
                        f"rows.{row}.values: {mean} is {reported[mean]:g}, and the mean of its numbers is {inner:.4g}; "
                        "one of them is not as printed"
                    )
        return problems

    def _claim_problems(self) -> list[str]:
        """Claims that the paper's own numbers do not bear out."""
        problems = []
        for number, claim in enumerate(self.claims, 1):
            more, than = self.reported(claim.more), self.reported(claim.than)
            if more and than:
                cells = self.selected(claim.cells)
                first, second = (fmean(values[cell] for cell in cells) for values in (more, than))
                if first <= second:
                    problems.append(
                        f"claims.{number}: the paper has {first:.4g} for {claim.more} and {second:.4g} for {claim.than}"
                    )
        return problems
