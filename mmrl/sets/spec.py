"""A set of runs as data: `conf/set/NAME.yaml`, and what all sets of a paper share, `conf/set/base/NAME.yaml`.

A set has rows (methods), columns (tasks, or what is evaluated on) and seeds. A cell is one row's score on one column.
Words are overrides as on the command line; some hold at one scale alone: of the papers' setup, the mini world's, and
so on. A row may start from the policy that another row has trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from mmrl.config.base import Section
from mmrl.errors import unknown

SCALES = ("paper", "mini", "real")
"""The papers' models and data; the mini world with the tiny models; a small real model on real data."""
Command = Literal["train", "eval"]
MAIN = "main"
"""In place of a metric: the task's main one."""


class Cell(NamedTuple):
    """A place of a row."""

    column: str
    score: str


def _flat(raw: object) -> object:
    """A list of words and of lists of words (YAML anchors) as one."""
    if not isinstance(raw, tuple | list):
        return raw
    words = [word for part in raw for word in (part if isinstance(part, tuple | list) else [part])]
    wrong = [str(word) for word in words if not str(word).partition("=")[0].strip() or "=" not in str(word)]
    if wrong:
        raise ValueError(f"got {', '.join(wrong)}, expected KEY=VALUE")
    return tuple(words)


WordList = Annotated[tuple[str, ...], BeforeValidator(_flat)]


class Words(Section):
    """Overrides; a plain list is short for `set`."""

    set: WordList = Field((), description="of training and evaluation")
    train: WordList = Field((), description="of training alone")
    eval: WordList = Field((), description="of evaluation alone")

    def of(self, command: Command) -> list[str]:
        """Those of one command."""
        return [*self.set, *(self.train if command == "train" else self.eval)]

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: object) -> object:
        return {"set": raw} if isinstance(raw, tuple | list) else raw


class Layer(Words):
    """Words at every scale, and further ones at each."""

    paper: Words = Words()
    mini: Words = Words()
    real: Words = Words()

    def at(self, scale: str, command: Command) -> list[str]:
        """All of one command at one scale; scale "": those of every scale alone."""
        further: Words = getattr(self, scale) if scale else Words()
        return [*self.of(command), *further.of(command)]


class Base(Layer):
    """`conf/set/base/NAME.yaml`: what all sets of a paper share."""

    algos: dict[str, Layer] = Field({}, description="words by algo=")


class Column(Layer):
    """What rows are trained or evaluated on."""

    rows: tuple[str, ...] = Field((), description="rows with a cell here; empty: all")
    cells: dict[str, Layer] = Field({}, description="further words of one row here")
    items: int | None = Field(None, ge=1, description="evaluated by the paper")


Numbers = float | tuple[float, ...]


class Row(Layer):
    """A method: one training per seed, and per column where its words differ."""

    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field("", alias="from", description="row from whose policy it starts, of the same column and seed")
    policy: str = Field("", description="what is evaluated; nothing is trained then")
    shown: bool = Field(True, description="false: it is a start of other rows alone")
    without: tuple[str, ...] = Field((), description="keys of set and column that do not hold for this row")
    seeds: tuple[int, ...] = Field((), description="of this row; empty: the set's")
    checkpoint: Literal["last", "before_collapse"] = Field("last", description="which one of training is evaluated")
    values: dict[str, Numbers] | tuple[float, ...] = Field(
        (), description="as printed: in the order of columns, scores in each, then means; or by their names"
    )
    std: dict[str, Numbers] | tuple[float, ...] = Field((), description="standard deviations as printed, likewise")
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
    """An order that is claimed: the mean over some cells of one row is above that of another."""

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
    window: int = Field(1, ge=1, description="steps that a training metric is averaged over, backwards")


class Case(Section):
    """One item, early and late in a training run."""

    early: int = Field(ge=1, description="steps; the first evaluation of training after so many")
    item: str = Field("", description="its id; empty: the first one whose last score rises the most")


