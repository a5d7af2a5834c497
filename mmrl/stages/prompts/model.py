"""The model that writes instructions for DSPy's optimisers: the policy itself, or one behind an endpoint.

Every completion is stored before it is used, under what was sent and how often it was sent before, so that an
optimiser which is run again gets the same ones and none is paid for twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import dspy
from dspy import lm15

from mmrl import rng
from mmrl.config import PromptCommandConfig
from mmrl.config.other_stages import ProposingConfig
from mmrl.engines.base import Completion, Request, Sampling
from mmrl.engines.endpoint_engine import SEEDS
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import LengthFailure
from mmrl.models.chat import decode_text, render_prompt
from mmrl.rollout.dspy.policy_lm import Answer, TextEngine, generate
from mmrl.stages import Stage
from mmrl.stages.prompts.rollouts import Loop
from mmrl.system.files import JsonObject
from mmrl.system.json_lines import Store
from mmrl.tasks.base import Message

WRITING_COSTS = ("prompt_tokens", "completion_tokens", "cost")
"""Costs in a stored completion; USD, of an endpoint with prices."""


@dataclass(slots=True, kw_only=True)
class Writer:
    """A source of completions, each of them stored."""

    stage: Stage[PromptCommandConfig]
    """Environment whose policy writes, with the weights of the program's first module."""
    algo: ProposingConfig
    store: Store
    loop: Loop
    paid: Counter[str]
    """Costs of the stage; names of the prompt model's part begin with `writer/`."""
    endpoint: OpenAIChat | None = field(init=False)
    """Endpoint that writes in the place of the policy."""
    _stored: dict[str, JsonObject] = field(init=False)
    _times: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        model = self.algo.prompt_model
        self.endpoint = None if model is None else OpenAIChat(model, "algo.prompt_model")
        self._stored = {line["key"]: line for line in self.store.lines}

    def close(self) -> None:
        """Close the endpoint's connections."""
        if self.endpoint is not None:
            self.endpoint.close()

    def lm(self, temperature: float) -> dspy.LM:
        """Return the prompt model as DSPy's optimisers call it."""

        def answer(messages: list[Message], config: lm15.Config) -> Answer:
            sampled = 1.0 if config.temperature is None else config.temperature
            record = self.loop.wait(self._written(messages, float(sampled)))
            # Stored like a reply: an optimiser that is run again must meet it at the same place.
            if record["error"]:
                raise lm15.ContextLengthError(record["error"])
            return Answer(record["text"], record["prompt_tokens"], record["completion_tokens"])

        # DSPy's own cache would answer from other runs of this user.
        return dspy.LM("mmrl", temperature=temperature, cache=False, num_retries=0, engine=TextEngine(answer))

    async def _written(self, messages: Sequence[Message], temperature: float) -> JsonObject:
        sent = list(map(dict, messages))
        request = f"{rng.digest(json.dumps(sent), repr(temperature)):032x}"
        # Asked for again, an equal request is to have another completion: its number makes the key, here and in a
        # resume. Greedy, it would be the same one.
        repeated = temperature == 0 and self._times[request] > 0
        self._times[request] += not repeated
        key = f"{request}-{self._times[request]}"
        if key not in self._stored:
            # From the key alone: how much came from the store before it changes no draw.
            seed = rng.digest(self.stage.config.seed, "prompt_model", key)
            completion = await self._complete(messages, temperature, seed)
            self._stored[key] = self.store.append(
                {"key": key, "temperature": temperature, "messages": sent, **completion}
            )
        record = self._stored[key]
        if not repeated:
            self.paid.update({"writer/requests": 1, **{f"writer/{name}": record[name] for name in WRITING_COSTS}})
        return record

    async def _complete(self, messages: Sequence[Message], temperature: float, seed: int) -> JsonObject:
        if self.endpoint is not None:
            return await self._from_endpoint(self.endpoint, messages, temperature, seed)
        prompt = render_prompt(self.stage.tokenizer, messages)
        sampling = Sampling(max_tokens=self.algo.prompt_max_tokens, temperature=temperature, seed=seed)
        request = Request(
            prompt_ids=prompt,
            sampling=sampling,
            module=self.stage.task.program.modules[0],
            messages=tuple(messages),
            order=("prompt_model",),
        )
        try:
            completion, error = await generate(self.stage.engine, request), ""
        except LengthFailure as failure:
            completion, error = Completion(ids=(), logprobs=None, finish=""), str(failure)
        return {
            "error": error,
            "text": decode_text(self.stage.tokenizer, completion.ids),
            "finish": completion.finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(completion.ids),
            "cost": 0.0,
        }

    async def _from_endpoint(
        self, endpoint: OpenAIChat, messages: Sequence[Message], temperature: float, seed: int
    ) -> JsonObject:
        # One request at a time: what the counters grow by is what this one cost.
        before = endpoint.usage.metrics()
        reply = await endpoint.reply(
            messages, max_tokens=self.algo.prompt_max_tokens, temperature=temperature, seed=seed % SEEDS
        )
        spent = {name: count - before[name] for name, count in endpoint.usage.metrics().items()}
        return {
            "error": "",
            "text": reply.text,
            "finish": reply.finish,
            "prompt_tokens": int(spent["endpoint/prompt_tokens"]),
            "completion_tokens": int(spent["endpoint/completion_tokens"]),
            "cost": spent["endpoint/cost"],
        }
