"""`mmrl index check`: how much of what questions need an index holds and finds: recall at k of gold titles, coverage.

Titles are compared letter by letter, passages counted as the index returns them: a title with several passages may take
several of the k places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmrl.errors import DataError
from mmrl.retrieval.base import Retriever
from mmrl.retrieval.store import PassageStore
from mmrl.system.bar import progress
from mmrl.tasks.data.layouts import LAYOUTS, OWN_LAYOUTS
from mmrl.tasks.data.rows import Row, Source

QUERIES = 64
"""Queries of one search."""
SHOWN = 5
"""Missing titles that are named."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched for, and the titles that should be found."""

    text: str
    titles: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What `check` found."""

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


def check(retriever: Retriever, passages: PassageStore, questions: Sequence[Question], ks: Iterable[int]) -> Check:
    """Search for every question as it stands.

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
