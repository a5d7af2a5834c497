"""Progress of long work that is no training: a bar in a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
"""Between two lines; work that takes less says nothing."""


@contextmanager
def progress(title: str, total: int | None = None, unit: str = "passages") -> Iterator[Callable[[int], None]]:
    """Show on stderr how far the work inside has come; yields what is called after each further piece of it.

    Args:
        title: what is done: `encoding`.
        total: pieces of work; None: not known.
        unit: what a piece is, as a plural.
    """
    if not sys.stderr.isatty():
        yield _Lines(title, total, unit).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, advance=done)


class _Lines:
    """Progress where nobody moves a cursor: log files, pipes, schedulers."""

    def __init__(self, title: str, total: int | None, unit: str):
        self._title, self._total, self._unit = title, total, unit
        self._done = 0
        self._started = self._printed = time.monotonic()

    def advance(self, done: int) -> None:
        """Count `done` further pieces; say so when the last line is long enough ago."""
        self._done += done
        now = time.monotonic()
        if now - self._printed < EVERY_S or self._done == self._total:
            return
        self._printed = now
        of = "" if self._total is None else f" of {self._total:,}"
        left = ""
        if self._total is not None and self._done:
            minutes = (now - self._started) / self._done * (self._total - self._done) / 60
            left = f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"
        print(f"{self._title}: {self._done:,}{of} {self._unit}{left}", file=sys.stderr, flush=True)
