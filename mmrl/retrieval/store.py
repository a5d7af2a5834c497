"""Passages on disk: written in one pass, read by number through a memory map. Part of every index folder.

`passages.jsonl` has one `[id, title, text]` a line, `offsets.npy` where each line starts, `titles.npy` a sorted 64-bit
hash of every title, so that millions of passages open in milliseconds and titles can be looked up.
"""

# Not `datasets` on Arrow: a passage is one slice of a memory map here, duplicates are dropped and ids made unique while
# writing, and a folder opens without importing a large library (bars in docs/performance.md).

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmrl.retrieval.base import Document
from mmrl.system.bar import progress

PASSAGES, OFFSETS, TITLES = "passages.jsonl", "offsets.npy", "titles.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """Counts and hash of the passages that `write_passages` wrote."""

    documents: int
    """Different (title, text) pairs."""
    duplicates: int
    """Passages left out because an earlier one has the same title and text."""
    text_bytes: int
    """UTF-8 bytes of titles and texts."""
    digest: str
    """Hash of all titles and texts in order."""


def short_hash(text: str) -> int:
    """Return the 64-bit hash of a title or an id."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield passages in the order given, each (title, text) once; ids that come twice get a suffix."""
    # Hashes, not texts: 21 million passages of Wikipedia are 14 GB of text.
    hashes: set[bytes] = set()
    ids: set[int] = set()
    for document in documents:
        key = hashlib.blake2b(_content(document), digest_size=16).digest()
        if key in hashes:
            continue
        # Corpora that number their passages, joined into one, repeat ids; tasks tell passages apart by them.
        if short_hash(document.id) in ids:
            document = replace(document, id=f"{document.id}~{len(hashes)}")
        hashes.add(key)
        ids.add(short_hash(document.id))
        yield document


def _content(document: Document) -> bytes:
    # Control characters as separators, so that titles and texts do not run into each other.
    return f"\x1e{document.title}\x1f{document.text}".encode("utf-8", "surrogatepass")


def write_passages(folder: Path, documents: Iterable[Document]) -> CorpusFacts:
    """Write the `distinct` of the passages.

    Args:
        folder: exists; files of this module in it are overwritten.
        documents: any number; consumed once, never held in memory (16 bytes of hash each are).

    Returns:
        Counts and hash.
    """
    offsets, titles = [0], []
    digest = hashlib.blake2b(digest_size=16)
    given = text_bytes = 0

    def counted() -> Iterator[Document]:
        nonlocal given
        for document in documents:
            given += 1
            advance(1)
            yield document

    with (folder / PASSAGES).open("wb") as file, progress("writing") as advance:
        for document in distinct(counted()):
            content = _content(document)
            digest.update(content)
            text_bytes += len(content) - 2
            line = json.dumps([document.id, document.title, document.text], ensure_ascii=True).encode() + b"\n"
            file.write(line)
            offsets.append(offsets[-1] + len(line))
            titles.append(short_hash(document.title))
    # shape (documents + 1,): line n is bytes offsets[n] to offsets[n + 1]
    np.save(folder / OFFSETS, np.array(offsets, dtype=np.int64))
    # shape (different titles,), sorted: `has_title` is a binary search
    np.save(folder / TITLES, np.unique(np.array(titles, dtype=np.uint64)))
    return CorpusFacts(
        documents=len(titles), duplicates=given - len(titles), text_bytes=text_bytes, digest=digest.hexdigest()
    )


class PassageStore(Sequence[Document]):
    """The passages of an index folder, read through a memory map; safe to use from several threads.

    Args:
        folder: folder that `write_passages` wrote.

    Raises:
        OSError, ValueError: missing files; `read_info` has compared their content.
    """

    def __init__(self, folder: Path):
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        self._titles = np.load(folder / TITLES, mmap_mode="r")
        with (folder / PASSAGES).open("rb") as file:
            # An empty file cannot be mapped.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._offsets[-1] else b""

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Document:  # type: ignore[override]  # nobody asks for slices
        if not 0 <= number < len(self):
            raise IndexError(f"passage {number} of {len(self)}")
        line = self._map[int(self._offsets[number]) : int(self._offsets[number + 1])]
        name, title, text = json.loads(line)
        return Document(id=name, title=title, text=text)

    def has_title(self, title: str) -> bool:
        """True where a passage has this title."""
        key = np.uint64(short_hash(title))
        index = int(np.searchsorted(self._titles, key))
        return index < len(self._titles) and bool(self._titles[index] == key)
