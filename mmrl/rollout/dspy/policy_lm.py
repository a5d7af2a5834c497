"""A trained policy as the LM of a DSPy program outside of any run: what a program of `mmrl.optimize` speaks with.

The other way round than `rollout.dspy.dspy_program`, inside of a rollout, where every request is recorded: here DSPy
is as it is, and its requests go to an engine in this process.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import dspy

from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.errors import ConfigError
from mmrl.models.chat import decode_text, render_prompt
from mmrl.rng import digest
from mmrl.rollout.dspy.host import messages_of
from mmrl.tasks.base import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
OPTIONS = frozenset({"temperature", "max_tokens", "top_p", "top_k", "stop", "n"})
"""Options of a request that have an effect here."""
WITHOUT_EFFECT = frozenset({"rollout_id", "cache", "num_retries", "prompt_cache"})
"""Options about DSPy's cache and network retries: there is neither here."""


class ServedPolicy:
    """An engine and the thread in which it generates; several LMs share one.

    Args:
        engine: of the policy.
        resources: closed by `close`: what the engine was built in.
        max_tokens: of a completion where a request says nothing.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        resources: ExitStack,
        max_tokens: int,
    ):
        self.name, self.engine, self.tokenizer, self.max_tokens = name, engine, tokenizer, max_tokens
        self._resources = resources
        self._numbers = itertools.count()
        # A loop of its own: the caller's may be a notebook's, which a decode must not hold up.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mmrl-policy", daemon=True).start()

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """The result of `work` in the engine's thread; blocks."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def given(self, work: Coroutine[object, object, T]) -> T:
        """The same, awaited from any loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def generate(self, module: str, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One completion by the weights of a module; in the engine's thread."""
        prompt = render_prompt(self.tokenizer, messages)
        # The engine decodes when all that run wait for it, so whoever does not wait is not counted.
        self.engine.enter()
        try:
            return await self.engine.generate(
                Request(
                    prompt_ids=prompt,
                    sampling=sampling,
                    module=module,
                    messages=tuple(messages),
                    order=(next(self._numbers),),
                )
            )
        finally:
            self.engine.leave()

    def close(self) -> None:
        """Free the engine."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._resources.close()


class PolicyLM(dspy.BaseLM):
    """The LM of one predictor: the weights that its module was trained with.

    Greedy unless `temperature` says otherwise. It is left out of what `program.save` writes: weights are exported with
    `mmrl export`.
    """

    def __init__(self, served: ServedPolicy, module: str):
        super().__init__(model=served.name, temperature=0.0, max_tokens=served.max_tokens, cache=False)
        self.served, self.module = served, module

    def __call__(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **options: object
    ) -> list[str]:
        """The texts of `n` completions of messages or a prompt."""
        sent, settings = self._request(prompt, messages, options)
        return self._answered(prompt, sent, settings, self.served.wait(self._generate(sent, settings)))

    async def acall(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **options: object
    ) -> list[str]:
        """The same, awaited."""
        sent, settings = self._request(prompt, messages, options)
        return self._answered(prompt, sent, settings, await self.served.given(self._generate(sent, settings)))

    def dump_state(self) -> None:  # DSPy reads no state as: the LM that is configured
        """Nothing, so that a saved program loads in plain DSPy and speaks with the LM that is configured there."""

    def __deepcopy__(self, memory: dict[int, Any]) -> PolicyLM:
        # An engine is not copied with a program that optimisers and `deepcopy` take apart.
        made: PolicyLM = self.copy()
        return made

    def _request(
        self, prompt: str | None, messages: Sequence[Message] | None, options: Mapping[str, object]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Messages and options of a request.

        Raises:
            ConfigError: an option that would have no effect.
        """
        given = {**self.kwargs, **options}
        settings = {name: value for name, value in given.items() if value is not None and name not in WITHOUT_EFFECT}
        if unknown := sorted(set(settings) - OPTIONS):
            taken = ", ".join(sorted(OPTIONS))
            raise ConfigError(f"{', '.join(unknown)}: has no effect on the LM of a trained policy; it takes {taken}")
        sent: list[Message] = [
            {"role": str(m["role"]), "content": str(m["content"])} for m in messages_of(prompt, messages)
        ]
        return sent, settings

    async def _generate(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> list[Completion]:
        stop = settings.get("stop") or ()
        samplings = [
            Sampling(
                max_tokens=int(settings.get("max_tokens", self.served.max_tokens)),
                temperature=float(settings.get("temperature", 0.0)),
                top_p=float(settings.get("top_p", 1.0)),
                top_k=int(settings.get("top_k", 0)),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                seed=digest("dspy", next(self.served._numbers)),
            )
            for _ in range(int(settings.get("n", 1)))
        ]
        made = [self.served.generate(self.module, messages, sampling) for sampling in samplings]
        return list(await asyncio.gather(*made))

    def _answered(
        self, prompt: str | None, messages: Sequence[Message], settings: Mapping[str, Any], made: Sequence[Completion]
    ) -> list[str]:
        """The texts, noted in DSPy's history and usage as those of any LM."""
        texts = [decode_text(self.served.tokenizer, completion.ids) for completion in made]
        usage = {"completion_tokens": sum(len(completion.ids) for completion in made)}
        response = SimpleNamespace(model=self.model, usage=usage, cache_hit=False)
        self._record_response(response, prompt, list(messages), texts, dict(settings))
        return texts


def speak(program: dspy.Module, lm_of: Callable[[str], dspy.BaseLM]) -> dspy.Module:
    """A copy of a program whose predictors have the LMs of their modules."""
    given = copy.deepcopy(program)
    for name, predictor in given.named_predictors():
        predictor.lm = lm_of(name)
    return given
