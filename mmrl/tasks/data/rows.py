"""Rows from data files and from the hub: plain dictionaries, each with a name for error messages. Used by loaders.

A source is on this machine (`tasks.data.places`): files `.json`, `.jsonl`, `.csv`, `.tsv`, `.parquet`, `.arrow`, or
`.txt` as DPR writes topics. Or it is a hub id `owner/name[:config[:split]]`, or a Python object `package.module:name`
(a list of mappings or `dspy.Example`s, or a function that returns one).

The readers of JSON, CSV and TSV are our own: `datasets` and pandas name no line in their errors, guess types (an id
`007` becomes 7), and want the same fields in every record.
"""

from __future__ import annotations

import ast
import csv
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import Field, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError

from mmrl.config.base import reasons
from mmrl.errors import DataError
from mmrl.models.hub import hub_answers
from mmrl.retrieval.base import whole_text
from mmrl.system.files import LFS, similar, user_path
from mmrl.system.objects import OBJECT, imported
from mmrl.tasks.data.places import FORMATS, files_of, names_files, parts_of

log = logging.getLogger("mmrl.data")

HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON's escape of half a UTF-16 pair; most are whole pairs."""
LONGEST_CELL = 2**31 - 1
"""Characters of a cell of CSV or TSV; Python's own limit is less than a long article, and a C long holds no more."""
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of a stream of Arrow batches."""
# Checked before anything is fetched: a spec that cannot be a hub id is a wrong path, and is reported as one.
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]*){0,2}")
HUB_SPLITS: Mapping[str, str] = {"train": "train", "dev": "validation", "test": "test"}


Fields = Mapping[str, Any]
"""A record as it was read, not yet checked: whoever uses a field checks its type, and names the record in the error."""


@dataclass(frozen=True, slots=True)
class Row:
    """Record of a source."""

    where: str
    """File and line, or file and number, for messages."""
    values: Any
    """The record as it was read; usually a mapping."""
    table: bool = False
    """It is of a table, whose records have the keys of all, with null for those that one lacks (but messages: their own
    alone)."""
    file: Path | None = None
    """Where a source has several."""


M = TypeVar("M", bound=BaseModel)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


def _not_nan(value: object) -> object:
    # Where numbers are read as texts, pandas' sign for a missing value would be one.
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"got {value}, expected a text")
    return value


Text = Annotated[str, BeforeValidator(_not_nan), AfterValidator(_not_empty)]
"""Text with something in it."""


class NoRecords(DataError):
    """A JSON file that holds something else than a list of records."""


def read_as(schema: type[M], key: str, row: Row) -> M:
    """Return the fields of a row that a schema has.

    Raises:
        DataError: with the row's place, and every field that is wrong.
    """
    try:
        return schema.model_validate(row.values)
    except ValidationError as error:
        fields = f" (fields: {', '.join(map(str, row.values))})" if isinstance(row.values, Mapping) else ""
        raise DataError(f"{key}: {row.where}: {reasons(error)}{fields}") from None


def record_id(values: Fields, *names: str, otherwise: object) -> str:
    """Return the first of the fields `names` that holds an id, or `otherwise`. 0 is one; null and no text are none."""
    return str(next((values[name] for name in names if values.get(name) not in (None, "")), otherwise))


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its mappings that are null."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return {k: without_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def own_fields(row: Row) -> Row:
    """Return a row without the nulls that a table has for the fields of other records."""
    if not row.table:
        return row
    return replace(row, values={k: v for k, v in row.values.items() if v is not None}, table=False)


def _row_of_table(where: str, values: Any) -> Row:
    """Return a row of a table, in whose messages the nulls of other messages' keys, and of other calls' arguments, are
    left out: chat templates write them."""

    def own(field: Any) -> Any:
        if not (
            isinstance(field, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in field)
        ):
            return field
        return [{"content": None, **without_nulls(message)} for message in field]

    return Row(where, {name: own(field) for name, field in values.items()}, table=True)


class _Named(Protocol):
    """Dataclass with an id."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def id(self) -> str: ...


NamedT = TypeVar("NamedT", bound=_Named)


