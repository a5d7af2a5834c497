"""Corpora: passages of many sources as one stream (`mmrl index build`, `task.corpus`); which questions they can answer.

A source may hold passages (see `layouts.passage`) or question records that bring paragraphs (`context`, `paragraphs`).
*Coverage* is behind the label 'partial corpus' that every result carries. An example that names gold titles counts when
all of them are titles of its corpus; one that names none counts when an accepted answer occurs in a passage, as a run
of whole lower-cased words.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from mmrl.errors import DataError, gathered
from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.store import PassageStore, distinct
from mmrl.retrieval.words import words
from mmrl.system.files import user_path
from mmrl.tasks.data.layouts import Evidence, passage
from mmrl.tasks.data.places import FORMATS, files_below, is_saved, missing_shard, parts_of
from mmrl.tasks.data.rows import NoRecords, Source, own_fields, read_as
from mmrl.tasks.mini.examples import mini_corpus

log = logging.getLogger("mmrl.data")

SCANNED = 200_000
"""Passages up to which answers are looked for; a larger corpus is known by its titles alone."""
LONGEST_ANSWER = 12
"""Words of an answer that are looked for; a longer answer counts by its first ones."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
"""Ends of the names of files that may hold a part of a corpus, and have to be unpacked."""
WIKIPEDIA_PASSAGES = 1_000_000
"""A corpus of fewer passages is a part of Wikipedia, even where it can answer all questions at hand."""


