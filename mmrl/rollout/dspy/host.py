"""Host of a rollout's DSPy module: requests and tools from any thread or event loop to the rollout's `ctx`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import dspy
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError
from pydantic import BaseModel
from typing_extensions import override

from mmrl.errors import LengthFailure, ParseFailure, ProgramFailure, RolloutError
from mmrl.rollout.dspy.structure import Structure, option_problem
from mmrl.system.user_code import copied, in_thread, is_async
from mmrl.tasks.base import Context, Message
from mmrl.tasks.dspy import tools as tape

Parse = Callable[[str], object]
T = TypeVar("T")
_IN_TOOL: ContextVar[bool] = ContextVar("mmrl_in_tool", default=False)


class Host(tape.Host):
    """Implementation of `mmrl.tasks.dspy.tools.Host` for one rollout, which runs on `loop`."""

    def __init__(self, ctx: Context, structure: Structure, loop: asyncio.AbstractEventLoop):
        self.ctx, self.structure, self.loop = ctx, structure, loop
        self.lm, self.adapter = dspy.settings.lm, dspy.settings.adapter or dspy.ChatAdapter()
        """What is configured outside of the rollout: frozen models of its tools have these."""
        self.failure: RolloutError | None = None
        self._caught: list[tuple[Exception, RolloutError]] = []
        """The module's exception for each reply that does not parse and each prompt that is too long, and the failure
        that it stands for."""
        self.unread_call: tuple[Any, Mapping[str, object]] | None = None
        """Predictor and inputs of the last of these replies."""
        self._ends: list[Callable[[], Awaitable[None]]] = []
        self._lock = threading.Lock()
        # Untyped: each future has the type of what its coroutine returns.
        self._waiting: set[Future[Any]] = set()
        self._closed = False

    async def call(
        self, messages: Sequence[Message], parse: Parse | None, inputs: Mapping[str, object], options: Mapping[str, Any]
    ) -> str:
        """Send a request of the innermost predictor; return the text of the reply."""
        self.raise_failure()
        with self._first_failure():
            name = self._caller(parse)
            problem = option_problem(name, options)
            if problem:
                raise ProgramFailure(problem)
            stop = options.get("stop") or ()
            try:
                reply = await self.ctx.call(
                    name,
                    checked_messages(name, messages),
                    parse=parse,
                    max_tokens=options.get("max_tokens"),
                    stop=(stop,) if isinstance(stop, str) else tuple(stop),
                )
                return reply.text
            except LengthFailure as error:
                failure: RolloutError = error
                raised: Exception = ContextWindowExceededError(message=str(error))
            except ParseFailure as error:
                # Without one the call has no reply: a teacher's rollout ended where the student's program goes on.
                if not isinstance(error.__cause__, AdapterParseError):
                    raise
                failure, raised = error, _same(error.__cause__)
                self.unread_call = (dspy.settings.caller_modules[-1], inputs)
        # Not a failure of the rollout: the module may catch it, as in plain DSPy, and go on.
        self._caught.append((raised, failure))
        raise raised

    @override
    async def tool(self, name: str, /, **arguments: object) -> object:
        self.raise_failure()
        with self._first_failure(), _in_tool():
            return await self.ctx.tool(name, **arguments)

    async def remember(
        self, name: str, arguments: Mapping[str, object], run: Callable[[], Awaitable[object]]
    ) -> object:
        """Call the rollout's `Context.remember`, for tools of the program's own."""
        self.raise_failure()
        with self._first_failure(), _in_tool():
            return await self.ctx.remember(name, arguments, run)

    @override
    def wait(self, coroutine: Coroutine[object, object, T]) -> T:
        if self.on_loop():
            coroutine.close()
            self.fail("aforward called a predictor or tool without await; use acall and use_tool")
        return self._started(coroutine).result()

    async def awaited(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the rollout's event loop, from whichever loop this is awaited on."""
        if self.on_loop():
            return await coroutine
        # A module that is run by `dspy.syncify` has a loop of its own, in a thread.
        return await asyncio.wrap_future(self._started(coroutine))

    def on_loop(self) -> bool:
        """Return True if the caller runs on the rollout's event loop, which must not be blocked."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def _started(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        # Under the lock, or a request could slip in after the rollout has ended.
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ProgramFailure("the rollout has ended")
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def close(self) -> None:
        """Close it after the rollout: a thread that still runs gets an exception at its next request."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    @override
    def at_end(self, end: Callable[[], Awaitable[None]]) -> None:
        self._ends.append(end)

    async def ended(self) -> None:
        """End what tools have begun for this rollout."""
        for end in self._ends:
            await end()

    def raise_failure(self) -> None:
        """Raise what ended the rollout, if something has: a module may have caught it."""
        if self.failure is not None:
            raise self.failure

    def fail(self, problem: str) -> NoReturn:
        """End the rollout, also where the module catches what is raised here."""
        with self._first_failure():
            raise ProgramFailure(problem)

    @property
    def module(self) -> str | None:
        """Module that is making a request; None: it is none of the program's."""
        return self.structure.name_of(dspy.settings.caller_modules or [])

    @property
    def frozen(self) -> bool:
        """Whether a request is of a tool's own model: the tool's result is recorded, and it is no call."""
        return _IN_TOOL.get() and self.module is None

    def raise_uncaught(self, error: Exception) -> None:
        """Raise the failure that `error` stands for, if it is what the module got for a reply or a prompt."""
        for raised, failure in self._caught:
            if raised is error:
                # Without the cause, by which `call` knows a reply.
                if isinstance(failure, ParseFailure):
                    failure = ParseFailure(str(failure), failure.present, failure.expected)
                raise failure from None

    @contextmanager
    def _first_failure(self) -> Iterator[None]:
        """Keep the first failure that leaves the block."""
        try:
            yield
        except RolloutError as error:
            self.failure = self.failure or error
            raise

    def _caller(self, parse: Parse | None) -> str:
        name = self.module
        if name is None:
            callers = dspy.settings.caller_modules
            raise ProgramFailure(
                f"a request from {type(callers[-1]).__name__ if callers else 'outside any module'}, which is none of "
                f"the program's predictors ({', '.join(self.structure.modules)}); predictors must be attributes of the "
                "module, made before it runs"
            )
        if parse is None:
            raise ProgramFailure(
                f"predictor '{name}' bypassed the adapter; set adapters with dspy.configure, not inside the module"
            )
        return name


