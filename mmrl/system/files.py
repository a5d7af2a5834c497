"""Files that survive a kill at any instant: atomic whole-file writes, append-only JSON lines.

Lowest part of `report`; knows nothing of runs. A reader never sees half of an atomically written file, and a
half-written last line of a JSON-lines file is as if it had never been written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mmrl.errors import DataError

Document: TypeAlias = dict[str, Any]
"""A JSON object, as `json.loads` returns it: whoever reads a value must know its type."""


def to_plain(value: object) -> object:
    """`json`'s `default`: what it cannot write itself (mappings, numpy numbers and arrays, paths, sets).

    Raises:
        TypeError: anything else; silently writing a `repr` would lose data.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


# A journal writes a thousand lines a step; making an encoder for each would be a third of its cost.
_ONE_LINE = json.JSONEncoder(default=to_plain, separators=(",", ":"))


def dumps(value: object, *, indent: int | None = None) -> str:
    """JSON with floats that read back bit-equal; one line unless `indent` is given."""
    if indent is None:
        return _ONE_LINE.encode(value)
    return json.dumps(value, default=to_plain, indent=indent)


def plain(value: object) -> Any:
    """`value` as JSON would read it back (tuples become lists, mappings dicts, numpy numbers Python's)."""
    return json.loads(dumps(value))


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`: all of it or none of it, also after a crash of the machine."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files that a killed `atomic_write` left in `folder`."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def append_jsonl(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Append records, one line each, in a single write; they outlive the process from then on."""
    text = "".join(dumps(record) + "\n" for record in records)
    if not text:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        rest = text.encode()
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def read_jsonl(path: Path) -> list[Document]:
    """All records; a last line without its newline is ignored, a missing file is empty.

    Raises:
        DataError: any other line that is not a JSON object, with file and line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError:
            raise DataError(f"{path}:{number}: got {line[:60]!r}, expected one JSON object per line") from None
        records.append(record)
    return records


def repair_jsonl(path: Path) -> None:
    """Cut a half-written last line off, so that the next append starts on a line of its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        atomic_write(path, data[: data.rfind(b"\n") + 1])
