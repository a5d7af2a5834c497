"""A bounded HTTP client: the one way in which mmrl sends requests to endpoints, retrievers and vLLM servers.

    client = HttpClient("retriever http://host:8000", timeout_s=30.0, concurrency=64, retries=3)
    content = await client.run(client.request("POST", url, parse, body=…, limit=2**20))    # from any event loop
    client.close()

A connection belongs to the event loop that opened it, and the loops that programs run in are short, so requests run in
the I/O loop (`system.portal`). A server may be wrong or hostile: time, size and form of a reply are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mmrl.errors import ConfigError, reason_of
from mmrl.secrets import hide
from mmrl.system.portal import io_loop
from mmrl.system.replies import (
    ACCEPTED,
    LONGEST_ERROR,
    ReplyRefused,
    quoted,
    read,
    refuse_large_redirect,
    retry_after,
)

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Cause = Literal["refused", "timeout", "connection", "status", "garbage"]

TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same request may succeed."""
IDLE_S = 4.0
"""Seconds that an idle connection stays open: uvicorn closes its own after 5, and a request must not meet that."""
CLOSE_S = 5.0
"""Longest wait for connections to close: a stuck one must not keep a run from ending."""

BREAKER_FAILURES = 8
"""Failed requests in a row after which requests fail at once."""
BREAKER_S = 15.0
"""Seconds until one request is let through again."""

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
"""Variables of the environment that name proxies, in lower or upper case."""

log = logging.getLogger("mmrl.http")


@dataclass(eq=False)
class HttpFailure(Exception):
    """A request without a usable reply."""

    cause: Cause
    """`refused` by the breaker, `timeout`, `connection`, `status` (300 or more), or `garbage`: a reply beyond its
    limit, or that cannot be read."""
    reason: str
    """Sentence about the failure, without secrets."""
    transient: bool = False
    """The same request may succeed."""
    status: int = 0
    """HTTP status of the reply."""
    text: str = ""
    """The beginning of an error's page."""
    pause: float | None = None
    """Seconds that the server asks to wait."""
    reached: bool = True
    """True if there was a connection."""
    tries: int = 1

    def __str__(self) -> str:
        return self.reason


class Breaker:
    """Counts failures in a row; open, it refuses until `wait_s` have passed, then lets one request through as a probe.

    Without it a server that no longer answers costs every rollout of a step the whole time of all its attempts.

    Args:
        failures: in a row, after which it opens.
        wait_s: seconds for which it stays open.
        clock: seconds, monotonic.
    """

    def __init__(
        self, failures: int = BREAKER_FAILURES, wait_s: float = BREAKER_S, clock: Callable[[], float] = time.monotonic
    ):
        self._limit, self._wait_s, self._clock = failures, wait_s, clock
        self._failures = 0
        self._probe_at = 0.0
        """Open, the time from which one request is let through; infinite while that one is under way."""

    @property
    def open(self) -> bool:
        """True once too many have failed, until one succeeds."""
        return self._failures >= self._limit

    def refuses(self) -> bool:
        """True where a request must not be sent now; one that is let through has to report `success` or `failure`."""
        if not self.open:
            return False
        if self._clock() < self._probe_at:
            return True
        self._probe_at = math.inf
        return False

    def success(self) -> bool:
        """Record an answered request. Returns True if the breaker was open until now."""
        was_open, self._failures = self.open, 0
        return was_open

    def failure(self) -> bool:
        """Record a request that failed for good. Returns True if this failure opens the breaker."""
        self._failures += 1
        self._probe_at = self._clock() + self._wait_s
        return self._failures == self._limit

    def abandoned(self) -> None:
        """Record a request that was cancelled before its outcome was known."""
        if self._probe_at == math.inf:
            self._probe_at = self._clock()


