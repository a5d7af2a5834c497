"""Vectors on disk: encoded in shards that survive a kill, searched by FAISS through a memory map.

Shared by `dense` (one vector a passage) and `colbert` (one a token). FAISS is imported when an index is built or
opened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.retrieval.base import Document

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

Shard = Mapping[str, np.ndarray]


def encode_shards(
    folder: Path, documents: Sequence[Document], encode: Callable[[Sequence[Document]], Shard], title: str
) -> list[Path]:
    """Encode a corpus shard by shard; shards of an earlier attempt are reused.

    Args:
        folder: where `shard-00000.npz` and so on go; a shard is whole or absent.
        documents: the corpus, in order.
        encode: documents -> named arrays.
        title: of the progress bar that a terminal shows.

    Returns:
        The shards' files in corpus order.
    """
    folder.mkdir(exist_ok=True)
    files = []
    with progress(len(documents), title) as advance:
        for start in range(0, len(documents), SHARD):
            file = folder / f"shard-{start // SHARD:05d}.npz"
            part = documents[start : start + SHARD]
            # A killed build leaves no half of a shard: it is written beside its place and renamed.
            if not file.is_file():
                work = file.with_suffix(".tmp")
                with work.open("wb") as out:
                    np.savez(out, **encode(part))  # type: ignore[arg-type]
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(work, file)
            files.append(file)
            advance(len(part))
    return files


def build_faiss(vectors: Iterator[np.ndarray], dimension: int, form: str, file: Path, *, half: bool = False) -> None:
    """Write a FAISS inner-product index of vectors that come in blocks.

    Args:
        vectors: blocks of shape (n, dimension).
        dimension: of a vector.
        form: `flat` (exact) or `hnsw`.
        file: to write.
        half: keep vectors in 16 bits, not 32.
    """
    import faiss

    index = _empty(dimension, form, half)
    for block in vectors:
        # In pieces: FAISS copies what it is given, and 16-bit blocks become float32 here.
        for start in range(0, len(block), ADD):
            index.add(np.ascontiguousarray(block[start : start + ADD], dtype=np.float32))
    faiss.write_index(index, str(file))


def _empty(dimension: int, form: str, half: bool) -> faiss.Index:
    import faiss

    metric = faiss.METRIC_INNER_PRODUCT
    sixteen = faiss.ScalarQuantizer.QT_fp16
    if form == "flat":
        return faiss.IndexScalarQuantizer(dimension, sixteen, metric) if half else faiss.IndexFlatIP(dimension)
    graph: faiss.IndexHNSW
    if half:
        # FAISS's type stubs miss that a quantizer can be given by its number.
        graph = faiss.IndexHNSWSQ(dimension, sixteen, HNSW_LINKS, metric)  # type: ignore[arg-type]
        # 16-bit floats have nothing to learn from the data, yet FAISS asks for training.
        graph.is_trained = graph.storage.is_trained = True
    else:
        graph = faiss.IndexHNSWFlat(dimension, HNSW_LINKS, metric)
    graph.hnsw.efConstruction = HNSW_BUILD
    return graph


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


@contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[int], None]]:
    """A progress bar in a terminal, else nothing; yields what advances it."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, advance=done)
