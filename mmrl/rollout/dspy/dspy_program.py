"""Any `dspy.Module` as a program: each of its predictors is a module, each of its LM requests a `ctx.call`.

Sits between DSPy, which renders prompts and parses replies, and `rollout.context`, which samples and records: DSPy gets
an LM and an adapter of the rollout's. Its behaviour stays as it is but for what would hide calls: no LM cache, and no
second request in JSON when a reply does not parse (the failure is recorded instead, with its raw text). Importing this
file imports DSPy (seconds), so only tasks that need it do (`rollout.with_program`).
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, cast

import dspy
from dspy.utils.callback import BaseCallback, with_callbacks
from dspy.utils.exceptions import AdapterParseError
from dspy.utils.parallelizer import ParallelExecutor
from dspy.utils.saving import get_dependency_versions
from typing_extensions import override

from mmrl.errors import ConfigError, ParseFailure, ProgramFailure, refuse, unknown
from mmrl.records import Call, Example
from mmrl.rollout.dspy.attempts import counted_anew
from mmrl.rollout.dspy.given_up import raise_given_up
from mmrl.rollout.dspy.guard import guarded
from mmrl.rollout.dspy.host import Host, Parse, checked_messages, messages_of, record_tools
from mmrl.rollout.dspy.structure import Structure
from mmrl.system.files import atomic_write, plain
from mmrl.system.replies import quoted
from mmrl.system.user_code import in_thread
from mmrl.tasks.base import Canonical, Context, Demonstration, FieldProgram, Guarded, Message, Program
from mmrl.tasks.dspy import notices
from mmrl.tasks.dspy import tools as tape
from mmrl.tasks.dspy.base import awaits
from mmrl.tasks.dspy.fields import adapter_in_use, inheriting, recast, within_bounds


class DspyProgram(Program, FieldProgram, Canonical, Guarded):
    """Program of a `dspy.Module`, called with `example.inputs` as keywords.

    `modules` are the attribute paths of the predictors (`craft.predict`); see `Structure`. Of `forward` and `aforward`
    the one of the most derived class runs, `aforward` where it has both. `aforward` runs on the event loop,
    `forward` in a thread of its own for each rollout (a shared pool would deadlock: a deterministic engine waits until
    all live programs wait in it). The prediction is what the module returns.

    A reply that the adapter cannot parse is retried as `parse_retries` says; then the module gets DSPy's exception,
    which ends the rollout unless the module catches it; so it is with a prompt that is too long. `present_fields` /
    `expected_fields` of the failing call are the output fields that were read and those of the signature (0 read where
    a value has the wrong type).

    Args:
        layout: `task.prompt_layout`.

    Raises:
        ConfigError: a program that cannot be trained, by its structure; see `Structure`.
    """

    def __init__(self, module: dspy.Module, layout: str = "dspy"):
        self.module, self.layout = module, layout
        self.structure = Structure(module)
        self.modules = self.structure.modules
        record_tools(tool for _, tool in module.named_sub_modules(dspy.Tool))

    def save(self, path: Path) -> None:
        """Write the predictors' prompts and demonstrations to a `.json` file that plain DSPy's `load` reads."""
        # Not by the module's `save`, which hands `dspy.Retrieve` an argument that it does not take.
        state = {name: parameter.dump_state() for name, parameter in self.module.named_parameters()}
        state["metadata"] = {"dependency_versions": get_dependency_versions()}
        atomic_write(path, json.dumps(plain(state), indent=2, ensure_ascii=False) + "\n")

    @override
    def canonical(self, call: Call) -> str | None:
        """Return the adapter's own text of the fields that it parsed."""
        adapter = adapter_in_use(self.layout)
        signature = self.structure.signature(call.module)
        try:
            fields = within_bounds(signature, call.text, adapter.parse)
        except AdapterParseError as error:
            raise parse_failure(error, signature) from error
        return self.written(call.module, fields)

    @override
    def written(self, module: str, fields: Fields) -> str:
        """Return the adapter's own text of a predictor's output fields."""
        adapter = adapter_in_use(self.layout)
        return str(adapter.format_assistant_message_content(self.structure.signature(module), fields))

    @override
    def demonstration(self, module: str, inputs: Fields, outputs: Fields) -> Demonstration:
        """Rendered by the predictor itself, its own demonstrations included."""
        predictor = dict(self.module.named_predictors()).get(module)
        if predictor is None:
            raise ConfigError(unknown("module", module, (name for name, _ in self.module.named_predictors())))
        signature = predictor.signature
        problems = _field_problems("inputs", inputs, signature.input_fields)
        problems += _field_problems("outputs", outputs, signature.output_fields)
        refuse(problems)
        adapter = adapter_in_use(self.layout)
        text = self.written(module, outputs).strip()
        try:
            within_bounds(signature, text, adapter.parse)
        except AdapterParseError as error:
            raise ConfigError(f"outputs: {parse_failure(error, signature)}") from None
        try:
            messages = sent_messages(predictor, inputs, adapter)
        except ProgramFailure as failure:
            raise ConfigError(f"inputs: {failure}") from None
        return Demonstration(module=module, messages=messages, completion=text)

    @override
    def guarded(self) -> AbstractContextManager[None]:
        """Refuse requests outside of a rollout."""
        return guarded()

    @override
    async def run(self, example: Example, ctx: Context) -> object:
        return await self.run_traced(example, ctx, [])

    async def run_traced(self, example: Example, ctx: Context, trace: list[Any]) -> object:
        """Run as `run` does, with DSPy's trace put into a list: predictor, inputs, prediction of each that returned.

        The predictor of the last reply that does not parse, if there was one, is at the end, with None as prediction.
        """
        host = Host(ctx, self.structure, asyncio.get_running_loop())
        adapter = tape_adapter(adapter_in_use(self.layout))
        callbacks = [*dspy.settings.callbacks, Watch(host)]
        settings = {"lm": TapeLM(host), "adapter": adapter, "callbacks": callbacks}
        settings |= {"disable_history": True, "track_usage": False}
        try:
            # DSPy's settings are context variables: rollouts that run at once do not see each other's.
            with dspy.context(**settings, trace=trace), tape.running(host), counted_anew():
                if awaits(self.module):
                    output: object = await self.module.acall(**example.inputs)
                else:
                    output = await in_thread(self.module, **example.inputs)
        except Exception as error:
            # what ended the rollout, not what the module or DSPy made of it
            host.raise_failure()
            host.raise_uncaught(error)
            raise_given_up(error)
            raise
        finally:
            host.close()
            await host.ended()
            if host.unread_call is not None:
                trace.append((*host.unread_call, None))
        host.raise_failure()
        return output


