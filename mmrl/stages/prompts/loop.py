"""What DSPy's threads wait for, on the loop of all rollouts, and the first error of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

from mmrl.system.portal import LOOK_S, STOP_S, Job, rollout_loop
from mmrl.system.stop import look

T = TypeVar("T")


class Loop:
    """Work of a search on the loop of all rollouts, while the optimiser waits for it in threads.

    The first error ends the search: whatever is asked for later raises it too. DSPy takes an exception for a bad
    candidate and goes on.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._waiting: set[Job[Any]] = set()

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, which runs in a thread and calls `wait`; raises the first error."""
        # Rollouts have DSPy's settings of now and not the optimiser's: a metric may call the LM that is configured.
        self._context = copy_context()
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(copy_context().run, function)
            try:
                while not done.done():
                    futures.wait([done], LOOK_S)
                    look()
                # Whatever DSPy has made of it.
                if self.failure is not None:
                    raise self.failure
                return done.result()
            finally:
                with self._lock:
                    self.failure = self.failure or RuntimeError("the search has ended")
                    jobs = list(self._waiting)
                # What was asked for as the search was stopped: nothing else would wake its threads.
                for job in jobs:
                    job.cancel()
                futures.wait([job.ended for job in jobs], STOP_S)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work` on the loop; called from any other thread, which it blocks."""
        with self._lock:
            if self.failure is not None:
                work.close()
                raise self.failure
            job = self._context.copy().run(Job, work, rollout_loop())
            self._waiting.add(job)
        job.ended.add_done_callback(lambda _: self._waiting.discard(job))
        with self.recording_failures():
            try:
                return job.ended.result()
            except asyncio.CancelledError:
                raise RuntimeError("the search has ended") from None

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Keep the first error that leaves the block."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise
