"""The gateway's cost: `python -m scripts.bench gateway [agents=64] [calls=20]`.

Agents of `calls` requests each run at once over a scripted engine, which replies at once: through the gateway, by a
bare HTTP client, and without it, by `ctx.call`. The difference of a call is what the gateway adds, the client's own
work included.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mmrl.config import DataConfig, ModelConfig
from mmrl.config.tasks import AnyAgentConfig
from mmrl.engines.base import Completion, Engine, Request
from mmrl.models.chat import encode_text
from mmrl.models.load import load_tokenizer
from mmrl.records import Example
from mmrl.rollout.environment import SamplingSettings, make_environment
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.system.objects import register
from mmrl.tasks import TASKS
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.own import FunctionProgram
from scripts.bench.common import Bar, Measured

OPTIONS = {"agents": "64", "calls": "20"}
ROWS = [{"question": "Where is Porto?"}]
REPLY = "In Portugal, on the river Douro."
ASK = [{"role": "system", "content": "Be brief. " * 40}, {"role": "user", "content": "Where is Porto?"}]


@dataclass
class Scripted(Engine):
    """Replies at once."""

    ids: tuple[int, ...]

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        return Completion(ids=self.ids, logprobs=(-0.1,) * len(self.ids), finish="eos")


def asked(number: int) -> list[dict[str, str]]:
    """A prompt that no other call has."""
    return [*ASK[:1], {"role": "user", "content": f"{number}: Where is Porto?"}]


async def _nothing(example: Any, base_url: str, api_key: str) -> None: ...


def played(function: Callable[..., Awaitable[Any]], agents: int, direct: bool, tokenizer: Any) -> float:
    """Seconds of so many rollouts at once: of an agent, or of a program that calls `ctx.call` itself."""
    names: dict[str, Any] = {
        "agent": register("bench_agent", _nothing if direct else function),
        "metric": register("bench_metric", lambda record, result: 1.0),
    }
    data = DataConfig(train=register("bench_rows", ROWS))
    config = AnyAgentConfig(name="agent", inputs=("question",), data=data, max_calls=10_000, **names)
    task: Any = TASKS["agent"](config, 0)
    if direct:
        task.program = FunctionProgram(function, ("agent",))
        task.score = lambda *arguments: Score(reward=1.0)
    engine = Scripted((*encode_text(tokenizer, REPLY), tokenizer.eos_token_id))
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, parse_retries=0, max_tokens=64)
    env = make_environment(task, engine, tokenizer, settings, (0, 1))
    examples = [Example(id=f"q{n}", inputs={"question": n}, metadata=ROWS[0]) for n in range(agents)]
    started = time.perf_counter()
    forest = asyncio.run(sample(env, [(example, independent(1)) for example in examples], "outcome"))
    seconds = time.perf_counter() - started
    if failed := [rollout.error_message for rollout in forest.rollouts if rollout.error]:
        raise SystemExit(failed[0])
    return seconds


def agent_of(calls: int) -> Callable[..., Awaitable[Any]]:
    """An agent with a connection of its own and the least that speaks HTTP: its work is not the gateway's."""

    async def agent(example: Any, base_url: str, api_key: str) -> int:
        at = urlsplit(base_url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        for call in range(calls):
            body = json.dumps({"model": "m", "messages": asked(example["question"] * calls + call)}).encode()
            head = f"POST {at.path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api_key}\r\n"
            writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            headers = await reader.readuntil(b"\r\n\r\n")
            length = int(headers.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["choices"][0]["message"]["content"] == REPLY
        writer.close()
        return 1

    return agent


def program_of(calls: int) -> Callable[..., Awaitable[Any]]:
    """The same calls without a gateway."""

    async def program(example: Any, ctx: Any) -> int:
        for call in range(calls):
            await ctx.call("agent", asked(example.inputs["question"] * calls + call))
        return 1

    return program


def measure(args: dict[str, str]) -> Measured:
    """Measure calls through the gateway and without it."""
    agents, calls = int(args["agents"]), int(args["calls"])
    tokenizer = load_tokenizer(ModelConfig(name="tiny", path="tiny"))
    played(agent_of(1), 2, False, tokenizer)  # the server starts
    through = min(played(agent_of(calls), agents, False, tokenizer) for _ in range(3))
    without = min(played(program_of(calls), agents, True, tokenizer) for _ in range(3))
    count = agents * calls
    added_ms = 1000 * (through - without) / count
    bars = [
        Bar(f"ms that a call costs more, {agents} agents", added_ms, 2.0, at_most=True, unit=""),
        Bar("calls a second of one process", count / through, 500.0, unit=""),
        Bar("calls a second without the gateway", count / without, unit=""),
    ]
    return bars, {"agents": agents, "calls": calls}
