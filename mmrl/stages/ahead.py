"""One batch ahead: rollouts of the next step are sampled in a thread of their own while this step trains.

Part of `stages`; `weights` starts it after a push of weights and waits for it before the next one, so a batch comes
from one version of the policy, which is one version behind when it is trained on (`train.staleness=1`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

STOP_S = 30.0
"""How long a batch that nobody wants any more may take to end."""


class Ahead(Generic[T]):
    """At most one piece of work under way, in an event loop of its own."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The step that is being sampled, or has been; None: nothing."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._stopped = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def start(self, step: int, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Begin `work` for `step`.

        Raises:
            RuntimeError: a batch that nobody has taken is there.
        """
        if self.step is not None:
            raise RuntimeError(f"step {self.step} has been sampled ahead and was never trained on")
        self.step, self._value, self._error, self._stopped = step, None, None, False
        # A daemon: a run that is being killed must not wait for a server that does not answer.
        self._thread = threading.Thread(target=self._run, args=(work,), name="mmrl-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being sampled; what was sampled stays there for `take`."""
        if self._thread is not None:
            self._thread.join()

    def take(self, step: int) -> T:
        """What was sampled for `step`; raises what sampling it raised."""
        if self.step != step:
            raise RuntimeError(f"step {step} is asked for, step {self.step} was sampled ahead")
        self.wait()
        error, value = self._error, self._value
        self.step = self._thread = self._value = self._error = None
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Cancel what is under way and forget it; may be called twice."""
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

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            self._value = asyncio.run(self._main(work))
        except BaseException as error:  # raised again by whoever takes it
            self._error = error

    async def _main(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError
        return await work()
