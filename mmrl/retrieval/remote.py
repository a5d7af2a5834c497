"""A retriever behind HTTP: Search-R1's `/retrieve`, or DSPy's ColBERT-server protocol. Used by tasks' search tools.

One asynchronous client with one connection pool serves all rollouts; it lives on one event loop in one thread of its
own, so it outlasts the loop of each step and is never kept waiting by a decode on the caller's loop.

What goes wrong is never an empty result: after `retries` further attempts it is a `RetrievalFailure`, an outside
failure of the rollout (journalled, counted, not trained on), with its cause in the message. After `BREAKER_FAILURES`
requests have failed in a row, further ones fail at once for `BREAKER_S` seconds; then one is let through to look.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mmrl.errors import RetrievalFailure
from mmrl.retrieval.base import Document
from mmrl.retrieval.protocols import read_dspy, read_search_r1

if TYPE_CHECKING:
    from aiohttp import ClientSession

T = TypeVar("T")

BREAKER_FAILURES = 8
"""Failed requests in a row after which requests fail at once."""
BREAKER_S = 15.0
"""Seconds until one request is let through again."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
"""Waits between attempts double from the first to the longest, with jitter."""
LARGEST_REPLY = 64 * 2**20
"""Bytes of a reply beyond which it is refused."""
SHOWN_OF_ERROR = 200
"""Bytes of an error's text that are read."""
TRANSIENT = frozenset({408, 425, 429})
"""Statuses below 500 that are worth another attempt."""

log = logging.getLogger("mmrl.retrieval")