def check_unique(key: str, objects: Iterable[tuple[Row, NamedT]]) -> list[NamedT]:
    """Return the objects built from rows, if no two have the same id.

    Where files of one source have ids in common, as files of several data sets have (`train_0`), all begin with the
    path of their file below the folder of all.

    Raises:
        DataError: two of one file have the same, or two are the same record.
    """
    found: dict[tuple[Path | None, str], NamedT] = {}
    first: dict[str, NamedT] = {}
    for row, item in objects:
        if (row.file, item.id) in found or first.get(item.id) == item:
            raise DataError(f"{key}: {row.where}: duplicate id '{item.id}'")
        found[row.file, item.id] = first[item.id] = item
    if len(first) == len(found):
        return list(found.values())
    # Ids repeat in different files alone: each row has one.
    files = {file: file.absolute() for file, _ in found if file is not None}
    folder = os.path.commonpath([file.parent for file in files.values()])
    return [
        replace(item, id=f"{files[file].relative_to(folder)}:{name}")
        for (file, name), item in found.items()
        if file is not None
    ]


def same_rows(sources: Mapping[str, str], amount: str | None = None) -> dict[tuple[str, ...], str]:
    """Group the splits whose sources have files or ids in common; returns them with a sentence that says so.

    Args:
        sources: split -> files, hub id or object.
        amount: word for what the splits of one source are of it; None: both or all.
    """
    # Compared by what a source holds, not by its spelling: two spellings of one file are one source, and a hub id
    # without a split has other rows for each of ours.
    parts = {split: Source("", spec).identities(split) for split, spec in sources.items()}
    groups: list[tuple[str, ...]] = []
    for split in sources:
        sharing = [group for group in groups if any(parts[split] & parts[other] for other in group)]
        groups = [*(group for group in groups if group not in sharing), (*chain.from_iterable(sharing), split)]
    texts = {}
    for splits in (group for group in groups if len(group) > 1):
        if all(parts[split] == parts[splits[0]] for split in splits):
            what = amount or ("both" if len(splits) == 2 else "all")
            texts[splits] = f"{' and '.join(splits)} are {what} {sources[splits[0]]}"
        else:
            texts[splits] = f"{' and '.join(f'{split} ({sources[split]})' for split in splits)} have files in common"
    return texts


