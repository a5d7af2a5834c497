"""`mmrl index build|info|search|check` and `mmrl serve-retriever`: index folders made, looked into, and served.

Sizes come before anything long: an index of a whole encyclopedia takes hours and a disk.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.config.retriever import (
    BuildIndexArguments,
    CheckIndexArguments,
    EncoderRetrieverConfig,
    IndexArguments,
    IndexInfoArguments,
    SearchIndexArguments,
    ServeIndexArguments,
)
from mmrl.errors import ConfigError, DataError
from mmrl.retrieval.base import Retriever
from mmrl.retrieval.index_folder import (
    IndexInfo,
    IndexSpec,
    build_index,
    estimated_bytes,
    open_index,
    partial_of,
    read_info,
    spec_of,
)
from mmrl.retrieval.select import encoder_and_treatment_problems, index_problems, packages_missing, server_problems
from mmrl.retrieval.serving import make_app
from mmrl.retrieval.store import CorpusFacts, PassageStore
from mmrl.secrets import token_of
from mmrl.system.bar import progress
from mmrl.system.files import user_path
from mmrl.tasks.data.corpus import Corpus
from mmrl.tasks.data.layouts import LAYOUTS, OWN_LAYOUTS
from mmrl.tasks.data.rows import Row, Source

KEY = "index"
PASSAGE_BYTES = 620
"""Text of a passage of 100 words, for estimates before a corpus is read."""
QUERIES = 64
"""Queries of one search."""
SHOWN = 5
"""Missing titles that are named."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched for, and the titles that should come back."""

    text: str
    titles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of `measure`."""

    questions: int
    titles: int
    """Gold titles, each question's counted for itself."""
    missing: tuple[str, ...]
    """Those that no passage has, in order, with repetitions."""
    answerable: int
    """Questions of which the corpus has all gold titles."""
    recall: dict[int, float]
    """k -> share of a question's gold titles among its first k passages, mean over questions."""
    all_found: dict[int, float]
    """k -> share of questions with all gold titles among their first k passages."""

    def lines(self) -> list[str]:
        """For people."""
        there, whole = 1 - len(self.missing) / self.titles, self.answerable / self.questions
        lines = [
            f"questions  {self.questions:,} with {self.titles:,} gold titles",
            f"coverage   {there:.1%} of the gold titles are in the corpus; {whole:.1%} of the questions have all there",
        ]
        if names := list(dict.fromkeys(self.missing)):
            more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
            lines.append(f"missing    {'; '.join(names[:SHOWN])}{more}")
        lines.append("passages   " + "".join(f"{f'first {k}':>10}" for k in self.recall))
        lines.append("recall     " + "".join(f"{share:>10.3f}" for share in self.recall.values()))
        lines.append("all found  " + "".join(f"{share:>10.3f}" for share in self.all_found.values()))
        return lines


def questions_of(spec: str, items: int | None, key: str = "data") -> list[Question]:
    """Questions with gold titles, from records of HotpotQA, 2WikiMultihopQA, MuSiQue, PopQA or HoVer.

    Args:
        spec: file or hub id.
        items: the first so many; None: all.
        key: that named it, for messages.

    Raises:
        DataError: no such file, or records of another kind.
    """
    questions: list[Question] = []
    reader = ""
    for row in Source(key, spec).stream("dev"):
        reader = reader or _reader(row, key)
        question = _question(row, reader, key)
        # PopQA's and unlabelled records may name none
        if question.titles:
            questions.append(question)
        if items is not None and len(questions) == items:
            break
    if not questions:
        raise DataError(f"{key}: {spec}: no record names gold titles (supporting_facts, or is_supporting)")
    return questions


def _reader(row: Row, key: str) -> str:
    """The layout of a record."""
    for name in ("hover", *OWN_LAYOUTS):
        try:
            if _question(row, name, key).titles:
                return name
        except DataError:
            continue
    raise DataError(
        f"{key}: {row.where}: names no gold titles; expected a record of HotpotQA, 2WikiMultihopQA, MuSiQue, PopQA or "
        "HoVer (question or claim, and supporting_facts or paragraphs with is_supporting)"
    )


