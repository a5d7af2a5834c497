"""What a search asks of models, each request through its memo: the policy, and the model that writes instructions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal, cast

import dspy
from dspy import lm15

from mmrl import rng
from mmrl.config import PromptRunConfig
from mmrl.config.prompts import ProposingConfig
from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.engines.completions import Reply, Usage, with_reasoning
from mmrl.engines.endpoint_engine import SEEDS
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import LengthFailure, RequestFailure
from mmrl.models.chat import render_prompt
from mmrl.models.replies import message_of
from mmrl.rollout.dspy.policy_lm import Answer, TextEngine, generate
from mmrl.stages import Stage
from mmrl.stages.prompts.loop import Loop
from mmrl.system.files import JsonObject
from mmrl.system.memo import Memo
from mmrl.tasks.base import Message

COSTS = ("calls", "prompt_tokens", "completion_tokens")
"""What is counted of the task's requests."""
WRITING_COSTS = ("requests", "prompt_tokens", "completion_tokens", "cost")
"""What is counted of those to the prompt model; USD, of an endpoint with prices."""


class RememberedEngine:
    """An engine whose completions come from a memo where it has them; the rest is the engine's own.

    Args:
        policy: names the weights.
        count: called with the tokens of prompt and completion, at each completion's first use in this process.
    """

    def __init__(self, engine: Engine, memo: Memo, policy: str, count: Callable[[int, int], None]):
        self._engine, self._memo, self._policy, self._count = engine, memo, policy, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        sampling, prompt = request.sampling, request.prompt_ids

        async def ask(number: int) -> JsonObject:
            # With the same seed it would be the same completion.
            seed = sampling.seed if number == 1 else rng.digest(sampling.seed, number)
            return asdict(await self._engine.generate(replace(request, sampling=replace(sampling, seed=seed))))

        asked = {"policy": self._policy, "module": request.module, "prompt": prompt, "messages": request.messages}
        reply = await self._memo.reply(
            # The seed stands for the example, the place in its rollout, the attempt, and DSPy's `rollout_id`.
            {**asked, "sampling": asdict(sampling)},
            ask,
            greedy=sampling.temperature == 0,
            used=lambda reply: self._count(len(prompt), len(reply["ids"])),
            waiting=self._left,
        )
        fields: JsonObject = {key: tuple(value) if isinstance(value, list) else value for key, value in reply.items()}
        return Completion(**fields)

    @contextmanager
    def _left(self) -> Iterator[None]:
        # The engine decodes when all that run wait in it, which this one does not.
        self._engine.leave()
        try:
            yield
        finally:
            self._engine.enter()


class Writer:
    """The model that writes instructions: the policy, with the weights of its first module, or one at an endpoint.

    Args:
        paid: its costs are added to, under names that begin with `writer/`.
    """

    def __init__(
        self,
        stage: Stage[PromptRunConfig],
        algo: ProposingConfig,
        memo: Memo,
        loop: Loop,
        paid: Counter[str],
    ):
        self._stage, self._algo, self._memo, self._loop, self._paid = stage, algo, memo, loop, paid
        model = algo.prompt_model
        self.endpoint = None if model is None else OpenAIChat(model, "algo.prompt_model")
        self._engine = RememberedEngine(stage.engine, memo, stage.config.model.path, self._count)

    def close(self) -> None:
        """Close the endpoint's connections."""
        if self.endpoint is not None:
            self.endpoint.close()

    def lm(self, temperature: float) -> dspy.LM:
        """Return the prompt model as DSPy's optimisers call it."""

        def answer(messages: list[Message], config: lm15.Config) -> Answer:
            sampled = 1.0 if config.temperature is None else float(config.temperature)
            written = self._by_policy if self.endpoint is None else self._by_endpoint
            reply = self._loop.wait(written(messages, sampled))
            # Raised here, not in the loop, where an error ends the search: of these only the proposal is lost.
            if isinstance(reply, Exception):
                raise reply
            if reply.finish == "length":
                raise ValueError(f"cut at algo.prompt_max_tokens={self._algo.prompt_max_tokens}")
            return reply

        # DSPy's own cache would answer from other runs of this user.
        return dspy.LM("mmrl", temperature=temperature, cache=False, num_retries=0, engine=TextEngine(answer))

    def _count(self, prompt_tokens: int, completion_tokens: int, cost: float = 0.0) -> None:
        spent = (1, prompt_tokens, completion_tokens, cost)
        self._paid.update({f"writer/{name}": count for name, count in zip(WRITING_COSTS, spent, strict=True)})

    async def _by_policy(self, messages: Sequence[Message], temperature: float) -> Answer | Exception:
        stage, prompt = self._stage, render_prompt(self._stage.tokenizer, messages)
        seed = rng.digest(stage.config.seed, "prompt_model", json.dumps(messages))
        request = Request(
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=self._algo.prompt_max_tokens, temperature=temperature, seed=seed),
            module=stage.task.program.modules[0],
            messages=tuple(messages),
            order=("prompt_model",),
        )
        try:
            completion = await generate(cast("Engine", self._engine), request)
        except LengthFailure as failure:
            too_long: Exception = lm15.ContextLengthError(str(failure))
            return too_long
        finish: Literal["stop", "length"] = "length" if completion.finish == "length" else "stop"
        text = message_of(stage.tokenizer, prompt, completion.ids, ())["content"]
        return Answer(without_thoughts(text), len(prompt), len(completion.ids), finish)

    async def _by_endpoint(self, messages: Sequence[Message], temperature: float) -> Answer | Exception:
        endpoint = self.endpoint
        assert endpoint is not None
        options = {"max_tokens": self._algo.prompt_max_tokens, "temperature": temperature}
        asked = {"endpoint": endpoint.settings.url, "model": endpoint.settings.model, "messages": messages, **options}

        async def ask(number: int) -> JsonObject:
            seed = rng.digest(self._stage.config.seed, "prompt_model", json.dumps(messages), number) % SEEDS
            return asdict(await endpoint.reply(messages, seed=seed, **options))

        def used(reply: JsonObject) -> None:
            usage = Usage()
            usage.add(Reply(**reply), endpoint.settings)
            self._count(usage.prompt_tokens, usage.completion_tokens, usage.cost)

        try:
            reply = await self._memo.reply(asked, ask, greedy=temperature == 0, used=used)
        except RequestFailure as failure:
            return failure
        finish: Literal["stop", "length"] = "length" if reply["finish"] == "length" else "stop"
        text = without_thoughts(reply["text"])
        return Answer(text, reply["prompt_tokens"], reply["completion_tokens"], finish)


def without_thoughts(text: str) -> str:
    """Return a reply behind the thoughts that begin it: DSPy would read the first draft in them as the proposal."""
    return with_reasoning(text, "", "cut")
