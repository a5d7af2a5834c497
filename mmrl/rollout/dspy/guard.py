"""Guard in the place of the configured LM (`dspy.configure(lm=…)`) while rollouts run.

In Python 3.11 a new thread has none of the context variables of the one that starts it, so that a program's calls in
threads of its own would go to the configured LM: neither recorded nor trained, and perhaps paid for. They are refused,
and end the run when the rollouts under way have ended.
Metrics may call the configured LM, also from their own threads.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import dspy
from dspy.dsp.utils.settings import main_thread_config

from mmrl.errors import ConfigError
from mmrl.system.user_code import user_location
from mmrl.tasks.dspy import tools as tape

P = ParamSpec("P")
T = TypeVar("T")


class _Refused(Exception):
    """Error where the request was made; the run is ended elsewhere, since the program may catch this."""


class _Guard(dspy.BaseLM):
    """LM that refuses all requests. Without attributes of its own: `BestOfN` and `Refine` copy the LM they find."""

    def __init__(self) -> None:
        super().__init__(model="mmrl", cache=False)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Called by adapters."""
        raise _refusal()

    acall = __call__


class _NoAdapter(dspy.Adapter):
    """Adapter that refuses every predictor, whichever LM it was called with."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Called by predictors."""
        raise _refusal()

    acall = __call__


@dataclass(slots=True, eq=False)
class _Sampling:
    """Rollouts under way in one event loop."""

    problem: str | None = None
    """The first one, which ends the run when they have ended."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Sampling and thread on whose behalf code runs."""

    sampling: _Sampling
    started: str | None = None
    """Source location that started the thread, if a program did; None in the code of mmrl and of metrics."""


_ORIGIN: ContextVar[_Origin | None] = ContextVar("mmrl_origin", default=None)
_lock = threading.Lock()
_under_way: list[_Sampling] = []
_configured: Any = None
"""The LM behind the guard."""
_thread_start, _pool_submit = threading.Thread.start, ThreadPoolExecutor.submit


@contextmanager
def guarded() -> Iterator[None]:
    """Run rollouts inside, in this task and those that it starts; the configured LM is there for metrics alone.

    Raises:
        ConfigError: a program has made a request outside of its rollout.
    """
    sampling = _Sampling()
    lm = _put_up(sampling)
    origin = _ORIGIN.set(_Origin(sampling))
    try:
        with dspy.context(lm=lm):
            yield
    except Exception:
        if sampling.problem is None:
            raise
    finally:
        _ORIGIN.reset(origin)
        _take_down(sampling)
    if sampling.problem is not None:
        raise ConfigError(sampling.problem)


def _put_up(sampling: _Sampling) -> Any:
    """Begin a sampling; returns the LM that its metrics call."""
    global _configured
    with _lock:
        # Several loops run rollouts at once (prefetching): the first puts the guard up, the last takes it down.
        if not _under_way:
            _configured, main_thread_config["lm"] = main_thread_config["lm"], _Guard()
            # New threads are told who has started them.
            threading.Thread.start, ThreadPoolExecutor.submit = _start, _submit  # type: ignore[method-assign,assignment]
        _under_way.append(sampling)
        lm = dspy.settings.lm
        return _configured if isinstance(lm, _Guard) else lm


def _take_down(sampling: _Sampling) -> None:
    with _lock:
        _under_way.remove(sampling)
        if _under_way:
            return
        threading.Thread.start = _thread_start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = _pool_submit  # type: ignore[method-assign]
        # Another one may have been configured meanwhile.
        if isinstance(main_thread_config["lm"], _Guard):
            main_thread_config["lm"] = _configured


def _refusal() -> _Refused:
    origin = _ORIGIN.get()
    where = user_location() or (origin and origin.started)
    problem = (
        f"task.program: a request outside of its rollout{f' ({where})' if where else ''}: threads that a program "
        "starts itself are no part of the rollout, so that their calls would be neither recorded nor trained; use "
        "dspy.Parallel"
    )
    with _lock:
        # A thread that was there before any rollout may be any program's.
        for sampling in _under_way if origin is None else [origin.sampling]:
            sampling.problem = sampling.problem or problem
    return _Refused(problem)


def _start(thread: threading.Thread) -> None:
    """Replace `threading.Thread.start` while rollouts run."""
    run = _with_origin(thread.run)

    def quietly() -> None:
        # Python would print a traceback of it; the run's own error is one line.
        with suppress(_Refused):
            run()

    thread.run = quietly  # type: ignore[method-assign]
    _thread_start(thread)


def _submit(pool: ThreadPoolExecutor, function: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
    """Replace `ThreadPoolExecutor.submit` while rollouts run."""
    return _pool_submit(pool, _with_origin(function), *args, **options)


def _with_origin(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap `function` for another thread: of a metric in the metric's context, of a program in one with the guard."""
    origin = _ORIGIN.get()
    if origin is None:
        return function
    if origin.started is None and tape.current() is None:
        return partial(contextvars.copy_context().run, function)
    started = _Origin(origin.sampling, user_location() if origin.started is None else origin.started)

    def run(*args: P.args, **options: P.kwargs) -> T:
        _ORIGIN.set(started)
        # The guard is the thread's own too, since it may outlive the rollouts.
        with dspy.context(lm=_Guard(), adapter=_NoAdapter()):
            return function(*args, **options)

    return partial(Context().run, run)
