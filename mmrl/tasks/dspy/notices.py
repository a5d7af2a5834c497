"""What DSPy warns of while it runs programs: counted by kind, of which the first, tenth, hundredth … is logged.

In rollouts the same sentence comes hundreds of times. Kept for the process, as DSPy's own loggers are.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter

from mmrl.engines.openai import worth_logging
from mmrl.system.replies import quoted

log = logging.getLogger("mmrl.dspy")

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def note(kind: str, text: str) -> None:
    """Count a warning."""
    with _lock:
        _counts[kind] += 1
        count = _counts[kind]
    if worth_logging(count):
        log.warning("DSPy: %s (%d of this kind so far; the others are counted)", quoted(text), count)


def kind_of(template: str) -> str:
    """The words of a warning that are the same each time: those before its first value or reason."""
    return re.split(r"[:%'\n]", template, maxsplit=1)[0].strip()[:60]


def counts() -> str:
    """How many there were of each kind, for a run's facts; empty where there were none."""
    return ", ".join(f"{count} {kind}" for kind, count in _counts.most_common())


def reset() -> None:
    """A run begins."""
    with _lock:
        _counts.clear()
