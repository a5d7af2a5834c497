"""Watches over code whose time must not grow with the square of its input, and over processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.helpers import TOP

LIMIT_S = 60


@contextmanager
def terminates() -> Iterator[None]:
    """Fails after a minute of processor time.

    What runs inside takes milliseconds if it reads its input once, and hours if it reads it once for each of its
    characters: the limit lies far from both, so that a slow or busy machine changes nothing.
    """

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {LIMIT_S} s of processor time")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def killed_when(ready: Callable[[], object], *words: str) -> None:
    """Run `mmrl WORDS` in a process, which is killed as soon as `ready`, before its end."""
    process = subprocess.Popen([sys.executable, "-m", "mmrl", *words], env={**os.environ, "PYTHONPATH": str(TOP)})
    while process.poll() is None and not ready():
        time.sleep(0.01)
    assert process.poll() is None, "it was killed before its end"
    process.kill()
    process.wait()


def running(pid: int) -> bool:
    """Whether a process has not ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
