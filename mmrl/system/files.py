"""Files that survive a kill at any instant: atomic files and folders, append-only JSON lines, locks.

A reader never sees half of an atomically written file or folder, and a half-written last line of a JSON-lines file is
as if it had never been written.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mmrl.errors import ConfigError, DataError, nearest
from mmrl.secrets import hide

LFS = b"version https://git-lfs.github.com/spec/"
"""Beginning of a pointer that Git LFS leaves in the place of a file."""
T = TypeVar("T")
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, as `json.loads` returns it: whoever reads a value must know its type."""
LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes of a file's name and of a path (Linux)."""
MOST_VALUES = 1_000_000
"""Values in a YAML file; a few lines of aliases may stand for more than a machine has."""


def to_plain(value: object) -> object:
    """Convert what `json` cannot write itself, as its `default` (mappings, numpy numbers and arrays, paths, sets).

    Raises:
        TypeError: anything else; silently writing a `repr` would lose data.
    """
    if isinstance(value, Mapping):
        return dict(value)
    # Not imported here: `mmrl credit` needs no arrays, and a numpy value exists only where numpy has been loaded.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


# A journal writes a thousand lines a step; making an encoder for each would be a third of its cost.
_ONE_LINE = json.JSONEncoder(default=to_plain, separators=(",", ":"), allow_nan=False)
_WITH_NAN = json.JSONEncoder(default=to_plain)


def dumps(value: object, *, indent: int | None = None) -> str:
    """Write JSON with floats that read back bit-equal, and without secrets; one line unless `indent` is given.

    NaN and infinity, which JSON does not have, become null.
    """
    encoder = _ONE_LINE if indent is None else json.JSONEncoder(default=to_plain, indent=indent, allow_nan=False)
    try:
        return hide(encoder.encode(value))
    except ValueError:
        return hide(encoder.encode(json.loads(_WITH_NAN.encode(value), parse_constant=lambda _: None)))


def plain(value: object) -> Any:
    """Convert `value` as a JSON round trip would: tuples become lists, numpy numbers Python's, secrets references."""
    return json.loads(dumps(value))


def user_path(text: str) -> Path:
    """Expand a path that a user typed: `~` is the home folder; `~somebody` stays if there is no such user.

    Raises:
        ConfigError: longer than any file's name, or with a NUL: every look at it would raise.
    """
    if "\0" in text:
        raise ConfigError(f"{text[:60]!r}: got a path with a NUL character, which no file can have")
    # not `Path.expanduser`, which raises RuntimeError for such a name
    path = Path(os.path.expanduser(text))
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in path.parts]
    if max(sizes, default=0) > LONGEST_NAME or sum(sizes) + len(sizes) > LONGEST_PATH:
        raise ConfigError(f"{text[:60]}…: got a path of {len(text)} characters, which no file can have")
    return path


