"""What a tool call of `task=environment` costs: `python -m scripts.bench environment [instances=64] [calls=20]`.

So many rollouts at once, each with a session of its own, use a tool that does nothing: of a class, of an MCP server and
of an OpenEnv server. Of the servers it is the difference to the same calls by a client alone, without threads, tape and
time limits. Seconds are of this process's CPU, which other load of the machine leaves as they are.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
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
TURNS = 2
"""Measurements of each, of which the fastest counts."""


class World:
    """An environment whose tool does nothing."""

    def reset(self, **columns: Any) -> None:
        """Begin an episode."""

    def step(self, number: int) -> str:
        """
        Do nothing.

        Args:
            number: any
        """
        return "done"

    def get_reward(self) -> float:
        """Return what it was worth."""
        return 0.0


def played(source: Source, instances: int, calls: int) -> float:
    """Seconds of so many rollouts at once, which do nothing but use the tool."""
    clock = Clock(instances)
    config = EnvironmentConfig(name="environment", environment=register("bench_world", World))
    task: Any = TASKS["environment"](config, 0)

    async def program(example: Any, ctx: Any) -> int:
        episode = Episode(ctx, {}, source, {"step": source}, lambda name: False, 60.0)
        await episode.reset()  # opens the session, which is none of a call's costs
        async with clock:
            for number in range(calls):
                assert "done" in (await episode.act("step", {"number": number})).text
        await episode.close()
        return 1

    task.program, task.score = FunctionProgram(program, ("agent",)), lambda *arguments: Score(reward=1.0)
    tokenizer = load_tokenizer(ModelConfig(name="tiny", path="tiny"))
    settings = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, parse_retries=0, max_tokens=8)
    env = make_environment(task, Scripted((1,)), tokenizer, settings, (0, 1))
    examples = [Example(id=f"q{n}", inputs={}, metadata={}) for n in range(instances)]
    forest = asyncio.run(sample(env, [(example, independent(1)) for example in examples], "outcome"))
    if failed := [rollout.error_message for rollout in forest.rollouts if rollout.error]:
        raise SystemExit(failed[0])
    return clock.seconds


class Clock:
    """Seconds of the CPU from when all of `count` users have entered until the last has left."""

    def __init__(self, count: int):
        self.missing, self.all_there = count, asyncio.Event()
        self.started = self.seconds = 0.0

    async def __aenter__(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.started = time.process_time()
            self.all_there.set()
        await self.all_there.wait()

    async def __aexit__(self, *error: object) -> None:
        self.seconds = time.process_time() - self.started


Sessions = Callable[[str, int, Clock], Coroutine[Any, Any, None]]
"""Address, calls and clock -> a session that makes the calls."""


async def by_mcp(url: str, calls: int, clock: Clock) -> None:
    """A session of an MCP client."""
    async with Client(url, mode="legacy") as client:
        await client.call_tool("step", {"number": 0})
        async with clock:
            for number in range(calls):
                await client.call_tool("step", {"number": number})


async def by_websocket(url: str, calls: int, clock: Clock) -> None:
    """A session of an OpenEnv server."""
    async with connect(f"{url.replace('http', 'ws', 1)}/ws", proxy=None) as socket, clock:
        for number in range(calls):
            await socket.send(json.dumps({"type": "step", "data": {"number": number}}))
            json.loads(await socket.recv())


def alone(session: Sessions, url: str, instances: int, calls: int) -> float:
    """Seconds of the same calls by clients alone."""

    async def together() -> float:
        clock = Clock(instances)
        await asyncio.gather(*(session(url, calls, clock) for _ in range(instances)))
        return clock.seconds

    return asyncio.run(together())


def command(kind: str, port: int) -> list[str]:
    """The command line of a server."""
    return [sys.executable, "-m", "scripts.bench.tool_servers", kind, str(port)]


def measure(args: dict[str, str]) -> Measured:
    """Measure the calls of a class, an MCP server and an OpenEnv server."""
    instances, calls = int(args["instances"]), int(args["calls"])
    count = instances * calls
    in_class = min(played(ClassSource("bench", f"{__name__}:World"), instances, calls) for _ in range(TURNS))
    bars = [Bar(f"ms of a class's tool, {instances} instances", 1000 * in_class / count, 2.0, at_most=True, unit="")]
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("mcp", "openenv"):
            server = ChildProcess(partial(command, kind), log=Path(folder) / kind, timeout_s=120)
            server.start()
            try:
                url = f"{server.url}/mcp" if kind == "mcp" else server.url
                source = McpSource("bench", url) if kind == "mcp" else OpenEnvSource("bench", url)
                client = by_mcp if kind == "mcp" else by_websocket
                through = min(played(source, instances, calls) for _ in range(TURNS))
                without = min(alone(client, url, instances, calls) for _ in range(TURNS))
            finally:
                server.stop()
            name = {"mcp": "an MCP tool", "openenv": "an OpenEnv step"}[kind]
            added = 1000 * (through - without) / count
            bars += [
                Bar(f"ms that {name} costs more, {instances} instances", added, 2.0, at_most=True, unit=""),
                Bar(f"ms of {name} by a client alone", 1000 * without / count, unit=""),
            ]
    return bars, {"instances": instances, "calls": calls}
