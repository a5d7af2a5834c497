"""HTTP requests from programs that live in short event loops: one background loop owns the connections.

Under the engines that talk to servers. Each step and evaluation runs in its own `asyncio.run`; a connection belongs to
the loop that opened it, so all of them are kept in one loop of a daemon thread, and callers in any loop wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """An event loop in a thread of its own, started at the first use."""

    def __init__(self, name: str):
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Any = None
        self._slots: asyncio.Semaphore | None = None
        self._lock = threading.Lock()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` from whatever loop this is; cancelling the waiter cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._start()))

    def wait(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The same for code without a loop; blocks.

        Raises:
            TimeoutError: after `timeout` seconds; the work is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._start())
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def client(self, make: Callable[[], Any]) -> Any:
        """The one HTTP client; only inside the background loop."""
        if self._client is None:
            self._client = make()
        return self._client

    def slots(self, count: int) -> asyncio.Semaphore:
        """The one bound on concurrency; only inside the background loop."""
        if self._slots is None:
            self._slots = asyncio.Semaphore(count)
        return self._slots

    def close(self) -> None:
        """Close connections and end the thread; may be called twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return

        async def stop() -> None:
            if self._client is not None:
                await self._client.aclose()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        with contextlib.suppress(TimeoutError, RuntimeError):  # a stuck connection must not keep the run from ending
            asyncio.run_coroutine_threadsafe(stop(), loop).result(5)
        self._client = self._slots = None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(5)

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self.name, daemon=True)
                self._thread.start()
            return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()