def _field_problems(part: str, values: Fields, fields: Collection[str]) -> list[str]:
    """Return the fields that are missing, and others that a signature does not have."""
    missing = [name for name in fields if name not in values]
    unexpected = [unknown(part, name, fields) for name in values if name not in fields]
    return [f"{part}: {', '.join(missing)} missing, expected {', '.join(fields)}"] * bool(missing) + unexpected


def _one_after_another(self: ParallelExecutor, function: Any, data: Any) -> Any:
    """`dspy.Parallel` in a rollout: requests are numbered, sampled and replayed by their order, not by which thread is
    first; elsewhere it is DSPy's. Without its progress bar, whose list of bars rollouts at once would share."""
    if tape.current() is None:
        return _in_threads(self, function, data)
    results: list[object] = [None] * len(data)
    wrapped = self._wrap_function(function)
    for index, item in enumerate(data):
        outcome = wrapped(item)
        if self.cancel_jobs.is_set():
            raise RuntimeError("Execution cancelled due to errors or interruption.")
        if isinstance(outcome, Exception):
            self.failed_indices.append(index)
            self.exceptions_map[index] = outcome
        else:
            results[index] = outcome
    return results


_in_threads = ParallelExecutor.execute
ParallelExecutor.execute = _one_after_another
notices.install()


