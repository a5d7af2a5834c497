"""A set of runs as data: `conf/set/NAME.yaml`, and what all sets of a paper share, `conf/set/base/NAME.yaml`.

A set has rows (methods), columns (tasks, or what is evaluated on) and seeds. A cell is one row's score on one column.
Words are overrides as on the command line; some hold at one scale alone: of the papers' setup, the mini world's, and
so on. A row may start from the policy that another row has trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product, zip_longest
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from mmrl.config.base import Section
from mmrl.errors import unknown

SCALES = {
    "paper": "paper: the papers' models, data and sizes",
    "mini": "mini: the mini world with the tiny models; values do not compare with the paper's, orders (claims) do",
    "real": "real: a small real model on real data; values do not compare with the paper's, orders (claims) do",
}
"""Meaning of the numbers of a page at each scale."""
Command = Literal["train", "eval"]
MAIN = "main"
"""Stands for the task's main metric."""


class Cell(NamedTuple):
    """Column and score of a value in a row."""

    column: str
    score: str


def _flat(raw: object) -> object:
    """Flatten a list of words and of lists of words (YAML anchors)."""
    if not isinstance(raw, tuple | list):
        return raw
    words = [word for part in raw for word in (part if isinstance(part, tuple | list) else [part])]
    malformed = [
        text for text in map(str, words) if not (text.partition("=")[0].strip() and ("=" in text or text[0] == "~"))
    ]
    if malformed:
        raise ValueError(f"got {', '.join(malformed)}, expected KEY=VALUE")
    return tuple(words)


WordList = Annotated[tuple[str, ...], BeforeValidator(_flat)]


class Words(Section):
    """Overrides; a plain list is short for `set`."""

    set: WordList = Field((), description="of training and evaluation")
    train: WordList = Field((), description="of training alone")
    eval: WordList = Field((), description="of evaluation alone")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: object) -> object:
        return {"set": raw} if isinstance(raw, tuple | list) else raw


class Layer(Words):
    """Words for every scale, and additional ones for each."""

    paper: Words = Words()
    mini: Words = Words()
    real: Words = Words()

    def words_at(self, scale: str, command: Command) -> list[str]:
        """Return the overrides of one command at one scale; scale "": those of every scale alone."""
        scaled: Words = getattr(self, scale) if scale else Words()
        return [*self.set, *getattr(self, command), *scaled.set, *getattr(scaled, command)]


class Base(Layer):
    """Words that all sets of a paper share: `conf/set/base/NAME.yaml`."""

    algos: dict[str, Layer] = Field({}, description="words by algo=")


class Column(Layer):
    """A task, or other data, that rows are trained or evaluated on."""

    rows: tuple[str, ...] = Field((), description="rows with a cell here; empty: all")
    cells: dict[str, Layer] = Field({}, description="further words of one row here")
    items: int | None = Field(None, ge=1, description="evaluated by the paper")


class Row(Layer):
    """A method: one training per seed, and per column where its words differ."""

    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field("", alias="from", description="row from whose policy it starts, of the same column and seed")
    policy: str = Field("", description="what is evaluated; nothing is trained then")
    shown: bool = Field(True, description="false: it is a start of other rows alone")
    without: tuple[str, ...] = Field((), description="keys of set and column that do not hold for this row")
    seeds: tuple[int, ...] = Field((), description="of this row; empty: the set's")
    checkpoint: Literal["last", "before_collapse"] = Field("last", description="which one of training is evaluated")
    values: tuple[float, ...] = Field((), description="as printed: of the set's cells in order, then of its means")
    std: tuple[float, ...] = Field((), description="standard deviations as printed, likewise")


class Source(Section):
    """Place of a table in a paper."""

    arxiv: str
    at: str = Field(description="Table 1")
    percent: bool = Field(False, description="values are per cent")
    decimals: int = Field(ge=0, le=6, description="digits after the point as printed")


class Claim(Section):
    """A claimed order: the mean over some cells of one row is above that of another."""

    more: str = Field(description="a row")
    than: str = Field(description="a row")
    cells: tuple[str, ...] = Field((), description="columns, scores, means or COLUMN/SCORE; empty: all")


Alternatives = Annotated[tuple[str, ...], BeforeValidator(lambda raw: (raw,) if isinstance(raw, str) else raw)]
"""Metrics, of which the first that is there is meant."""


class Diagram(Section):
    """Diagram of a figure: a metric of training by step, a line for each row."""

    metric: Alternatives = Field(description="of metrics.jsonl, or eval/METRIC: of evaluations during training")
    label: str = Field(description="of its axis")


class Figure(Section):
    """Diagrams of the training runs."""

    diagrams: tuple[Diagram, ...] = Field((), description="none: the main metric, the reward and what programs do")
    band: Literal["std", "range"] = Field("std", description="around the mean over seeds: a deviation, or all seeds")


