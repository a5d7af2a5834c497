"""Rollouts of agents over a scripted engine, with a real tokenizer and chat template."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import trl

from mmrl.config import DataConfig, ModelConfig
from mmrl.config.tasks import AnyAgentConfig
from mmrl.engines.base import Completion, Engine, Request
from mmrl.models.chat import encode_text
from mmrl.models.load import load_tokenizer
from mmrl.records import Call, Example, Forest, Rollout
from mmrl.rollout.environment import SamplingSettings, make_environment
from mmrl.rollout.plans import Tree, independent
from mmrl.rollout.sample import sample
from mmrl.system.objects import register
from mmrl.tasks import TASKS

ROWS = [{"id": f"q{n}", "question": f"What is {n}?", "gold": str(n)} for n in range(8)]
ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Porto?"}]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
_NUMBERS = itertools.count()


def tokenizer(template: str | None = None) -> Any:
    """The tiny model's, with a chat template of TRL's where one is named."""
    loaded = load_tokenizer(ModelConfig(name="tiny", path="tiny"))
    if template is not None:
        loaded.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return loaded


@dataclass
class Scripted(Engine):
    """Answers by a function of the request's text, after `delay` seconds."""

    answer: Callable[[str], str] = str
    tokenizer: Any = field(default_factory=tokenizer)
    delay: float = 0.0
    requests: list[Request] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    live: int = 0
    waiting: int = 0
    cancelled: int = 0
    pieces: bool = False
    """Says each token as it comes."""

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.prompts.append(self.tokenizer.decode(list(request.prompt_ids)))
        self.waiting += 1
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        ids = tuple(encode_text(self.tokenizer, self.reply(request)))[: request.sampling.max_tokens]
        whole = len(ids) < request.sampling.max_tokens
        ids = (*ids, self.tokenizer.eos_token_id) if whole else ids
        for token in ids if self.pieces and request.on_token is not None else ():
            request.on_token(token)
        return Completion(ids=ids, logprobs=(-0.25,) * len(ids), finish="eos" if whole else "length")

    def reply(self, request: Request) -> str:
        return self.answer(self.tokenizer.decode(list(request.prompt_ids)))

    def enter(self) -> None:
        self.live += 1

    def leave(self) -> None:
        self.live -= 1


def named(value: Any) -> str:
    """The name under which a config finds an object."""
    return register(f"of_a_test_{next(_NUMBERS)}", value)


def right(record: Any, result: Any) -> float:
    return float(result == record["gold"])


async def post(base_url: str, api_key: str, model: str = "m", text: str = "Where?", **body: Any) -> httpx.Response:
    """One request of an agent, as a plain client sends it."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=60) as client:
        body = {"model": model, "messages": [{"role": "user", "content": text}]} | body
        return await client.post(f"{base_url}/chat/completions", json=body)


def agent_task(agent: Any = None, **options: Any) -> Any:
    """A task around a function, or a command."""
    chosen: dict[str, Any] = {"agent": None if agent is None else named(agent), "inputs": ("question",)} | options
    metric = chosen.pop("metric", right)
    chosen["metric"] = None if metric is None else named(metric)
    chosen["data"] = DataConfig(train=named(ROWS))
    return TASKS["agent"](AnyAgentConfig(name="agent", **chosen), 0)


def rolled_out(
    task: Any,
    engine: Scripted,
    plan: Sequence[Tree] = independent(1),
    examples: Sequence[Example] | None = None,
    reward_set: str = "outcome",
    timeout_s: float = 60.0,
    seed: int = 0,
    max_tokens: int = 64,
) -> Forest:
    limits: dict[str, Any] = {"max_tokens": max_tokens, "timeout_s": timeout_s, "max_context": 2000}
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, parse_retries=0, **limits)
    env = make_environment(task, engine, engine.tokenizer, settings, (seed, 1))
    chosen = task.examples("train")[:1] if examples is None else examples
    return asyncio.run(sample(env, [(example, plan) for example in chosen], reward_set))


def one(task: Any, engine: Scripted, **options: Any) -> tuple[Rollout, tuple[Call, ...]]:
    """The only rollout, and its calls."""
    forest = rolled_out(task, engine, **options)
    (rollout,) = forest.rollouts
    return rollout, forest.path(rollout)


def client(base_url: str, api_key: str, **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **options)


def agent_of(work: Callable[[Any], Any]) -> Callable[..., Any]:
    """An agent that hands an `openai` client to `work`."""

    async def agent(example: Any, base_url: str, api_key: str) -> Any:
        async with client(base_url, api_key) as asking:
            return await work(asking)

    return agent
