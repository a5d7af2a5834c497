"""DSPy's log lines and printed text while rollouts run: counted by kind; the first, tenth, hundredth … is logged.

In rollouts the same sentence comes hundreds of times. Kept for the process, as DSPy's own loggers are. Outside of
rollouts DSPy's lines stay as they are.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections import Counter
from functools import partial
from typing import Any

from mmrl.engines.openai import worth_logging
from mmrl.system.replies import quoted
from mmrl.tasks.dspy import tools as tape

log = logging.getLogger("mmrl.dspy")

_counts: Counter[str] = Counter()


def _note(kind: str, text: str) -> None:
    _counts[kind] += 1
    if worth_logging(_counts[kind]):
        log.warning("DSPy: %s (%d of this kind so far)", quoted(text), _counts[kind])


def _written(record: logging.LogRecord) -> bool:
    """Filter a record of DSPy's handler: True if it is written."""
    if tape.current() is None or record.levelno < logging.WARNING:
        return True
    # Warnings that begin alike, up to their first value or reason, are of the same kind.
    _note(re.split(r"[:%'\n]", str(record.msg), maxsplit=1)[0].strip()[:60], record.getMessage())
    return False


def _print(kind: str, *values: object, **options: Any) -> None:
    """Replace `print` in a module that prints only failed attempts."""
    if tape.current() is None:
        builtins.print(*values, **options)
    else:
        _note(kind, " ".join(map(str, values)))


def install() -> None:
    """Install the filters, once per process, where programs run: a task alone needs no DSPy."""
    from dspy.predict import best_of_n, refine

    for handler in logging.getLogger("dspy").handlers:
        handler.addFilter(_written)
    for module, name in ((refine, "Refine"), (best_of_n, "BestOfN")):
        vars(module)["print"] = partial(_print, f"{name}: attempt failed")
