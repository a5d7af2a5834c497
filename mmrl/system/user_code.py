"""Code that a user wrote: run in threads of its own, and its exceptions reported with file, line and traceback."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import logging
import math
import sys
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from decimal import Decimal
from numbers import Real
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from pydantic_core import to_jsonable_python

from mmrl.errors import ProgramFailure, RewardFailure, RolloutError
from mmrl.records import LARGEST
from mmrl.system.portal import Job, agent_loop, thread_of

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=RolloutError)

MOST_AT_ONCE = 32
"""Metrics that run at once; the others wait, each in its thread."""
MOST_FRAMES = 20
MOST_CHARACTERS = 4000
"""Limits of a traceback that is reported."""

LOOK_S, BLOCKED_LOOKS = 0.25, 4
"""Pause between looks at the loop of agents, and looks at one and the same place after which it counts as blocked."""

log = logging.getLogger("mmrl.agents")

_IDLE = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]
"""What calls the selector in which a loop waits."""

_OWN = Path(__file__).parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SLOTS = threading.BoundedSemaphore(MOST_AT_ONCE)


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call what may block in a thread of its own, with the caller's context variables (DSPy keeps its settings there).

    A thread for each call and no shared pool: a function that waits for another one would fill the pool and wait for
    ever.
    """
    context = contextvars.copy_context()
    outcome: Future[T] = Future()
    # Started here: the waiter may be cancelled while the thread works, its outcome may not.
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(context.run(carried(function), *args, **kwargs))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="mmrl-user-code", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def carried(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function for another thread, which raises what a future can carry to whoever awaits it.

    No future takes a StopIteration: whoever waited would wait for ever. A cancellation would be taken for the waiter's
    own, and what ends a process (SystemExit) ends what was asked for, not the run.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (StopIteration, CancelledError) as error:
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            failure.__traceback__ = error.__traceback__
            raise failure from None
        except Exception:
            raise
        except BaseException as error:
            raise ProgramFailure(f"{type(error).__name__}: {error}") from None

    return call


class Worker:
    """A thread that calls functions one after another: what an object of a user's keeps may belong to its thread.

    Ends with `close`, or with the process; one that never comes back holds up nobody else.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in it, with the caller's context variables."""
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()  # as in `in_thread`
        context = contextvars.copy_context()

        def job() -> None:
            try:
                outcome.set_result(context.run(carried(function), *args, **kwargs))
            except Exception as error:
                outcome.set_exception(error)

        self.put(job)
        return await asyncio.wrap_future(outcome)

    def put(self, job: Callable[[], None]) -> None:
        """Have it do something after what it has to do, and do not wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mmrl-user-code", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End it after what it has to do."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


async def on_agent_loop(result: Awaitable[T]) -> T:
    """Await what an agent's code has returned, on the loop of agents: a client that it keeps serves every rollout.

    Where one blocks that loop, those that have not begun get loops of their own, so that it holds up itself alone.

    Raises:
        ProgramFailure: it would end the process.
    """
    # Popped by whoever is first: the loop of agents, or this one that takes it back.
    not_begun = {"result": result}

    async def begun() -> T:
        mine = not_begun.pop("result", None)
        if mine is None:
            raise asyncio.CancelledError
        try:
            return await mine
        except (KeyboardInterrupt, SystemExit, GeneratorExit) as error:  # as in `in_thread`
            raise ProgramFailure(f"{type(error).__name__}: {error}") from None

    job, places = Job(begun(), agent_loop()), list[tuple[int, int]]()
    ended = asyncio.wrap_future(job.ended)
    try:
        while not_begun:
            frame = sys._current_frames()[thread_of(agent_loop())]
            # Busy code (imports, a large prompt) is somewhere else at each look; an idle loop was not woken yet.
            if frame.f_back is not None and frame.f_back.f_code is not _IDLE:
                places.append((id(frame), frame.f_lasti))
            blocked = bool(places) and places.count(places[-1]) > BLOCKED_LOOKS
            if blocked and (mine := not_begun.pop("result", None)) is not None:
                _say_blocked(user_location(frame))
                return await _in_own_loop(mine)
            await asyncio.wait([ended], timeout=LOOK_S)
        return await job.awaited(patience_s=0)
    finally:
        job.cancel()
        ended.cancel()
        if inspect.iscoroutine(mine := not_begun.pop("result", None)):
            mine.close()  # cancelled before it began


@functools.cache
def _say_blocked(where: str) -> None:
    log.warning(
        "async code of the agent blocks its event loop%s: what waits for that loop gets one of its own, where a client "
        "that the code keeps does not work; await there, or make it a plain function",
        f" ({where})" if where else "",
    )


async def _in_own_loop(result: Awaitable[T]) -> T:
    """Await something in a thread and an event loop of its own; cancelling cancels it."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    cancelled = threading.Event()

    async def awaited() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        if cancelled.is_set():  # before there was a task to cancel
            task.cancel()
        return await result

    try:
        return await in_thread(lambda: asyncio.run(awaited()))
    except asyncio.CancelledError:
        cancelled.set()
        for loop, task in running:
            with suppress(RuntimeError):  # it has ended, and its loop is closed
                loop.call_soon_threadsafe(task.cancel)
        raise


async def call_scorer(metric: Callable[..., Any], *args: object, beside_agent: bool = False) -> Any:
    """Call a metric: awaited where it is async, else in a thread, `MOST_AT_ONCE` at a time.

    Args:
        beside_agent: await it where agents run, with which it may share a client.

    Raises:
        RewardFailure: it would end the process.
    """

    def bounded() -> object:
        # Metrics do not wait for each other, so that the bound cannot lead to a deadlock.
        with _SLOTS:
            return metric(*args)

    try:
        result = metric(*args) if is_async(metric) else await in_thread(bounded)
        if beside_agent and inspect.isawaitable(result):
            return await on_agent_loop(result)
    except ProgramFailure as failure:  # its SystemExit (`in_thread`)
        raise RewardFailure(str(failure)) from None
    return await result if inspect.isawaitable(result) else result


def as_number(value: object) -> float | None:
    """Return a number as a float, else None; numpy's and torch's numbers and one-element arrays are numbers.

    What is too large for a float is infinite.
    """
    # By their methods, not by type: neither library is imported for it.
    shape: Any = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item") and math.prod(shape) == 1:
        value = value.item()
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def finite_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Check a reward function's numbers by name and return them as floats.

    Raises:
        RewardFailure: one is no number, not finite, or beyond `LARGEST`.
    """
    # One NaN would spread through the baseline of a whole group, and through the mean of a step.
    numbers = {}
    for name, value in values.items():
        number = as_number(value)
        if number is None or not abs(number) <= LARGEST:
            raise RewardFailure(
                f"the reward function returned {value!r:.100} for {name}, expected a finite number of at most "
                f"{LARGEST:g} in size"
            )
        numbers[str(name)] = number
    return numbers


def as_json(prediction: object) -> object:
    """Return a prediction as JSON values: dates as text, sets as lists, dataclasses and pydantic's models as mappings.

    Raises:
        ProgramFailure: it holds something else, or itself.
    """
    try:
        return to_jsonable_python(prediction, fallback=_by_method)
    # The object's class is the user's too.
    except Exception as error:
        raise ProgramFailure(
            f"the prediction cannot be written as JSON ({error}); return texts, numbers, lists"
        ) from None


def _by_method(value: Any) -> object:
    for method in ("toDict", "tolist"):  # DSPy's examples; NumPy's and PyTorch's arrays
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def copied(value: Any) -> Any:
    """Return a copy that a user's code may change; what cannot be copied (locks, connections) is shared."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def own_containers(value: Any) -> Any:
    """Return a copy of dicts, lists, tuples and sets, with the same objects in them, which stay equal to themselves."""
    if type(value) is dict:
        return {key: own_containers(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(own_containers(part) for part in value)
    return set(value) if type(value) is set else value


def as_async(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tool as an async function; a synchronous one runs in threads, so that it blocks no other rollout."""

    async def call_tool(**arguments: object) -> Any:
        result = tool(**arguments) if is_async(tool) else await in_thread(tool, **arguments)
        return await result if inspect.isawaitable(result) else result

    return call_tool


def is_async(function: Callable[..., Any]) -> bool:
    """True for a function, or an object with `__call__`, that gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def user_failure(kind: type[F], error: BaseException, before: str = "") -> F:
    """Return a failure that says where in the user's code `error` was raised, and keeps the end of its traceback.

    Args:
        before: beginning of the message.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # Without a user frame (a built-in task, a server that is down) the message names no position.
    user_frames = [frame for frame in frames if _is_own(frame.filename)]
    where = ""
    if user_frames:
        # The last one: what the user's own code was doing, whichever library it called for it.
        where = f" ({_describe_frame(user_frames[-1].filename, user_frames[-1].lineno, user_frames[-1].name)})"
    failure = kind(f"{before}{type(error).__name__}: {error}{where}")
    # From the user's first frame: what is above it is mmrl's and DSPy's way of calling it.
    start = next((number for number, frame in enumerate(frames) if frame in user_frames), 0)
    lines = traceback.format_list(frames[start:][-MOST_FRAMES:])
    lines += traceback.format_exception_only(type(error), error)
    text = "".join(lines)
    failure.traceback = text if len(text) <= MOST_CHARACTERS else "...\n" + text[-MOST_CHARACTERS:]
    return failure


def user_location(frame: FrameType | None = None) -> str:
    """Return file, line and function of the user's code that a frame runs; empty if it runs none.

    Args:
        frame: None: the caller's.
    """
    frame = frame or inspect.currentframe()
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return _describe_frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


def _is_own(file: str) -> bool:
    return not file.startswith(("<", str(_OWN), *_LIBRARIES))


def _describe_frame(file: str, line: int | None, function: str) -> str:
    path = Path(file).absolute()
    relative = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{relative}, line {line}, in {function}"
