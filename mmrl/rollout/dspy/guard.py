"""Guard in the place of the configured LM (`dspy.configure(lm=…)`) while rollouts run.

In Python 3.11 a new thread has none of the context variables of the one that starts it, so that requests from threads
of a program's own would go to the configured LM: neither recorded nor trained, and perhaps paid for. They are refused,
and end the run when the rollouts under way have ended. Metrics call the configured LM, which their context names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dspy
from dspy.dsp.utils.settings import main_thread_config

from mmrl.errors import ConfigError
from mmrl.system.user_code import user_location


class _Guard(dspy.BaseLM):
    """LM that refuses all requests. Without attributes of its own: `BestOfN` and `Refine` copy the LM they find."""

    def __init__(self) -> None:
        super().__init__(model="mmrl", cache=False)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Called by adapters."""
        where = user_location()
        problem = (
            f"task.program: a request outside of its rollout{f' ({where})' if where else ''}: threads that a program "
            "or metric starts itself have no part in it, so that their calls would be neither recorded nor trained; "
            "use dspy.Parallel, or run them in contextvars.copy_context()"
        )
        _problems.append(problem)
        raise RuntimeError(problem)

    acall = __call__


_lock = threading.Lock()
_under_way = 0
"""Event loops with rollouts."""
_configured: Any = None
"""The LM behind the guard."""
_problems: list[str] = []
"""Of the rollouts under way."""


@contextmanager
def guarded() -> Iterator[None]:
    """Run rollouts inside, in this task and those that it starts; the configured LM is there for metrics alone.

    Raises:
        ConfigError: a request was made outside of any rollout.
    """
    global _configured, _under_way
    with _lock:
        # Several loops run rollouts at once (prefetching): the first puts the guard up, the last takes it down.
        if not _under_way:
            _problems.clear()
            _configured, main_thread_config["lm"] = main_thread_config["lm"], _Guard()
        _under_way += 1
        lm = _configured if isinstance(dspy.settings.lm, _Guard) else dspy.settings.lm
    try:
        with dspy.context(lm=lm):
            yield
    except Exception:
        if not _problems:
            raise
    finally:
        with _lock:
            _under_way -= 1
            # Another one may have been configured meanwhile.
            if not _under_way and isinstance(main_thread_config["lm"], _Guard):
                main_thread_config["lm"] = _configured
    if _problems:
        raise ConfigError(_problems[0])