def similar(path: Path) -> str:
    """Return `"; did you mean 'x'?"` for the name beside a path that is not there, or beside its first such folder."""
    try:
        missing = next((part for part in (*reversed(path.parents), path) if not part.exists()), None)
        return nearest(missing.name, [entry.name for entry in missing.parent.iterdir()]) if missing is not None else ""
    except OSError:  # nothing can be listed there
        return ""


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add `path` to errors of the operating system inside: a write to an open file does not name it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`, text without secrets: all of it or none of it, also after a crash or on a full disk."""
    # Beside its target: a rename across file systems would be a copy. The pid keeps two writers apart.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with named(path):
            with open(temporary, "wb") as file:
                file.write(hide(data).encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            # The rename is durable once the folder itself is on disk.
            sync(path.parent)
    finally:
        # On a full disk its half would keep others from being written.
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which becomes `path` when the block ends; after an error it is removed.

    Raises:
        OSError: `path` exists and is not empty, or cannot be written.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield work
        for folder, _, names in os.walk(work):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
        # `mkdtemp` makes folders for their owner alone.
        work.chmod(0o755)
        os.replace(work, path)
        sync(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def left_beside(path: Path) -> list[Path]:
    """Return the folders of an `atomic_dir(path)` that was killed, or that another process is filling now."""
    name = re.compile(rf"\.{re.escape(path.name)}-[a-z0-9_]{{8}}")  # as `mkdtemp` makes them
    return sorted(found for found in path.parent.iterdir() if name.fullmatch(found.name) and found.is_dir())


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files that a killed `atomic_write` left in `folder`."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def append_jsonl(path: Path, records: Iterable[Mapping[str, object]]) -> bytes:
    """Append records, one line each, in a single write; they outlive the process from then on.

    Returns:
        What was appended. Where that fails, the file is as it was.
    """
    data = "".join(dumps(record) + "\n" for record in records).encode()
    if not data:
        return data
    with named(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(descriptor).st_size
        try:
            remaining = data
            # A write may be partial (a full disk, a signal); what is missing is written on.
            while remaining:
                remaining = remaining[os.write(descriptor, remaining) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)
    return data


def read_jsonl(path: Path) -> list[JsonObject]:
    """Return all records; a last line without its newline is ignored, a missing file is empty.

    Raises:
        DataError: any other line that is not a JSON object, with file and line.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    # After the last newline is nothing, or a half-written line.
    return parse_jsonl(data[: data.rfind(b"\n") + 1], str(path))


def parse_jsonl(data: bytes, source: str) -> list[JsonObject]:
    """Parse the JSON objects in `data`, one a line; empty lines are skipped.

    Raises:
        DataError: any other line that is not a JSON object, with its number in `source`.
    """
    records = []
    # Line feeds alone separate lines: JSON text may hold the other separators of Unicode.
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            raise DataError(f"{source}:{number}: got {line[:60]!r}, expected one JSON object per line") from None
        records.append(record)
    return records


def read_yaml(path: Path) -> object:
    """Read a YAML file.

    Raises:
        DataError: it cannot be read, is not YAML, or has a key twice; names the file and the line.
    """
    import yaml  # here: `mmrl credit` of a file reads none

    repeated: list[str] = []

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
            # Here and not where a mapping is made of it: by then `<<` has brought in the keys of another.
            node = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
                if (key.tag, key.value) in seen:
                    repeated.append(f"{path}:{key.start_mark.line + 1}: {key.value}: given more than once")
                seen.add((key.tag, key.value))
            return node

    try:
        content: object = Loader(path.read_text(encoding="utf-8")).get_single_data()
        values = _written_out(content, {})
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}{similar(path)}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: cannot be read: not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2000-99-99
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or " ".join(str(error).split()).partition(' in "<unicode string>"')[0]
        line = f":{mark.line + 1}" if mark else ""
        raise DataError(f"{path}{line}: cannot be read: not YAML ({reason or type(error).__name__})") from None
    if repeated:
        raise DataError(repeated)
    if values > MOST_VALUES:
        raise DataError(f"{path}: cannot be read: more than {MOST_VALUES:,} values once its aliases are written out")
    return content


def _written_out(value: object, counts: dict[int, float]) -> float:
    """Count the values in `value`, an alias at each use; infinite if a value contains itself.

    Args:
        counts: counts of lists and mappings that were counted already, by identity.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counts:
        counts[id(value)] = math.inf  # found again below itself
        items = value.values() if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_written_out(item, counts) for item in items)
    return counts[id(value)]


def gunzip(data: bytes, largest: int) -> bytes:
    """Unpack `data`, a few kilobytes of which may unpack to more than a machine has: to `largest` bytes at most.

    Raises:
        ValueError: it unpacks to more.
        EOFError: it ends early.
        zlib.error, OSError: it is damaged, or not gzip.
    """
    with gzip.open(io.BytesIO(data)) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it unpacks to more than {largest} bytes")
    return content


def repair_jsonl(path: Path) -> None:
    """Cut a half-written last line off, so that the next append starts on a line of its own."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        atomic_write(path, data[: data.rfind(b"\n") + 1])


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hexadecimal digits."""
    with named(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def map_threaded(work: Callable[[T], str], items: Iterable[T]) -> list[str]:
    """Call `work` on each item, in several threads: reading and hashing both release the interpreter lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


def differences(files: Mapping[Path, tuple[int, str | None]]) -> dict[Path, str]:
    """Return the files that differ from what was written, and how each differs.

    Args:
        files: file -> its bytes and SHA-256 then; None: its size alone is compared.
    """

    def difference(path: Path) -> str:
        size, sha256 = files[path]
        if not path.is_file():
            return "is missing"
        if (current_size := path.stat().st_size) != size:
            return f"has {current_size:,} bytes, not the {size:,} that were written"
        # A torn write often has the right size: file systems extend a file before its blocks are there.
        return "" if sha256 is None or file_digest(path) == sha256 else "has not the content that was written"

    texts = map_threaded(difference, files)
    return {path: text for path, text in zip(files, texts, strict=True) if text}


def take_lock(path: Path) -> int:
    """Hold the lock file `path` until the descriptor that is returned is closed or the process ends.

    The file stays, with the holder's pid in it: deleting it would let two processes hold two locks.

    Raises:
        BlockingIOError: another process holds it; the message is that one's pid.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # flock, not a file's existence: the kernel releases it however the process ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise BlockingIOError(holder or "unknown") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def is_locked(path: Path) -> bool:
    """True while a process holds the lock file `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # A shared lock is refused exactly while a holder has the exclusive one.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
