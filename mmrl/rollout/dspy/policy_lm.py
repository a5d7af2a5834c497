"""Models of mmrl behind `dspy.LM`: the one engine class of all of them, and a trained policy outside of any run.

The other way round than `rollout.dspy.dspy_program`, inside of a rollout, where every request is recorded: here DSPy
is as it is, and its requests go to an engine in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import dspy
from dspy import lm15

from mmrl import rng
from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.errors import LengthFailure
from mmrl.models.chat import decode_text, growing_text, render_prompt
from mmrl.rollout.dspy.structure import Structure
from mmrl.tasks.base import Message
from mmrl.tasks.dspy.fields import adapter_in_use

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StreamEvent: TypeAlias = lm15.StreamStartEvent | lm15.StreamDeltaEvent | lm15.StreamEndEvent
OnToken = Callable[[int], None]
OPTIONS = frozenset({"temperature", "max_tokens", "top_p", "top_k", "stop"})
"""Options of a request that have an effect on a policy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of a model to one request."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish: Literal["stop", "length"] = "stop"


@dataclass(frozen=True, slots=True)
class TextEngine:
    """An engine of `dspy.LM` whose requests a function answers, which takes messages and options."""

    answer: Callable[[list[Message], lm15.Config], Answer]

    def complete(self, request: lm15.Request) -> lm15.Response:
        """See `dspy.clients.engines.base.Engine`."""
        return _response(request, self.answer(_messages(request), request.config))


def _messages(request: lm15.Request) -> list[Message]:
    """Return the messages of a request.

    Raises:
        UnsupportedFeatureError: one has parts that are not text, such as tool calls.
    """
    parts = [(str(message.role), message.parts) for message in request.messages]
    if request.system is not None:
        system = (lm15.TextPart(request.system),) if isinstance(request.system, str) else request.system
        parts.insert(0, ("system", system))
    if other := sorted({part.type for _, given in parts for part in given if not isinstance(part, lm15.TextPart)}):
        raise lm15.UnsupportedFeatureError(f"messages: got {', '.join(other)}; this LM reads text alone")
    return [{"role": role, "content": "\n".join(part.text for part in given)} for role, given in parts]


def _response(request: lm15.Request, answer: Answer) -> lm15.Response:
    message = lm15.Message.assistant(answer.text)
    return lm15.Response(
        id=None, model=request.model, message=message, finish_reason=answer.finish, usage=_usage(answer)
    )


def _usage(answer: Answer) -> lm15.Usage:
    return lm15.Usage(input_tokens=answer.prompt_tokens, output_tokens=answer.completion_tokens)


class ServedPolicy:
    """An engine and the thread in which it generates; several LMs share one.

    Args:
        engine: of the policy.
        resources: closed by `close`: what the engine was built in.
        max_tokens: of a completion where a request says nothing.
        reopen: called where a pickle of it is loaded.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        resources: ExitStack,
        max_tokens: int,
        reopen: Callable[[], ServedPolicy],
    ):
        self.name, self.engine, self.tokenizer, self.max_tokens = name, engine, tokenizer, max_tokens
        self._reopen = reopen
        self._resources = resources
        self._numbers = itertools.count()
        # A loop of its own: the caller's may be a notebook's, which a decode must not hold up.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mmrl-policy", daemon=True).start()

    def started(self, module: str, request: lm15.Request, on_token: OnToken | None = None) -> Future[Answer]:
        """Start a completion with the weights of a module, in the engine's thread.

        Raises (the future):
            UnsupportedFeatureError: an option that would have no effect.
            ContextLengthError: the prompt leaves no room in the context.
        """
        return asyncio.run_coroutine_threadsafe(self._answer(module, request, on_token), self._loop)

    async def _answer(self, module: str, request: lm15.Request, on_token: OnToken | None) -> Answer:
        config, messages = request.config, _messages(request)
        options = {field.name: getattr(config, field.name) for field in fields(config)} | (config.extensions or {})
        passed = {name for name, value in options.items() if value not in (None, ()) and name != "extensions"}
        if unknown := sorted(passed - OPTIONS):
            supported = ", ".join(sorted(OPTIONS))
            raise lm15.UnsupportedFeatureError(
                f"{', '.join(unknown)}: has no effect on the LM of a trained policy; it takes {supported}"
            )
        number = next(self._numbers)
        sampling = Sampling(
            max_tokens=config.max_tokens or self.max_tokens,
            temperature=config.temperature or 0.0,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k or 0,
            stop=config.stop,
            seed=rng.digest("dspy", number),
        )
        prompt = render_prompt(self.tokenizer, messages)
        generation = Request(
            prompt_ids=prompt,
            sampling=sampling,
            module=module,
            messages=tuple(messages),
            order=(number,),
            on_token=on_token,
        )
        try:
            completion = await generate(self.engine, generation)
        except LengthFailure as failure:  # as DSPy knows it: its agents shorten what they remember
            raise lm15.ContextLengthError(str(failure)) from None
        text, finish = decode_text(self.tokenizer, completion.ids), completion.finish
        return Answer(text, len(prompt), len(completion.ids), "length" if finish == "length" else "stop")

    def __reduce__(self) -> tuple[Callable[[], ServedPolicy], tuple[()]]:
        return self._reopen, ()

    def close(self) -> None:
        """Free the engine."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._resources.close()


async def generate(engine: Engine, request: Request) -> Completion:
    """Return a completion for whoever is no rollout."""
    # The engine decodes when all that run wait for it, so whoever does not wait is not counted.
    engine.enter()
    try:
        return await engine.generate(request)
    finally:
        engine.leave()


