"""Corpora: passages of many sources as one stream (`mmrl index`), and whether a corpus can answer a task's questions.

A source may hold passages (see `layouts.passage`) or question records that bring paragraphs (`context`, `paragraphs`).
*Coverage* is behind the label 'partial corpus' that every result carries. An example that names gold titles counts when
all of them are titles of its corpus; one that names none counts when an accepted answer occurs in a passage, as a run
of whole lower-cased words. Which answers occur is cached, since looking takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from mmrl.errors import DataError, gathered
from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.store import PassageStore
from mmrl.system.files import atomic_write, user_path
from mmrl.tasks.data.layouts import passage
from mmrl.tasks.data.rows import FORMATS, Fields, Row, Source
from mmrl.tasks.mini.examples import mini_corpus

KEY = "corpus"
SCANNED = 200_000
"""Passages up to which answers are looked for; a larger corpus is known by its titles alone."""
LONGEST = 12
"""Words of an answer that are looked for; a longer answer counts by its first ones."""
WORD = re.compile(r"\w+")
WHOLE = 1_000_000
"""A corpus of fewer passages is a part of Wikipedia, even where it can answer all questions at hand."""
FORMAT = 1

log = logging.getLogger("mmrl.data")


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
        problems: list[str] = []
        if not self.specs:
            problems.append(f"{KEY}: missing, expected files, folders, hub ids or mini (corpus=A,B)")
        for spec in self.specs:
            with gathered(problems):
                if spec != "mini" and not self._folder(spec):
                    _ = Source(KEY, spec).path
                elif self._folder(spec) and not self._files(spec):
                    raise DataError(f"{KEY}: {spec}: has no {', '.join(FORMATS)} file")
        if problems:
            raise DataError(problems)

    @staticmethod
    def _folder(spec: str) -> bool:
        return user_path(spec).is_dir()

    @staticmethod
    def _files(spec: str) -> list[Path]:
        below = sorted(user_path(spec).rglob("*"))
        return [path for path in below if path.suffix.lower() in FORMATS and path.is_file()]

    def paths(self) -> list[Path]:
        """All local files, in order."""
        paths: list[Path] = []
        for spec in self.specs:
            if self._folder(spec):
                paths += self._files(spec)
            elif spec != "mini" and (path := Source(KEY, spec).path) is not None:
                paths.append(path)
        return paths

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
                    passages = 0
                    for document in _of_source(Source(KEY, str(path)), numbers, strict=False):
                        passages += 1
                        yield document
                    if not passages:
                        self.skipped.append(str(path))
            else:
                yield from _of_source(Source(KEY, spec), numbers, strict=True)


def _of_source(source: Source, numbers: Iterator[int], *, strict: bool) -> Iterator[Document]:
    """Passages of one source; the first record says which kind: passages, questions with paragraphs, or neither."""
    kind = ""
    for row in source.stream("train"):
        this_kind = _kind(row.values)
        kind = kind or this_kind
        # a record that lost a field, in a file of passages
        if not this_kind and kind:
            passage(source, row, 0)  # raises: names what the record misses
        if not this_kind:
            if strict:
                raise DataError(
                    f"{source.key}: {row.where}: holds no passages; expected title and text, contents, context or "
                    "paragraphs"
                )
            return
        if this_kind == "passage":
            yield passage(source, row, next(numbers))
        else:
            for values in _paragraphs(row.values):
                yield passage(source, Row(row.where, values), next(numbers))


def _kind(values: object) -> str:
    """`passage`, `record`, or nothing."""
    if isinstance(values, Mapping):
        if "paragraphs" in values or ("context" in values and "question" in values):
            return "record"
        if "contents" in values or ("title" in values and "text" in values):
            return "passage"
    if isinstance(values, list) and len(values) == 2:
        title, text = values
        return "passage" if isinstance(title, str) and isinstance(text, list | str) else ""
    return ""


def _paragraphs(values: Fields) -> list[object]:
    """The paragraphs of a question, each as `passage` reads it."""
    paragraphs = values.get("paragraphs", values.get("context"))
    if isinstance(paragraphs, Mapping):  # as the hub's columns have it
        return [list(pair) for pair in zip(paragraphs["title"], paragraphs["sentences"], strict=True)]
    if not isinstance(paragraphs, list):
        return [paragraphs]
    return [
        {"title": p.get("title"), "text": p.get("paragraph_text", p.get("text"))} if isinstance(p, Mapping) else p
        for p in paragraphs
        if p is not None
    ]


def coverage(
    splits: Mapping[str, Sequence[Example]], corpora: Mapping[str, Sequence[Document]], cache: Path | None
) -> dict[str, float]:
    """Split -> share of its questions that their corpus can answer; splits that cannot be judged are absent.

    Args:
        splits: examples with `inputs["corpus"]`, and `metadata["titles"]` or `metadata["answers"]`.
        corpora: name -> passages; an empty one (a remote retriever's) is unknown.
        cache: folder for results of the search for answers; None keeps none.
    """
    judged: dict[str, list[bool]] = {split: [] for split in splits}
    for name, documents in corpora.items():
        examples_of = {
            split: [e for e in examples if e.inputs.get("corpus") == name] for split, examples in splits.items()
        }
        if not len(documents) or not any(examples_of.values()):
            continue
        # A corpus on disk answers from its own index of titles; loading all of them would take gigabytes.
        if isinstance(documents, PassageStore):
            has_title: Callable[[str], bool] = documents.has_title
        else:
            has_title = {document.title for document in documents}.__contains__
        untitled = [e for examples in examples_of.values() for e in examples if not e.metadata.get("titles")]
        # Titles are known at once; looking for answers reads every passage.
        scans = len(documents) <= SCANNED
        answers = {str(answer) for e in untitled for answer in e.metadata.get("answers", ())} if scans else set()
        present = occurring(answers, documents, cache)
        for split, examples in examples_of.items():
            for example in examples:
                if titles := example.metadata.get("titles"):
                    judged[split].append(all(map(has_title, titles)))
                elif scans:
                    judged[split].append(any(str(a) in present for a in example.metadata.get("answers", ())))
    return {split: sum(values) / len(values) for split, values in judged.items() if values}


def label(criterion: str, shares: Mapping[str, float], passages: int, *, real: bool) -> dict[str, str]:
    """What a result says of its corpus: the share of each split's items, under 'partial corpus' where it is one.

    Args:
        criterion: what an item has to have in the corpus.
        shares: of `coverage`.
        passages: how many there are.
        real: whether the items come from files or the hub; the mini world's corpus is whole, and says nothing.
    """
    if not shares or (not real and min(shares.values()) == 1):
        return {}
    name = "partial corpus" if min(shares.values()) < 1 or passages < WHOLE else "corpus coverage"
    return {name: f"{criterion}: {', '.join(f'{split} {share:.1%}' for split, share in shares.items())}"}


def occurring(answers: set[str], documents: Sequence[Document], cache: Path | None = None) -> set[str]:
    """Those of `answers` that occur in a passage."""
    if not answers:
        return set()
    ordered = sorted(answers)
    file = cache / "coverage" / f"{_key(ordered, documents)}.json" if cache is not None else None
    if file is not None and file.is_file():
        try:
            return {ordered[number] for number in json.loads(file.read_text(encoding="utf-8"))}
        # cut short, or written by another version: it costs seconds to make again, never a run
        except (ValueError, TypeError, IndexError):
            log.warning("%s is damaged; it is made again", file)
    present = _search(ordered, documents)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps([number for number, answer in enumerate(ordered) if answer in present]))
        # A full or read-only cache only costs time.
        except OSError as error:
            log.warning("cannot write %s (%s)", file, error)
    return present


def _key(answers: Sequence[str], documents: Sequence[Document]) -> str:
    state = hashlib.blake2b(f"{FORMAT} {SCANNED} {LONGEST}".encode(), digest_size=16)
    if isinstance(documents, PassageStore):
        state.update(documents.identity())
    else:
        for document in documents:
            state.update(f"\x1e{document.title}\x1f{document.text}".encode("utf-8", "surrogatepass"))
    state.update("\x1d".join(answers).encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def _search(answers: Sequence[str], documents: Iterable[Document]) -> set[str]:
    """Those whose first words stand in a passage, one after the other."""
    answers_of: dict[tuple[str, ...], list[str]] = {}
    # By first word: one pass over the passages, whatever the number of answers.
    lengths: dict[str, set[int]] = {}
    for answer in answers:
        if run := tuple(WORD.findall(answer.lower())[:LONGEST]):
            answers_of.setdefault(run, []).append(answer)
            lengths.setdefault(run[0], set()).add(len(run))
    present: set[tuple[str, ...]] = set()
    for document in documents:
        words = WORD.findall(f"{document.title} {document.text}".lower())
        for start, word in enumerate(words):
            runs = (tuple(words[start : start + length]) for length in lengths.get(word, ()))
            present.update(run for run in runs if run in answers_of)
    return {answer for run in present for answer in answers_of[run]}
