"""Runs that Python starts: beside a notebook's event loop, stoppable by its button, with the output of a command."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TypeVar

from mmrl.errors import storage
from mmrl.secrets import HidingStream, add_environment
from mmrl.system.portal import LOOK_S
from mmrl.system.stop import Stop, obeying

T = TypeVar("T")


@contextmanager
def as_the_command() -> Iterator[None]:
    """Treat output and errors as the command `mmrl` does: hide secrets, report a full disk in one sentence."""
    add_environment()
    out, err = HidingStream.around(sys.stdout), HidingStream.around(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err), storage():
        yield


def outside_of_loops(work: Callable[[], T]) -> T:
    """Call `work` where no event loop runs: here, or in a thread of its own below a notebook's loop.

    Ctrl-C (a notebook's stop button) asks the thread to end (`system.stop`), and is raised here when it has.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    outcome: Future[T] = Future()
    stop = Stop()

    def run() -> None:
        try:
            with obeying(stop):
                outcome.set_result(work())
        except BaseException as error:  # handed on to the caller, whatever it is
            outcome.set_exception(error)

    # a daemon: a kernel that is restarted must not wait for the run
    threading.Thread(target=run, name="mmrl-train", daemon=True).start()
    with _interrupts_raised():
        # Not `join`: interrupted, it takes a thread that runs for one that has ended (CPython 3.11).
        while not outcome.done():
            try:
                wait([outcome], timeout=LOOK_S)
            except KeyboardInterrupt:
                print("stopping: a step under way is trained and saved first", file=sys.stderr, flush=True)
                stop.request()
    return outcome.result()


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C; asyncio would cancel the task, which waits here and would not notice."""
    try:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # not the main thread: someone else handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