@dataclass(slots=True)
class Corpus:
    """The passages of several sources, in order; may repeat itself (`mmrl.retrieval.store` keeps each once).

    Args:
        specs: `mini`, a folder (all files below it that hold passages), or another source (`tasks.data.rows`).

    Raises:
        DataError: a source that is not there.
    """

    specs: Sequence[str]
    key: str = "corpus"
    """Key that the user typed, for messages."""
    skipped: list[str] = field(default_factory=list)
    """Files of folders that were left out, most with a reason; known once `passages` has been run through."""

    _sources: list[tuple[Source | None, bool]] = field(init=False, default_factory=list)
    """Each with whether it must hold passages; None: the mini world."""
    _packed: list[str] = field(init=False, default_factory=list)
    """Compressed files of folders, which nothing reads."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not self.specs:
            problems.append(f"{self.key}: missing, expected files, folders, hub ids or mini (corpus=A,B)")
        for spec in self.specs:
            with gathered(problems):
                self._sources += _sources(self.key, spec)
                if (folder := user_path(spec)).is_dir():
                    self._packed += [f"{path}: is compressed" for path in files_below(folder, COMPRESSED)]
        if problems:
            raise DataError(problems)

    def stamp(self) -> str:
        """Return a text that changes with the sources: their names, sizes and times."""
        paths = [path for source, _ in self._sources if source is not None for path in source.files("train")]
        files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return hashlib.blake2b(repr((list(self.specs), files)).encode(), digest_size=16).hexdigest()

    def passages(self) -> Iterator[Document]:
        """Yield all passages.

        Raises:
            DataError: a malformed file, one named by itself that holds no passages, or no passages at all.
        """
        self.skipped[:] = self._packed
        numbers, empty = count(), True
        for source, strict in self._sources:
            documents = mini_corpus() if source is None else _of_source(source, numbers, strict=strict)
            try:
                for document in documents:
                    yield document
                    empty = False
            except NoRecords as error:
                if strict:
                    raise
                self.skipped.append(str(error))
        if empty and self.skipped:
            raise DataError(
                f"{self.key}: {', '.join(self.specs)}: has no passages; left out: {'; '.join(self.skipped)}"
            )


def _sources(key: str, spec: str) -> list[tuple[Source | None, bool]]:
    if spec == "mini":
        return [(None, True)]
    folder, source = user_path(spec), Source(key, spec)
    if not folder.is_dir() or is_saved(folder):
        source.files("train")  # raises where there are none
        return [(source, True)]
    if not (files := files_below(folder)):
        raise DataError(f"{key}: {spec}: has no {', '.join(FORMATS)} file")
    if missing := missing_shard(files):
        raise DataError(f"{key}: {spec}: {missing}")
    return [(Source(key, str(path)), False) for path in files]


def _of_source(source: Source, numbers: Iterator[int], *, strict: bool) -> Iterator[Document]:
    """Yield a source's passages.

    Raises:
        NoRecords: it need not hold any, and its first two records hold none.
        DataError: it has to, or others of its records do.
    """
    # DPR's topics are questions; any other text beside a corpus, a README say, has no passages either.
    if not strict and source.spec.lower().endswith(".txt"):
        raise NoRecords(f"{source.spec}: is a text")
    first: DataError | None = None
    number = -1
    for number, row in enumerate(map(own_fields, source.stream("train"))):
        try:
            fields = row.values if isinstance(row.values, Mapping) else ()
            if "paragraphs" in fields or ("context" in fields and "question" in fields):
                paragraphs = read_as(Evidence, source.key, row).passages()
                documents = [Document(id=str(next(numbers)), title=title, text=text) for title, text in paragraphs]
            else:
                documents = [passage(source, row, next(numbers))]
        except DataError as error:
            if first is not None:
                break
            if strict or number:
                raise
            first = error
            continue
        if first is not None:  # among passages a damaged record, and not a file of another kind
            raise first
        yield from documents
    if first is not None or (number < 0 and not strict):
        raise NoRecords(str(first or f"{source.spec}: has no records"))


def load_corpus(key: str, spec: str) -> list[Document]:
    """Load the passages of `task.corpus` into memory: those that an index of the same sources has.

    Raises:
        DataError: no passages, a missing or malformed file, or one named by itself that holds other records.
    """
    corpus = Corpus(parts_of(spec), key)
    documents = list(distinct(corpus.passages()))
    if corpus.skipped:
        log.warning("%s: left out: %s", key, "; ".join(corpus.skipped))
    if not documents:
        raise DataError(f"{key}: {spec}: has no passages")
    return documents


def coverage(
    splits: Mapping[str, Sequence[Example]],
    corpora: Mapping[str, Sequence[Document]],
    same: Callable[[str], str] = str,
) -> dict[str, float]:
    """Return each split's share of questions that their corpus can answer; splits that cannot be judged are absent.

    Args:
        splits: examples, with `metadata["titles"]` or `metadata["answers"]`, and `inputs["corpus"]` where there are
            several.
        corpora: name -> passages; an empty one (a remote retriever's) is unknown.
        same: key that is equal for titles of one page; a corpus on disk knows equal titles alone.
    """
    judged: dict[str, list[bool]] = {split: [] for split in splits}
    for name, documents in corpora.items():
        examples_of = {
            split: [e for e in examples if e.inputs.get("corpus", name) == name] for split, examples in splits.items()
        }
        if not len(documents) or not any(examples_of.values()):
            continue
        # A corpus on disk answers from its own index of titles; loading all of them would take gigabytes.
        if isinstance(documents, PassageStore):
            has_title: Callable[[str], bool] = documents.has_title
            key: Callable[[str], str] = str
        else:
            has_title, key = {same(document.title) for document in documents}.__contains__, same
        untitled = [e for examples in examples_of.values() for e in examples if not e.metadata.get("titles")]
        # Titles are known at once; looking for answers reads every passage.
        scans = len(documents) <= SCANNED
        answers = {str(answer) for e in untitled for answer in e.metadata.get("answers", ())} if scans else set()
        present = find_occurring(answers, documents) if answers else set()
        for split, examples in examples_of.items():
            for example in examples:
                if titles := example.metadata.get("titles"):
                    judged[split].append(all(has_title(key(title)) for title in titles))
                elif scans:
                    judged[split].append(any(str(a) in present for a in example.metadata.get("answers", ())))
    return {split: sum(values) / len(values) for split, values in judged.items() if values}


def warn_of_gaps(shares: Mapping[str, float], criterion: str) -> None:
    """Warn of splits whose examples the corpus cannot all answer; `criterion` says in words what they need."""
    for split, share in shares.items():
        if share < 1:
            log.warning("task.data.%s: only %.1f %% of the %s", split, 100 * share, criterion)


def label(criterion: str, shares: Mapping[str, float], passages: int, *, real: bool) -> dict[str, str]:
    """Return a result's facts about its corpus: the share of each split's items, as 'partial corpus' if it is one.

    Args:
        criterion: requirement on an item, in words.
        shares: result of `coverage`.
        passages: number of passages.
        real: True if the items come from files or the hub; the mini world's corpus is complete and has no fact.
    """
    if not shares or (not real and min(shares.values()) == 1):
        return {}
    name = "partial corpus" if min(shares.values()) < 1 or passages < WIKIPEDIA_PASSAGES else "corpus coverage"
    return {name: f"{criterion}: {', '.join(f'{split} {share:.1%}' for split, share in shares.items())}"}


def find_occurring(answers: Iterable[str], documents: Iterable[Document]) -> set[str]:
    """Return the answers whose first words stand in a passage, one after the other."""
    by_words: dict[tuple[str, ...], list[str]] = {}
    # Indexed by first word: one pass over the passages for any number of answers.
    lengths: dict[str, set[int]] = {}
    for answer in answers:
        if run := tuple(words(answer)[:LONGEST_ANSWER]):
            by_words.setdefault(run, []).append(answer)
            lengths.setdefault(run[0], set()).add(len(run))
    present: set[tuple[str, ...]] = set()
    for document in documents:
        found = words(f"{document.title} {document.text}")
        for start, word in enumerate(found):
            runs = (tuple(found[start : start + length]) for length in lengths.get(word, ()))
            present.update(run for run in runs if run in by_words)
    return {answer for run in present for answer in by_words[run]}
