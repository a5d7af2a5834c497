"""`dspy.Tool`s of a program in a rollout: on its tape, and in threads where they are plain functions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import dspy
from dspy.utils.callback import with_callbacks
from pydantic import BaseModel

from mmrl.system.user_code import in_thread, is_async
from mmrl.tasks.dspy import tools as tape


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a tool gave, kept on the tape: also an exception, which agents show to their model."""

    result: Any = None
    error: Exception | None = None
    trace: TracebackType | None = None
    """Of the error, from the tool's own frames on: agents show it too, so that it must be the same on replay."""

    def value(self) -> Any:
        """The result; containers are copied, since several rollouts may get it and change it."""
        return _copied(self.result) if isinstance(self.result, dict | list | set | tuple | BaseModel) else self.result

    def raised(self, error: Exception) -> Exception:
        """The error with its own frames alone; each rollout raises one of its own."""
        made = _copied(error)
        if type(made) is not type(error) or str(made) != str(error):
            made = error
        return made.with_traceback(self.trace)


class RecordedTool(dspy.Tool):
    """A tool of a program; outside of rollouts it is what it was.

    Awaited, or called in a module's `forward`, it is on the tape. Called without `await` in `aforward` it runs where it
    stands, and again on each replay.
    """

    @with_callbacks
    def __call__(self, **arguments: Any) -> Any:
        """See `dspy.Tool.__call__`."""
        host = tape.current()
        if host is None or host.on_loop():
            return dspy.Tool.__call__(self, **arguments)
        request = host.remember(str(self.name), _copied(arguments), lambda: self._run(arguments))
        outcome = host.wait(request)
        if outcome.error is not None:
            raise outcome.raised(outcome.error)
        return outcome.value()

    @with_callbacks
    async def acall(self, **arguments: Any) -> Any:
        """See `dspy.Tool.acall`."""
        host = tape.current()
        if host is None:
            return await dspy.Tool.acall(self, **arguments)
        request = host.remember(str(self.name), _copied(arguments), lambda: self._run(arguments))
        outcome = await host.awaited(request)
        if outcome.error is not None:
            raise outcome.raised(outcome.error)
        return outcome.value()

    async def _run(self, arguments: dict[str, Any]) -> _Outcome:
        try:
            parsed = self._validate_and_parse_args(**arguments)
            result = self.func(**parsed) if is_async(self.func) else await in_thread(self.func, **parsed)
            return _Outcome(result=await result if inspect.isawaitable(result) else result)
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, in_thread.__code__.co_filename):
                trace = trace.tb_next
            return _Outcome(error=error, trace=trace)


def record_tools(tools: Iterable[dspy.Tool]) -> None:
    """Let a program's own tools go onto the tape of the rollout that uses them."""
    for tool in tools:
        # In place, wherever an agent keeps it. A subclass of the user's may have a `__call__` of its own.
        if type(tool) is dspy.Tool:
            tool.__class__ = RecordedTool


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # locks, connections: what cannot be copied is shared
        return value
