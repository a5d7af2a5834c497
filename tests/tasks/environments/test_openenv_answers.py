"""What OpenEnv's servers may answer, from a server that speaks its protocol and has no package of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from mmrl.errors import ConfigError
from tests.helpers.gateway import one
from tests.helpers.servers import listening
from tests.helpers.worlds import actions, environment_task, tool_call

pytest.importorskip("websockets", reason="the extra openenv is not installed")

Data = dict[str, Any]
GUESS = {"type": "object", "properties": {"guess": {"type": "integer"}}, "required": ["guess"]}
UNION = {"oneOf": [{"type": "object"}, GUESS], "discriminator": {"propertyName": "type"}}
REFUSED = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no"}}


def observed(observation: Data, reward: float | None = None, done: bool = False) -> Data:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def listed(*names: str) -> Data:
    empty = {"type": "object", "properties": {}}
    return observed({"tools": [{"name": name, "description": "", "input_schema": empty} for name in names]})


def world(name: str, schema: Data, answer: Callable[[bool, Data], Data], begun: Data) -> Mount:
    """An environment: `answer(whether it was reset, an action)`."""

    async def described(request: Request) -> JSONResponse:
        return JSONResponse({"action": schema})

    async def session(socket: WebSocket) -> None:
        await socket.accept()
        reset = False
        try:
            while (asked := json.loads(await socket.receive_text()))["type"] != "close":
                match asked["type"]:
                    case "reset":
                        reset, said = True, begun
                    case "step":
                        said = answer(reset, asked["data"])
                    case _:
                        said = {"type": "error", "data": {"code": "UNKNOWN_TYPE", "message": "unknown"}}
                await socket.send_text(json.dumps(said))
            await socket.close()
        except WebSocketDisconnect:
            pass

    return Mount(f"/{name}", routes=[Route("/schema", described), WebSocketRoute("/ws", session)])


def tools(result: Data, late: bool = False) -> Callable[[bool, Data], Data]:
    """A tool `buy`, which there may be after `reset` alone."""

    def answer(reset: bool, action: Data) -> Data:
        if action["type"] == "list_tools":
            return listed(*["buy"] * (reset or not late))
        return observed(result, reward=1.0, done=False)

    return answer


IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
LINK = {"type": "resource_link", "name": "report", "uri": "file:///r.csv"}
FILE = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}
PARTS = {"content": [{"type": "text", "text": "clicked"}, IMAGE, LINK, FILE], "is_error": False}
OWN = {"tool_name": "buy", "tool_result": "bought 3"}
BEGUN = observed({"task": "buy"})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    over = observed({"hand": "21"}, reward=-1.0, done=True)
    routes = [
        world("late", GUESS, tools({"result": "done"}, late=True), BEGUN),
        world("never", GUESS, lambda reset, action: listed() if "type" in action else observed({"x": 1}, 0.5), BEGUN),
        world("union", UNION, tools({"result": "done"}), BEGUN),
        world("nothing", UNION, lambda reset, action: listed(), BEGUN),
        world("over", GUESS, lambda reset, action: REFUSED if "type" in action else observed({}, 1.0), over),
        world("own", GUESS, tools(OWN), BEGUN),
        world("null", GUESS, tools({"tool_name": "buy", "result": None}), BEGUN),
        world("parts", GUESS, tools({"result": PARTS}), BEGUN),
    ]
    with listening(Starlette(routes=routes)) as address:
        yield address


def served(url: str, name: str, **options: Any) -> Any:
    return environment_task(None, environment=f"openenv:{url}/{name}", **options)


@pytest.mark.parametrize(("name", "tool"), [("late", "buy"), ("union", "buy"), ("never", "step")])
def test_tools_are_those_of_an_episode_that_has_begun(url: str, name: str, tool: str) -> None:
    task = served(url, name)
    assert list(task.worlds[""].names) == [tool]
    rollout, _ = one(task, actions(tool_call(tool)))
    assert (rollout.error, rollout.metrics["tool_calls"]) == (None, 1)


def test_an_environment_without_tools_or_an_action_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.environment: openenv:.*/nothing: lists no tools"):
        served(url, "nothing")


@pytest.mark.parametrize("step_rewards", ["last", "sum"])
@pytest.mark.parametrize("replies", [(), (tool_call("step", guess=1),)])
def test_an_episode_that_is_over_when_it_begins_is_worth_what_reset_gave(
    url: str, replies: tuple[str, ...], step_rewards: str
) -> None:
    """No step goes to the environment, which would give 1 for it."""
    rollout, path = one(served(url, "over", step_rewards=step_rewards), actions(*replies))
    assert (rollout.error, rollout.reward, len(path)) == (None, -1.0, 1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own", '{"tool_result": "bought 3"}'),
        ("null", "null"),
        ("parts", "clicked\n[image]\nreport file:///r.csv\ninside"),
    ],
)
def test_what_a_tool_gave_is_shown(url: str, name: str, told: str) -> None:
    engine = actions(tool_call("buy"))
    one(served(url, name), engine)
    assert f"<tool_response>\n{told}\n</tool_response>" in engine.prompts[1]
