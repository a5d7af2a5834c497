"""A set of runs as data: `conf/set/NAME.yaml`, and what several sets share, `conf/set/base/NAME.yaml`.

A set has rows (methods), columns (tasks) and seeds. A cell is what one row's training reaches on one column. Words are
overrides as on the command line. A row may start from the policy that another row has trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from mmrl.config.base import Section
from mmrl.errors import unknown

Command = Literal["train", "eval"]


def _flat(raw: object) -> object:
    """Flatten a list of words and of lists of words (YAML anchors)."""
    if not isinstance(raw, tuple | list):
        return raw
    lists = [part for part in raw if isinstance(part, tuple | list)]
    own = [part for part in raw if not isinstance(part, tuple | list)]
    words = [word for part in raw for word in (part if isinstance(part, tuple | list) else [part])]
    malformed = [
        text for text in map(str, words) if not (text.partition("=")[0].strip() and ("=" in text or text[0] == "~"))
    ]
    if malformed:
        raise ValueError(f"got {', '.join(malformed)}, expected KEY=VALUE")
    # What a list takes up of others (anchors) it may set otherwise.
    keys = [[text.partition("=")[0].lstrip("+") for text in map(str, part) if text[0] != "~"] for part in (own, *lists)]
    if repeated := [key for part in keys for key in dict.fromkeys(part) if part.count(key) > 1]:
        raise ValueError(f"got {', '.join(repeated)} more than once")
    return tuple(words)


WordList = Annotated[tuple[str, ...], BeforeValidator(_flat)]


class Layer(Section):
    """Overrides; a plain list is short for `set`."""

    set: WordList = Field((), description="of every run")
    train: WordList = Field((), description="of training")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, raw: object) -> object:
        return {"set": raw} if isinstance(raw, tuple | list) else raw


class Base(Layer):
    """Words that several sets share: `conf/set/base/NAME.yaml`."""

    algos: Mapping[str, Layer] = Field({}, description="words by algo=")


class Column(Layer):
    """A task, or other data, that rows are trained on."""

    rows: tuple[str, ...] = Field((), description="rows with a cell here; empty: all")
    cells: Mapping[str, Layer] = Field({}, description="further words of one row here")


class Row(Layer):
    """A method: one training per seed, and per column where its words differ."""

    model_config = ConfigDict(populate_by_name=True)

    from_: str = Field("", alias="from", description="row from whose policy it starts, of the same column and seed")
    shown: bool = Field(True, description="false: it is a start of other rows alone")
    without: tuple[str, ...] = Field((), description="keys of set and column that do not hold for this row")
    seeds: tuple[int, ...] = Field((), description="of this row; empty: the set's")


class SetSpec(Base):
    """A set: `conf/set/NAME.yaml`; its own words apply to every run."""

    shows: str = Field(description="one line")
    base: Base = Field(Base(), description="name of a file of conf/set/base, whose words come first")
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="of rows that name none")
    rows: Mapping[str, Row] = Field(min_length=1, description="in the page's order")
    columns: Mapping[str, Column] = Field({"": Column()}, min_length=1)
    notes: tuple[str, ...] = Field((), description="below the tables")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Cells' (row, column) pairs."""
        pairs = product(self.rows, self.columns.items())
        return [(row, name) for row, (name, column) in pairs if row in (column.rows or self.rows)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        # The rows' starts can be checked only if all names are valid.
        if problems := [*self.name_problems()] or [*self.row_problems()]:
            raise ValueError(*problems)
        return self

    def name_problems(self) -> Iterator[str]:
        """Yield names that stand for nothing."""
        for name, column in self.columns.items():
            yield from undeclared(f"columns.{name}.rows", column.rows, self.rows)
            yield from undeclared(f"columns.{name}.cells", column.cells, self.rows)
        for name, row in self.rows.items():
            yield from undeclared(f"rows.{name}.from", [row.from_] if row.from_ else [], self.rows)

    def row_problems(self) -> Iterator[str]:
        """Yield the problems of rows: a start that cannot be."""
        for name in self.rows:
            chain = [name]
            while (previous := self.rows[chain[-1]].from_) and previous not in chain:
                chain.append(previous)
            if previous:
                yield f"rows.{name}.from: {' starts from '.join([*chain, previous])}"


def undeclared(key: str, names: Iterable[str], declared: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each name used under a key that is not declared."""
    known = [*declared]
    yield from (unknown(key, name, known) for name in names if name not in known)
