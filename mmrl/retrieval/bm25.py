"""BM25 by bm25s, over a corpus in memory (50 microseconds a passage to build) or an index folder. Used by search tools.

Lucene's variant of BM25 (idf = ln(1 + (N - df + 0.5) / (df + 0.5))), over title and text, lower-cased words; without
Lucene's English stop words and without stemming, unless `Bm25Settings` say otherwise. A document that shares no indexed
word with a query is never returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.words import words
from mmrl.system.bar import progress

if TYPE_CHECKING:
    from bm25s import BM25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bm25Settings:
    """Weights and forms of indexed words; part of an index, whose queries are read alike."""

    k1: float = 0.9
    """Saturation of term frequency."""
    b: float = 0.4
    """Weight of length normalisation."""
    stemmer: str = "none"
    """Snowball's algorithm that takes endings off, by PyStemmer's name for it."""
    stopwords: str = "english"
    """Language of the words that are left out (before stemming), or `none`."""

    def tokenizer(self) -> Callable[[str], list[str]]:
        """Return the function from a text to its indexed words."""
        from bm25s import stopwords

        name = "EN" if self.stopwords == "english" else self.stopwords.upper()
        stop = frozenset() if self.stopwords == "none" else frozenset(getattr(stopwords, f"STOPWORDS_{name}"))
        if self.stemmer == "none":
            return lambda text: tokenize(text, stop)
        from Stemmer import Stemmer

        # One for each text: PyStemmer's objects are not to be shared by threads.
        return lambda text: list(Stemmer(self.stemmer).stemWords(tokenize(text, stop)))


DEFAULT = Bm25Settings()

log = logging.getLogger("mmrl.retrieval")


class Bm25Retriever(Retriever):
    """Exact BM25 search; safe to use from several threads.

    Args:
        documents: the corpus, in the order that breaks ties.
        built: an index of the same documents and settings, from `write_index`; None builds one in memory.
    """

    def __init__(self, documents: Sequence[Document], settings: Bm25Settings = DEFAULT, *, built: Path | None = None):
        self.documents = documents
        self._words = settings.tokenizer()
        if built is None:
            self._index = _build(documents, settings)
        else:
            from bm25s import BM25

            self._index = BM25.load(built, mmap=True, load_corpus=False, show_progress=False)

    @override
    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        return [self._search(query, k) for query, k in zip(queries, top_k, strict=True)]

    def _search(self, query: str, k: int) -> list[Document]:
        vocabulary = self._index.vocab_dict
        # Words that no document has add nothing to any score.
        ids = [vocabulary[word] for word in self._words(query) if word in vocabulary]
        if not ids or k < 1:
            return []
        # shape (documents,)
        scores = self._index.get_scores_from_ids(ids)
        return [replace(self.documents[i], score=float(scores[i])) for i in top_indices(scores, k)]


def write_index(folder: Path, documents: Sequence[Document], settings: Bm25Settings) -> None:
    """Build an index and write it into a folder, for `Bm25Retriever(built=...)`."""
    folder.mkdir(exist_ok=True)
    _build(documents, settings).save(folder, show_progress=False)


def tokenize(text: str, stop: frozenset[str]) -> list[str]:
    """Return the lower-cased words without stop words."""
    return [word for word in words(text) if word not in stop]


def top_indices(scores: np.ndarray, k: int) -> list[int]:
    """Return the indices of the k highest positive scores (n,), best first; equal scores in index order."""
    # A full sort of a million scores would cost more than scoring them. The k-th highest is a threshold; whatever ties
    # with it stays in, so that the stable sort below breaks ties by index.
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k] if k < len(scores) else 0.0
    candidates = np.flatnonzero(scores >= threshold if threshold > 0 else scores > 0)
    order = np.argsort(-scores[candidates], kind="stable")[:k]
    return [int(index) for index in candidates[order]]


def _build(documents: Sequence[Document], settings: Bm25Settings) -> BM25:
    from bm25s import BM25

    # bm25s sets its logger to DEBUG when it is imported.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    words_of = settings.tokenizer()
    vocabulary: dict[str, int] = {}
    corpus_ids: list[list[int]] = []
    with progress("reading words for BM25", len(documents)) as advance:
        for document in documents:
            advance(1)
            found = words_of(f"{document.title} {document.text}")
            corpus_ids.append([vocabulary.setdefault(word, len(vocabulary)) for word in found])
    # A corpus of stop words only: bm25s needs one column, which no query can name.
    if not vocabulary:
        vocabulary[""] = 0
        corpus_ids[0] = [0]
    # numpy, not numba, which would compile for seconds in every process.
    index = BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy", csc_backend="numpy")
    index.index((corpus_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index
