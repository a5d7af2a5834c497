"""Runs that Python starts: beside a notebook's event loop, stoppable by its button, with the output of a command.

Their process goes on afterwards, so they leave it as they found it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TypeVar

from mmrl.errors import MmrlError, storage
from mmrl.secrets import HidingStream, add_environment
from mmrl.system.portal import LOOK_S
from mmrl.system.stop import Stop, obeying

T = TypeVar("T")
_ALONE = threading.Lock()


@contextmanager
def as_the_command() -> Iterator[None]:
    """Treat output and errors as the command `mmrl` does: hide secrets, report a full disk in one sentence.

    Raises:
        MmrlError: another thread has a run, with which this one would share sources of random numbers.
    """
    add_environment()
    if not _ALONE.acquire(blocking=False):
        raise MmrlError("a process has one run at a time, and one is under way here; mmrl compare jobs=N runs several")
    out, err = HidingStream.around(sys.stdout), HidingStream.around(sys.stderr)
    try:
        with redirect_stdout(out), redirect_stderr(err), storage():
            yield
    finally:
        _ALONE.release()


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Leave torch's number of threads and the random numbers of Python, numpy and torch as they were."""
    # Imported here: a refused config need not wait for them.
    import numpy
    import torch

    threads, python_state, numpy_state = torch.get_num_threads(), random.getstate(), numpy.random.get_state()
    # Not of all devices, each of which it would take memory of.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


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
    thread = threading.Thread(target=run, name="mmrl-train", daemon=True)
    thread.start()
    with _interrupts_raised():
        # Not `join`: interrupted, it takes a thread that runs for one that has ended (CPython 3.11).
        while not outcome.done():
            try:
                wait([outcome], timeout=LOOK_S)
                if thread.ident is not None and not outcome.done():
                    stop.reach(thread.ident)
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
