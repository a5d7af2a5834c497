"""Question answering data: official record layouts to examples and paragraphs. Used by `open_qa`.

A *layout* says how one data set writes a record. Files hold the official JSON; the hub's copies hold the same fields
in columns; both come through the same reader. Files with nothing but questions and answers are read under any layout.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import from_json
from typing_extensions import override

from mmrl import rng
from mmrl.records import Example
from mmrl.retrieval.base import Document, title_and_text
from mmrl.tasks.data.rows import Row, Source, Text, check_unique, own_fields, read_as, record_id

Paragraph = tuple[str, str]
"""Title and text."""
_LIST = re.compile(r"\s*\[\s*(u?[\"'].*)?\]\s*", re.DOTALL)


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
    normalized: tuple[str, ...] = ()
    """TriviaQA's `normalized_aliases`: those of the answers that its own script made."""


def _listed(value: object) -> object:
    """Read a list that a file of columns holds as text, in JSON (PopQA's) or as Python prints it (pandas)."""
    # Without quotes it is an answer as it stands: `[sic]`, or the interval `[0, 1]`.
    if not (isinstance(value, str) and _LIST.fullmatch(value)):
        return value
    with suppress(ValueError):
        return from_json(value)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        read = ast.literal_eval(value.strip())
        # numpy prints no commas, and Python joins texts side by side.
        tokens = tokenize.generate_tokens(io.StringIO(value.strip()).readline)
        if isinstance(read, list) and sum(token.type == tokenize.STRING for token in tokens) <= len(read):
            return read
    raise ValueError(f"got {value[:60]!r}, expected an answer, or a list of them in JSON or as Python prints it")


def _accepted(value: object) -> object:
    """Read accepted answers: a text, a list, or TriviaQA's record of aliases."""
    if isinstance(value, Mapping):
        # Both: its script puts a space in the place of a punctuation mark, which `task.punctuation=delete` does not.
        lists = [value.get(name) or [] for name in ("aliases", "normalized_aliases")]
        if not all(isinstance(aliases, list) for aliases in lists):  # the letters of a text would be taken for aliases
            raise ValueError("expected lists in aliases and normalized_aliases")
        # What that script leaves nothing of is no answer.
        return [*lists[0], *(alias for alias in lists[1] if alias != "")]
    value = _listed(value)
    return [value] if isinstance(value, str | int) else value


