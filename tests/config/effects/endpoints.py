"""Effects of OpenAI-compatible endpoints, wherever a config has one: what its client sends, and how long it tries."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx

from mmrl.config import ENGINE_SCHEMAS, EndpointConfig
from mmrl.config.teacher import TeacherConfig
from mmrl.engines import EngineSetup, build_engine
from mmrl.engines.endpoint_engine import EndpointEngine, with_endpoints
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import MmrlError
from mmrl.rollout.teachers import LoadedTeacher
from mmrl.run.build import _load_teachers
from mmrl.tasks.agents.judge import JudgedTurn
from tests.config.effects import Body, Busy, Options, acts, refused
from tests.config.effects.task import built
from tests.helpers.engines import tokenizer
from tests.helpers.programs import FakeEngine

CERTIFICATES = ssl.create_default_context()
KEYS = {"KEY_OF_A_TEST": "one", "OPENAI_API_KEY": "default"}


@dataclass
class Server(Busy):
    """Stands where httpx sends: answers every request in the way that shows what `key` does."""

    text: str = "fine"
    sent: list[tuple[str, list[str | None], Any]] = field(default_factory=list)

    async def send(self, request: httpx.Request) -> httpx.Response:
        kept = ("authorization", "openai-organization", "openai-project", "x-title")
        headers = [request.headers.get(name) for name in kept]
        self.sent.append((str(request.url), headers, json.loads(request.content)))
        await self.wait()
        if self.key == "attempts":
            return httpx.Response(500, stream=Body(b"broken"), request=request)
        if self.key == "max_wait_s":
            headers = {"retry-after": "0.02"}
            return httpx.Response(429, headers=headers, stream=Body(b"later"), request=request)
        message = {"role": "assistant", "content": self.text, "reasoning_content": "thoughts"}
        usage = {"prompt_tokens": 1000, "completion_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 500}}
        reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        # not read yet, as a reply comes from a network
        return httpx.Response(200, stream=Body(json.dumps(reply).encode()), request=request)


@contextmanager
def answering(section: str, options: Options, text: str = "fine") -> Iterator[tuple[Options, Server]]:
    """The options of the endpoint in a section, with short waits, or a test would have to; and its server."""
    own = {path.removeprefix(f"{section}."): value for path, value in options.items() if path.startswith(f"{section}.")}
    server = Server(next(iter(own)), text=text)
    base: Options = {"url": "http://host/v1", "model": "m", "key_env": None, "max_wait_s": 0.001}
    base["attempts"] = 1 if server.key == "timeout_s" else 2

    # certificates take longer to read than all else here
    unsafe = patch.object(ssl, "create_default_context", lambda *given, **more: CERTIFICATES)
    with server.in_place(), patch.dict(os.environ, KEYS), unsafe:
        yield base | own, server


def _traced(chat: OpenAIChat, server: Server) -> object:
    """Three requests at once: what was sent, and what came of it."""

    async def ask() -> list[object]:
        messages = [{"role": "user", "content": "?"}]
        return await asyncio.gather(
            *(chat.complete(messages, temperature=0.5, max_tokens=64) for _ in range(3)), return_exceptions=True
        )

    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0 if server.key == "requests_per_minute" else seconds)

    with patch.object(asyncio, "sleep", recorded):
        found = [str(reply) for reply in asyncio.run(ask())]
    chat.close()
    if server.key == "concurrency":
        return server.most > 1
    if server.key == "requests_per_minute":
        return max(pauses) > 0.3
    return sorted(map(str, server.sent)), found, chat.usage.cost


def _task(name: str, section: str, given: Options, folder: Path) -> Any:
    """A task whose endpoint in `section` has these options."""
    more = {} if name == "papillon" else {"reward": "judge_outcome"}
    return built(name, more | {f"{section}.{option}": value for option, value in given.items()}, folder)


def of_judge(name: str, options: Options, folder: Path) -> object:
    """The judge's client."""
    with answering("judge", options) as (given, server):
        task = _task(name, "judge", given, folder)
        return _traced(task.judges.chat if name == "papillon" else task.judge.chat, server)


def asked(name: str, options: Options, folder: Path) -> object:
    """What a judge is sent for one rollout when none of its replies can be read, and what it says then."""
    with answering("judge", options, text="nonsense") as (given, server):
        task = _task(name, "judge", given, folder)
        judge = task.judges if name == "papillon" else task.judge
        try:
            if name == "papillon":
                said = str(asyncio.run(judge.quality("query", "new", "gold")))
            else:
                said = str(asyncio.run(judge.verdict("judge_outcome", "prompt", [JudgedTurn("text")], ["answer"])))
        except MmrlError as error:
            said = str(error)
        judge.chat.close()
    return server.sent, said


