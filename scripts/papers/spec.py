"""A table of a paper as data: `sets/NAME.yaml`, and what all tables of a paper share, `sets/base/NAME.yaml`.

A set of `mmrl compare` (mmrl/sets/spec.py) whose policies are evaluated on each column. Some words hold at one scale
alone: of the papers' setup, the mini world's, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from mmrl.config.base import Section
from mmrl.sets import spec as sets
from mmrl.sets.spec import Command, WordList, undeclared
from mmrl.sets.words import is_below, read_set, words_of
from mmrl.system.conf import user_dirs

SETS = Path(__file__).parent / "sets"
SCALES = {
    "paper": "paper: the papers' models, data and sizes",
    "mini": "mini: the mini world with the tiny models; values do not compare with the paper's, orders (claims) do",
    "real": "real: a small real model on real data; values do not compare with the paper's, orders (claims) do",
}
"""Meaning of the numbers of a page at each scale."""
TRAINING_ALONE = (
    *("train", "algo", "from", "eval.every", "model.lora", "model.gradient_checkpointing"),
    *("hardware.sharding", "hardware.cpu_offload", "hardware.rollout_devices"),
    *("run.doctor", "run.progress", "run.name", "run.report_to", "run.report_calls"),
    *("run.wandb_project", "run.group", "run.tags"),
)
"""Sections and keys that an evaluation does not take."""


class Cell(NamedTuple):
    """Column and score of a value in a row."""

    column: str
    score: str


class Words(sets.Layer):
    """Overrides of training, of evaluation, and of both."""

    eval: WordList = Field((), description="of evaluation alone")


class Layer(Words):
    """Words for every scale, and additional ones for each."""

    paper: Words = Words()
    mini: Words = Words()
    real: Words = Words()

    def words_at(self, scale: str, command: Command) -> list[str]:
        """Return the overrides of one command at one scale."""
        scaled: Words = getattr(self, scale)
        return [*self.set, *getattr(self, command), *scaled.set, *getattr(scaled, command)]


class Base(sets.Base, Layer):
    """Words that all tables of a paper share."""

    algos: Mapping[str, Layer] = Field({}, description="words by algo=")


class Column(sets.Column, Layer):
    """What rows are evaluated on, and with words of training also what they are trained on."""

    cells: Mapping[str, Layer] = Field({}, description="further words of one row here")
    items: int | None = Field(None, ge=1, description="evaluated by the paper")


class Row(sets.Row, Layer):
    """A method."""

    policy: str = Field("", description="what is evaluated; nothing is trained then")
    checkpoint: Literal["last", "before_collapse"] = Field("last", description="which one of training is evaluated")
    values: tuple[float, ...] = Field((), description="as printed: of the table's cells in order, then of its means")
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

    diagrams: tuple[Diagram, ...] = Field(min_length=1)
    band: Literal["std", "range"] = Field("std", description="around the mean over seeds: a deviation, or all seeds")


class Table(sets.SetSpec, Base):
    """A table or figure of a paper."""

    base: Base = Field(Base(), description="name of a file of sets/base, whose words come first")
    rows: Mapping[str, Row] = Field(min_length=1, description="in the page's order")
    columns: Mapping[str, Column] = Field({"": Column()}, min_length=1)
    scores: dict[str, str] = Field(min_length=1, description="metrics of `mmrl eval` by name")
    counts: tuple[str, ...] = Field((), description="scores that are no shares, so never per cent")
    order: Literal["columns", "scores"] = Field("columns", description="what the paper's table groups values by")
    means: dict[str, tuple[str, ...]] = Field({}, description="printed averages -> columns, scores or COLUMN/SCORE")
    source: Source = Field(description="where the paper prints it")
    agree: float = Field(0.0, ge=0, description="difference to the paper at most, where it is not in our interval")
    claims: tuple[Claim, ...] = ()
    figure: Figure | None = None
    case: int | None = Field(None, ge=1, description="steps after which an answer is shown beside the last one")

    @property
    def cells(self) -> list[Cell]:
        """Cells in the order of the paper's table."""
        if self.order == "columns":
            return [Cell(column, score) for column in self.columns for score in self.scores]
        return [Cell(column, score) for score in self.scores for column in self.columns]

    @property
    def scales(self) -> list[str]:
        """Scales that it has words for, its base's first."""
        layers: list[Layer] = [self.base]
        if "base" not in self.model_fields_set:
            layers = [self, *self.rows.values(), *self.columns.values()]
        scaled = {scale: [getattr(layer, scale) for layer in layers] for scale in SCALES}
        return [scale for scale in SCALES if any(words.set or words.train for words in scaled[scale])]

    def label(self, cell: Cell) -> str:
        """Return a cell's place, without what is the same everywhere."""
        if len(self.scores) == 1:
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

    def name_problems(self) -> Iterator[str]:
        """Yield names that stand for nothing, or for two things."""
        yield from super().name_problems()
        cells = [*self.columns, *self.scores, *(f"{cell.column}/{cell.score}" for cell in self.cells)]
        yield from undeclared("counts", self.counts, self.scores)
        for mean, names in self.means.items():
            yield from undeclared(f"means.{mean}", names, cells)
        for n, claim in enumerate(self.claims, 1):
            yield from undeclared(f"claims.{n}.more", [claim.more], self.rows)
            yield from undeclared(f"claims.{n}.than", [claim.than], self.rows)
            yield from undeclared(f"claims.{n}.cells", claim.cells, [*cells, *self.means])
        all_names = [*self.columns, *self.scores, *self.means]
        twice = [name for name in dict.fromkeys(all_names) if all_names.count(name) > 1]
        yield from (f"columns, scores, means: {name} is the name of two of them" for name in twice)

    def row_problems(self) -> Iterator[str]:
        """Yield the problems of rows: too few values, or a start that cannot be."""
        yield from super().row_problems()
        value_count = len(self.cells) + len(self.means)
        for name, row in self.rows.items():
            if row.from_ and (row.policy or self.rows[row.from_].policy):
                yield f"rows.{name}.from: only what is trained starts from a row or is started from; one has policy="
            if len(row.values) not in (0, value_count):
                yield f"rows.{name}.values: got {len(row.values)} numbers, expected {value_count} or none"


def read_table(name: str, config_dir: str | None = None) -> Table:
    """Read a table, of the user's own folders of configs or the papers', with its base; raises as `read_set`."""
    return read_set(Table, name, [*(folder / "set" for folder in user_dirs(config_dir)), SETS], config_dir)


def table_words(
    table: Table, row: str, column: str, scale: str, command: Command, overrides: Sequence[str] = ()
) -> list[str]:
    """Return the overrides of one run of a cell, as `words_of`; an evaluation has those that it can take."""
    said: Callable[[Any], Sequence[str]] = lambda layer: layer.words_at(scale, command)  # noqa: E731
    policy = [f"policy={table.rows[row].policy}"] if command == "eval" and table.rows[row].policy else []
    words = words_of(table, row, column, [*policy, *overrides], said)
    return [word for word in words if command == "train" or not is_below(word, TRAINING_ALONE)]