Fields = Mapping[str, object]
"""Inputs or outputs of a signature, by name."""
Signature = type[dspy.Signature]
Demos = Sequence[Fields]


class TapeLM(dspy.BaseLM):
    """The LM of a rollout: hands each request to `ctx.call`."""

    def __init__(self, host: Host):
        super().__init__(model="mmrl", cache=False)
        self.host = host
        self.parse: Parse | None = None
        self.inputs: Fields = {}
        self.unread: AdapterParseError | None = None
        """Exception for the reply, if it does not parse."""

    def __call__(self, *request: Any, **named: Any) -> Any:
        """Called by adapters."""
        if (lm := frozen_lm(self.host, self)) is not None:
            return lm(*request, **named)
        return self._read(self._told(*request, **named))

    async def acall(self, *request: Any, **named: Any) -> Any:
        """Called by adapters."""
        if (lm := frozen_lm(self.host, self)) is not None:
            return await lm.acall(*request, **named)
        return self._read(await self._atold(*request, **named))

    # What LM callbacks see: a reply that does not parse is no error of the LM's. Arguments have the names of DSPy's.
    @with_callbacks
    def _told(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **kwargs: object
    ) -> list[str]:
        return [self.host.wait(self._reply(prompt, messages, kwargs))]

    @with_callbacks
    async def _atold(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **kwargs: object
    ) -> list[str]:
        return [await self.host.awaited(self._reply(prompt, messages, kwargs))]

    def _read(self, texts: list[str]) -> list[str]:
        if self.unread is not None:
            raise self.unread
        return texts

    async def _reply(self, prompt: str | None, messages: Sequence[Message] | None, options: Fields) -> str:
        sent_messages, self.unread = messages_of(prompt, messages), None
        try:
            return await self.host.call(sent_messages, self.parse, self.inputs, {**self.kwargs, **options})
        except AdapterParseError as error:
            self.unread = error
            return str(error.lm_response)

    def copy(self, **options: object) -> dspy.BaseLM:
        """Copy it for an attempt of `BestOfN` or `Refine`, or for a program that sets options for some requests."""
        # A number for DSPy's cache, and DSPy's way to get other replies: here each request has a seed of its own.
        if set(options) == {"rollout_id", "temperature"} and options["temperature"] == 1.0:
            options = {}
        copied: dspy.BaseLM = super().copy(**options)
        return copied

    def bound(self, parse: Parse, inputs: Fields) -> TapeLM:
        """Copy the LM for one request of these inputs with this parser."""
        # A copy per request: concurrent requests of one rollout have different parsers.
        copied = copy.copy(self)
        copied.parse, copied.inputs = parse, inputs
        return copied


class Watch(BaseCallback):
    """Ends a rollout where another LM answers a module: `dspy.context(lm=…, adapter=…)` leaves out `TapeAdapter`."""

    def __init__(self, host: Host):
        self.host = host

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """See `BaseCallback`."""
        if not isinstance(instance, TapeLM) and self.host.module is not None:
            with suppress(ProgramFailure):  # DSPy logs what a callback raises, and goes on
                self.host.fail(foreign(instance))


def foreign(lm: object) -> str:
    """Return the sentence about an LM that is not the rollout's."""
    return (
        f"a predictor was called with an LM of its own ({type(lm).__name__}), whose replies are not recorded; make "
        "another model a tool of the task"
    )


def frozen_lm(host: Host, lm: dspy.BaseLM) -> dspy.BaseLM | None:
    """Return the LM of a request that a tool makes of its own, by default the configured one; None: it is a call."""
    if not host.frozen:
        return None
    return host.lm if isinstance(lm, TapeLM) else lm


