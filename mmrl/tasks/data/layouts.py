"""Question answering data: official record layouts to examples and paragraphs. Used by `open_qa`.

A *layout* says how one data set writes a record. Files hold the official JSON; the hub's copies hold the same fields
in columns; both come through the same reader. Files with nothing but questions and answers are read under any layout.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl import rng
from mmrl.errors import DataError
from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.tasks.data.rows import Fields, Row, Source, check_unique, record_id

log = logging.getLogger("mmrl.data")

Paragraph = tuple[str, str]
"""Title and text."""


@dataclass(frozen=True, slots=True)
class Record:
    """Common record of all layouts."""

    id: str
    question: str
    answers: tuple[str, ...]
    titles: tuple[str, ...]
    """Titles of the gold paragraphs, without repetition."""
    kind: str
    paragraphs: tuple[Paragraph, ...]


Layout = Callable[[Fields], Record]
"""Reader of a data set's records; raises `KeyError` (missing field), `TypeError` or `ValueError` (wrong shape)."""


def _hotpot(values: Fields) -> Record:
    """Read HotpotQA (distractor and fullwiki) and 2WikiMultihopQA."""
    context = _pairs(values["context"], "context", ("title", "sentences"))
    facts = _pairs(values["supporting_facts"], "supporting_facts", ("title", "sent_id"))
    if not all(isinstance(title, str) and _is_texts(sentences) for title, sentences in context):
        raise TypeError("context: expected a list of sentences for each title")
    if not all(isinstance(title, str) for title, _ in facts):
        raise TypeError("supporting_facts: expected a title in each pair")
    return Record(
        id=_text(values["id"] if (name := record_id(values, "_id")) is None else name, "id"),
        question=_text(values["question"], "question"),
        answers=(_text(values["answer"], "answer"),),
        titles=tuple(dict.fromkeys(title for title, _ in facts)),
        kind=str(values.get("type", "")),
        paragraphs=tuple((title, "".join(sentences)) for title, sentences in context),
    )


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _pairs(value: object, field: str, columns: tuple[str, str]) -> list[tuple[Any, Any]]:
    """Read pairs in the files' form `[[a, b], ...]` or in the hub's, two columns."""
    if isinstance(value, Mapping):
        cells = [value[column] for column in columns]
        if any(isinstance(column, str) for column in cells):  # whose letters would be taken for entries
            raise TypeError(f"{field}: expected lists in its columns {' and '.join(columns)}")
        return list(zip(*cells, strict=True))
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise TypeError(f"{field}: expected a list of [{', '.join(columns)}] pairs")
    return [(first, second) for first, second in value]


def _musique(values: Fields) -> Record:
    """Read MuSiQue-Ans."""
    paragraphs = values["paragraphs"]
    if not isinstance(paragraphs, list) or not all(isinstance(paragraph, Mapping) for paragraph in paragraphs):
        raise TypeError("paragraphs: expected a list of objects")
    # MuSiQue scores the best over the answer and its aliases.
    aliases = values.get("answer_aliases") or []
    if not isinstance(aliases, list):
        raise TypeError(f"answer_aliases: got {type(aliases).__name__}, expected a list of texts")
    answers = [_text(values["answer"], "answer"), *(_text(alias, "answer_aliases") for alias in aliases)]
    return Record(
        id=_text(values["id"], "id"),
        question=_text(values["question"], "question"),
        answers=tuple(answers),
        titles=_supporting(paragraphs, required=True),
        kind=f"{str(values['id']).split('hop')[0]}hop",
        paragraphs=tuple((p["title"], _string(p["paragraph_text"], "paragraphs: paragraph_text")) for p in paragraphs),
    )


def _supporting(paragraphs: Sequence[Fields], *, required: bool) -> tuple[str, ...]:
    """Return the titles of the gold paragraphs; every paragraph has to have one."""
    titles = [_string(p["title"], "paragraphs: title") for p in paragraphs]
    gold = [p["is_supporting"] if required else p.get("is_supporting") for p in paragraphs]
    return tuple(dict.fromkeys(title for title, supports in zip(titles, gold, strict=True) if supports))


def _popqa(values: Fields) -> Record:
    """Read PopQA with gold passages."""
    paragraphs = [p for p in values["paragraphs"] if isinstance(p, Mapping)]  # the file has null where one is missing
    return Record(
        id=_text(values["id"], "id"),
        question=_text(values["question"], "question"),
        answers=_answers(values),
        titles=_supporting(paragraphs, required=False),
        kind=str(values.get("prop", "")),
        paragraphs=tuple((p["title"], _string(p["text"], "paragraphs: text")) for p in paragraphs),
    )


def _questions(values: Fields, name: object = None) -> Record:
    """Return a question with its accepted answers and nothing else; `name` is its id where it has none."""
    return Record(
        id=_text(values["id"] if name is None else name, "id"),
        question=_text(values["question"], "question"),
        answers=_answers(values),
        titles=(),
        kind=str(values.get("type", "")),
        paragraphs=(),
    )


ANSWER_FIELDS = ("possible_answers", "golden_answers", "answers", "answer")
"""Fields that hold accepted answers (PopQA's, FlashRAG's, others'), the first one there counts."""


