"""What a retriever is: queries in, scored documents out. Used by the tools of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One passage of a corpus."""

    id: str
    """Unique within its corpus."""
    title: str
    text: str
    score: float = 0.0
    """What the retriever gave it for a query; higher is better; 0 outside a search."""


class Retriever(Protocol):
    """Finds documents of one corpus."""

    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """The best documents for each query.

        Args:
            queries: any text, also empty.
            top_k: how many documents to return at most, one number for each query.

        Returns:
            One list for each query, best first, ties in corpus order. Shorter than asked when fewer documents match.
        """
        ...


@runtime_checkable
class AsyncRetriever(Protocol):
    """A retriever that can be awaited: one behind HTTP, that must not keep the other rollouts waiting."""

    async def search_async(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """`Retriever.search`, awaited."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """What was asked so far: requests, retries, failures, ..."""
        ...

    def close(self) -> None:
        """Stop its child process, if it has one, and close its connections."""
        ...


def whole_text(text: str) -> str:
    """`text` in which U+FFFD stands for each half of a UTF-16 pair: no tokenizer and no file takes those."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
