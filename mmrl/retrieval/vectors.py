"""Vectors on disk: encoded in shards that survive a kill, searched by FAISS through a memory map. Used by `dense`.

FAISS is imported when an index is built or opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.retrieval.base import Document
from mmrl.system.bar import progress

if TYPE_CHECKING:
    import faiss

SHARD = 4096
"""Passages of a shard: what a killed build loses at most."""
HNSW_LINKS = 32
HNSW_BUILD, HNSW_SEARCH = 128, 128
"""Breadth of the graph search while building and searching: recall against time."""
FAISS_FILE = "vectors.faiss"
ADD = 65_536
"""Vectors given to FAISS at once."""

PIECE = 4
"""Batches after which progress is reported."""

Advance = Callable[[int], object]
"""Called with how many further passages are encoded."""


def encode_shards(
    folder: Path, documents: Sequence[Document], encode: Callable[[Sequence[Document], Advance], np.ndarray]
) -> list[Path]:
    """Encode a corpus shard by shard; shards of an earlier attempt are reused.

    Args:
        folder: where `shard-00000.npz` and so on go; a shard is whole or absent.
        documents: the corpus, in order.
        encode: documents, and what its progress is reported to -> one vector each.

    Returns:
        The shards' files in corpus order.
    """
    folder.mkdir(exist_ok=True)
    files = []
    with progress("encoding", len(documents)) as advance:
        for start in range(0, len(documents), SHARD):
            file = folder / f"shard-{start // SHARD:05d}.npz"
            part = [documents[number] for number in range(start, min(start + SHARD, len(documents)))]
            # A killed build leaves no half of a shard: it is written beside its place and renamed.
            if not file.is_file():
                work = file.with_suffix(".tmp")
                with work.open("wb") as out:
                    np.savez(out, vectors=encode(part, advance))
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(work, file)
            else:
                advance(len(part))
            files.append(file)
    return files


def in_pieces(
    texts: Sequence[str], encode: Callable[[list[str]], Iterable[np.ndarray]], batch_size: int, advance: Advance
) -> list[np.ndarray]:
    """What `encode` makes of each text, in the order of the texts; `advance` is called after every few batches."""
    # Texts of like length side by side: little padding in a batch.
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    encoded: dict[int, np.ndarray] = {}
    for start in range(0, len(order), PIECE * batch_size):
        numbers = order[start : start + PIECE * batch_size]
        encoded.update(zip(numbers, encode([texts[number] for number in numbers]), strict=True))
        advance(len(numbers))
    return [encoded[number] for number in range(len(texts))]


def build_faiss(vectors: Iterator[np.ndarray], dimension: int, form: str, file: Path) -> None:
    """Write a FAISS inner-product index of vectors that come in blocks.

    Args:
        vectors: blocks of shape (n, dimension).
        dimension: of a vector.
        form: `flat` (exact) or `hnsw`.
        file: to write.
    """
    import faiss

    index: faiss.Index
    if form == "flat":
        index = faiss.IndexFlatIP(dimension)
    else:
        index = faiss.IndexHNSWFlat(dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILD
    for block in vectors:
        # In pieces: FAISS copies what it is given.
        for start in range(0, len(block), ADD):
            index.add(np.ascontiguousarray(block[start : start + ADD], dtype=np.float32))
    faiss.write_index(index, str(file))


def open_faiss(file: Path) -> faiss.Index:
    """A FAISS index, memory-mapped: opens at once, and processes that search the same file share its pages."""
    import faiss

    index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = HNSW_SEARCH
    return index


def nearest(index: faiss.Index, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and numbers of the k vectors with the highest inner product.

    Args:
        index: from `open_faiss`.
        queries: float32, shape (q, dimension).
        k: at least 1; fewer come back where the index holds fewer.

    Returns:
        Two arrays of shape (q, min(k, vectors)); number -1 where a graph search reached fewer.
    """
    k = min(k, index.ntotal)
    if hasattr(index, "hnsw"):
        import faiss

        # At least k: a graph search returns no more vectors than its breadth. FAISS's type stubs miss the class.
        breadth = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, k))  # type: ignore[attr-defined]
        return index.search(np.ascontiguousarray(queries, dtype=np.float32), k, params=breadth)
    return index.search(np.ascontiguousarray(queries, dtype=np.float32), k)
