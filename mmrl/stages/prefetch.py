"""Sampling one batch ahead (`train.staleness=1`): the next step's rollouts run in a thread while this step trains.

Part of the weight stage: `collect` starts it after the engine has new weights, and `weights` waits for it before the
next ones are pushed, so that a batch comes from one version of the policy, one step behind when it is trained on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

T = TypeVar("T")

STOP_S = 30.0
"""Longest wait for a cancelled batch to end."""


class Prefetch(Generic[T]):
    """At most one batch under way, in an event loop of its own."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The step that is being sampled, or has been; None: nothing."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._stopped = False
        # Lists, because None may be a result: empty while nothing has ended.
        self._results: list[T] = []
        self._error: BaseException | None = None

    def start(self, step: int, work: Callable[[], Coroutine[object, object, T]]) -> None:
        """Begin `work` for `step`.

        Raises:
            RuntimeError: the batch before was never taken.
        """
        if self.step is not None:
            raise RuntimeError(f"step {self.step} was prefetched and never trained on")
        self.step, self._results, self._error, self._stopped = step, [], None, False
        # A daemon: a run that is being killed must not wait for a server that does not answer.
        self._thread = threading.Thread(target=self._run, args=(work,), name="mmrl-prefetch", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being sampled; the batch stays there for `take`."""
        if self._thread is not None:
            self._thread.join()

    def take(self, step: int) -> T:
        """The batch of `step`; raises what sampling it raised."""
        if self.step != step:
            raise RuntimeError(f"step {step} was requested, step {self.step} was prefetched")
        self.wait()
        error, results = self._error, self._results
        self.step, self._thread, self._results, self._error = None, None, [], None
        if error is not None:
            raise error
        return results[0]

    def close(self) -> None:
        """Cancel what is under way and drop it; may be called twice."""
        thread, self._thread, self.step = self._thread, None, None
        self._stopped = True
        if thread is None or not thread.is_alive():
            return
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:  # it has just ended
                return
        thread.join(STOP_S)

    def _run(self, work: Callable[[], Coroutine[object, object, T]]) -> None:
        try:
            self._results = [asyncio.run(self._main(work))]
        except BaseException as error:  # raised again by `take`, in the thread that trains
            self._error = error

    async def _main(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        # `close` may have run between the thread's start and here, when there was no task to cancel yet.
        if self._stopped:
            raise asyncio.CancelledError
        return await work()