def _pairs(*columns: str) -> BeforeValidator:
    """Read pairs in the files' form `[[a, b], ...]`, or in the hub's: a list in each of two columns."""

    def read(value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        cells = [value.get(column) for column in columns]
        if not all(isinstance(column, list) for column in cells):  # the letters of a text would be taken for entries
            raise ValueError(f"expected lists in its columns {' and '.join(columns)}")
        return list(zip(*cells, strict=True))

    return BeforeValidator(read)


Context = Annotated[list[tuple[str, list[str]]], _pairs("title", "sentences")]


class Questions(BaseModel):
    """Questions with accepted answers: NQ and TriviaQA, and files of all other sets that bring no paragraphs."""

    model_config = ConfigDict(coerce_numbers_to_str=True, loc_by_alias=False)
    question: Text
    answers: Annotated[list[Text], BeforeValidator(_accepted)] = Field(
        # PopQA's, FlashRAG's, others'; the first one there counts
        validation_alias=AliasChoices("possible_answers", "golden_answers", "answers", "answer"),
        min_length=1,
    )
    answer_aliases: Annotated[list[Text] | None, BeforeValidator(_listed)] = None
    """MuSiQue's; it scores the best over the answer and these."""
    normalized: Annotated[list[str] | None, Field(validation_alias=AliasPath("answer", "normalized_aliases"))] = None
    type: Any = ""

    def kind(self) -> str:
        """Return the kind of question."""
        return str(self.type)

    def titles(self) -> Iterable[str]:
        """Return the titles of the gold paragraphs."""
        return ()


class SupportedParagraph(BaseModel):
    """Paragraph of PopQA or MuSiQue."""

    title: str
    text: str = Field(validation_alias=AliasChoices("text", "paragraph_text"))
    is_supporting: Any = False


def _texts(paragraphs: Sequence[Sequence[str]]) -> list[str]:
    """Join the sentences of each paragraph of a record."""
    # HotpotQA's begin with their space (in a few paragraphs they do not, so the record decides), 2WikiMultihopQA's
    # have none.
    pairs = (pair for sentences in paragraphs for pair in pairwise(sentences))
    spaced = any(before[-1:].isspace() or after[:1].isspace() for before, after in pairs)
    return [("" if spaced else " ").join(sentences) for sentences in paragraphs]


class Evidence(BaseModel):
    """Paragraphs that questions bring, in the fields of any layout."""

    model_config = ConfigDict(coerce_numbers_to_str=True)
    context: Context = []
    paragraphs: list[SupportedParagraph | None] = []  # PopQA's file has null where one is missing

    def passages(self) -> Iterable[Paragraph]:
        """Return the paragraphs."""
        titles, paragraphs = [title for title, _ in self.context], [sentences for _, sentences in self.context]
        yield from zip(titles, _texts(paragraphs), strict=True)
        yield from ((paragraph.title, paragraph.text) for paragraph in self.paragraphs if paragraph)


class Hotpot(Questions, Evidence):
    """HotpotQA (distractor and fullwiki) and 2WikiMultihopQA; without `context` it brings no paragraphs."""

    supporting_facts: Annotated[list[tuple[str, Any]], _pairs("title", "sent_id")]

    @override
    def titles(self) -> Iterable[str]:
        return (title for title, _ in self.supporting_facts)


class Popqa(Questions, Evidence):
    """PopQA with gold passages."""

    paragraphs: list[SupportedParagraph | None]
    prop: Any = ""

    @override
    def kind(self) -> str:
        return str(self.prop)

    @override
    def titles(self) -> Iterable[str]:
        return (paragraph.title for paragraph in self.paragraphs if paragraph and paragraph.is_supporting)


class Musique(Popqa):
    """MuSiQue-Ans."""

    id: str

    @override
    def kind(self) -> str:
        return f"{self.id.split('hop')[0]}hop"


EVIDENCE = ("context", "supporting_facts", "paragraphs")
"""A record with one of these is in its data set's own layout; one without any has a question and answers alone."""
LAYOUTS: Mapping[str, type[Questions]] = {
    "hotpotqa": Hotpot,
    "2wiki": Hotpot,
    "musique": Musique,
    "nq": Questions,
    "triviaqa": Questions,
    "popqa": Popqa,
}
"""`task.dataset` -> layout."""


def load_records(source: Source, split: str, layout: type[Questions]) -> list[Record]:
    """Return all records of a source.

    Raises:
        DataError: a missing or malformed file, a record without a field or with an empty answer, or duplicate ids.
    """
    rows = enumerate(map(own_fields, source.rows(split)))
    return check_unique(source.key, ((row, _record(source.key, row, layout, f"{split}-{n}")) for n, row in rows))


def _record(key: str, row: Row, layout: type[Questions], number: str) -> Record:
    """Convert a row to a record; `number` is its id where it has none."""
    bare = not (isinstance(row.values, Mapping) and any(field in row.values for field in EVIDENCE))
    fields = read_as(Questions if bare else layout, key, row)
    name = record_id(row.values, "_id", "id", otherwise="")
    # several sets in one, each with ids of its own (Search-R1's)
    if name and row.values.get("data_source"):
        name = f"{row.values['data_source']}-{name}"
    return Record(
        id=name or number,
        question=fields.question,
        answers=tuple(dict.fromkeys([*fields.answers, *(fields.answer_aliases or ())])),
        titles=tuple(dict.fromkeys(fields.titles())),
        kind=fields.kind(),
        paragraphs=tuple(fields.passages()) if isinstance(fields, Evidence) else (),
        normalized=tuple(filter(None, fields.normalized or ())),
    )


def to_example(record: Record, corpus: str) -> Example:
    """Convert a record to an example that searches the corpus of that name."""
    metadata = {"answers": list(record.answers), "titles": list(record.titles), "type": record.kind}
    if record.normalized:
        metadata["normalized"] = list(record.normalized)
    return Example(id=record.id, inputs={"question": record.question, "corpus": corpus}, metadata=metadata)


def merge_paragraphs(records: Iterable[Record]) -> list[Document]:
    """Merge the records' paragraphs, in order of first appearance, without repetition of (title, text)."""
    # The same paragraph comes with many questions; one document each, in a stable order, or ids would change with the
    # splits in use.
    union = dict.fromkeys(paragraph for record in records for paragraph in record.paragraphs)
    return [Document(id=str(number), title=title, text=text) for number, (title, text) in enumerate(union)]


class Passage(BaseModel):
    """Passage of a corpus."""

    title: str
    text: str


def passage(source: Source, row: Row, number: int) -> Document:
    """Read a passage: `title` and `text` (or sentences), `[title, text]`, or `contents` with a title in its first line.

    Raises:
        DataError: another shape.
    """
    values = row.values
    if isinstance(values, list) and len(values) == 2:  # HotpotQA's paragraphs
        values = dict(zip(("title", "text"), values, strict=True))
    if isinstance(values, Mapping):
        if "text" not in values and isinstance(values.get("contents"), str):
            title, text = title_and_text(values["contents"])
            values = {"id": values.get("id"), "title": title, "text": text}
        sentences = values.get("text")
        if isinstance(sentences, list) and all(isinstance(sentence, str) for sentence in sentences):
            values = {**values, "text": _texts([sentences])[0]}
    fields = read_as(Passage, source.key, Row(row.where, values))
    return Document(id=record_id(values, "id", otherwise=number), title=fields.title, text=fields.text)


def subset_of(examples: Sequence[Example], split: str, seed: int, items: int | None) -> list[Example]:
    """Return a task's subset of a split, drawn by the run's seed for `train` alone."""
    # dev and test subsets are the same for every seed, so that runs can be compared item by item
    return subset(examples, items, split, *((seed,) if split == "train" else ()))


def subset(examples: Sequence[Example], items: int | None, *key: int | str) -> list[Example]:
    """Return the first `items` after a shuffle keyed by `key`; without a limit, all in their order."""
    if items is None or items >= len(examples):
        return list(examples)
    # Ordered by keyed digest, not by shuffling: a row added to the file changes at most one member of the subset.
    order = sorted(examples, key=lambda example: (rng.digest("subset", *key, example.id), example.id))
    return order[:items]
