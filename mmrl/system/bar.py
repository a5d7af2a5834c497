"""Progress of long work that is no training: a bar in a terminal, in a log one every ten seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
"""Between two states of it in a log; work that takes less says nothing."""


@contextmanager
def progress(title: str, total: int | None = None, unit: str = "passages") -> Iterator[Callable[[int], object]]:
    """Show on stderr how far the work inside has come; yields what is called after each further piece of it.

    Args:
        title: name of the work: `encoding`.
        total: of `unit`; None: not known.
    """
    from tqdm import tqdm

    every = 0.1 if sys.stderr.isatty() else EVERY_S
    with tqdm(desc=title, total=total, unit=f" {unit}", mininterval=every, delay=every, leave=False) as bar:
        yield bar.update
