"""Corpora as streams: passages of files, folders, hub data sets and the mini world, joined. Used by `mmrl index`.

A source may hold passages (see `data.passage`) or question records that bring paragraphs (`context`, `paragraphs`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.retrieval.base import Document
from mmrl.tasks.data.layouts import passage
from mmrl.tasks.data.rows import FORMATS, Row, Source
from mmrl.tasks.mini.examples import mini_corpus

KEY = "corpus"


@dataclass(slots=True)
class Corpus:
    """The passages of several sources, in order; may repeat itself (`mmrl.retrieval.store` keeps each once).

    Args:
        specs: `mini`, a file, a folder (all files below it that hold passages), or a hub id.

    Raises:
        DataError: a source that is not there.
    """

    specs: Sequence[str]
    skipped: list[str] = field(default_factory=list)
    """Files of folders that held no passages; known once `passages` has been run through."""

    def __post_init__(self) -> None:
        problems = []
        if not self.specs:
            problems.append(f"{KEY}: missing, expected files, folders, hub ids or mini (corpus=A,B)")
        for spec in self.specs:
            try:
                if spec != "mini" and not self._folder(spec):
                    _ = Source(KEY, spec).path
                elif self._folder(spec) and not self._files(spec):
                    raise DataError(f"{KEY}: {spec}: has no {', '.join(FORMATS)} file")
            except DataError as error:
                problems += error.problems
        if problems:
            raise DataError(problems)

    @staticmethod
    def _folder(spec: str) -> bool:
        return Path(spec).expanduser().is_dir()

    @staticmethod
    def _files(spec: str) -> list[Path]:
        below = sorted(Path(spec).expanduser().rglob("*"))
        return [path for path in below if path.suffix.lower() in FORMATS and path.is_file()]

    def paths(self) -> list[Path]:
        """All local files, in order."""
        found: list[Path] = []
        for spec in self.specs:
            if self._folder(spec):
                found += self._files(spec)
            elif spec != "mini" and (path := Source(KEY, spec).path) is not None:
                found.append(path)
        return found

    def hub_ids(self) -> list[str]:
        """Sources that are fetched from the hub."""
        return [s for s in self.specs if s != "mini" and not self._folder(s) and Source(KEY, s).path is None]

    def local_bytes(self) -> int:
        """Size of the local files."""
        return sum(path.stat().st_size for path in self.paths())

    def stamp(self) -> str:
        """Changes when the sources do: their names, sizes and times."""
        files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths()]
        return hashlib.blake2b(repr((list(self.specs), files)).encode(), digest_size=16).hexdigest()

    def passages(self) -> Iterator[Document]:
        """All passages.

        Raises:
            DataError: a malformed file, or one named by itself that holds no passages.
        """
        self.skipped.clear()
        numbers = count()
        for spec in self.specs:
            if spec == "mini":
                yield from mini_corpus()
            elif self._folder(spec):
                for path in self._files(spec):
                    found = 0
                    for document in _of_source(Source(KEY, str(path)), numbers, strict=False):
                        found += 1
                        yield document
                    if not found:
                        self.skipped.append(str(path))
            else:
                yield from _of_source(Source(KEY, spec), numbers, strict=True)


def _of_source(source: Source, numbers: Iterator[int], *, strict: bool) -> Iterator[Document]:
    """Passages of one source; the first record says which kind: passages, questions with paragraphs, or neither."""
    kind = ""
    for row in source.stream("train"):
        own = _kind(row.values)
        kind = kind or own
        if not own and kind:
            passage(source, row, 0)  # raises: names what the record misses
        if not own:
            if strict:
                raise DataError(
                    f"{source.key}: {row.where}: holds no passages; expected title and text, contents, context or "
                    "paragraphs"
                )
            return
        if own == "passage":
            yield passage(source, row, next(numbers))
        else:
            for values in _paragraphs(row.values):
                yield passage(source, Row(row.where, values), next(numbers))


def _kind(values: Any) -> str:
    """`passage`, `record`, or nothing."""
    if isinstance(values, Mapping):
        if "paragraphs" in values or ("context" in values and "question" in values):
            return "record"
        if "contents" in values or ("title" in values and "text" in values):
            return "passage"
    pair = isinstance(values, list) and len(values) == 2 and isinstance(values[0], str)
    return "passage" if pair and isinstance(values[1], list | str) else ""


def _paragraphs(values: Mapping[str, Any]) -> list[Any]:
    """The paragraphs of a question, each as `passage` reads it."""
    found = values.get("paragraphs", values.get("context"))
    if isinstance(found, Mapping):  # as the hub's columns have it
        return [list(pair) for pair in zip(found["title"], found["sentences"], strict=True)]
    if not isinstance(found, list):
        return [found]
    return [
        {"title": p.get("title"), "text": p.get("paragraph_text", p.get("text"))} if isinstance(p, Mapping) else p
        for p in found
        if p is not None
    ]
