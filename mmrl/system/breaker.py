"""A circuit breaker: after many failures in a row a server is sent nothing for a while, and requests fail at once.

Used by the clients of retrievers and endpoints. Without it a server that no longer answers costs every rollout of a
step the whole time of all its attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BREAKER_FAILURES = 8
"""Failed requests in a row after which requests fail at once."""
BREAKER_S = 15.0
"""Seconds until one request is let through again."""


class Breaker:
    """Counts failures in a row; open, it refuses until `wait_s` have passed, then lets one request through as a probe.

    Args:
        failures: in a row, after which it opens.
        wait_s: seconds for which it stays open.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        failures: int = BREAKER_FAILURES,
        wait_s: float = BREAKER_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit, self._wait_s, self._clock = failures, wait_s, clock
        self._failures = 0
        self._opened: float | None = None
        self._probing = False

    @property
    def open(self) -> bool:
        """Whether too many have failed, and none has succeeded since."""
        return self._opened is not None

    def refuses(self) -> bool:
        """Whether a request must not be sent now. A request let through has to report `success` or `failure`."""
        if self._opened is None:
            return False
        if self._probing or self._clock() - self._opened < self._wait_s:
            return True
        self._probing = True
        return False

    def success(self) -> bool:
        """A request was answered. Returns whether it was open until now."""
        was_open = self.open
        self._failures, self._opened, self._probing = 0, None, False
        return was_open

    def failure(self) -> bool:
        """A request failed for good. Returns whether it opens by this one."""
        was_open = self.open
        self._failures += 1
        self._probing = False
        if self._failures >= self._limit:
            self._opened = self._clock()
        return self.open and not was_open

    def abandoned(self) -> None:
        """A request was cancelled before its outcome was known."""
        self._probing = False