class SetSpec(Base):
    """`conf/set/NAME.yaml`; its own words are those of every run."""

    shows: str = Field(description="one line")
    base: str = Field("", description="file of conf/set/base, whose words come first")
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="of rows that name none")
    rows: dict[str, Row] = Field(min_length=1, description="in the page's order")
    columns: dict[str, Column] = Field({"": Column()}, min_length=1)
    scores: dict[str, str] = Field(
        {}, description="name -> metric of an `mmrl eval` of each row's policy; none: the runs' own evaluations"
    )
    counts: tuple[str, ...] = Field((), description="scores that are no shares, so never per cent")
    order: Literal["columns", "scores"] = Field("columns", description="what the paper's table groups values by")
    means: dict[str, tuple[str, ...]] = Field({}, description="printed averages -> columns, scores or COLUMN/SCORE")
    source: Source | None = Field(None, description="where the paper prints it; none: a set of our own")
    agree: Agreement = Agreement(within=0)
    claims: tuple[Claim, ...] = ()
    figure: Figure | None = None
    case: Case | None = None
    notes: tuple[str, ...] = ()
    config_dir: str | None = Field(None, description="written by mmrl train stages=: the --config-dir of its words")

    @property
    def measured(self) -> Mapping[str, str]:
        """Score -> metric; of a set without scores the tasks' main metrics."""
        return self.scores or {"score": MAIN}

    @property
    def cells(self) -> list[Cell]:
        """In the order of the paper's table."""
        if self.order == "columns":
            return [Cell(column, score) for column in self.columns for score in self.measured]
        return [Cell(column, score) for score in self.measured for column in self.columns]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(row, column) of every cell."""
        return [
            (row, name)
            for row in self.rows
            for name, column in self.columns.items()
            if row in (column.rows or self.rows)
        ]

    def label(self, cell: Cell) -> str:
        """A cell's place, without what is the same everywhere."""
        if len(self.measured) == 1:
            return cell.column or cell.score
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
        for name, numbers in values.items():
            under: list[Cell | str] = [name] if name in self.means else [*self.selected([name])]
            placed |= zip(under, numbers if isinstance(numbers, tuple) else (numbers,), strict=True)
        return placed

    @model_validator(mode="after")
    def _fits(self) -> Self:
        # Numbers and claims are judged by names that stand for something.
        if problems := [*self._name_problems()] or [*self._number_problems(), *self._claim_problems()]:
            raise ValueError(*problems)
        return self

    def _name_problems(self) -> Iterator[str]:
        """Names that stand for nothing, or for two things."""
        cells = [*self.columns, *self.scores, *(f"{cell.column}/{cell.score}" for cell in self.cells)]
        every = [*self.columns, *self.scores, *self.means]
        rows, columns = [*self.rows], [*self.columns]
        diagrams = self.figure.diagrams if self.figure is not None else ()
        # (where, names that are used there, names that there are)
        uses: list[tuple[str, Collection[str], Sequence[str]]] = [
            ("counts", self.counts, [*self.scores]),
            *((f"means.{mean}", names, cells) for mean, names in self.means.items()),
            *((f"columns.{name}.rows", column.rows, rows) for name, column in self.columns.items()),
            *((f"columns.{name}.cells", column.cells, rows) for name, column in self.columns.items()),
            *((f"rows.{name}.from", [row.from_] if row.from_ else [], rows) for name, row in self.rows.items()),
            *((f"claims.{n}.more", [claim.more], rows) for n, claim in enumerate(self.claims, 1)),
            *((f"claims.{n}.than", [claim.than], rows) for n, claim in enumerate(self.claims, 1)),
            *((f"claims.{n}.cells", claim.cells, [*cells, *self.means]) for n, claim in enumerate(self.claims, 1)),
            *(
                (f"figure.diagrams.{n}.column", [one.column] if one.column else [], columns)
                for n, one in enumerate(diagrams, 1)
            ),
        ]
        for where, names, known in uses:
            yield from (unknown(where, name, known) for name in names if name not in known)
        if not self.scores:
            evaluated = [name for name, row in self.rows.items() if row.policy]
            yield from (
                f"rows.{name}.policy: nothing is trained, and the set has no scores to evaluate" for name in evaluated
            )
        twice = [name for name in dict.fromkeys(every) if every.count(name) > 1]
        yield from (f"columns, scores, means: {name} is the name of two of them" for name in twice)
        if any(row.from_ not in ("", *rows) for row in self.rows.values()):
            return
        for name in self.rows:
            yield from self._start_problems(name)
        for name, row in self.rows.items():
            for key, values in (("values", row.values), ("std", row.std)):
                if isinstance(values, Mapping):
                    yield from self._mapping_problems(f"rows.{name}.{key}", values, cells)

    def _start_problems(self, name: str) -> Iterator[str]:
        """Why a row cannot start from the row that it names."""
        row, start = self.rows[name], self.rows[name].from_
        if not start:
            return
        if row.policy or self.rows[start].policy:
            both = f"rows.{name}: has policy= too" if row.policy else f"rows.{name}.from: {start} has policy="
            yield f"{both}, and only what is trained starts from a row or is started from"
        chain = [name]
        while start and start not in chain:
            chain, start = [*chain, start], self.rows[start].from_
        if start:
            yield f"rows.{name}.from: {' starts from '.join([*chain, start])}"
            return
        start = row.from_
        pairs = set(self.pairs)
        lacking = [column for column in self.columns if (name, column) in pairs and (start, column) not in pairs]
        yield from (f"rows.{name}.from: {start} has no cell in column {column}, and {name} has" for column in lacking)
        if seeds := sorted(set(self.seeds_of(name)) - set(self.seeds_of(start))):
            yield f"rows.{name}.from: {start} has no seed {', '.join(map(str, seeds))}, and {name} has"

    def _mapping_problems(self, where: str, values: Mapping[str, Numbers], known: Collection[str]) -> Iterator[str]:
        for name, numbers in values.items():
            if name not in known and name not in self.means:
                yield unknown(where, name, [*known, *self.means])
                continue
            expected = 1 if name in self.means else len(self.selected([name]))
            got = len(numbers) if isinstance(numbers, tuple) else 1
            if got != expected:
                yield f"{where}.{name}: got {got} numbers, expected {expected}"

    def _number_problems(self) -> Iterator[str]:
        """Rows with some values only, and printed averages that their numbers do not give."""
        every = len(self.cells) + len(self.means)
        for name, row in self.rows.items():
            reported = self.reported(name)
            if not reported:
                continue
            if self.source is None:
                yield f"rows.{name}.values: got numbers as printed, and no source says where"
                continue
            counts = len(row.values) if isinstance(row.values, tuple) else len(reported)
            if counts != every:
                yield f"rows.{name}.values: got {counts} numbers, expected {every} or none"
                continue
            # A paper averages before it rounds: half a digit from the numbers, half from the average.
            room = 1.5 * 10**-self.source.decimals
            for mean, names in self.means.items():
                inner = fmean(reported[cell] for cell in self.selected(names))
                if abs(inner - reported[mean]) > room:
                    yield (
                        f"rows.{name}.values: {mean} is {reported[mean]:g}, and the mean of its numbers is "
                        f"{inner:.4g}; one of them is not as printed"
                    )

    def _claim_problems(self) -> Iterator[str]:
        """Claims that the paper's own numbers do not bear out."""
        for number, claim in enumerate(self.claims, 1):
            more, than = self.reported(claim.more), self.reported(claim.than)
            if more and than:
                cells = self.selected(claim.cells)
                first, second = (fmean(values[cell] for cell in cells) for values in (more, than))
                if first <= second:
                    yield (
                        f"claims.{number}: the paper has {first:.4g} for {claim.more} and {second:.4g} for {claim.than}"
                    )
