"""Has what DSPy logs and prints in rollouts counted (`mmrl.tasks.dspy.notices`); elsewhere it stays as it is."""

from __future__ import annotations

import builtins
import logging
from functools import partial
from typing import Any

from dspy.predict import best_of_n, refine

from mmrl.tasks.dspy import tools as tape
from mmrl.tasks.dspy.notices import kind_of, note


def _counted(record: logging.LogRecord) -> bool:
    """A filter of DSPy's handler: whether it writes the record."""
    if tape.current() is None or record.levelno < logging.WARNING:
        return True
    note(kind_of(str(record.msg)), record.getMessage())
    return False


def _printed(kind: str, *values: object, **options: Any) -> None:
    """`print` in a module of DSPy's that prints nothing but attempts that failed."""
    if tape.current() is None:
        builtins.print(*values, **options)
    else:
        note(kind, " ".join(map(str, values)))


def install() -> None:
    """Once for the process."""
    for handler in logging.getLogger("dspy").handlers:
        handler.addFilter(_counted)
    for module, name in ((refine, "Refine"), (best_of_n, "BestOfN")):
        vars(module)["print"] = partial(_printed, f"{name}: attempt failed")
