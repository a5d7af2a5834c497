"""Any `dspy.Module` as a program: each of its predictors is a module, each of its LM requests a `ctx.call`.

Sits between DSPy, which renders prompts and parses replies, and `rollout.context`, which samples and records. DSPy's
behaviour stays as it is but for what would hide calls or make a replay differ: no LM cache, no second request in JSON
when a reply does not parse (the failure is recorded instead, with its raw text), no history. Importing this file
imports DSPy (seconds), so only tasks that need it do (`rollout.with_program`).
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import dspy
from dspy.utils.exceptions import AdapterParseError

from mmrl.errors import ConfigError, ParseFailure, ProgramFailure, RolloutError
from mmrl.records import Call, Example
from mmrl.system.replies import quoted
from mmrl.tasks.base import Context, Message
from mmrl.tasks.dspy import tools as tape
from mmrl.tasks.dspy.fields import within_bounds

Parse = Callable[[str], object]
Fields = Mapping[str, object]
"""Inputs or outputs of a signature, by name."""
T = TypeVar("T")

Signature = type[dspy.Signature]
Demos = Sequence[Fields]

PASSED_ON = frozenset({"max_tokens", "stop"})
"""Options of a predictor that reach the engine."""
WITHOUT_EFFECT = frozenset({"rollout_id", "cache", "num_retries"})
"""Options about DSPy's cache and network retries: there is neither here."""


class DspyProgram:
    """Implements `mmrl.tasks.base.Program` around a `dspy.Module`, which is called with `example.inputs` as keywords.

    `modules` are the attribute paths of the predictors (`craft.predict`), as `named_predictors` gives them. A module
    with `aforward` runs on the event loop; one with `forward` alone runs in a thread of its own for each rollout (a
    shared pool would deadlock: a deterministic engine waits until all live programs wait in it). The prediction is the
    returned `dspy.Prediction` as a plain mapping.

    A reply that the adapter cannot parse is retried as `parse_retries` says and then ends the rollout, even where the
    module catches the exception: `present_fields` / `expected_fields` of the failing call are the output fields that
    were read and those of the signature (0 read where a value has the wrong type).

    Raises:
        ConfigError: no predictors, or predictors with an LM of their own.
    """

    def __init__(self, module: dspy.Module):
        named = module.named_predictors()
        if not named:
            raise ConfigError(
                f"task.program: {type(module).__name__} has no predictors (dspy.Predict), nothing to train"
            )
        own = [name for name, predictor in named if predictor.lm is not None]
        if own:
            raise ConfigError(
                f"task.program: {', '.join(own)} have an LM of their own, whose calls would not be recorded; "
                "leave `lm` unset, or make a frozen model a tool of the task"
            )
        # By identity: a predictor is known by the object that makes the request, not by a name in it.
        self.module = module
        self.modules: tuple[str, ...] = tuple(name for name, _ in named)
        self._names: Mapping[int, str] = {id(predictor): name for name, predictor in named}

    def canonical(self, call: Call) -> str | None:
        """See `mmrl.tasks.base.Canonical`: the adapter's own text of the fields that it parsed."""
        adapter = dspy.settings.adapter or dspy.ChatAdapter()
        # Outside a rollout there is no wrapped adapter, so the user's own parses.
        signature = dict(self.module.named_predictors())[call.module].signature
        try:
            fields = within_bounds(signature, call.text, adapter.parse)
        except AdapterParseError as error:
            raise _parse_failure(error, signature) from error
        return self.written(call.module, fields)

    def written(self, module: str, fields: Fields) -> str:
        """The adapter's own text of a predictor's output fields; inside a rollout, too."""
        adapter = dspy.settings.adapter or dspy.ChatAdapter()
        adapter = adapter.inner if isinstance(adapter, _TapeAdapter) else adapter
        signature = dict(self.module.named_predictors())[module].signature
        return str(adapter.format_assistant_message_content(signature, fields))

    async def run(self, example: Example, ctx: Context) -> object:
        """See `mmrl.tasks.base.Program.run`."""
        host = _Host(ctx, self._names, asyncio.get_running_loop())
        adapter = _TapeAdapter(dspy.settings.adapter or dspy.ChatAdapter())
        settings = {"lm": _TapeLM(host), "adapter": adapter, "disable_history": True, "track_usage": False, "trace": []}
        try:
            # DSPy's settings are context variables: rollouts that run at once do not see each other's.
            with dspy.context(**settings), tape.running(host):
                if hasattr(self.module, "aforward"):
                    output = await self.module.acall(**example.inputs)
                else:
                    output = await _in_thread(self.module, dict(example.inputs))
        except Exception:
            # what ended the rollout, not what the module or DSPy made of it
            host.raise_failure()
            raise
        finally:
            host.close()
        host.raise_failure()
        return _plain(output)


