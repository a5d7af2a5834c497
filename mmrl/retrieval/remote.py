"""A retriever behind HTTP, by Search-R1's or DSPy's protocol. Used by tasks' search tools.

One client serves all rollouts; its connections live on the process's I/O loop, so they outlast the loop of each step
and never wait for a decode on the caller's loop.

A failed search is never an empty result: after `retries` further attempts it is a `RetrievalFailure`, which aborts the
rollout (journalled, counted, not trained on), with its cause in the message. After many failed requests in a row,
further ones fail at once for a while (`system.breaker`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict, TypeVar
from urllib.parse import urlsplit

from mmrl.errors import RetrievalFailure
from mmrl.retrieval.base import Document, Retriever, whole_text
from mmrl.retrieval.protocols import MAX_QUERY_CHARS, MAX_URL_QUERY_CHARS, read_dspy_reply, read_search_r1_reply
from mmrl.system import replies
from mmrl.system.breaker import Breaker
from mmrl.system.portal import IoScope

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
"""Waits between attempts double from the first to the longest, with jitter."""
LARGEST_REPLY, LARGEST_PASSAGE = 64 * 2**20, 2 * 2**20
"""Bytes of a reply beyond which it is refused: so many for each passage of the request, and at most so many."""
TRANSIENT = frozenset({408, 425, 429})
"""Statuses below 500 that are worth another attempt."""
IDLE_S = 4.0
"""Seconds that an idle connection stays open."""

log = logging.getLogger("mmrl.retrieval")


class HttpOptions(TypedDict, total=False):
    """Options of `RemoteRetriever` that a config sets."""

    timeout_s: float
    retries: int
    concurrency: int
    cache_size: int


class RemoteRetriever(Retriever):
    """Searches over HTTP; safe to use from any thread and event loop.

    Args:
        url: `http(s)://host:port[/path]`. Search-R1: `/retrieve` is added unless it is there. DSPy: used as it is.
        protocol: `search_r1` or `dspy`.
        timeout_s: of one attempt.
        retries: further attempts after a timeout, a refused connection, a status >= 500 (or 408, 425, 429), or a reply
            that cannot be read.
        concurrency: requests under way at once; more wait for their turn.
        cache_size: results in the cache, by query and number; the least recently used goes first.
        token: sent with each request; None: the server wants none.
        breaker: see `Breaker`.
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
        breaker: Breaker | None = None,
    ):
        self.url = url.rstrip("/") if protocol == "dspy" else f"{url.rstrip('/').removesuffix('/retrieve')}/retrieve"
        self.protocol, self.timeout_s, self.retries = protocol, timeout_s, retries
        # Written on the I/O loop alone, like the cache and the breaker: none of them needs a lock.
        self._counts: Counter[str] = Counter()
        self._cache: dict[tuple[str, int], list[Document]] = {}
        self._cache_size = cache_size
        self._headers = replies.ACCEPTED if token is None else {**replies.ACCEPTED, "Authorization": f"Bearer {token}"}
        self._breaker = breaker or Breaker()
        self._last_failure = ""
        # Idle clients, of one connection each: with every request, a pool of httpx looks at all of its connections; at
        # 64 of them that costs several times as much as the request.
        self._io: IoScope[list[httpx.AsyncClient]] = IoScope(list, _close_all, concurrency)

    @property
    def counts(self) -> Counter[str]:
        """See `Retriever.counts`; since the start."""
        return self._counts

    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """See `Retriever.search`; blocks. Not for use on an event loop: see `search_async`."""
        return self._io.wait(self._search(list(queries), list(top_k)))

    async def search_async(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """See `Retriever.search_async`; cancelling it cancels the requests."""
        return await self._io.run(self._search(list(queries), list(top_k)))

    def ping(self) -> None:
        """One search whose result does not matter.

        Raises:
            RetrievalFailure: no usable answer.
        """
        self._io.wait(self._request(["ping"], [1]))

    def close(self) -> None:
        """Close connections. A later search starts anew."""
        self._io.close()

    async def _search(self, queries: list[str], top_k: list[int]) -> list[list[Document]]:
        results: dict[int, list[Document]] = {}
        missing = []
        for number, (query, k) in enumerate(zip(queries, top_k, strict=True)):
            cached = self._recall(query, k)
            if k < 1:
                results[number] = []
            elif cached is not None:
                self._counts["cached"] += 1
                results[number] = cached
            else:
                missing.append(number)
        if missing:
            answers = await self._request([queries[n] for n in missing], [top_k[n] for n in missing])
            for number, answer in zip(missing, answers, strict=True):
                # One Search-R1 request has one `topk`, the largest of its queries.
                documents = answer[: top_k[number]]
                self._count_short(len(documents), top_k[number])
                self._remember(queries[number], top_k[number], documents)
                results[number] = documents
        return [results[number] for number in range(len(queries))]

    async def _request(self, queries: list[str], top_k: list[int]) -> list[list[Document]]:
        if self.protocol == "search_r1":
            body = {
                "queries": [query[:MAX_QUERY_CHARS] for query in queries],
                "topk": max(top_k),
                "return_scores": True,
            }
            limit = largest_reply(len(queries) * max(top_k))
            return await self._attempts(
                "POST", body, {}, limit, lambda reply: read_search_r1_reply(reply, len(queries))
            )
        sent = [whole_text(query[:MAX_URL_QUERY_CHARS]) for query in queries]
        searches = [
            self._attempts("GET", None, {"query": query, "k": str(k)}, largest_reply(k), read_dspy_reply)
            for query, k in zip(sent, top_k, strict=True)
        ]
        return list(await asyncio.gather(*searches))

    async def _attempts(
        self, method: str, body: object, params: Mapping[str, str], limit: int, parse: Callable[[object], T]
    ) -> T:
        """One request with its retries, behind the breaker."""
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

        probe = self._breaker.open
        if self._breaker.refuses():
            refusal = self._refusal()
            self._count_failure(refusal)
            raise refusal
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self.retries + 1),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            retry=retry_if_exception(lambda error: isinstance(error, RetrievalFailure) and error.transient),
            before_sleep=lambda state: self._counts.update(("retries",)),
            reraise=True,
        )
        try:
            answer: T = await attempts(self._attempt, method, body, params, limit, parse, probe)
        except RetrievalFailure as failure:
            # A refusal says nothing about the server: it must neither open the breaker nor hide what opened it.
            if failure.cause != "refused":
                self._last_failure = str(failure).removeprefix(f"retriever {self.url}: ")
                if self._breaker.failure():
                    log.warning(
                        "retriever %s: too many requests have failed in a row; none is sent for a while, and rollouts "
                        "that search are aborted",
                        self.url,
                    )
            self._count_failure(failure)
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        if self._breaker.success():
            log.warning("retriever %s: answers again", self.url)
        return answer

    async def _attempt(
        self,
        method: str,
        body: object,
        params: Mapping[str, str],
        limit: int,
        parse: Callable[[object], T],
        probe: bool,
    ) -> T:
        async with self._io.slots:
            # It may have opened while this request waited for its turn or its next attempt.
            if self._breaker.open and not probe:
                raise self._refusal()
            self._counts["requests"] += 1
            status, content = await self._send(method, body, params, limit)
        if status >= 300:
            text = replies.quoted(content.decode(errors="replace"))
            raise RetrievalFailure(
                f"retriever {self.url}: answered with status {status}" + (f" ({text})" if text else ""),
                "status",
                transient=status >= 500 or status in TRANSIENT,
            )
        try:
            return parse(json.loads(content))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise RetrievalFailure(
                f"retriever {self.url}: a reply that is not the {self.protocol} protocol's "
                f"({replies.quoted(str(error))})",
                "garbage",
                transient=True,
            ) from None

    async def _send(self, method: str, body: object, params: Mapping[str, str], limit: int) -> tuple[int, bytes]:
        """Status and content of one reply; of an error its beginning."""
        import httpx

        idle = self._io.client
        client = idle.pop() if idle else self._connect()
        # Not httpx's `json=`: it writes UTF-8, which cannot hold half of a UTF-16 pair; escapes can.
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        try:
            # httpx lets an impossible port through to the socket, which fails with a group of other errors.
            _ = urlsplit(self.url).port
            # httpx limits each pause of a reply; the config limits the whole attempt.
            async with asyncio.timeout(self.timeout_s):
                async with client.stream(
                    method, self.url, params=params or None, content=data, headers=headers
                ) as reply:
                    fine = reply.status_code < 300
                    return reply.status_code, await replies.read(
                        reply, limit if fine else 4 * replies.QUOTED, cut=not fine
                    )
        # The same request would bring the same again.
        except (replies.ReplyTooLarge, replies.ReplyUnreadable) as error:
            raise RetrievalFailure(f"retriever {self.url}: {error}", "garbage") from None
        except TimeoutError:
            raise RetrievalFailure(
                f"retriever {self.url}: no answer within {self.timeout_s:g} s", "timeout", transient=True
            ) from None
        except (httpx.InvalidURL, ValueError):
            raise RetrievalFailure(f"retriever {self.url}: is no address (host or port)", "connection") from None
        except (httpx.HTTPError, OSError) as error:
            reason = replies.quoted(str(error)) or type(error).__name__
            raise RetrievalFailure(f"retriever {self.url}: {reason}", "connection", transient=True) from None
        finally:
            idle.append(client)

    def _connect(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            timeout=None,
            # uvicorn closes connections that were idle for 5 s: ours must go first, or a request meets the closing one.
            limits=httpx.Limits(max_connections=1, keepalive_expiry=IDLE_S),
            follow_redirects=True,
            event_hooks={"response": [replies.refuse_large_redirect]},
            # A proxy of the environment knows nothing of servers on this machine or in this cluster.
            trust_env=False,
            verify=self._tls if self.url.startswith("https:") else False,
        )

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        # The system's certificates: a cluster's own authority is among them, not among httpx's.
        return ssl.create_default_context()

    def _refusal(self) -> RetrievalFailure:
        return RetrievalFailure(
            f"retriever {self.url}: not sent, since too many requests have failed in a row; "
            f"the last: {self._last_failure}",
            "refused",
        )

    def _count_failure(self, failure: RetrievalFailure) -> None:
        self._counts["failures"] += 1
        self._counts[f"failures_{failure.cause}"] += 1
        if self._counts["failures"] == 1:
            log.warning("%s; the rollout is aborted, and such failures are counted from here on", failure)

    def _count_short(self, got: int, k: int) -> None:
        if got >= k:
            return
        self._counts["short"] += 1
        self._counts["empty"] += got == 0
        if self._counts["short"] == 1:
            log.warning(
                "retriever %s returned %d of %d passages for a query; it is used as it is, and counted from here on",
                self.url,
                got,
                k,
            )

    def _recall(self, query: str, k: int) -> list[Document] | None:
        # A dict keeps the order of insertion: taking a result out and back in makes it the most recently used.
        documents = self._cache.pop((query, k), None)
        if documents is not None:
            self._cache[query, k] = documents
        return documents

    def _remember(self, query: str, k: int, documents: list[Document]) -> None:
        # A short result may be a fault that passes.
        if len(documents) < k or not self._cache_size:
            return
        self._cache[query, k] = documents
        if len(self._cache) > self._cache_size:
            del self._cache[next(iter(self._cache))]


def largest_reply(passages: int) -> int:
    """Bytes that a reply with so many passages may have."""
    return min(LARGEST_REPLY, LARGEST_PASSAGE * (passages + 1))


async def _close_all(clients: list[httpx.AsyncClient]) -> None:
    for client in clients:
        await client.aclose()
