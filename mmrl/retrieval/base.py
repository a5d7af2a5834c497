"""Retriever interface: queries in, scored documents out. Used by the tools of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Passage of a corpus."""

    id: str
    """Unique within its corpus."""
    title: str
    text: str
    score: float = 0.0
    """Score by the retriever, for a query; higher is better; 0 outside a search."""


class Retriever(ABC):
    """Searches one corpus. All that callers use of a retriever is here; only `search` has to be written."""

    over_http: bool = False
    """True if a search waits for a server: then callers await `search_async`, so that other rollouts go on."""

    @abstractmethod
    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """Return the best documents for each query.

        Args:
            queries: any text, also empty.
            top_k: maximum number of documents, for each query.

        Returns:
            One list for each query, best first, ties in corpus order; shorter than `top_k` when fewer documents match.

        Raises:
            RetrievalFailure: a server gave no usable answer.
        """

    def load(self) -> None:
        """Load what the first search would load (the weights of an encoder), so that searches can be timed."""
        # Nothing where no network encodes the queries.
        return

    async def search_async(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """Search as `search`, for callers on an event loop."""
        # In process a search is computation: a thread would only compete with the decode loop for the interpreter.
        return self.search(queries, top_k)

    def close(self) -> None:
        """Close connections. May be called twice."""
        # In process nothing has to be released: memory maps go with the object.
        return


def unquoted(title: str) -> str:
    """Return a title without the quotes around it that wiki-18's `contents` have; those inside are its own."""
    title = title.strip()
    return title[1:-1] if len(title) > 1 and title[0] == title[-1] == '"' else title


def title_and_text(contents: str) -> tuple[str, str]:
    """Return the title in the first line of a passage's `contents`, and the text; of one line, which is text, no title.

    Search-R1's wiki-18 has titles, Pyserini's plain JSON has none.
    """
    title, line_end, text = contents.partition("\n")
    return (unquoted(title), text) if line_end else ("", contents)


def whole_text(text: str) -> str:
    """Replace each lone UTF-16 surrogate in `text` by U+FFFD: no tokenizer and no file takes those."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
