"""User code over several steps: what it keeps finds its event loop again, and what it changes is its own."""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
import httpx
import pytest

from mmrl.config import DataConfig
from mmrl.config.tasks import DspyProgramConfig
from mmrl.records import Example
from mmrl.rollout import with_program
from mmrl.rollout.plans import independent
from mmrl.tasks import TASKS
from tests.helpers.gateway import Scripted, agent_task, named, post, rolled_out
from tests.helpers.programs import filled

STEPS, ROLLOUTS = 3, 4


class Session:
    """What a user's code keeps: of the loop in which it was used first, and dead in any other."""

    def __init__(self) -> None:
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.lock = asyncio.Lock()
        self.uses = 0

    async def use(self, topic: str = "") -> str:
        """Look something up."""
        self.loops.add(asyncio.get_running_loop())
        async with self.lock:  # somebody waits for it, so that it is bound to a loop
            await asyncio.sleep(0.001)
        self.uses += 1
        return "found"


def dspy_task(program: Any, metric: Any) -> Any:
    rows = [{"question": "What?", "gold": "0", "nested": {"of": [1]}}]
    config = DspyProgramConfig(
        name="dspy",
        program=named(program),
        metric=named(metric),
        inputs=("question", "nested"),
        data=DataConfig(train=named(rows)),
    )
    return with_program(TASKS["dspy"](config, 0))


class Plain(dspy.Module):
    """With a `forward` alone, which runs in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str, nested: Any) -> Any:
        return self.answer(question=question)


class Looking(Plain):
    """The same with an async tool."""

    def __init__(self, session: Session):
        super().__init__()
        self.look = dspy.Tool(session.use, name="look")

    def forward(self, question: str, nested: Any) -> Any:
        self.look(topic=question)
        return super().forward(question, nested)


class Awaiting(Looking):
    async def aforward(self, question: str, nested: Any) -> Any:
        await self.look.acall(topic=question)
        return await self.answer.acall(question=question)


def judged_by(session: Session) -> Any:
    async def metric(*given: Any) -> float:
        await session.use()
        return 1.0

    return metric


def one(*given: Any) -> float:
    return 1.0


def agent_of(session: Session) -> Any:
    async def agent(example: Any, base_url: str, api_key: str) -> str:
        await post(base_url, api_key)
        await session.use()
        return "0"

    return agent


async def asks(example: Any, base_url: str, api_key: str) -> str:
    await post(base_url, api_key)
    return "0"


TASKS_OF = {
    "a tool that is awaited": lambda session: dspy_task(Awaiting(session), one),
    "an async tool of a plain module": lambda session: dspy_task(Looking(session), one),
    "a metric": lambda session: dspy_task(Plain(), judged_by(session)),
    "an agent": lambda session: agent_task(agent_of(session), metric=one),
    "a metric of an agent": lambda session: agent_task(asks, metric=judged_by(session)),
    "an agent and its metric": lambda session: agent_task(agent_of(session), metric=judged_by(session)),
}


@pytest.mark.parametrize("kind", TASKS_OF)
def test_what_user_code_keeps_serves_every_step(kind: str) -> None:
    session = Session()
    task = TASKS_OF[kind](session)
    for _ in range(STEPS):
        forest = rolled_out(task, Scripted(lambda prompt: filled(answer="0")), independent(ROLLOUTS))
        assert [rollout.error for rollout in forest.rollouts] == [None] * ROLLOUTS, forest.rollouts[0].error_message
    assert len(session.loops) == 1 and session.uses == STEPS * ROLLOUTS * (2 if "and" in kind else 1)


def test_a_client_over_http_serves_every_step_of_its_agent() -> None:
    """The kind that failed: a client at module level keeps connections of the loop that opened them."""
    kept: list[httpx.AsyncClient] = []

    async def agent(example: Any, base_url: str, api_key: str) -> str:
        if not kept:
            kept.append(httpx.AsyncClient())
        body = {"model": "m", "messages": [{"role": "user", "content": "Where?"}]}
        sent: dict[str, Any] = {"headers": {"Authorization": f"Bearer {api_key}"}, "json": body, "timeout": 20}
        return (await kept[0].post(f"{base_url}/chat/completions", **sent)).json()["choices"][0]["message"]["content"]

    for _ in range(2):
        forest = rolled_out(agent_task(agent, metric=one), Scripted(lambda prompt: "x", delay=0.01), independent(24))
        assert [rollout.error for rollout in forest.rollouts] == [None] * 24, forest.rollouts[0].error_message


def spoiled(record: Any) -> list[int]:
    """The nested field of a record as it comes; it is another one afterwards."""
    found = list(record["nested"]["of"])
    record["nested"]["of"].append(2)
    record["nested"]["more"] = True
    return found


SEEN: list[list[int]] = []


class Spoiling(Plain):
    def forward(self, question: str, nested: Any) -> Any:
        SEEN.append(spoiled({"nested": nested}))
        return super().forward(question, nested)


@pytest.mark.parametrize("kind", ["program", "metric", "agent", "metric of an agent"])
def test_what_user_code_changes_is_its_own(kind: str) -> None:
    SEEN.clear()

    def metric(record: Any, *given: Any) -> float:
        if kind.startswith("metric"):
            SEEN.append(spoiled(record))
        return 1.0

    async def agent(example: Any, base_url: str, api_key: str) -> str:
        if kind == "agent":
            SEEN.append(spoiled(example))
        return await asks(example, base_url, api_key)

    if "agent" in kind:
        task: Any = agent_task(agent, metric=metric)
    else:
        task = dspy_task(Spoiling() if kind == "program" else Plain(), metric)
    example = Example(
        id="e", inputs={"question": "What?", "nested": {"of": [1]}}, metadata={"nested": {"of": [1]}, "gold": "0"}
    )
    for _ in range(2):
        forest = rolled_out(task, Scripted(lambda prompt: filled(answer="0")), independent(2), [example])
        assert [rollout.error for rollout in forest.rollouts] == [None, None], forest.rollouts[0].error_message
    assert SEEN == [[1]] * 4 and example.metadata["nested"] == example.inputs["nested"] == {"of": [1]}