@dataclass(frozen=True, slots=True)
class Source:
    """A place to read rows from.

    Args:
        key: the config key that named it (`task.data.train`).
        spec: text of the user; several sources have commas between them.
    """

    key: str
    spec: str

    def files(self, split: str) -> list[Path]:
        """Return the files, in the order in which they are read; none for a hub id or an object.

        Raises:
            DataError: neither a file nor a hub id; files that are not all there, or of several splits.
        """
        if self.is_object:
            return []
        try:
            if names_files(self.spec):
                files = [file for part in parts_of(self.spec) for file in files_of(part, split)]
                if twice := [file for file, count in Counter(map(Path.resolve, files)).items() if count > 1]:
                    raise DataError(f"{twice[0]} is named twice, and its records would count twice; name it once")
                return files
        except DataError as error:
            raise DataError(f"{self.key}: {error}") from None
        path = user_path(self.spec)
        # a typo in a file name must not become a request to the hub
        if path.suffix.lower() in FORMATS or not HUB_ID.fullmatch(self.spec):
            raise DataError(
                f"{self.key}: '{self.spec}': no such file; expected {', '.join(FORMATS)} files (one, a folder, a "
                "pattern or a list of them), a hub id owner/name[:config[:split]]"
                + ("" if self.key == "algo.file" else ", or mini")
                + similar(path)
            )
        return []

    @property
    def is_object(self) -> bool:
        """True if the source is a Python object, not a file."""
        return OBJECT.fullmatch(self.spec) is not None and not user_path(self.spec).is_file()

    def identities(self, split: str) -> set[str]:
        """Return texts of which two sources share one if they have rows in common: their files, or what they name."""
        # What is wrong with its files is said where they are read.
        with suppress(DataError):
            if files := self.files(split):
                return {str(file.resolve()) for file in files}
        return {self.spec if self.is_object else ":".join(self._hub_place(split))}

    def _hub_place(self, split: str) -> tuple[str, str, str]:
        """Return name, config (may be empty) and split of a hub id."""
        name, _, rest = self.spec.partition(":")
        config, _, hub_split = rest.partition(":")
        return name, config, hub_split or HUB_SPLITS[split]

    def rows(self, split: str) -> list[Row]:
        """Return all rows.

        Args:
            split: `train`, `dev` or `test`; names the hub split where the id does not.

        Raises:
            DataError: unreadable, malformed or empty.
        """
        rows = list(self.stream(split))
        if not rows:
            raise DataError(f"{self.key}: {self.spec}: has no records")
        return rows

    def stream(self, split: str) -> Iterator[Row]:
        """Yield rows one by one, for sources larger than memory (all but `.json`); an empty source is no error here."""
        if self.is_object:
            return self._object()
        files = self.files(split)
        if len(files) < 2:
            return self._file(files[0]) if files else self._hub(split)
        return (replace(row, file=file) for file in files for row in self._file(file))

    def _object(self) -> Iterator[Row]:
        records = imported(self.key, self.spec)
        if callable(records):
            try:
                records = records()
            except Exception as error:  # whatever the user's own code raises
                raise DataError(f"{self.key}: {self.spec}() raised {type(error).__name__}: {error}") from None
        if isinstance(records, str | Mapping) or not isinstance(records, Iterable):
            raise DataError(f"{self.key}: {self.spec} is a {type(records).__name__}, expected a list of records")
        row = _row_of_table if type(records).__module__.startswith("datasets.") else Row
        for number, record in enumerate(records):
            # a `dspy.Example` has `items` and is no Mapping
            if not (isinstance(record, Mapping) or hasattr(record, "items")):
                kind = type(record).__name__
                raise DataError(f"{self.key}: {self.spec}[{number}] is a {kind}, expected a mapping or dspy.Example")
            yield row(f"{self.spec}[{number}]", dict(record.items()))

    def _file(self, path: Path) -> Iterator[Row]:
        readers: Mapping[str, Callable[[Path], Iterator[Row]]] = {
            ".json": _json,
            ".jsonl": _jsonl,
            ".csv": partial(_table, delimiter=","),
            ".tsv": partial(_table, delimiter="\t"),
            ".parquet": _parquet,
            ".arrow": _arrow,
            ".txt": _topics,
        }
        try:
            with path.open("rb") as file:
                if file.read(len(LFS)) == LFS:
                    raise ValueError(
                        f"{path} is a pointer of Git LFS and not the file itself; get it by `git lfs pull`"
                    )
            yield from readers[path.suffix.lower()](path)
        except OSError as error:
            raise DataError(f"{self.key}: cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{self.key}: {path} is not UTF-8 (byte {error.start})") from None
        except NoRecords as error:
            raise NoRecords(f"{self.key}: {error}") from None
        except ValueError as error:
            raise DataError(f"{self.key}: {error}") from None

    def _hub(self, split: str) -> Iterator[Row]:
        from datasets import load_dataset

        name, config, hub_split = self._hub_place(split)
        offline = not Path(name).exists() and not hub_answers()  # its client would try for half a minute, a line a try
        try:
            with _offline() if offline else nullcontext():
                table = load_dataset(name, config or None, split=hub_split)
        except Exception as error:
            # `datasets` raises many types here: no network, no such repository, config or split
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            why = "the hub does not answer, and it is not in the local cache" if offline else reason
            hint = similar(user_path(self.spec))
            raise DataError(
                f"{self.key}: cannot load '{self.spec}' (split {hub_split}) from the hub: {why}{hint}"
            ) from None
        try:
            yield from _numbered(table, self.spec)
        except ValueError as error:
            raise DataError(f"{self.key}: {error}") from None


@contextmanager
def _offline() -> Iterator[None]:
    """Load data sets from the local cache alone."""
    import datasets
    from huggingface_hub import constants

    # Both libraries read their switch once, at import, so an environment variable would come too late.
    settings = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = settings


def _json(path: Path) -> Iterator[Row]:
    # A JSON list is read whole; JSON Lines and parquet are streamed.
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = _parsed(text, str(path))
    except ValueError as error:
        lines = "; records line by line are a .jsonl file" if "Extra data: line 2" in str(error) else ""
        raise ValueError(f"{error}{lines}") from None
    if not isinstance(content, list):
        raise NoRecords(f"{path}: got {type(content).__name__}, expected a JSON list of records")
    for number, values in enumerate(content):
        yield Row(f"{path} record {number}", values)