@contextmanager
def _in_tool() -> Iterator[None]:
    token = _IN_TOOL.set(True)
    try:
        yield
    finally:
        _IN_TOOL.reset(token)


def messages_of(prompt: str | None, messages: Sequence[Message] | None) -> Sequence[Message]:
    """Return messages of a request to an LM of DSPy's: an adapter's, or a prompt of a module that calls it itself."""
    return messages if messages is not None else [{"role": "user", "content": prompt or ""}]


def checked_messages(name: str, messages: Sequence[object]) -> list[Message]:
    """Return a predictor's messages, if all of them are text.

    Raises:
        ProgramFailure: they are not.
    """
    checked: list[Message] = []
    for message in messages:
        text = message.get("content") if isinstance(message, Mapping) and not message.get("tool_calls") else None
        if not isinstance(message, Mapping) or not isinstance(text, str):
            raise ProgramFailure(f"predictor '{name}' sends something other than text; only text can be trained on")
        checked.append({"role": str(message["role"]), "content": text})
    return checked


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Outcome of a tool of the program, as the tape has it: also an exception, which agents show to their model."""

    result: Any = None
    error: Exception | None = None
    trace: TracebackType | None = None
    """Traceback from the tool's own frames on: agents show it too, so that it must be the same on replay."""

    def value(self) -> Any:
        """Return the result; containers are copied, since several rollouts may get it and change it."""
        return copied(self.result) if isinstance(self.result, dict | list | set | tuple | BaseModel) else self.result

    def raised(self, error: Exception) -> Exception:
        """Return the error with its own frames alone; each rollout raises one of its own."""
        own = copied(error)
        if type(own) is not type(error) or str(own) != str(error):
            own = error
        return own.with_traceback(self.trace)


class RecordedTool(dspy.Tool):
    """A tool of a program; outside of rollouts it is what it was.

    Awaited, or called in a module's `forward`, it is on the tape. Called without `await` in `aforward` it runs where it
    stands, and again on each replay.
    """

    @with_callbacks
    @override
    def __call__(self, **arguments: Any) -> Any:
        host = tape.current()
        if host is None or host.on_loop():
            return dspy.Tool.__call__(self, **arguments)
        request = host.remember(str(self.name), copied(arguments), lambda: self._run(arguments))
        outcome = host.wait(request)
        if outcome.error is not None:
            raise outcome.raised(outcome.error)
        return outcome.value()

    @with_callbacks
    @override
    async def acall(self, **arguments: Any) -> Any:
        host = tape.current()
        if host is None:
            return await dspy.Tool.acall(self, **arguments)
        request = host.remember(str(self.name), copied(arguments), lambda: self._run(arguments))
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


def _same(error: AdapterParseError) -> AdapterParseError:
    """Copy DSPy's exception for one rollout: several replay a call, and each may change what it gets."""
    same: AdapterParseError = type(error).__new__(type(error), *error.args)
    vars(same).update({name: copied(value) for name, value in vars(error).items()})
    same.__cause__, same.__suppress_context__ = error.__cause__, error.__suppress_context__
    return same