def _question(row: Row, reader: str, key: str) -> Question:
    try:
        if reader != "hover":
            record = LAYOUTS[reader].read(row.values)
            return Question(record.question, record.titles)
        claim, facts = row.values["claim"], row.values["supporting_facts"]
        titles = facts["key"] if isinstance(facts, dict) else [title for title, _ in facts]
        if not isinstance(claim, str) or not all(isinstance(title, str) for title in titles):
            raise TypeError("claim and supporting_facts: expected text and [title, sentence] pairs")
        return Question(claim, tuple(dict.fromkeys(titles)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{key}: {row.where}: not a record of {reader}: {error}") from None


def measure(retriever: Retriever, passages: PassageStore, questions: Sequence[Question], ks: Iterable[int]) -> Check:
    """Search for every question as it stands: recall at k of its gold titles, and which of them the index has at all.

    Titles are compared letter by letter, passages counted as the index returns them: a title with several passages may
    take several of the k places.

    Args:
        retriever: of the index.
        passages: of the index.
        questions: each with a gold title at least.
        ks: numbers of passages, ascending.
    """
    numbers = tuple(ks)
    there = {title: passages.has_title(title) for question in questions for title in question.titles}
    recalls: dict[int, list[float]] = {k: [] for k in numbers}
    with progress("searching", len(questions), "questions") as advance:
        for start in range(0, len(questions), QUERIES):
            part = questions[start : start + QUERIES]
            results = retriever.search([question.text for question in part], [numbers[-1]] * len(part))
            for question, documents in zip(part, results, strict=True):
                for k in numbers:
                    first = {document.title for document in documents[:k]}
                    recalls[k].append(sum(title in first for title in question.titles) / len(question.titles))
            advance(len(part))
    gold = [title for question in questions for title in question.titles]
    return Check(
        questions=len(questions),
        titles=len(gold),
        missing=tuple(title for title in gold if not there[title]),
        answerable=sum(all(there[title] for title in question.titles) for question in questions),
        recall={k: sum(shares) / len(shares) for k, shares in recalls.items()},
        all_found={k: sum(share == 1 for share in shares) / len(shares) for k, shares in recalls.items()},
    )


def build(given: BuildIndexArguments) -> int:
    """`mmrl index build`."""
    section, folder = given.section(), user_path(given.index)
    # Nothing is downloaded or read before all of this is right.
    problems = packages_missing(section)
    if folder.exists():
        problems.append(f"index: {folder} exists, and is left as it is; choose another folder or remove it yourself")
    if not problems and isinstance(section, EncoderRetrieverConfig):
        problems += encoder_and_treatment_problems(section, "")
    try:
        corpus = Corpus(given.corpus)
    except DataError as error:
        problems += error.problems
    if problems:
        raise ConfigError([f"mmrl index build: {problem}" for problem in problems])
    spec = spec_of(section, "")
    # Sizes come before anything is read: an index may not fit on this disk, and its build takes hours.
    print(_estimate_text(spec, corpus.local_bytes(), corpus.hub_ids(), folder), flush=True)
    if given.plan:
        return 0
    if partial_of(folder).is_dir():
        print(f"continuing the build in {partial_of(folder)}", flush=True)
    try:
        built = build_index(
            folder,
            spec,
            corpus.passages,
            sources=given.corpus,
            stamp=corpus.stamp(),
            device=given.device,
            batch_size=given.batch_size,
            on_corpus=lambda passages: print(_corpus_text(spec, passages), flush=True),
        )
    except OSError as error:
        raise ConfigError(f"mmrl index build: cannot build {folder}: {error}; the same command goes on") from None
    if corpus.skipped:
        print("\n  ".join(["without passages, left out:", *corpus.skipped]))
    print(f"built in {built.build_seconds:.1f} s: {folder}\nuse it: task.retriever.name={built.kind} ", end="")
    print(f"task.retriever.index={folder}, or mmrl serve-retriever index={folder}")
    return 0


def info(given: IndexInfoArguments) -> int:
    """`mmrl index info`."""
    folder = user_path(given.index)
    print(_info_text(folder, read_info(folder, KEY)))
    return 0


def search(given: SearchIndexArguments) -> int:
    """`mmrl index search`."""
    _, retriever, _ = _opened(given)
    _load(retriever)
    started = time.perf_counter()
    (documents,) = retriever.search([given.query], [given.top_k])
    spent = time.perf_counter() - started
    for rank, document in enumerate(documents, 1):
        title, text = (_line(part) for part in (document.title, document.text[:300]))
        print(f"{rank:3d}  {document.score:9.4f}  [{_line(document.id)}] {title}\n     {text}")
    print(f"{len(documents)} passages in {1000 * spent:.1f} ms")
    return 0


def check(given: CheckIndexArguments) -> int:
    """`mmrl index check`."""
    # Before an encoder is loaded.
    questions = questions_of(given.data, given.items)
    facts, retriever, passages = _opened(given)
    _load(retriever)
    started = time.perf_counter()
    checked = measure(retriever, passages, questions, given.top_k)
    spent = time.perf_counter() - started
    print(f"index      {given.index}: {_spec_text(facts.spec)}, {facts.documents:,} passages")
    print(f"data       {given.data}")
    print("\n".join("".join(c if c.isprintable() else " " for c in line) for line in checked.lines()))
    print(f"searched in {spent:.1f} s")
    return 0


def _line(text: str) -> str:
    """Text of a corpus on one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def serve(given: ServeIndexArguments) -> int:
    """`mmrl serve-retriever`."""
    if problems := server_problems("mmrl serve-retriever"):
        raise ConfigError(problems)
    token = None if given.token_env is None else token_of(given.token_env, "mmrl serve-retriever: token_env")
    facts, retriever, passages = _opened(given)
    from mmrl.system.http_server import serve as serve_app

    served: dict[str, str | int] = {
        "kind": facts.kind,
        "documents": len(passages),
        "index": Path(given.index).name,
        "digest": facts.digest,
    }
    app = make_app(retriever, served, max_batch=given.max_batch, token=token)
    try:
        serve_app(app, given.host, given.port, parent=given.parent, announce="listening on {url}")
    except OSError as error:
        raise ConfigError(
            f"mmrl serve-retriever: cannot listen on host={given.host} port={given.port}: {error.strerror or error}"
        ) from None
    print("stopped", file=sys.stderr)
    return 0


def _estimate_text(spec: IndexSpec, local_bytes: int, hub_ids: Sequence[str], folder: Path) -> str:
    """What is known before the sources are read."""
    lines = [f"index: {_spec_text(spec)} -> {folder}"]
    if hub_ids:
        lines.append(
            f"fetched from the hub first: {', '.join(hub_ids)} (size: see docs/retrieval.md; stays in the hub's cache)"
        )
    if local_bytes:
        passages = max(1, local_bytes // PASSAGE_BYTES)
        lines.append(f"files: {_bytes_text(local_bytes)}, at most about {passages:,} passages of 100 words")
        lines.append(_sizes_text(spec, passages, local_bytes))
    if not (hub_ids or local_bytes):
        lines.append("the embedded mini world: about 1,200 short passages, some megabytes of disk and memory at most")
    return "\n".join(lines)


def _corpus_text(spec: IndexSpec, corpus: CorpusFacts) -> str:
    """What is known once the passages are written."""
    return (
        f"{corpus.documents:,} passages, {_bytes_text(corpus.text_bytes)} of text"
        f" ({corpus.duplicates:,} with the same title and text left out)\n"
        + _sizes_text(spec, corpus.documents, corpus.text_bytes)
    )


def _sizes_text(spec: IndexSpec, passages: int, text_bytes: int) -> str:
    """One line of estimated sizes."""
    sizes = estimated_bytes(spec, passages, text_bytes)
    more = f" and {_bytes_text(sizes['work'])} more while building" if sizes["work"] else ""
    return (
        f"estimated: disk {_bytes_text(sizes['disk'])}{more}, memory {_bytes_text(sizes['build'])} to build, "
        f"{_bytes_text(sizes['search'])} to search (memory-mapped)"
    )


def _info_text(folder: Path, info: IndexInfo) -> str:
    """What `mmrl index info` prints."""
    disk = sum(int(size) for size, _ in info.files.values())
    return "\n".join(
        [
            f"index      {folder}",
            f"retriever  {_spec_text(info.spec)}",
            f"passages   {info.documents:,} ({info.duplicates:,} repeated ones left out)",
            f"text       {_bytes_text(info.text_bytes)}",
            f"disk       {_bytes_text(disk)}",
            f"corpus     {', '.join(info.sources) or 'a task'}",
            f"digest     {info.digest}",
            f"built in   {info.build_seconds:.1f} s",
        ]
    )


def _spec_text(spec: IndexSpec) -> str:
    """Kind and settings in one line."""
    # Prompts end in spaces: in quotes.
    shown = {n: repr(v) if isinstance(v, str) and v != v.strip() else v for n, v in spec.settings.items() if v != ""}
    return f"{spec.kind} ({', '.join(f'{name} {value}' for name, value in shown.items())})"


def _bytes_text(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _load(retriever: Retriever) -> None:
    """Load what searches need, without a bar among the results."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    retriever.load()


def _opened(given: IndexArguments) -> tuple[IndexInfo, Retriever, PassageStore]:
    """Info, retriever and passages of an index folder."""
    folder = user_path(given.index)
    facts = read_info(folder, KEY)
    if problems := index_problems(KEY, facts):
        raise DataError(problems)
    try:
        passages = PassageStore(folder)
        retriever = open_index(
            folder,
            facts,
            passages,
            device=given.device,
            batch_size=given.batch_size,
            candidates=given.candidates,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{KEY}: cannot open {folder}: {error}") from None
    return facts, retriever, passages