class Breaker:
    """Counts failures in a row; open, it refuses until `wait_s` have passed, then lets one request look.

    Args:
        failures: in a row, after which it opens.
        wait_s: seconds for which it stays open.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        failures: int = BREAKER_FAILURES,
        wait_s: float = BREAKER_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit, self._wait_s, self._clock = failures, wait_s, clock
        self._failures = 0
        self._opened: float | None = None
        self._looking = False

    @property
    def open(self) -> bool:
        """Whether too many have failed, and none has succeeded since."""
        return self._opened is not None

    def refuses(self) -> bool:
        """Whether a request must not be sent now. A request that may look has to report `success` or `failure`."""
        if self._opened is None:
            return False
        if self._looking or self._clock() - self._opened < self._wait_s:
            return True
        self._looking = True
        return False

    def success(self) -> bool:
        """A request was answered. Returns whether it was open until now."""
        was_open = self.open
        self._failures, self._opened, self._looking = 0, None, False
        return was_open

    def failure(self) -> bool:
        """A request failed for good. Returns whether it opens by this one."""
        was_open = self.open
        self._failures += 1
        self._looking = False
        if self._failures >= self._limit:
            self._opened = self._clock()
        return self.open and not was_open

    def abandoned(self) -> None:
        """A request was cancelled before it was known how it ends."""
        self._looking = False


class RemoteRetriever:
    """Searches over HTTP; safe to use from any thread and event loop.

    Args:
        url: `http(s)://host:port[/path]`. Search-R1: `/retrieve` is added unless it is there. DSPy: used as it is.
        protocol: `search_r1` or `dspy`.
        timeout_s: of one attempt.
        retries: further attempts after a timeout, a refused connection, a status >= 500 (or 408, 425, 429), or a reply
            that cannot be read.
        concurrency: requests under way at once; more wait for their turn.
        cache_size: results kept, by query and number.
        breaker: see `Breaker`.
    """

    def __init__(
        self,
        url: str,
        *,
        protocol: str = "search_r1",
        timeout_s: float = 30.0,
        retries: int = 3,
        concurrency: int = 64,
        cache_size: int = 10_000,
        breaker: Breaker | None = None,
    ):
        self.url = url.rstrip("/") if protocol == "dspy" else f"{url.rstrip('/').removesuffix('/retrieve')}/retrieve"
        self.protocol, self.timeout_s, self.retries = protocol, timeout_s, retries
        self.counts: Counter[str] = Counter()
        """Requests, answers from the cache, retries, short results, and failures by cause, since the start."""
        self._concurrency, self._cache_size = concurrency, cache_size
        self._cache: OrderedDict[tuple[str, int], list[Document]] = OrderedDict()
        self._breaker = breaker or Breaker()
        self._last = ""
        """What the last request failed of."""
        self._loop = _Loop()
        self._session: ClientSession | None = None
        self._turn: asyncio.Semaphore | None = None

    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """See `mmrl.retrieval.base.Retriever.search`; blocks. Not for use on an event loop: see `search_async`.

        Raises:
            RetrievalFailure: no usable answer within all attempts.
        """
        return self._loop.run(self._search(list(queries), list(top_k)))

    async def search_async(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """`search` for callers on an event loop."""
        return await self._loop.wait(self._search(list(queries), list(top_k)))

    def ping(self) -> None:
        """One search whose result does not matter.

        Raises:
            RetrievalFailure: no usable answer.
        """
        self._loop.run(self._ask(["ping"], [1]))

    def close(self) -> None:
        """Close connections and stop the client's thread. A later search starts anew."""
        self._loop.stop(self._close())

    async def _close(self) -> None:
        session, self._session, self._turn = self._session, None, None
        if session is not None:
            await session.close()

    async def _search(self, queries: list[str], top_k: list[int]) -> list[list[Document]]:
        found: dict[int, list[Document]] = {}
        missing = []
        for number, (query, k) in enumerate(zip(queries, top_k, strict=True)):
            kept = self._recall(query, k)
            if k < 1:
                found[number] = []
            elif kept is not None:
                self.counts["cached"] += 1
                found[number] = kept
            else:
                missing.append(number)
        if missing:
            answers = await self._ask([queries[n] for n in missing], [top_k[n] for n in missing])
            for number, answer in zip(missing, answers, strict=True):
                cut = answer[: top_k[number]]
                self._count_short(len(cut), top_k[number])
                self._remember(queries[number], top_k[number], cut)
                found[number] = cut
        return [found[number] for number in range(len(queries))]

    async def _ask(self, queries: list[str], top_k: list[int]) -> list[list[Document]]:
        if self.protocol == "search_r1":
            body = {"queries": queries, "topk": max(top_k), "return_scores": True}
            return await self._attempts("POST", {"json": body}, lambda reply: read_search_r1(reply, len(queries)))
        asked = [
            self._attempts("GET", {"params": {"query": query, "k": str(k)}}, read_dspy)
            for query, k in zip(queries, top_k, strict=True)
        ]
        return list(await asyncio.gather(*asked))

    async def _attempts(self, method: str, arguments: dict[str, Any], read: Callable[[Any], T]) -> T:
        """One request with its retries, behind the breaker."""
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

        looks = self._breaker.open
        if self._breaker.refuses():
            refusal = self._refusal()
            self._fail(refusal)
            raise refusal
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self.retries + 1),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
            retry=retry_if_exception(lambda error: isinstance(error, RetrievalFailure) and error.transient),
            before_sleep=lambda state: self.counts.update(("retries",)),
            reraise=True,
        )
        try:
            answer: T = await attempts(self._once, method, arguments, read, looks)
        except RetrievalFailure as failure:
            if failure.cause != "refused":
                self._last = str(failure).removeprefix(f"retriever {self.url}: ")
            if failure.cause != "refused" and self._breaker.failure():
                log.warning(
                    "retriever %s: too many requests have failed in a row; none is sent for a while, and rollouts that "
                    "search fail from outside",
                    self.url,
                )
            self._fail(failure)
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        if self._breaker.success():
            log.warning("retriever %s: answers again", self.url)
        return answer

    def _refusal(self) -> RetrievalFailure:
        return RetrievalFailure(
            f"retriever {self.url}: not asked, since too many requests have failed in a row; the last: {self._last}",
            "refused",
        )

    async def _once(self, method: str, arguments: dict[str, Any], read: Callable[[Any], T], looks: bool) -> T:
        from aiohttp import ClientError, InvalidURL

        session, turn = self._connect()
        async with turn:
            if self._breaker.open and not looks:  # opened while this one waited for its turn or its next attempt
                raise self._refusal()
            self.counts["requests"] += 1
            try:
                async with session.request(method, self.url, **arguments) as reply:
                    status, content = reply.status, b""
                    limit = LARGEST_REPLY if status < 300 else SHOWN_OF_ERROR
                    while len(content) <= limit and (part := await reply.content.read(limit + 1 - len(content))):
                        content += part
            except TimeoutError:
                raise RetrievalFailure(
                    f"retriever {self.url}: no answer within {self.timeout_s:g} s", "timeout", transient=True
                ) from None
            except InvalidURL:
                raise RetrievalFailure(f"retriever {self.url}: is no address (host or port)", "connection") from None
            except (ClientError, OSError) as error:
                raise RetrievalFailure(f"retriever {self.url}: {error}", "connection", transient=True) from None
        if status >= 300:
            again = status >= 500 or status in TRANSIENT
            said = " ".join(content.decode(errors="replace").split())
            raise RetrievalFailure(
                f"retriever {self.url}: answered with status {status}" + (f" ({said})" if said else ""),
                "status",
                transient=again,
            )
        if len(content) > LARGEST_REPLY:
            raise RetrievalFailure(f"retriever {self.url}: a reply above {LARGEST_REPLY} bytes", "garbage")
        try:
            return read(json.loads(content))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise RetrievalFailure(
                f"retriever {self.url}: a reply that is not the {self.protocol} protocol's ({error})",
                "garbage",
                transient=True,
            ) from None

    def _connect(self) -> tuple[ClientSession, asyncio.Semaphore]:
        """The session, made on the client's loop at first use."""
        if self._session is None or self._turn is None:
            from aiohttp import ClientSession, ClientTimeout, TCPConnector

            self._turn = asyncio.Semaphore(self._concurrency)
            self._session = ClientSession(
                timeout=ClientTimeout(total=self.timeout_s), connector=TCPConnector(limit=self._concurrency)
            )
        return self._session, self._turn

    def _fail(self, failure: RetrievalFailure) -> None:
        self.counts["failures"] += 1
        self.counts[f"failures_{failure.cause}"] += 1
        if self.counts["failures"] == 1:
            log.warning("%s; the rollout fails from outside, and such failures are counted from here on", failure)

    def _count_short(self, got: int, asked: int) -> None:
        if got >= asked:
            return
        self.counts["short"] += 1
        self.counts["empty"] += got == 0
        if self.counts["short"] == 1:
            log.warning(
                "retriever %s returned %d of %d passages for a query; it is used as it is, and counted from here on",
                self.url,
                got,
                asked,
            )

    def _recall(self, query: str, k: int) -> list[Document] | None:
        kept = self._cache.get((query, k))
        if kept is not None:
            self._cache.move_to_end((query, k))
        return kept

    def _remember(self, query: str, k: int, documents: list[Document]) -> None:
        if len(documents) < k or not self._cache_size:  # a short result may be a fault that passes
            return
        self._cache[query, k] = documents
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


class _Loop:
    """An event loop in one thread of its own, started at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="mmrl-retrieval", daemon=True).start()
            return self._loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, blocking."""
        return asyncio.run_coroutine_threadsafe(work, self._running()).result()

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work` on the caller's loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._running()))

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then end the thread; nothing where none runs."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            last.close()
            return
        asyncio.run_coroutine_threadsafe(last, loop).result(timeout=5)
        loop.call_soon_threadsafe(loop.stop)
