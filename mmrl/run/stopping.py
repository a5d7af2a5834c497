"""How a run ends early, and what is let go of however it ends.

Part of `stages`; used by `run`, `evaluation` and the comparison of the command line.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def released(task: Task) -> Iterator[None]:
    """Let a task stop what it has started (a retriever's child process), however the run ends.

    A sweep uses a task for several runs: each begins with counts of its own.
    """
    task.reset_counts()
    try:
        yield
    finally:
        task.close()


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM (a scheduler's stop) ends a run like Ctrl-C does: what is saved is kept, and the way on is printed."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: someone else handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
