"""Watches over code whose time must not grow with the square of its input, and over processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import TOP

LIMIT_S = 60


@contextmanager
def stopped_after(seconds: float, error: BaseException, timer: int, number: signal.Signals) -> Iterator[None]:
    """Raise `error` in what runs longer by a timer, which sends signal `number`."""

    def stop(*_: object) -> None:
        raise error

    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


def terminates() -> AbstractContextManager[None]:
    """Fails after a minute of processor time.

    What runs inside takes milliseconds if it reads its input once, and hours if it reads it once for each of its
    characters: the limit lies far from both, so that a slow or busy machine changes nothing.
    """
    error = AssertionError(f"still running after {LIMIT_S} s of processor time")
    return stopped_after(LIMIT_S, error, signal.ITIMER_PROF, signal.SIGPROF)


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    """`mmrl WORDS` in a process of its own."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(TOP)}  # of now: a fixture may have set something
    return subprocess.Popen([sys.executable, "-m", "mmrl", *words], env=environment, **{**streams, **options})


def until(ready: Callable[[], object], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait; fails after minutes, and where the process has ended first."""
    limit = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < limit
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def killed_when(ready: Callable[[], object], *words: str) -> None:
    """Run `mmrl WORDS`, and kill it as soon as `ready`, before its end."""
    process = started(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(ready, process)
    process.kill()
    process.wait()


def running(pid: int) -> bool:
    """Whether a process has not ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
