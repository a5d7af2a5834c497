"""A retriever behind HTTP, by Search-R1's or DSPy's protocol. Used by tasks' search tools.

One client serves all rollouts; its connections live on the process's I/O loop, so they outlast the loop of each step
and never wait for a decode on the caller's loop.

A failed search is never an empty result: after `retries` further attempts it is a `RetrievalFailure`, which aborts the
rollout (journalled, counted, not trained on), with its cause in the message.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from typing_extensions import override

from mmrl.errors import RetrievalFailure
from mmrl.retrieval.base import Document, Retriever, whole_text
from mmrl.retrieval.protocols import MAX_QUERY_CHARS, MAX_URL_QUERY_CHARS, read_dspy_reply, read_search_r1_reply
from mmrl.system.http_client import HttpClient, HttpFailure

T = TypeVar("T")

WAITS_S = (0.2, 5.0)
"""Pauses between attempts: the first, and the longest."""
LARGEST_REPLY, LARGEST_PASSAGE = 64 * 2**20, 2 * 2**20
"""Bytes of a reply beyond which it is refused: so many for each passage of the request, and at most so many."""
log = logging.getLogger("mmrl.retrieval")


class RemoteRetriever(Retriever):
    """Searches over HTTP; safe to use from any thread and event loop.

    Args:
        url: `http(s)://host:port[/path]`. Search-R1: `/retrieve` is added unless it is there. DSPy: used as it is.
        protocol: `search_r1` or `dspy`.
        timeout_s: timeout of one attempt.
        retries: further attempts after a timeout, a refused connection, a status >= 500 (or 408, 409, 425, 429), or a
            reply that cannot be read.
        concurrency: requests under way at once; more wait for their turn.
        cache_size: results in the cache, by query and number; the least recently used goes first.
        token: sent with each request; None: the server wants none.
    """

    over_http = True

    def __init__(
        self,
        url: str,
        *,
        protocol: str = "search_r1",
        timeout_s: float = 30.0,
        retries: int = 3,
        concurrency: int = 64,
        cache_size: int = 10_000,
        token: str | None = None,
    ):
        self.url = url.rstrip("/") if protocol == "dspy" else f"{url.rstrip('/').removesuffix('/retrieve')}/retrieve"
        self.protocol = protocol
        # Written on the I/O loop alone, like the cache: neither needs a lock.
        self.counts: Counter[str] = Counter()
        """Requests, answers from the cache, retries, short results, failures by cause."""
        self._cache: dict[tuple[str, int], list[Document]] = {}
        self._cache_size = cache_size
        self._http = HttpClient(
            f"retriever {self.url}",
            timeout_s=timeout_s,
            concurrency=concurrency,
            retries=retries,
            waits_s=WAITS_S,
            opens_on=("timeout", "connection", "status", "garbage"),
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            redirects=True,
        )

    @override
    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """Blocks. Not for use on an event loop: see `search_async`."""
        return self._http.wait(self._search(list(queries), list(top_k)))

    @override
    async def search_async(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """Cancelling it cancels the requests."""
        return await self._http.run(self._search(list(queries), list(top_k)))

    def ping(self) -> None:
        """Send one search and ignore its result.

        Raises:
            RetrievalFailure: no usable answer.
        """
        self._http.wait(self._request(["ping"], [1]))

    @override
    def close(self) -> None:
        self._http.close()

    async def _search(self, queries: list[str], top_k: list[int]) -> list[list[Document]]:
        results: dict[int, list[Document]] = {}
        missing = []
        for number, (query, k) in enumerate(zip(queries, top_k, strict=True)):
            if k < 1:
                results[number] = []
            elif (query, k) in self._cache:
                self.counts["cached"] += 1
                # A dict keeps the order of insertion: taken out and put back, it is the most recently used.
                results[number] = self._cache[query, k] = self._cache.pop((query, k))
            else:
                missing.append(number)
        if missing:
            answers = await self._request([queries[n] for n in missing], [top_k[n] for n in missing])
            for number, answer in zip(missing, answers, strict=True):
                # One Search-R1 request has one `topk`, the largest of its queries.
                documents = answer[: top_k[number]]
                results[number] = documents
                if len(documents) < top_k[number]:
                    self._count_short(len(documents), top_k[number])
                    continue  # not stored: it may be a fault that passes
                self._cache[queries[number], top_k[number]] = documents
                if len(self._cache) > self._cache_size:
                    del self._cache[next(iter(self._cache))]
        return [results[number] for number in range(len(queries))]

    async def _request(self, queries: list[str], top_k: list[int]) -> list[list[Document]]:
        if self.protocol == "search_r1":
            body = {
                "queries": [query[:MAX_QUERY_CHARS] for query in queries],
                "topk": max(top_k),
                "return_scores": True,
            }
            limit = largest_reply(len(queries) * max(top_k))
            return await self._send("POST", lambda reply: read_search_r1_reply(reply, len(queries)), body, {}, limit)
        sent = [whole_text(query[:MAX_URL_QUERY_CHARS]) for query in queries]
        searches = [
            self._send("GET", read_dspy_reply, None, {"query": query, "k": str(k)}, largest_reply(k))
            for query, k in zip(sent, top_k, strict=True)
        ]
        return list(await asyncio.gather(*searches))

    async def _send(
        self, method: str, read: Callable[[object], T], body: object, params: Mapping[str, str], limit: int
    ) -> T:
        """Send one request, with retries."""

        def parse(content: bytes) -> T:
            try:
                return read(json.loads(content))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise ValueError(f"a reply that is not the {self.protocol} protocol's ({error})") from None

        try:
            return await self._http.request(
                method, self.url, parse, body=body, params=params, limit=limit, before=self._count_request
            )
        except HttpFailure as failure:
            self.counts["failures"] += 1
            self.counts[f"failures_{failure.cause}"] += 1
            failed = RetrievalFailure(
                f"retriever {self.url}: {failure.reason}", failure.cause, transient=failure.transient
            )
            if self.counts["failures"] == 1:
                log.warning("%s; the rollout is aborted, and such failures are counted from here on", failed)
            raise failed from None

    async def _count_request(self, number: int) -> None:
        self.counts["requests"] += 1
        self.counts["retries"] += number > 0

    def _count_short(self, got: int, k: int) -> None:
        self.counts["short"] += 1
        self.counts["empty"] += got == 0
        if self.counts["short"] == 1:
            log.warning(
                "retriever %s returned %d of %d passages for a query; it is used as it is, and counted from here on",
                self.url,
                got,
                k,
            )


def largest_reply(passages: int) -> int:
    """Return the largest size in bytes of a reply with so many passages."""
    return min(LARGEST_REPLY, LARGEST_PASSAGE * (passages + 1))