@dataclass(frozen=True, slots=True)
class _PolicyEngine:
    """An engine of `dspy.LM`: the weights that the asking module was trained with. Streams text as its tokens come."""

    served: ServedPolicy
    structure: Structure

    def complete(self, request: lm15.Request) -> lm15.Response:
        """See `dspy.clients.engines.base.Engine`."""
        return _response(request, self.served.started(_asking(self.structure), request).result())

    def stream(self, request: lm15.Request) -> Iterator[StreamEvent]:
        """See `dspy.clients.engines.base.Engine`."""
        new: SimpleQueue[int | None] = SimpleQueue()
        answer = self.served.started(_asking(self.structure), request, new.put)
        answer.add_done_callback(lambda _: new.put(None))
        growing = growing_text(self.served.tokenizer)
        try:
            yield lm15.StreamStartEvent(model=request.model)
            while (token := new.get()) is not None:
                yield from _deltas(growing.add(token))
            yield from _ended(growing.text, answer.result())
        finally:
            answer.cancel()  # whoever listened has gone


@dataclass(frozen=True, slots=True)
class _AsyncPolicyEngine:
    """The async engine beside `_PolicyEngine`."""

    served: ServedPolicy
    structure: Structure

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """See `dspy.clients.engines.base.AsyncEngine`."""
        answer = self.served.started(_asking(self.structure), request)
        return _response(request, await asyncio.wrap_future(answer))

    async def stream(self, request: lm15.Request) -> AsyncIterator[StreamEvent]:
        """See `dspy.clients.engines.base.AsyncEngine`."""
        loop, new = asyncio.get_running_loop(), asyncio.Queue[int | None]()

        def put(token: int | None) -> None:
            with suppress(RuntimeError):  # the listener's loop has ended meanwhile
                loop.call_soon_threadsafe(new.put_nowait, token)

        answer = self.served.started(_asking(self.structure), request, put)
        answer.add_done_callback(lambda _: put(None))
        growing = growing_text(self.served.tokenizer)
        try:
            yield lm15.StreamStartEvent(model=request.model)
            while (token := await new.get()) is not None:
                for event in _deltas(growing.add(token)):
                    yield event
            for event in _ended(growing.text, answer.result()):
                yield event
        finally:
            answer.cancel()


def _asking(structure: Structure) -> str:
    """Return the module that makes a request, the first for requests of none: by hand, or of a predictor made since."""
    return structure.name_of(dspy.settings.caller_modules or []) or structure.modules[0]


def _deltas(text: str) -> list[StreamEvent]:
    return [lm15.StreamDeltaEvent(lm15.TextDelta(text))] if text else []


def _ended(sent: str, answer: Answer) -> list[StreamEvent]:
    """Return the events after the last token: the text that was not sent (of some engines all of it), and the end."""
    end = lm15.StreamEndEvent(finish_reason=answer.finish, usage=_usage(answer))
    return [*_deltas(answer.text.removeprefix(sent) if answer.text.startswith(sent) else ""), end]


class PolicyLM(dspy.LM):
    """The LM of a program: each predictor speaks with the weights that its module was trained with.

    One for all of them: `BestOfN` and `Refine` give what they try a copy of its one LM.

    Greedy unless `temperature` says otherwise. It is left out of the state that `program.save` writes: weights are
    exported with `mmrl export`. A program that is saved whole keeps it, and opens the run again where it is loaded.
    """

    def __init__(self, served: ServedPolicy, structure: Structure):
        self.served = served
        super().__init__(
            model=served.name,
            temperature=0.0,
            max_tokens=served.max_tokens,
            cache=False,
            num_retries=0,
            engine=_PolicyEngine(served, structure),
            async_engine=_AsyncPolicyEngine(served, structure),
        )

    def dump_state(self) -> None:  # DSPy reads no state as: the LM that is configured
        """Return nothing, so that a saved program loads in plain DSPy and uses the LM that is configured there."""

    def __deepcopy__(self, memory: dict[int, Any]) -> PolicyLM:
        # Neither it nor its engine is copied with a program that optimisers and `deepcopy` take apart.
        return self


def as_trained(program: dspy.Module, served: ServedPolicy, structure: Structure, layout: str) -> None:
    """Let a program speak as in its training, with the LM and the adapter that it had there.

    Args:
        structure: the program's.
        layout: `task.prompt_layout`.
    """
    for _, refine in list(program.named_sub_modules(dspy.Refine)):
        _put_before(refine, _Advised)
    _put_before(program, _Trained, _layout=layout)
    program.set_lm(PolicyLM(served, structure))


class _Within(dspy.Module):
    """Put before a module's class: it runs under settings of its own."""

    def _settings(self) -> dict[str, object]:
        return {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with dspy.context(**self._settings()):
            return super().__call__(*args, **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with dspy.context(**self._settings()):
            return await super().acall(*args, **kwargs)


class _Trained(_Within):
    """Put before the class of a program."""

    _layout: str

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "adapter": adapter_in_use(self._layout)}


class _Advised(_Within):
    """Put before a `dspy.Refine`, which makes the predictor of its advice as it runs."""

    module: dspy.Module

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "lm": self.module.get_lm()}


def _put_before(module: dspy.Module, kind: type[_Within], **attributes: object) -> None:
    of = type(module)
    # Under the name of the user's, by which `Refine` and prompt optimisers find its source.
    same = {name: vars(of)[name] for name in ("__module__", "__qualname__", "__firstlineno__") if name in vars(of)}
    module.__class__ = type(of.__name__, (kind, of), {**same, **attributes})
