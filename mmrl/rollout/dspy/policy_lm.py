"""Models of mmrl behind `dspy.LM`: the one engine class of all of them, and a trained policy outside of any run.

The other way round than `rollout.dspy.dspy_program`, inside of a rollout, where every request is recorded: here DSPy
is as it is, and its requests go to an engine in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import dspy
from dspy import lm15

from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.errors import LengthFailure
from mmrl.models.chat import decode_text, render_prompt
from mmrl.rng import digest
from mmrl.tasks.base import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
OPTIONS = frozenset({"temperature", "max_tokens", "top_p", "top_k", "stop"})
"""Options of a request that have an effect on a policy."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of a model to one request."""

    text: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TextEngine:
    """An engine of `dspy.LM` whose requests a function answers, which takes messages and options."""

    answer: Callable[[list[Message], lm15.Config], Answer]

    def complete(self, request: lm15.Request) -> lm15.Response:
        """See `dspy.clients.engines.base.Engine`."""
        return _response(request, self.answer(_messages(request), request.config))


@dataclass(frozen=True, slots=True)
class AsyncTextEngine:
    """An engine of `dspy.LM` whose requests an async function answers."""

    answer: Callable[[list[Message], lm15.Config], Awaitable[Answer]]

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """See `dspy.clients.engines.base.AsyncEngine`."""
        return _response(request, await self.answer(_messages(request), request.config))


def _messages(request: lm15.Request) -> list[Message]:
    system: list[Message] = [] if request.system is None else [{"role": "system", "content": str(request.system)}]
    return [*system, *({"role": str(m.role), "content": m.text or ""} for m in request.messages)]


def _response(request: lm15.Request, answer: Answer) -> lm15.Response:
    usage = lm15.Usage(input_tokens=answer.prompt_tokens, output_tokens=answer.completion_tokens)
    message = lm15.Message.assistant(answer.text)
    return lm15.Response(id=None, model=request.model, message=message, finish_reason="stop", usage=usage)


class ServedPolicy:
    """An engine and the thread in which it generates; several LMs share one.

    Args:
        engine: of the policy.
        resources: closed by `close`: what the engine was built in.
        max_tokens: of a completion where a request says nothing.
    """

    def __init__(
        self, name: str, engine: Engine, tokenizer: PreTrainedTokenizerBase, resources: ExitStack, max_tokens: int
    ):
        self.name, self.engine, self.tokenizer, self.max_tokens = name, engine, tokenizer, max_tokens
        self._resources = resources
        self._numbers = itertools.count()
        # A loop of its own: the caller's may be a notebook's, which a decode must not hold up.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mmrl-policy", daemon=True).start()

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of `work` in the engine's thread; blocks."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def awaited(self, work: Coroutine[object, object, T]) -> T:
        """Await the result of `work` in the engine's thread, from any loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def answer(self, module: str, messages: list[Message], config: lm15.Config) -> Answer:
        """Generate a completion with the weights of a module; in the engine's thread.

        Raises:
            UnsupportedFeatureError: an option that would have no effect.
            ContextLengthError: the prompt leaves no room in the context.
        """
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
            seed=digest("dspy", number),
        )
        prompt = render_prompt(self.tokenizer, messages)
        request = Request(
            prompt_ids=prompt, sampling=sampling, module=module, messages=tuple(messages), order=(number,)
        )
        try:
            completion = await generate(self.engine, request)
        except LengthFailure as failure:  # as DSPy knows it: its agents shorten what they remember
            raise lm15.ContextLengthError(str(failure)) from None
        return Answer(decode_text(self.tokenizer, completion.ids), len(prompt), len(completion.ids))

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


class PolicyLM(dspy.LM):
    """The LM of one predictor: the weights that its module was trained with.

    Greedy unless `temperature` says otherwise. It is left out of what `program.save` writes: weights are exported with
    `mmrl export`.
    """

    def __init__(self, served: ServedPolicy, module: str):
        self.served = served
        super().__init__(
            model=served.name,
            temperature=0.0,
            max_tokens=served.max_tokens,
            cache=False,
            num_retries=0,
            engine=TextEngine(lambda *request: served.wait(served.answer(module, *request))),
            async_engine=AsyncTextEngine(lambda *request: served.awaited(served.answer(module, *request))),
        )

    def dump_state(self) -> None:  # DSPy reads no state as: the LM that is configured
        """Return nothing, so that a saved program loads in plain DSPy and uses the LM that is configured there."""

    def __deepcopy__(self, memory: dict[int, Any]) -> PolicyLM:
        # An engine is not copied with a program that optimisers and `deepcopy` take apart.
        copied: PolicyLM = self.copy()
        return copied
