"""The model that writes instructions for DSPy's optimisers: the policy itself, or one behind an endpoint.

Every completion is stored before it is used, under what was sent and how often it was sent before, so that an
optimiser which is run again gets the same ones and none is paid for twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dspy
from dspy.utils.exceptions import ContextWindowExceededError

from mmrl import rng
from mmrl.engines.base import Engine, Request, Sampling
from mmrl.engines.endpoint_engine import SEEDS
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import LengthFailure
from mmrl.models.chat import decode_text, render_prompt
from mmrl.rollout.dspy.host import messages_of
from mmrl.stages.prompts.stored_rollouts import Loop
from mmrl.system.files import JsonObject
from mmrl.system.json_lines import Store
from mmrl.tasks.base import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class WriterUsage:
    """What the prompt model was paid for."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """USD, of an endpoint with prices."""

    def add(self, record: JsonObject) -> None:
        """Count a completion."""
        self.requests += 1
        self.prompt_tokens += record["prompt_tokens"]
        self.completion_tokens += record["completion_tokens"]
        self.cost += record["cost"]


@dataclass(slots=True, kw_only=True)
class Writer:
    """A source of completions, each of them stored."""

    engine: Engine
    """The policy's."""
    tokenizer: PreTrainedTokenizerBase
    module: str
    """Of the policy's modules, the one whose weights write."""
    endpoint: OpenAIChat | None
    """In the place of the policy."""
    max_tokens: int
    seed: int
    store: Store
    loop: Loop
    usage: WriterUsage = field(default_factory=WriterUsage)
    _stored: dict[str, JsonObject] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._stored = {line["key"]: line for line in self.store.lines}

    def write(self, messages: Sequence[Message], temperature: float, number: int | None) -> str:
        """One completion.

        Args:
            number: DSPy's, which makes equal requests differ.

        Raises:
            ContextWindowExceededError: the prompt alone is too long for the policy.
        """
        record = self.loop.wait(self._written(messages, temperature, number))
        # Stored like a reply: an optimiser that is run again must meet it at the same place.
        if record["error"]:
            raise ContextWindowExceededError(record["error"])
        return str(record["text"])

    async def _written(self, messages: Sequence[Message], temperature: float, number: int | None) -> JsonObject:
        sent = json.dumps(list(map(dict, messages)))
        request = f"{rng.digest(sent, repr(temperature), number):032x}"
        # Asked for again, an equal request is to have another completion: its number makes the key, here and in a
        # resume. Greedy, it would be the same one.
        again = temperature == 0 and self._times[request] > 0
        self._times[request] += not again
        key = f"{request}-{self._times[request]}"
        if key not in self._stored:
            # From the key alone: how much came from the store before it changes no draw.
            seed = rng.digest(self.seed, "prompt_model", key)
            made = await self._made(messages, temperature, seed)
            options = {"temperature": temperature, "number": number}
            line = {"key": key, **options, "messages": list(map(dict, messages)), **made}
            self._stored[key] = self.store.append(line)
        if not again:
            self.usage.add(self._stored[key])
        return self._stored[key]

    async def _made(self, messages: Sequence[Message], temperature: float, seed: int) -> JsonObject:
        if self.endpoint is not None:
            return await self._from_endpoint(self.endpoint, messages, temperature, seed)
        prompt = render_prompt(self.tokenizer, messages)
        sampling = Sampling(max_tokens=self.max_tokens, temperature=temperature, seed=seed)
        request = Request(
            prompt_ids=prompt, sampling=sampling, module=self.module, messages=tuple(messages), order=("prompt_model",)
        )
        made: JsonObject = {"error": "", "text": "", "finish": "", "prompt_tokens": len(prompt), "completion_tokens": 0}
        # The engine decodes when all that are live wait for it; this request is one of them.
        self.engine.enter()
        try:
            completion = await self.engine.generate(request)
        except LengthFailure as failure:
            return made | {"error": str(failure), "cost": 0.0}
        finally:
            self.engine.leave()
        text = decode_text(self.tokenizer, completion.ids)
        return made | {
            "text": text,
            "finish": completion.finish,
            "completion_tokens": len(completion.ids),
            "cost": 0.0,
        }

    async def _from_endpoint(
        self, endpoint: OpenAIChat, messages: Sequence[Message], temperature: float, seed: int
    ) -> JsonObject:
        # One request at a time: what the counters grow by is what this one cost.
        before = endpoint.usage.metrics()
        text, finish = await endpoint.complete_with_finish(
            messages, max_tokens=self.max_tokens, temperature=temperature, seed=seed % SEEDS
        )
        spent = {name: count - before[name] for name, count in endpoint.usage.metrics().items()}
        return {
            "error": "",
            "text": text,
            "finish": finish,
            "prompt_tokens": int(spent["endpoint/prompt_tokens"]),
            "completion_tokens": int(spent["endpoint/completion_tokens"]),
            "cost": spent["endpoint/cost"],
        }


class PromptLM(dspy.BaseLM):
    """The prompt model as DSPy's optimisers call it."""

    def __init__(self, writer: Writer, temperature: float):
        # DSPy's own cache would answer from other runs of this user.
        super().__init__(model="mmrl", temperature=temperature, max_tokens=writer.max_tokens, cache=False)
        self.writer = writer

    def __call__(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **options: Any
    ) -> list[str]:
        """The texts of `n` completions."""
        given = {**self.kwargs, **options}
        plain = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages_of(prompt, messages)]
        temperature = given.get("temperature")
        return [
            self.writer.write(plain, 1.0 if temperature is None else float(temperature), given.get("rollout_id"))
            for _ in range(int(given.get("n") or 1))
        ]
