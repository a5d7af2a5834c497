"""Retrieval as a tool of a task: the corpora, a retriever for each, and the requests to them.

Held by `open_qa` and `dspy.hover`; how many documents a search may bring, and what a program sees of them, is theirs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from mmrl.config.retriever import RetrieverConfig
from mmrl.errors import ConfigError
from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.select import open_index_corpus, open_retriever
from mmrl.tasks.data.corpus import load_corpus
from mmrl.tasks.mini.examples import mini_corpus

T = TypeVar("T")
Results = Sequence[Sequence[Document]]
"""Documents of each query, best first."""


def named_corpus(retriever: RetrieverConfig, corpus: str | None) -> dict[str, Sequence[Document]]:
    """Return the corpus that a config names, by its name; empty if it names none.

    What a remote retriever holds is not known: its corpus has no documents here.

    Raises:
        ConfigError: a corpus beside a retriever that has its own.
        DataError: an index or a file that cannot be used.
    """
    if (retriever.get("index") or retriever.get("url")) is not None and corpus is not None:
        owner = "task.retriever.name=remote" if retriever.get("url") is not None else "task.retriever.index"
        raise ConfigError(f"task.corpus: has no effect with {owner}, which brings its own passages")
    if retriever.get("url") is not None:
        return {"remote": ()}
    if retriever.get("index") is not None:
        return {"index": open_index_corpus(retriever)}
    if corpus == "mini":
        return {"mini": mini_corpus()}
    return {} if corpus is None else {"given": load_corpus("task.corpus", corpus)}


class SearchTool:
    """Searches a task's corpora. A retriever is opened at its first search, and again after `close`.

    Args:
        config: `task.retriever`.
        corpora: name -> documents; an example names the corpus that it is about.
    """

    def __init__(self, config: RetrieverConfig, corpora: Mapping[str, Sequence[Document]]):
        self.config = config
        self.corpora = corpora
        self.retrievers: dict[str, Retriever] = {}
        """Open retrievers, by corpus."""

    def search(self, queries: Sequence[str], top_k: Sequence[int], corpus: str) -> list[list[Document]]:
        """Return the best `top_k[i]` documents for each query; blocks."""
        return self._open(corpus).search(queries, top_k)

    def use(
        self, queries: Sequence[str], top_k: Sequence[int], corpus: str, present: Callable[[Results], T]
    ) -> T | Awaitable[T]:
        """`present` of what a search finds: to be awaited where the retriever is behind HTTP, so that it does not keep
        the other rollouts waiting; at once where it is in process."""
        retriever = self._open(corpus)
        # In process a search is short and holds the interpreter anyway; a thread would only reorder rollouts.
        if not retriever.over_http:
            return present(retriever.search(queries, top_k))

        async def answer() -> T:
            return present(await retriever.search_async(queries, top_k))

        return answer()

    def _open(self, corpus: str) -> Retriever:
        # At the first search: evaluating without a search, or `mmrl plan`, must not load an index.
        if corpus not in self.retrievers:
            self.retrievers[corpus] = open_retriever(self.config, self.corpora[corpus])
        return self.retrievers[corpus]

    def close(self) -> None:
        """Close the retrievers' connections."""
        retrievers, self.retrievers = self.retrievers, {}
        for retriever in retrievers.values():
            retriever.close()

    def describe(self) -> str:
        """Describe the retriever, its budget, and what it searches."""
        where = self.config.get("index") or self.config.get("url")
        return f"{self.config.name}, {self.config.top_k} documents{f', {where}' if where else ''}"