class HttpClient:
    """HTTP client with a connection pool, a limit of concurrent requests, retries and a circuit breaker.

    Args:
        name: name of the server, for log lines.
        timeout_s: timeout of one attempt, from its first byte to its last.
        concurrency: number of `slots`.
        retries: further attempts of `request`.
        waits_s: pauses between attempts are drawn below the first, doubled each time up to the second; a server that
            asks for a longer one than that is not asked again.
        opens_on: causes that open the breaker.
        headers: headers of every request.
        redirects: follow them.
        proxies: use those of the environment, which knows nothing of servers on this machine or in this cluster.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        concurrency: int,
        retries: int = 0,
        waits_s: tuple[float, float] = (0.5, 60.0),
        opens_on: tuple[Cause, ...] = ("timeout", "connection"),
        headers: Mapping[str, str] | None = None,
        redirects: bool = False,
        proxies: bool = False,
    ):
        self.name, self.timeout_s = name, timeout_s
        self.breaker = Breaker()
        self._concurrency, self._retries, self._waits_s = concurrency, retries, waits_s
        self._opens_on, self._redirects, self._proxies = opens_on, redirects, proxies
        self._headers = {**ACCEPTED, **(headers or {})}
        self._last_failure = ""
        self._slots: asyncio.Semaphore | None = None
        self._tls: ssl.SSLContext | None = None
        # Idle clients, of one connection each: with every request, a pool of httpx looks at all of its connections; at
        # 64 of them that costs several times as much as the request.
        self._idle: list[httpx.AsyncClient] = []
        self._tasks: set[Future[Any]] = set()

    # -- from any thread and event loop

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Await `work` in the I/O loop; cancelling the waiter cancels the work."""
        return await asyncio.wrap_future(self._start(work))

    def wait(self, work: Coroutine[object, object, T], timeout: float | None = None) -> T:
        """Wait for `work` in the I/O loop, for code without a loop; blocks.

        Raises:
            TimeoutError: after `timeout` seconds; the work is cancelled.
        """
        future = self._start(work)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs and close connections; may be called twice. A later use starts anew."""
        running = list(self._tasks)
        for future in running:
            future.cancel()
        if not self._idle and not running:
            return

        async def stop() -> None:
            clients, self._idle, self._slots = self._idle, [], None
            for client in clients:
                await client.aclose()

        with contextlib.suppress(TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(stop(), io_loop()).result(CLOSE_S)

    def _start(self, work: Coroutine[object, object, T]) -> Future[T]:
        future = asyncio.run_coroutine_threadsafe(work, io_loop())
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
        return future

    # -- in the I/O loop

    @property
    def slots(self) -> asyncio.Semaphore:
        """The bound on concurrency."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._concurrency)
        return self._slots

    async def request(
        self,
        method: str,
        url: str,
        parse: Callable[[bytes], T],
        *,
        body: object = None,
        params: Mapping[str, str] | None = None,
        limit: int,
        before: Callable[[int], Awaitable[None]] | None = None,
    ) -> T:
        """Request and parse a reply: in a slot, behind the breaker, with retries.

        Args:
            parse: raises `ValueError` and the like for a reply that is none; it is then requested again.
            limit: see `attempt`.
            before: awaited before each attempt, with its number from 0.

        Raises:
            HttpFailure: of the last attempt; `tries` has their number.
        """
        # Held during pauses between attempts too: a server that refuses for its load is not sent more meanwhile.
        async with self.slots:
            probe = self.breaker.open
            if self.breaker.refuses():
                raise self._refusal()
            try:
                for number in itertools.count():
                    if self.breaker.open and not probe:  # it opened during a pause
                        raise self._refusal()
                    if before is not None:
                        await before(number)
                    try:
                        answer = _parsed(await self.attempt(method, url, body=body, params=params, limit=limit), parse)
                        break
                    except HttpFailure as failure:
                        failure.tries = number + 1
                        pause = self._pause(number, failure)
                        if not failure.transient or number == self._retries:
                            raise
                    await asyncio.sleep(pause)
            except HttpFailure as failure:
                self._judge(failure)
                raise
            except BaseException:  # whoever waited has run out of time
                self.breaker.abandoned()
                raise
            if self.breaker.success():
                log.warning("%s: answers again", self.name)
            return answer

    async def attempt(
        self,
        method: str,
        url: str,
        *,
        body: object = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int,
    ) -> bytes:
        """Send the request once, without waiting, and return the content of the reply.

        Args:
            body: sent as JSON.
            headers: headers of this request, beside those of every request.
            limit: bytes of the reply, decompressed, beyond which it is refused.

        Raises:
            HttpFailure: no such reply.
            ConfigError: a proxy of the environment that cannot be used.
        """
        import httpx

        idle = self._idle
        client = idle.pop() if idle else self._connect()
        # Not httpx's `json=`: it writes UTF-8, which cannot hold half of a UTF-16 pair; escapes can.
        data = None if body is None else json.dumps(body).encode()
        sent = {**self._headers, **(headers or {}), **({} if data is None else {"Content-Type": "application/json"})}
        try:
            # httpx limits each pause of a reply, this the whole attempt.
            async with (
                asyncio.timeout(self.timeout_s),
                client.stream(method, url, params=params or None, content=data, headers=sent) as reply,
            ):
                fine = reply.status_code < 300
                # The beginning of an error page is enough to say what is wrong, however long the page is.
                content = await read(reply, limit if fine else LONGEST_ERROR, cut=not fine)
        except ReplyRefused as error:
            raise HttpFailure("garbage", str(error)) from None
        except TimeoutError:
            raise HttpFailure("timeout", f"no reply within {self.timeout_s:g} s", transient=True) from None
        # A group: a port that is none gets through httpx to the socket (in a redirect's address; ours are checked).
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError, ExceptionGroup):
            proxy = f", or that of a proxy is none: {names}" if self._proxies and (names := _proxies()) else ""
            raise HttpFailure("connection", f"is no address (host or port){proxy}", reached=False) from None
        except (httpx.HTTPError, OSError) as error:
            reason = f"{type(error).__name__}: {quoted(str(error))}".removesuffix(": ")
            reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise HttpFailure("connection", reason, transient=True, reached=reached) from None
        finally:
            idle.append(client)
        if fine:
            return content
        text = content.decode(errors="replace")
        raise HttpFailure(
            "status",
            f"HTTP {reply.status_code}: {quoted(text)}".removesuffix(": "),
            transient=reply.status_code >= 500 or reply.status_code in TRANSIENT,
            status=reply.status_code,
            text=text,
            pause=retry_after(reply.headers),
        )

    def _pause(self, number: int, failure: HttpFailure) -> float:
        """Return the seconds until the next attempt; if the server asks for too many, the failure is not transient."""
        first, longest = self._waits_s
        if failure.pause is None:
            # Random: after equal pauses, requests that were refused together would come back together.
            return random.uniform(0.0, min(longest, first * 2.0**number))
        if failure.transient and failure.pause > longest:
            failure.transient = False
            failure.reason += f" (asks to wait {failure.pause:g} s, longer than {longest:g} s)"
        return failure.pause

    def _judge(self, failure: HttpFailure) -> None:
        """Tell the breaker of a request that has failed for good."""
        # A refusal says nothing about the server: it must neither open the breaker nor hide what opened it.
        if failure.cause == "refused":
            return
        if failure.cause not in self._opens_on:
            self.breaker.success()
            return
        self._last_failure = failure.reason
        if self.breaker.failure():
            log.warning(
                "%s: too many requests have failed in a row; none is sent for a while, and rollouts that need one fail",
                self.name,
            )

    def _refusal(self) -> HttpFailure:
        why = f"not sent, since too many requests have failed in a row; the last: {self._last_failure}"
        return HttpFailure("refused", why)

    def _connect(self) -> httpx.AsyncClient:
        import httpx

        if self._tls is None:
            # httpx's certificates and the system's: a cluster's own authority is among those.
            self._tls = httpx.create_ssl_context()
            self._tls.load_default_certs()
        try:
            return httpx.AsyncClient(
                timeout=None,
                limits=httpx.Limits(max_connections=1, keepalive_expiry=IDLE_S),
                follow_redirects=self._redirects,
                event_hooks={"response": [refuse_large_redirect]} if self._redirects else {},
                trust_env=self._proxies,
                verify=self._tls,
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # of a proxy: nothing else in it is typed
            reason = hide(reason_of(error))
            raise ConfigError(
                f"{_proxies()}: no proxy that can be used ({reason}); expected http://HOST:PORT"
            ) from None


def _proxies() -> str:
    """Return the variables of the environment that name proxies."""
    return ", ".join(name for name, value in os.environ.items() if name.lower() in PROXIES and value)


def _parsed(content: bytes, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(content)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise HttpFailure("garbage", quoted(str(error)), transient=True) from None