def _jsonl(path: Path) -> Iterator[Row]:
    # utf-8-sig: spreadsheets write a byte order mark, which would become part of the first field's name
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            values = _parsed(line, where)
            if isinstance(values, list):
                raise ValueError(f"{where}: got a list, expected a record; a list of records is a .json file")
            yield Row(where, values)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; of a key that stands twice in it, one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key '{key}' stands twice in an object")
    return found


def _parsed(text: str, where: str) -> object:
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or thousands of brackets
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not HALF.search(text):
        return values
    encoded = json.dumps(values, ensure_ascii=False)
    if (text := whole_text(encoded)) == encoded:
        return values
    log.warning("%s: holds half of a UTF-16 pair, which is no character; U+FFFD stands for it", where)
    return json.loads(text)


def _cells(path: Path, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the cells of each record, with the place where it ends."""
    csv.field_size_limit(LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        # Strict: else a quote that is not closed takes the records after it into its cell.
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        end = 0
        try:
            for cells in reader:
                end = reader.line_num
                yield f"{path} line {end}", cells
        except csv.Error as error:
            raise ValueError(
                f"{path} line {end + 1}: {error}; a cell that begins with a quote ends with one, and has those inside "
                'doubled ("")'
            ) from None


def _table(path: Path, delimiter: str) -> Iterator[Row]:
    records = _cells(path, delimiter)
    where, header = next(records, ("", []))
    _refuse_repeated(header, where)
    for where, cells in records:
        if not cells:
            continue
        # `csv.DictReader` fills missing cells with None and hides the line.
        if len(cells) != len(header):
            raise ValueError(f"{where}: got {len(cells)} cells, the header has {len(header)} ({', '.join(header)})")
        yield Row(where, dict(zip(header, cells, strict=True)))


def _topics(path: Path) -> Iterator[Row]:
    """Read topics of DPR and Anserini: question, tab, a Python list of answers; no header."""
    for where, cells in _cells(path, "\t"):
        try:
            question, answers = cells
            yield Row(where, {"question": question, "answer": ast.literal_eval(answers)})
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{where}: expected a question, a tab and a list of answers") from None


def _refuse_repeated(names: Iterable[str], where: str) -> None:
    # The later column would silently replace the earlier one.
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{where}: more than one column is called {', '.join(map(repr, twice))}")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    _refuse_repeated(table.schema_arrow.names, str(path))
    # batch by batch: a corpus may be larger than memory
    yield from _numbered(chain.from_iterable(map(_values, table.iter_batches())), str(path))


def _arrow(path: Path) -> Iterator[Row]:
    """Read what `datasets` keeps its rows in (a stream), or an Arrow file."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            whole = source.read(6) == b"ARROW1"
            # A stream that was cut between two batches would be taken for a shorter one.
            source.seek(max(0, source.size() - len(STREAM_END)))
            if not whole and source.read() != STREAM_END:
                raise ValueError(f"{path} is not an Arrow file, or only its beginning")
            source.seek(0)
            reader = pyarrow.ipc.open_file(source) if whole else pyarrow.ipc.open_stream(source)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if whole else reader
            _refuse_repeated(reader.schema.names, str(path))
            yield from _numbered(chain.from_iterable(map(_values, batches)), str(path))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not an Arrow file: {error}") from None


def _values(batch: Any) -> Iterable[Any]:
    """Return the rows of a batch of a table; where one cannot be read, those before it come first."""
    try:
        rows: list[Any] = batch.to_pylist()
        return rows
    except (ValueError, OverflowError):
        return (values for number in range(len(batch)) for values in batch.slice(number, 1).to_pylist())


def _numbered(records: Iterable[Any], source: str) -> Iterator[Row]:
    """Yield the records of a table, each with its number; what pyarrow cannot read, or Python has no value for, is a
    `ValueError`."""
    import pyarrow

    number = 0
    try:
        for values in records:
            yield _row_of_table(f"{source} row {number}", values)
            number += 1
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise ValueError(f"{source} row {number}: cannot be read: {error}") from None