class _Host:
    """One rollout as its module sees it; implements `mmrl.tasks.dspy.tools.Host`."""

    def __init__(self, ctx: Context, names: Mapping[int, str], loop: asyncio.AbstractEventLoop):
        self.ctx, self.names, self.loop = ctx, names, loop
        self.failure: RolloutError | None = None
        self._lock = threading.Lock()
        # Untyped: each future has the type of what its coroutine returns.
        self._waiting: set[Future[Any]] = set()
        self._closed = False

    async def call(self, messages: Sequence[Message], parse: Parse | None, options: Mapping[str, Any]) -> str:
        """One request of the innermost predictor; the text of the reply."""
        self.raise_failure()
        with self._first_failure():
            name = self._caller(parse)
            stop = options.get("stop") or ()
            reply = await self.ctx.call(
                name,
                _checked_messages(name, messages),
                parse=parse,
                max_tokens=_checked_options(name, options).get("max_tokens"),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
            )
        return reply.text

    async def tool(self, name: str, **arguments: object) -> object:
        """See `mmrl.tasks.dspy.tools.Host.tool`."""
        self.raise_failure()
        with self._first_failure():
            result: object = await self.ctx.tool(name, **arguments)
            return result

    def wait(self, coroutine: Coroutine[object, object, T]) -> T:
        """See `mmrl.tasks.dspy.tools.Host.wait`."""
        try:
            on_loop = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            on_loop = False
        # Under the lock, or a request could slip in after the rollout has ended.
        with self._lock:
            if on_loop or self._closed:
                coroutine.close()
                if on_loop:
                    raise ProgramFailure("aforward called a predictor or tool without await; use acall and use_tool")
                raise ProgramFailure("the rollout has ended")
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._waiting.add(future)
        try:
            return future.result()
        finally:
            self._waiting.discard(future)

    def close(self) -> None:
        """The rollout has ended: a thread that still runs gets an exception at its next request."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def raise_failure(self) -> None:
        """Raise what ended the rollout, if something has: a module may have caught it."""
        if self.failure is not None:
            raise self.failure

    def _first_failure(self) -> _Remember:
        return _Remember(self)

    def _caller(self, parse: Parse | None) -> str:
        callers = dspy.settings.caller_modules or []
        name = self.names.get(id(callers[-1])) if callers else None
        if name is None:
            raise ProgramFailure(
                f"a request from {type(callers[-1]).__name__ if callers else 'outside any module'}, which is none of "
                f"the program's predictors ({', '.join(self.names.values())}); predictors must be attributes of the "
                "module, made before it runs and neither copied nor replaced"
            )
        if parse is None:
            raise ProgramFailure(
                f"predictor '{name}' bypassed the adapter; set adapters with dspy.configure, not inside the module"
            )
        return name


class _Remember:
    """Keeps the first failure that leaves the block."""

    def __init__(self, host: _Host):
        self.host = host

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RolloutError) and self.host.failure is None:
            self.host.failure = error


class _TapeLM(dspy.BaseLM):
    """The LM of a rollout: hands each request to `ctx.call`."""

    def __init__(self, host: _Host, parse: Parse | None = None):
        super().__init__(model="mmrl", cache=False)
        self.host, self.parse = host, parse

    def __call__(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **options: object
    ) -> list[str]:
        return self.host.wait(self.acall(prompt, messages=messages, **options))

    async def acall(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **options: object
    ) -> list[str]:
        # A predictor's adapter sends messages; a plain prompt comes from a module that calls its LM itself.
        sent = messages if messages is not None else [{"role": "user", "content": prompt or ""}]
        return [await self.host.call(sent, self.parse, {**self.kwargs, **options})]

    def bound(self, parse: Parse) -> _TapeLM:
        """The same LM, for one request with this parser."""
        # A copy per request: concurrent requests of one rollout have different parsers.
        other = copy.copy(self)
        other.parse = parse
        return other


class _TapeAdapter(dspy.Adapter):
    """The user's adapter; gives each request the parser of its reply, so that the call is recorded with the outcome."""

    def __init__(self, inner: dspy.Adapter):
        super().__init__(callbacks=inner.callbacks)
        # The user's adapter stays as it is outside of rollouts.
        self.inner = copy.copy(inner)
        if hasattr(inner, "use_json_adapter_fallback"):
            self.inner.use_json_adapter_fallback = False

    def __call__(
        self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, demos: Demos, inputs: Fields
    ) -> list[Fields]:
        bound = self._bound(lm, lm_kwargs, signature, inputs)
        fields: list[Fields] = self.inner(bound, lm_kwargs, signature, demos, inputs)
        return fields

    async def acall(
        self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, demos: Demos, inputs: Fields
    ) -> list[Fields]:
        bound = self._bound(lm, lm_kwargs, signature, inputs)
        fields: list[Fields] = await self.inner.acall(bound, lm_kwargs, signature, demos, inputs)
        return fields

    def format(self, signature: Signature, demos: Demos, inputs: Fields) -> list[Message]:
        """The inner adapter's messages."""
        messages: list[Message] = self.inner.format(signature, demos, inputs)
        return messages

    def parse(self, signature: Signature, completion: str) -> Fields:
        """The inner adapter's fields."""
        fields: Fields = self.inner.parse(signature, completion)
        return fields

    def _bound(self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, inputs: Fields) -> _TapeLM:
        if not isinstance(lm, _TapeLM):
            raise ProgramFailure(f"a predictor was called with an LM of its own ({type(lm).__name__})")
        # DSPy's own steps before and after a request, so that what counts as parsed is what DSPy returns.
        processed = self.inner._call_preprocess(lm, dict(lm_kwargs), signature, inputs)

        def postprocessed(signature: Signature, text: str) -> object:
            return self.inner._call_postprocess(processed, signature, [text], lm, {})

        def parse(text: str) -> None:
            try:
                within_bounds(signature, text, postprocessed)
            except AdapterParseError as error:
                raise _parse_failure(error, signature) from error

        return lm.bound(parse)


