"""Hand-written fakes shared by tests: an engine without a model, small programs, a task around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl import rng
from mmrl.engines.base import Completion, Engine, Request
from mmrl.records import Call, Example
from mmrl.rollout.environment import Environment, SamplingSettings
from mmrl.tasks.base import BaseTask, ModuleScore, Score

Answer = Callable[[Request], str]


def letters(text: str) -> tuple[int, ...]:
    """The fakes' tokenizer: one token per character."""
    return tuple(ord(character) for character in text)


def spelled(ids: Sequence[int]) -> str:
    return "".join(chr(i) for i in ids)


@dataclass
class FakeEngine(Engine):
    """Answers each request with `answer(request)`, after a random pause; counts live programs like a real one."""

    answer: Answer
    pause: Callable[[], float] = lambda: 0.0
    live: int = 0
    policy_version: int = 0
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(self.pause())
        text = self.answer(request)
        return Completion(ids=letters(text), logprobs=(-0.5,) * len(text), finish="eos")

    def enter(self) -> None:
        self.live += 1

    def leave(self) -> None:
        self.live -= 1


def seeded_letter(request: Request) -> str:
    """A completion that depends on the request's seed and prompt alone."""
    return "abcdefghijklmnopqrstuvwxyz"[rng.digest(request.sampling.seed, spelled(request.prompt_ids)) % 26]


@dataclass
class Chain:
    """A program whose modules each see the outputs before them; `tool` is used between calls."""

    modules: tuple[str, ...] = ("a", "b", "c")

    async def run(self, example: Example, ctx: Any) -> str:
        text = example.inputs["text"]
        for module in self.modules:
            reply = await ctx.call(module, [{"role": "user", "content": f"{module}:{text}"}])
            text += reply.text
            text += await ctx.tool("echo", text="+")
        return text


@dataclass
class FakeTask(BaseTask):
    """A task around a program; the reward is the share of 'a' to 'm' letters in the prediction."""

    program: Any
    name: str = "fake"
    tools: dict[str, Any] = field(default_factory=lambda: {"echo": lambda text: text})
    reward_sets: tuple[str, ...] = ("outcome",)
    main_metric: str = "score"
    failure_score: float = 0.0
    reward: Callable[[Any], float] = lambda prediction: sum(c in "abcdefghijklm" for c in str(prediction)) / 10

    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"q{i}", inputs={"text": f"{split}{i}"}) for i in range(8)]

    def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        value = self.reward(prediction)
        return Score(reward=value, metrics={"score": value})

    def score_call(self, call: Call) -> ModuleScore:
        return ModuleScore(penalty=-0.5 if call.text == "z" else 0.0, facts={"words": len(call.text.split())})

    def describe(self) -> dict[str, Any]:
        return {"data": "fake"}


def extended(context: Sequence[int], observation: Any) -> tuple[int, ...]:
    text = observation if isinstance(observation, str) else "".join(f"<{m['role']}>{m['content']}" for m in observation)
    return (*context, *letters(text))


def environment(
    task: Any, engine: Any, retries: int = 0, key: tuple[Any, ...] = (0, 1), timeout_s: float = 600.0
) -> Environment:
    settings = SamplingSettings(
        temperature=1.0, top_p=1.0, top_k=0, parse_retries=retries, max_tokens=8, timeout_s=timeout_s
    )
    return Environment(
        task=task,
        engine=engine,
        render=lambda messages: letters("|".join(m["content"] for m in messages)),
        extend=extended,
        decode=spelled,
        settings=settings,
        key=key,
    )