def sent_messages(predictor: dspy.Predict, inputs: Fields, adapter: dspy.Adapter) -> list[Message]:
    """Return the messages that a rollout would send for the inputs of a predictor.

    Raises:
        ProgramFailure: something other than text among them.
    """
    lm = dspy.BaseLM("mmrl")
    with dspy.context(warn_on_type_mismatch=False):  # what is shown is text, whatever the field's type
        _, options, signature, demos, values = predictor._forward_preprocess(lm=lm, **inputs)
    rendered = adapter._call_preprocess(lm, options, signature, values)
    return checked_messages(type(predictor).__name__, adapter.format(rendered, demos, values))


def running_host() -> Host:
    """Return the host of the rollout that is running."""
    host = tape.current()
    assert isinstance(host, Host)
    return host


class TapeAdapter(dspy.Adapter):
    """Base put before the user's class of adapters; gives each request the parser of its reply.

    A subclass of the user's and no wrapper around it: `ReAct` and `Refine` use adapters' other methods and their class.
    """

    @override
    def __call__(
        self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, demos: Demos, inputs: Fields
    ) -> list[Fields]:
        host = running_host()
        if (frozen := frozen_lm(host, lm)) is not None:
            fields: list[Fields] = host.adapter(frozen, lm_kwargs, signature, demos, inputs)
            return fields
        fields = super().__call__(self._bound(lm, lm_kwargs, signature, inputs), lm_kwargs, signature, demos, inputs)
        return fields

    @override
    async def acall(
        self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, demos: Demos, inputs: Fields
    ) -> list[Fields]:
        host = running_host()
        if (frozen := frozen_lm(host, lm)) is not None:
            fields: list[Fields] = await host.adapter.acall(frozen, lm_kwargs, signature, demos, inputs)
            return fields
        bound = self._bound(lm, lm_kwargs, signature, inputs)
        fields = await super().acall(bound, lm_kwargs, signature, demos, inputs)
        return fields

    def _bound(self, lm: dspy.BaseLM, lm_kwargs: Fields, signature: Signature, inputs: Fields) -> TapeLM:
        if not isinstance(lm, TapeLM):
            running_host().fail(foreign(lm))
        # DSPy's own steps before and after a request, so that what counts as parsed is what DSPy returns.
        processed = self._call_preprocess(lm, dict(lm_kwargs), signature, dict(inputs))

        def postprocessed(signature: Signature, text: str) -> object:
            return self._call_postprocess(processed, signature, [text], lm, {})

        def parse(text: str) -> None:
            try:
                within_bounds(signature, text, postprocessed)
            except AdapterParseError as error:
                raise parse_failure(error, signature) from error

        return lm.bound(parse, inputs)


def tape_adapter(inner: dspy.Adapter) -> dspy.Adapter:
    """Return the user's adapter as a rollout uses it; the user's own stays as it is."""
    adapter = recast(inner, _tape_class(cast("Hashable", type(inner))))
    if hasattr(adapter, "use_json_adapter_fallback"):
        adapter.use_json_adapter_fallback = False
    return adapter


inheriting(TapeAdapter)


@functools.cache
def _tape_class(kind: Any) -> Any:
    return inheriting(type(kind.__name__, (TapeAdapter, kind), {}))


def parse_failure(error: AdapterParseError, signature: Signature) -> ParseFailure:
    """Return the failure of a reply that DSPy could not read: how many of its output fields were there."""
    expected = list(signature.output_fields)
    # a value of the wrong type is raised with its cause, or without any result: then nothing counts as read
    wrong_type = error.parsed_result is None or error.__cause__ is not None
    read = [] if wrong_type else [name for name in expected if name in error.parsed_result]
    # DSPy's message quotes the whole reply
    reason = quoted(str(error.message))
    missing = ", ".join(name for name in expected if name not in read)
    return ParseFailure(reason if wrong_type else f"output fields missing: {missing}", len(read), len(expected))