def _answers(values: Fields) -> tuple[str, ...]:
    """Read accepted answers: one text, a list, a list written as JSON text, or TriviaQA's record of aliases."""
    field = next((name for name in ANSWER_FIELDS if name in values), "answer")
    value = values[field]
    # PopQA's file holds the list as JSON text in one column.
    if field == "possible_answers" and isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, Mapping):
        # TriviaQA's own evaluation compares with these.
        value = value.get("normalized_aliases") or value["aliases"]
    answers = [value] if isinstance(value, str | int) else value
    if not isinstance(answers, list | tuple):
        raise TypeError(f"{field}: got {type(answers).__name__}, expected text or a list of texts")
    if not answers:
        raise ValueError(f"{field}: is empty")
    return tuple(dict.fromkeys(_text(answer, field) for answer in answers))


EVIDENCE = ("context", "supporting_facts", "paragraphs")
"""A record with one of these is in its data set's own layout; one without any has a question and answers alone."""
# NQ and TriviaQA have no layout of their own: questions and answers, whatever else their copies hold.
LAYOUTS: Mapping[str, Layout] = {
    "hotpotqa": _hotpot,
    "2wiki": _hotpot,
    "musique": _musique,
    "nq": _questions,
    "triviaqa": _questions,
    "popqa": _popqa,
}
"""`task.dataset` -> layout."""


def load_records(source: Source, split: str, layout: Layout) -> list[Record]:
    """Return all records of a source.

    Raises:
        DataError: a missing or malformed file, a record without a field or with an empty answer, or duplicate ids.
    """
    rows = source.rows(split)
    return check_unique(
        source.key, ((row, _record(source, row, layout, f"{split}-{number}")) for number, row in enumerate(rows))
    )


def _record(source: Source, row: Row, layout: Layout, number: str) -> Record:
    """Convert a row to a record; if it has neither id nor evidence, `number` is its id."""
    values = row.values
    if not isinstance(values, Mapping):
        raise DataError(f"{source.key}: {row.where}: got {type(values).__name__}, expected a record (a JSON object)")
    name = record_id(values, "_id", "id")
    if name is not None and values.get("data_source"):  # several sets in one, each with ids of its own (Search-R1's)
        name = f"{values['data_source']}-{name}"
    where = f"{source.key}: {row.where}" + (f" (id '{name}')" if name is not None else "")
    # A record with evidence must fit its layout; without any, all layouts agree on question and answers.
    bare = not any(field in values for field in EVIDENCE)
    try:
        return _questions(values, number if name is None else name) if bare else layout(values)
    except KeyError as error:
        raise DataError(f"{where}: misses the field {error}; it has {', '.join(map(str, values))}") from None
    except DataError:  # names its place
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: {error}") from None


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field}: got {type(value).__name__}, expected text")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise TypeError(f"{field}: got {type(value).__name__}, expected text")
    if not str(value).strip():
        raise ValueError(f"{field}: is empty")
    return str(value)


def to_example(record: Record, corpus: str) -> Example:
    """Convert a record to an example that searches the corpus of that name."""
    return Example(
        id=record.id,
        inputs={"question": record.question, "corpus": corpus},
        metadata={"answers": list(record.answers), "titles": list(record.titles), "type": record.kind},
    )


def merge_paragraphs(records: Iterable[Record]) -> list[Document]:
    """Merge the records' paragraphs, in order of first appearance, without repetition of (title, text)."""
    # The same paragraph comes with many questions; one document each, in a stable order, or ids would change with the
    # splits in use.
    union = dict.fromkeys(paragraph for record in records for paragraph in record.paragraphs)
    return [Document(id=str(number), title=title, text=text) for number, (title, text) in enumerate(union)]


def load_corpus(key: str, spec: str) -> list[Document]:
    """Load a corpus from a file or the hub into memory; see `passage` for the records that it may have.

    Raises:
        DataError: a missing or malformed file, a document without a field, or duplicate ids.
    """
    source = Source(key, spec)
    rows = source.rows("train")
    return check_unique(key, ((row, passage(source, row, number)) for number, row in enumerate(rows)))


def passage(source: Source, row: Row, number: int) -> Document:
    """Read a passage: `title` and `text` (or sentences), `[title, text]`, or `contents` with the title as first line.

    Raises:
        DataError: another shape.
    """
    values = row.values
    # HotpotQA's paragraphs: title and sentences
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == 2:
        title, text = values
        values = {"title": title, "text": text}
    if not isinstance(values, Mapping):
        raise DataError(
            f"{source.key}: {row.where}: got {type(values).__name__}, expected a document with title and text"
        )
    if "text" not in values and isinstance(values.get("contents"), str):  # as in Search-R1's wiki-18
        title, _, text = values["contents"].partition("\n")
        values = {"id": values.get("id"), "title": title.strip().strip('"'), "text": text}
    sentences = values.get("text")
    if isinstance(sentences, list) and all(isinstance(sentence, str) for sentence in sentences):
        values = {name: values[name] for name in ("id", "title") if name in values} | {"text": "".join(sentences)}
    for field in ("title", "text"):
        if not isinstance(values.get(field), str):
            got = f"got {type(values[field]).__name__}, expected text" if field in values else "is missing"
            raise DataError(f"{source.key}: {row.where}: {field} {got} (fields: {', '.join(map(str, values))})")
    name = record_id(values, "id")
    return Document(id=str(number if name is None else name), title=values["title"], text=values["text"])


def subset(examples: Sequence[Example], items: int | None, *key: int | str) -> list[Example]:
    """Return the first `items` after a shuffle keyed by `key`; without a limit, all in their order."""
    if items is None or items >= len(examples):
        return list(examples)
    # Ordered by keyed digest, not by shuffling: a row added to the file changes at most one member of the subset.
    order = sorted(examples, key=lambda example: (rng.digest("subset", *key, example.id), example.id))
    return order[:items]