def _parse_failure(error: AdapterParseError, signature: Signature) -> ParseFailure:
    expected = list(signature.output_fields)
    # a value of the wrong type is raised with its cause, or without any result: then nothing counts as read
    wrong_type = error.parsed_result is None or error.__cause__ is not None
    read = [] if wrong_type else [name for name in expected if name in error.parsed_result]
    # DSPy's message quotes the whole reply
    reason = quoted(str(error.message))
    missing = ", ".join(name for name in expected if name not in read)
    return ParseFailure(reason if wrong_type else f"output fields missing: {missing}", len(read), len(expected))


def _checked_options(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a request.

    Raises:
        ProgramFailure: one that would have no effect.
    """
    # None is DSPy's way to leave an option out.
    given = {key: value for key, value in options.items() if value is not None and key not in WITHOUT_EFFECT}
    if given.get("n") == 1:
        del given["n"]
    refused = sorted(set(given) - PASSED_ON)
    if refused:
        raise ProgramFailure(
            f"predictor '{name}' sets {', '.join(refused)}; sampling is set by algo.* and eval.*, and a call is one "
            "completion: leave these out (call a predictor several times for several completions)"
        )
    return given


def _checked_messages(name: str, messages: Sequence[object]) -> list[Message]:
    checked: list[Message] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ProgramFailure(f"predictor '{name}' sends something other than text; only text can be trained on")
        checked.append({"role": str(message["role"]), "content": message["content"]})
    return checked


async def _in_thread(module: Callable[..., object], inputs: Fields) -> object:
    """Call a module that blocks in a thread of its own."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[object] = loop.create_future()
    # A new thread starts without context variables, and DSPy keeps its settings in them.
    context = contextvars.copy_context()

    def settle(result: object, error: BaseException | None) -> None:
        # The rollout may have timed out while the thread worked.
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(module, **inputs)
        except Exception as error:
            failure = error
        except BaseException as error:  # SystemExit in a module ends its rollout, not the run
            failure = ProgramFailure(f"{type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="mmrl-dspy", daemon=True).start()
    return await outcome


def _plain(output: object) -> object:
    """The prediction as JSON values.

    Raises:
        ProgramFailure: it holds something else.
    """
    value = output.toDict() if isinstance(output, dspy.Example) else output
    try:
        # The journal would fail on it later, for the whole batch.
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ProgramFailure(
            f"the prediction cannot be written as JSON ({error}); return texts, numbers, lists"
        ) from None
    return value
