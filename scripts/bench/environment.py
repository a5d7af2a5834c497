"""What a tool call of `task=environment` costs: `python -m scripts.bench environment [instances=64] [calls=20]`.

So many rollouts at once, each with a session of its own, use a tool that does nothing: of a class, of an MCP server and
of an OpenEnv server. Of the servers it is the difference to the same calls by a client alone, without threads, tape and
time limits.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mcp import Client
from websockets.asyncio.client import connect

from mmrl.config import ModelConfig
from mmrl.config.tasks import EnvironmentConfig
from mmrl.models.load import load_tokenizer
from mmrl.records import Example
from mmrl.rollout.environment import SamplingSettings, make_environment
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.system.child_process import ChildProcess
from mmrl.system.objects import register
from mmrl.tasks import TASKS
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.own import FunctionProgram
from mmrl.tasks.environments.base import Source
from mmrl.tasks.environments.classes import ClassSource
from mmrl.tasks.environments.episode import Episode
from mmrl.tasks.environments.mcp import McpSource
from mmrl.tasks.environments.openenv import OpenEnvSource
from scripts.bench.common import Bar, Measured
from scripts.bench.gateway import Scripted

OPTIONS = {"instances": "64", "calls": "20"}
TURNS = 3
"""Measurements of each, of which the fastest counts."""


class World:
    """An environment whose tool does nothing."""

    def reset(self, **columns: Any) -> None: ...

    def step(self, number: int) -> str:
        """
        Do nothing.

        Args:
            number: any
        """
        return "done"

    def get_reward(self) -> float:
        return 0.0


def played(source: Source, instances: int, calls: int) -> float:
    """Seconds of so many rollouts at once, which do nothing but use the tool."""
    times: list[float] = []
    config = EnvironmentConfig(name="environment", environment=register("bench_world", World))
    task: Any = TASKS["environment"](config, 0)

    async def program(example: Any, ctx: Any) -> int:
        episode = Episode(ctx, {}, source, {"step": source}, lambda name: False, 60.0)
        await episode.reset()  # opens the session, which is none of a call's costs
        await together()
        started = time.perf_counter()
        for number in range(calls):
            assert "done" in (await episode.act("step", {"number": number})).text
        times.append(time.perf_counter() - started)
        await episode.close()
        return 1

    together = _barrier(instances)
    task.program, task.score = FunctionProgram(program, ("agent",)), lambda *arguments: Score(reward=1.0)
    tokenizer = load_tokenizer(ModelConfig(name="tiny", path="tiny"))
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, parse_retries=0, max_tokens=8)
    env = make_environment(task, Scripted((1,)), tokenizer, settings, (0, 1))
    examples = [Example(id=f"q{n}", inputs={}, metadata={}) for n in range(instances)]
    forest = asyncio.run(sample(env, [(example, independent(1)) for example in examples], "outcome"))
    if failed := [rollout.error_message for rollout in forest.rollouts if rollout.error]:
        raise SystemExit(failed[0])
    return max(times)


def _barrier(count: int) -> Callable[[], Awaitable[None]]:
    """A function that returns once it has been awaited so many times."""
    waiting = 0
    all_there = asyncio.Event()

    async def wait() -> None:
        nonlocal waiting
        waiting += 1
        if waiting == count:
            all_there.set()
        await all_there.wait()

    return wait


def bare(
    session: Callable[[int, Callable[[], Awaitable[None]]], Awaitable[float]], instances: int, calls: int
) -> float:
    """Seconds of the same calls by clients alone."""

    async def together() -> float:
        wait = _barrier(instances)
        return max(await asyncio.gather(*(session(calls, wait) for _ in range(instances))))

    return asyncio.run(together())


def by_mcp(url: str) -> Callable[[int, Callable[[], Awaitable[None]]], Awaitable[float]]:
    """A session of an MCP client."""

    async def session(calls: int, wait: Callable[[], Awaitable[None]]) -> float:
        async with Client(url, mode="legacy") as client:
            await client.call_tool("step", {"number": 0})
            await wait()
            started = time.perf_counter()
            for number in range(calls):
                await client.call_tool("step", {"number": number})
            return time.perf_counter() - started

    return session


def by_websocket(url: str) -> Callable[[int, Callable[[], Awaitable[None]]], Awaitable[float]]:
    """A session of an OpenEnv server."""

    async def session(calls: int, wait: Callable[[], Awaitable[None]]) -> float:
        async with connect(f"{url.replace('http', 'ws', 1)}/ws", proxy=None) as socket:
            await wait()
            started = time.perf_counter()
            for number in range(calls):
                await socket.send(json.dumps({"type": "step", "data": {"number": number}}))
                json.loads(await socket.recv())
            return time.perf_counter() - started

    return session


def measure(args: dict[str, str]) -> Measured:
    """Measure the calls of a class, an MCP server and an OpenEnv server."""
    instances, calls = int(args["instances"]), int(args["calls"])
    count = instances * calls
    in_class = min(played(ClassSource("bench", f"{__name__}:World"), instances, calls) for _ in range(TURNS))
    bars = [Bar(f"ms of a class's tool, {instances} instances", 1000 * in_class / count, 2.0, at_most=True, unit="")]
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("mcp", "openenv"):
            words = [sys.executable, "-m", "scripts.bench.tool_servers", kind]
            server = ChildProcess(lambda port, words=words: [*words, str(port)], log=Path(folder) / kind, timeout_s=120)
            server.start()
            try:
                url = f"{server.url}/mcp" if kind == "mcp" else server.url
                source = McpSource("bench", url) if kind == "mcp" else OpenEnvSource("bench", url)
                client = by_mcp(url) if kind == "mcp" else by_websocket(url)
                pairs = [(played(source, instances, calls), bare(client, instances, calls)) for _ in range(TURNS)]
            finally:
                server.stop()
            through, alone = (min(times) for times in zip(*pairs, strict=True))
            name = {"mcp": "an MCP tool", "openenv": "an OpenEnv step"}[kind]
            added = 1000 * (through - alone) / count
            bars += [
                Bar(f"ms that {name} costs more, {instances} instances", added, 2.0, at_most=True, unit=""),
                Bar(f"ms of {name} by a client alone", 1000 * alone / count, unit=""),
            ]
    return bars, {"instances": instances, "calls": calls}
