"""Attempts of `dspy.BestOfN` and `dspy.Refine` that may still fail, counted for each rollout on its own.

DSPy counts down on the module and never up again. Rollouts share the module, so that what one could still catch would
depend on the failures of others: on which were there before, and in a fork or a resumed run on which were not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mmrl.rollout.dspy.structure import COPYING

Counts = dict[int, tuple[Any, int]]
"""Id of a module -> the module, which keeps its id from being used again, and its count."""
# A context variable, as DSPy's settings are: rollouts run at once, also in threads of `forward`.
_COUNTS: ContextVar[Counts | None] = ContextVar("mmrl_fail_counts", default=None)
_NAME = "fail_count"


class FailCount:
    """The attribute `fail_count` of these modules: in a rollout a change of it is the rollout's own."""

    def __get__(self, module: Any, kind: object = None) -> Any:
        """Return the count, of the rollout that is running or of the program."""
        if module is None:
            return self
        counts = _COUNTS.get() or {}
        return counts[id(module)][1] if id(module) in counts else vars(module)[_NAME]

    def __set__(self, module: Any, count: int) -> None:
        counts = _COUNTS.get()
        # The first value is what the module is built with, also where a rollout builds or copies one.
        if counts is None or _NAME not in vars(module):
            vars(module)[_NAME] = count
        else:
            counts[id(module)] = (module, count)


@contextmanager
def counted_anew() -> Iterator[None]:
    """Start the modules of a program with the counts that it was built with."""
    token = _COUNTS.set({})
    try:
        yield
    finally:
        _COUNTS.reset(token)


for kind in COPYING:
    setattr(kind, _NAME, FailCount())
