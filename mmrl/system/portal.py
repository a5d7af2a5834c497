"""The one event loop for network I/O of a process, in a thread of its own, and what a client keeps in it.

    io = IoScope(make_http_client, close_http_client, concurrency=16)
    reply = await io.run(ask())     # from any event loop; ask() runs in the I/O loop
    reply = io.wait(ask())          # from code without a loop

A connection belongs to the event loop that opened it, and the loops that programs run in are short: each step and each
evaluation has one of its own, and a deterministic engine decodes inside it, which holds it up. So network clients live
in this loop, which only ever does I/O and lasts as long as the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
C = TypeVar("C")

CLOSE_S = 5.0
"""Longest wait for connections to close: a stuck one must not keep a run from ending."""

_LOCK = threading.Lock()
# By process id: after a fork the child has the object but not the thread that runs it.
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


def io_loop() -> asyncio.AbstractEventLoop:
    """The I/O loop of this process, started at the first use."""
    with _LOCK:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            # Not anyio's BlockingPortal: it makes the caller wait for a turn of this loop with every request, and its
            # clean end can hang the interpreter's. A daemon thread simply ends with the process.
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="mmrl-io", daemon=True).start()
        return loop


class IoScope(Generic[C]):
    """One client's part of the I/O loop: its connections, its limit of concurrent requests, its running tasks.

    Args:
        connect: makes the client that owns the connections; called in the I/O loop, at the first use.
        disconnect: closes it; awaited in the I/O loop.
        concurrency: requests in flight at once, for `slots`.
    """

    def __init__(self, connect: Callable[[], C], disconnect: Callable[[C], Awaitable[None]], concurrency: int):
        self._connect = connect
        self._disconnect = disconnect
        self._concurrency = concurrency
        self._client: C | None = None
        self._slots: asyncio.Semaphore | None = None
        self._tasks: set[Future[Any]] = set()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Await `work` from whatever loop this is; cancelling the waiter cancels the work."""
        return await asyncio.wrap_future(self._start(work))

    def wait(self, work: Coroutine[object, object, T], timeout: float | None = None) -> T:
        """The same for code without a loop; blocks.

        Raises:
            TimeoutError: after `timeout` seconds; the work is cancelled.
        """
        future = self._start(work)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    @property
    def client(self) -> C:
        """The one client; only inside the I/O loop."""
        if self._client is None:
            self._client = self._connect()
        return self._client

    @property
    def slots(self) -> asyncio.Semaphore:
        """The one bound on concurrency; only inside the I/O loop."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._concurrency)
        return self._slots

    def close(self) -> None:
        """Cancel what runs and close connections; may be called twice. A later use starts anew."""
        running = list(self._tasks)
        for future in running:
            future.cancel()
        if self._client is None and not running:
            return

        async def stop() -> None:
            client, self._client, self._slots = self._client, None, None
            if client is not None:
                await self._disconnect(client)

        with contextlib.suppress(TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(stop(), io_loop()).result(CLOSE_S)

    def _start(self, work: Coroutine[object, object, T]) -> Future[T]:
        future = asyncio.run_coroutine_threadsafe(work, io_loop())
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
        return future