class SetSpec(Base):
    """A set: `conf/set/NAME.yaml`; its own words apply to every run."""

    shows: str = Field(description="one line")
    base: Base = Field(Base(), description="name of a file of conf/set/base, whose words come first")
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="of rows that name none")
    rows: dict[str, Row] = Field(min_length=1, description="in the page's order")
    columns: dict[str, Column] = Field({"": Column()}, min_length=1)
    scores: dict[str, str] = Field({}, description="metrics of `mmrl eval` by name; none: the runs' own evaluations")
    counts: tuple[str, ...] = Field((), description="scores that are no shares, so never per cent")
    order: Literal["columns", "scores"] = Field("columns", description="what the paper's table groups values by")
    means: dict[str, tuple[str, ...]] = Field({}, description="printed averages -> columns, scores or COLUMN/SCORE")
    source: Source | None = Field(None, description="where the paper prints it; none: a set of our own")
    agree: float = Field(0.0, ge=0, description="difference to the paper at most, where it is not in our interval")
    claims: tuple[Claim, ...] = ()
    figure: Figure | None = None
    case: int | None = Field(None, ge=1, description="steps after which an answer is shown beside the last one")
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> Mapping[str, str]:
        """Metric of each score; of a set without scores the tasks' main metrics."""
        return self.scores or {"score": MAIN}

    @property
    def cells(self) -> list[Cell]:
        """Cells in the order of the paper's table."""
        if self.order == "columns":
            return [Cell(column, score) for column in self.columns for score in self.measured]
        return [Cell(column, score) for score in self.measured for column in self.columns]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Cells' (row, column) pairs."""
        pairs = product(self.rows, self.columns.items())
        return [(row, name) for row, (name, column) in pairs if row in (column.rows or self.rows)]

    def label(self, cell: Cell) -> str:
        """Return a cell's place, without what is the same everywhere."""
        if len(self.measured) == 1:
            return cell.column or cell.score
        return cell.score if len(self.columns) == 1 else f"{cell.column} {cell.score}"

    def selected(self, names: Sequence[str]) -> list[Cell]:
        """Return the cells that columns, scores, means and COLUMN/SCORE stand for; all for none."""
        if not names:
            return self.cells
        selected: dict[Cell, None] = {}
        for name in names:
            inner = self.selected(self.means[name]) if name in self.means else self.cells
            for cell in inner:
                if name in self.means or name in (cell.column, cell.score, f"{cell.column}/{cell.score}"):
                    selected[cell] = None
        return list(selected)

    def reported(self, row: str) -> dict[Cell | str, tuple[float, float | None]]:
        """Return the paper's values of a row with their standard deviations, by cell and by the name of a mean."""
        method = self.rows[row]
        return dict(zip([*self.cells, *self.means], zip_longest(method.values, method.std), strict=False))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        # The rows' starts can be checked only if all names are valid.
        if problems := [*self._name_problems()] or [*self._row_problems()]:
            raise ValueError(*problems)
        return self

    def _name_problems(self) -> Iterator[str]:
        """Yield names that stand for nothing, or for two things."""
        rows, all_names = [*self.rows], [*self.columns, *self.scores, *self.means]
        cells = [*self.columns, *self.scores, *(f"{cell.column}/{cell.score}" for cell in self.cells)]
        # (key, names used there, names declared)
        uses: list[tuple[str, Collection[str], Sequence[str]]] = [
            ("counts", self.counts, [*self.scores]),
            *((f"means.{mean}", names, cells) for mean, names in self.means.items()),
            *((f"columns.{name}.rows", column.rows, rows) for name, column in self.columns.items()),
            *((f"columns.{name}.cells", column.cells, rows) for name, column in self.columns.items()),
            *((f"rows.{name}.from", [row.from_], rows) for name, row in self.rows.items() if row.from_),
            *((f"claims.{n}.more", [claim.more], rows) for n, claim in enumerate(self.claims, 1)),
            *((f"claims.{n}.than", [claim.than], rows) for n, claim in enumerate(self.claims, 1)),
            *((f"claims.{n}.cells", claim.cells, [*cells, *self.means]) for n, claim in enumerate(self.claims, 1)),
        ]
        for key, names, declared in uses:
            yield from (unknown(key, name, declared) for name in names if name not in declared)
        twice = [name for name in dict.fromkeys(all_names) if all_names.count(name) > 1]
        yield from (f"columns, scores, means: {name} is the name of two of them" for name in twice)

    def _row_problems(self) -> Iterator[str]:
        """Yield the problems of rows: too few values, a start that cannot be, or nothing that evaluates them."""
        value_count = len(self.cells) + len(self.means)
        for name, row in self.rows.items():
            if row.policy and not self.scores:
                yield f"rows.{name}.policy: nothing is trained, and the set has no scores to evaluate"
            if row.from_ and (row.policy or self.rows[row.from_].policy):
                yield f"rows.{name}.from: only what is trained starts from a row or is started from; one has policy="
            chain = [name]
            while (previous := self.rows[chain[-1]].from_) and previous not in chain:
                chain.append(previous)
            if previous:
                yield f"rows.{name}.from: {' starts from '.join([*chain, previous])}"
            if len(row.values) not in (0, value_count):
                yield f"rows.{name}.values: got {len(row.values)} numbers, expected {value_count} or none"
