"""ColBERT: one vector a token; FAISS over token vectors names candidates, exact MaxSim scores them (arXiv 2112.01488).

The encoder is sentence-transformers' `MultiVectorEncoder`, which loads Stanford ColBERT and PyLate checkpoints. Token
vectors are stored in 16 bits. A passage's score is the sum over query tokens of the highest inner product with any of
the passage's tokens, not only with those that named it. sentence-transformers (hence torch) and FAISS are
imported when something is encoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.vectors import FAISS_FILE, Shard, build_faiss, encode_shards, in_pieces, nearest, open_faiss

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

DEFAULT_MODEL = "colbert-ir/colbertv2.0"
TOKENS, BOUNDS = "tokens.npy", "bounds.npy"


class TokenEncoder:
    """Texts to one vector a token; loads its weights at the first text.

    Args:
        model: folder or hub id that `MultiVectorEncoder` takes.
        device: `cpu` or `cuda`.
        batch_size: texts encoded at once.
    """

    def __init__(self, model: str, *, device: str = "cpu", batch_size: int = 32):
        self.model, self.device, self.batch_size = model, device, batch_size
        self._lock = threading.Lock()

    @cached_property
    def _network(self) -> MultiVectorEncoder:
        from sentence_transformers import MultiVectorEncoder

        return MultiVectorEncoder(self.model, device=self.device)

    def load(self) -> None:
        """Load the weights, if they are not."""
        with self._lock:
            _ = self._network

    def queries(self, texts: Sequence[str]) -> list[np.ndarray]:
        """For each query its token vectors: float32, shape (tokens, dimension)."""
        # The lock: the network is loaded once, and its tokenizer is not safe in two threads.
        with self._lock:
            encoded = self._network.encode_query(
                list(texts), batch_size=self.batch_size, show_progress_bar=False, convert_to_numpy=True
            )
        return [np.asarray(vectors, dtype=np.float32) for vectors in encoded]

    def passages(
        self, documents: Sequence[Document], advance: Callable[[int], None] = lambda done: None
    ) -> list[np.ndarray]:
        """For each passage (title and text) its token vectors: float32, shape (tokens, dimension)."""

        def encode(texts: list[str]) -> Iterable[np.ndarray]:
            return self._network.encode_document(
                texts, batch_size=self.batch_size, show_progress_bar=False, convert_to_numpy=True
            )

        with self._lock:
            encoded = in_pieces([f"{d.title} | {d.text}" for d in documents], encode, self.batch_size, advance)
        return [np.asarray(vectors, dtype=np.float32) for vectors in encoded]


class ColbertRetriever(Retriever):
    """Searches an index folder's token vectors.

    Args:
        folder: from `build`.
        documents: the passages, in the order of `bounds.npy`.
        encoder: the one that the passages were encoded with.
        candidates: nearest tokens of each query token; the passages that they belong to are scored.
    """

    def __init__(self, folder: Path, documents: Sequence[Document], encoder: TokenEncoder, candidates: int = 256):
        self.documents = documents
        self._encoder, self._candidates = encoder, candidates
        self._tokens = np.load(folder / TOKENS, mmap_mode="r")
        self._bounds = np.load(folder / BOUNDS)
        self._index = open_faiss(folder / FAISS_FILE)
        if not len(self._bounds) - 1 == len(documents) or not self._index.ntotal == len(self._tokens):
            raise ValueError(f"{TOKENS}, {BOUNDS} and {FAISS_FILE} do not belong together")

    def load(self) -> None:
        """See `mmrl.retrieval.base.Retriever.load`."""
        self._encoder.load()

    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """See `mmrl.retrieval.base.Retriever.search`. Short where fewer passages are candidates."""
        if len(queries) != len(top_k):
            raise ValueError(f"got {len(queries)} queries and {len(top_k)} numbers")
        # A budget of 0 costs no encoding.
        active = [n for n, k in enumerate(top_k) if k > 0]
        results: list[list[Document]] = [[] for _ in queries]
        if active:
            for number, vectors in zip(active, self._encoder.queries([queries[n] for n in active]), strict=True):
                results[number] = self._search(vectors, top_k[number])
        return results

    def _search(self, query: np.ndarray, k: int) -> list[Document]:
        # tokens: (query tokens, candidates), numbers of token vectors; bounds[p] is the first one of passage p
        _, tokens = nearest(self._index, query, self._candidates)
        passages = np.unique(np.searchsorted(self._bounds, np.unique(tokens[tokens >= 0]), side="right") - 1)
        scores = np.array([self.maxsim(query, int(number)) for number in passages], dtype=np.float64)
        # `passages` is sorted, so a stable sort breaks ties in corpus order.
        order = np.argsort(-scores, kind="stable")[:k]
        return [replace(self.documents[int(passages[n])], score=float(scores[n])) for n in order]

    def maxsim(self, query: np.ndarray, number: int) -> float:
        """The score of one passage. Shape of query: (tokens, dimension)."""
        # (passage tokens, dimension); scored in 32 bits, stored in 16
        tokens = self._tokens[self._bounds[number] : self._bounds[number + 1]].astype(np.float32)
        return float((query @ tokens.T).max(axis=1).sum()) if len(tokens) else 0.0


def build(folder: Path, documents: Sequence[Document], encoder: TokenEncoder, form: str) -> None:
    """Encode a corpus in shards and write its token index; a build that was killed goes on where it was."""

    def encode(part: Sequence[Document], advance: Callable[[int], None]) -> Shard:
        vectors = encoder.passages(part, advance)
        lengths = np.array([len(v) for v in vectors], dtype=np.int32)
        return {"vectors": np.concatenate(vectors).astype(np.float16), "lengths": lengths}

    shards = encode_shards(folder / "shards", documents, encode, "encoding")
    lengths = np.concatenate([np.load(shard)["lengths"] for shard in shards])
    # (documents + 1,): the vectors of passage n are bounds[n] to bounds[n + 1]
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    np.save(folder / BOUNDS, bounds)
    dimension = np.load(shards[0])["vectors"].shape[1]
    # Shard by shard into a memory map: all token vectors of a large corpus do not fit into memory.
    tokens = np.lib.format.open_memmap(folder / TOKENS, mode="w+", dtype=np.float16, shape=(int(bounds[-1]), dimension))
    start = 0
    for shard in shards:
        block = np.load(shard)["vectors"]
        tokens[start : start + len(block)] = block
        start += len(block)
    tokens.flush()
    blocks = (np.load(shard)["vectors"] for shard in shards)
    build_faiss(blocks, dimension, form, folder / FAISS_FILE, half=True)
