"""The event loops of a process, each in a thread of its own, from its first use to the end of the process.

A connection, a session or a lock belongs to the event loop that it was made in. What is kept over a run, by mmrl or by
a user's code, finds the same loop at each step and in each evaluation:

- network clients live in the I/O loop, which only ever does I/O;
- rollouts run in a second one, with the programs, tools and metrics of users; a deterministic engine decodes inside it,
  which holds it up;
- async agents and their metrics run in a third: one that blocks while it waits for a reply must not hold up the rollout
  that makes the reply (`user_code.on_agent_loop`).
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

from mmrl.errors import Stopped
from mmrl.system.stop import look

P = ParamSpec("P")
T = TypeVar("T")

STOP_S = 10.0
"""Longest wait for cancelled work to end."""
EXIT_S = 5.0
"""Time in which what still runs on a loop may clean up when the process ends."""
LOOK_S = 0.2
"""Longest pause in which a thread does not notice that it is to end (`system.stop.look`, a stop button)."""

_LOCK = threading.Lock()
_THREADS: dict[asyncio.AbstractEventLoop, int] = {}
"""Loop -> id of its thread."""
_LOOPS: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}
"""By process id, since after a fork the child has the object but not the thread that runs it, and name."""
exit_code: int | None = None
"""What the command ends with, set when it does; None in a process that is not ours to end."""


def io_loop() -> asyncio.AbstractEventLoop:
    """Return the I/O loop of this process, started at the first use."""
    return _loop("mmrl-io")


def rollout_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of rollouts and of the user's code in them, started at the first use."""
    return _loop("mmrl-rollouts")


def agent_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of async agents and their metrics, started at the first use."""
    return _loop("mmrl-agents")


def _loop(name: str) -> asyncio.AbstractEventLoop:
    with _LOCK:
        key = os.getpid(), name
        if key not in _LOOPS:
            # Not anyio's BlockingPortal: it makes the caller wait for a turn of this loop with every request, and its
            # clean end can hang the interpreter's. A daemon thread simply ends with the process.
            loop = _LOOPS[key] = asyncio.new_event_loop()
            thread = threading.Thread(target=_run_forever, args=(loop,), name=name, daemon=True)
            thread.start()
            _THREADS[loop] = thread.ident or 0
        return _LOOPS[key]


def thread_of(loop: asyncio.AbstractEventLoop) -> int:
    """Return the id of a loop's thread."""
    return _THREADS[loop]


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # What a task of a user's code raises to end the process; whoever awaits the task gets it too.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


@atexit.register
def _clean_up() -> None:
    """Cancel what a user's code has left on the loops, and close its async generators."""

    async def end(loop: asyncio.AbstractEventLoop) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await loop.shutdown_asyncgens()

    mine = [loop for (process, name), loop in _LOOPS.items() if process == os.getpid() and name != "mmrl-io"]
    busy = [loop for loop in mine if futures.wait([Job(end(loop), loop).ended], EXIT_S).not_done]
    # In a long forward: the interpreter's end under a thread that torch runs in aborts the process, with code 134.
    if busy and exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class Job(Generic[T]):
    """A coroutine on a loop of this process, with the context variables of whoever starts it.

    When `ended` is done, nothing of it is under way any more, also after `cancel`.
    """

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop):
        self.ended: Future[T] = Future()
        # Only the work's end completes it: whoever waits may be cancelled.
        self.ended.set_running_or_notify_cancel()
        self._loop = loop
        loop.call_soon_threadsafe(self._start, work)

    def _start(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        try:
            self.ended.set_result(task.result())
        except BaseException as error:  # raised again where it is waited for
            self.ended.set_exception(error)

    def cancel(self) -> None:
        """Cancel it; no effect where it has ended."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())

    async def awaited(self, patience_s: float = STOP_S) -> T:
        """Return its result, awaited on any other loop; cancelling ends it too.

        Args:
            patience_s: longest wait for its end after that.
        """
        outcome = asyncio.wrap_future(self.ended)
        try:
            while not outcome.done():
                await asyncio.wait([outcome], timeout=LOOK_S)
                look()
            return outcome.result()
        except (asyncio.CancelledError, Stopped):
            if not outcome.done():
                self.cancel()
                await asyncio.wait([outcome], timeout=patience_s)
                if not outcome.cancel():
                    outcome.exception()  # how it ended is nobody's affair any more
            raise


def on_rollout_loop(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate an async function that runs on the loop of rollouts, from whichever loop it is awaited."""

    @functools.wraps(function)
    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        work, loop = function(*args, **kwargs), rollout_loop()
        return await (work if asyncio.get_running_loop() is loop else Job(work, loop).awaited())

    return called
