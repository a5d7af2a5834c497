"""A watch over code that must not take time that grows with the square of its input."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