def of_external(name: str, options: Options, folder: Path) -> object:
    """The client of the external model."""
    with answering("external", options) as (given, server):
        return _traced(_task(name, "external", given, folder).external, server)


def of_request(name: str, options: Options, folder: Path) -> object:
    """What the external model is sent."""
    with answering("external", options) as (given, server):
        task = _task(name, "external", given, folder)
        asyncio.run(task.ask_external("a request"))
        task.external.close()
    return sorted(map(str, server.sent))


def of_module(name: str, options: Options, folder: Path) -> object:
    """The client of an endpoint that answers for a module."""
    with answering("endpoints", options) as (given, server):
        config = ENGINE_SCHEMAS[name].model_validate({"name": name, "endpoints": {"one": given}})
        router: Any = with_endpoints(FakeEngine(str), config, tokenizer())
        return _traced(router.endpoints["one"].chat, server)


def of_engine(name: str, options: Options, folder: Path) -> object:
    """The client of `engine=openai`."""
    with answering("endpoint", options) as (given, server):
        del given["model"]
        config = ENGINE_SCHEMAS[name].model_validate({"name": name, "endpoint": given})
        engine = build_engine(config, None, tokenizer(), EngineSetup(served="m"))
        assert isinstance(engine, EndpointEngine)
        return _traced(engine.chat, server)


def of_teacher(name: str, options: Options, folder: Path) -> object:
    """The client of a teacher behind an endpoint."""
    with answering("teachers.endpoint", options) as (given, server):
        teacher = TeacherConfig(name="t", endpoint=EndpointConfig(**given))
        student: Any = LoadedTeacher(task=None, engine=FakeEngine(str), tokenizer=tokenizer(), shares_vocabulary=True)
        config: Any = SimpleNamespace(algo=SimpleNamespace(teachers=[teacher]), task=None, seed=0)
        with patch("mmrl.run.build.build_task"):
            found: Any = _load_teachers(config, student)
        return _traced(found["t"].engine.chat, server)


VALUES: dict[str, tuple[Any, Any]] = {
    "url": ("http://host/v1", "http://other/v1"),
    "key_env": (None, "KEY_OF_A_TEST"),
    "timeout_s": (5.0, 0.05),
    "attempts": (1, 3),
    "max_wait_s": (0.001, 1.0),
    "concurrency": (16, 1),
    "requests_per_minute": (None, 200.0),
    "price_in": (0.0, 2.0),
    "price_cached": (None, 2.0),
    "price_out": (0.0, 2.0),
    "organization": (None, "org-1"),
    "project": (None, "proj-1"),
    "max_tokens_field": ("auto", "max_completion_tokens"),
    "omit": ((), ("temperature",)),
    "extra_body": ({}, {"reasoning_effort": "low"}),
    "extra_headers": ({}, {"X-Title": "mmrl"}),
    "reasoning": ("drop", "keep"),
    "model": ("m", "other"),
}
NOT_OPENAI = "engine.transformers;engine.vllm_server;engine.vllm_colocated"
JUDGED = "task.search_agent;task.tool_agent;task.papillon"
for key, (one, other) in VALUES.items():
    acts("task.search_agent;task.tool_agent", f"judge.{key}", of_judge, one, other, shared=True)
    acts("task.papillon", f"judge.{key}", of_judge, one, other)
    acts("task.papillon", f"external.{key}", of_external, one, other)
    acts(NOT_OPENAI, f"endpoints.{key}", of_module, one, other, shared=True)
    acts("algo.mmgrpo;algo.ccpo", f"teachers.endpoint.{key}", of_teacher, one, other)
    if key != "model":
        acts("engine.openai", f"endpoint.{key}", of_engine, one, other)
    refused(
        "engine.openai",
        f"endpoints.{key}",
        json.dumps(other).replace('"', ""),
        "with engine=openai, which answers for all modules",
        typed=f"engine.endpoints.answerer.{key}",
        starts="engine.endpoints",
    )
acts(JUDGED, "judge.max_tokens", asked, 2048, 7)
acts(JUDGED, "judge.temperature", asked, None, 0.5)
acts("task.papillon", "external.temperature", of_request, None, 0.5)
acts(JUDGED, "judge.retries", asked, 0, 2)
acts("task.search_agent;task.tool_agent", "judge.on_unreadable", asked, "fail", "rule")
