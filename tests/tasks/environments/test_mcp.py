"""Tools of real MCP servers, written with the `mcp` package: processes of their own, and one over HTTP."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter as Counted
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mmrl.config.tasks import EnvironmentConfig
from mmrl.errors import ConfigError
from mmrl.rollout.plans import independent
from mmrl.system.child_process import free_port
from mmrl.tasks.environments import mcp
from mmrl.tasks.environments.schema import function_schema
from tests.helpers import TOP, mcp_server
from tests.helpers.gateway import one, rolled_out
from tests.helpers.servers import Scripted as Page
from tests.helpers.servers import Seen, serving
from tests.helpers.worlds import Counter, actions, environment_task, tool_call
from tests.tasks.environments.test_replay import forked

COMMAND = shlex.join([sys.executable, mcp_server.__file__])


def said(record: Any, prediction: Any) -> float:
    """The last number that a tool said."""
    told = [message["content"] for message in prediction["messages"] if message["role"] == "tool"]
    return float(told[-1]) if told and told[-1].isdigit() else 0.0


def served(where: str = COMMAND, world: Any = None, **options: Any) -> Any:
    """A task around an MCP server's tools."""
    options = {"metric": said} | options
    return environment_task(world, tools=(f"mcp:{where}",), **options)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, mcp_server.__file__, "streamable-http", str(port)]) as process:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
        process.send_signal(signal.SIGKILL)


@pytest.fixture(params=["process", "http"])
def where(request: pytest.FixtureRequest, url: str) -> str:
    return COMMAND if request.param == "process" else url


def running() -> list[psutil.Process]:
    """Servers of this process: other workers of the tests have theirs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ends meanwhile
            if process.cmdline() == [sys.executable, mcp_server.__file__]:
                found.append(process)
    return found


def test_a_rollout_has_a_session_of_its_own(where: str) -> None:
    """Its counter begins at 0; what the server refuses is an observation."""
    task = served(where)
    wrong = (tool_call("add", step="x"), tool_call("fail", text="oh"), tool_call("walk"))
    engine = actions(tool_call("add", step=2), *wrong, tool_call("add", step=3))
    forest = rolled_out(task, engine, independent(2))
    assert [rollout.reward for rollout in forest.rollouts] == [5.0, 5.0]
    assert forest.rollouts[0].metrics["tool_errors"] == 3
    told = "".join(engine.prompts)
    assert "valid integer" in told and "{'error': 'Error executing tool fail" in told and "walk not found" in told
    (tool, *_) = task.beside[0].tools
    assert tool["function"] == {
        "name": "add",
        "description": "Adds to the counter of this session.",
        "parameters": {"type": "object", "properties": {"step": {"type": "integer"}}, "required": ["step"]},
    }


def test_a_fork_does_the_recorded_actions_again_in_its_own_session(where: str) -> None:
    """4 is reached by all; then 3, 4 or 5 twice."""
    forest = forked(served(where))
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3
    assert [rollout.reward for rollout in forest.rollouts] == [10.0, 12.0, 14.0]


@pytest.mark.parametrize(("stateless", "calls"), [((), 3 * 4), (("add",), 2 + 3 * 2), ("all", 2 + 3 * 2)])
def test_stateless_tools_are_not_used_again(
    stateless: Any, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMRL_TEST_CALLS", str(tmp_path / "calls"))
    forest = forked(served(tools_stateless=stateless))
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3
    assert len((tmp_path / "calls").read_text().splitlines()) == calls


def test_one_session_may_be_all_rollouts(tmp_path: Path) -> None:
    before = len(running())
    task = served(tools_shared=True)
    forest = rolled_out(task, actions(tool_call("add", step=2)), independent(4))
    assert sorted(rollout.reward for rollout in forest.rollouts) == [2.0, 4.0, 6.0, 8.0]
    assert len(running()) == before + 1
    task.close()
    assert len(running()) == before
    assert one(task, actions(tool_call("add", step=2)))[0].reward == 2.0, "a later use begins it again"
    task.close()


def test_tools_stand_beside_an_environment() -> None:
    engine = actions(tool_call("look"), tool_call("key"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMRL_TEST_KEY", "of this environment")
        rollout, _ = one(served(world=Looking, metric=None), engine)
    assert rollout.error is None and "of this environment" in engine.prompts[2] and "it is 0" in engine.prompts[1]
    with pytest.raises(ConfigError, match=r"task\.tools: two tools have the name add"):
        served(world=Counter)


class Looking(Counter):
    """Without a tool that the server has too."""

    add = None


@pytest.mark.parametrize("shared", [False, True])
def test_a_server_that_ends_fails_its_rollouts_and_is_started_again(shared: bool) -> None:
    before, task = len(running()), served(tools_shared=shared)
    rollout, _ = one(task, actions(tool_call("add", step=2), tool_call("die"), tool_call("add", step=2)))
    assert (rollout.error, rollout.reward) == ("tool", None)
    assert "has lost the session during die: Connection closed; it said: out of memory" in rollout.error_message
    assert one(task, actions(tool_call("add", step=2)))[0].reward == 2.0
    task.close()
    assert len(running()) == before


def test_a_server_that_is_killed_while_it_works_fails_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = served()

    def kill() -> None:
        while not (tmp_path / "calls").exists():
            time.sleep(0.1)
        for process in running():
            process.kill()

    monkeypatch.setenv("MMRL_TEST_CALLS", str(tmp_path / "calls"))
    threading.Thread(target=kill).start()
    rollout, _ = one(task, actions(tool_call("wait", seconds=60)))
    assert rollout.error == "tool" and "has lost the session during wait" in rollout.error_message


JSON = {"content-type": "application/json"}
LOST = [
    (404, {"code": -32600, "message": "Session not found"}),  # the package's own server after a restart
    (404, {"code": -32001, "message": "Session not found"}),  # the SDK in TypeScript
    (404, ""),
    (503, "upstream connect error"),
]


def answered(seen: Seen, content: Any, headers: Any) -> Page:
    """What a server says whose one tool gives `content`; as a stream of events, which is what most send."""
    if seen.method != "POST" or "id" not in seen.body:
        return Page(status=405 if seen.method == "GET" else 202)
    begun = {"capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    result = {
        "initialize": {"protocolVersion": "2025-06-18"} | begun,
        "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object", "properties": {}}}]},
        "tools/call": {"content": content},
    }[seen.body["method"]]
    said = json.dumps({"jsonrpc": "2.0", "id": seen.body["id"], "result": result})
    return Page(f"event: message\ndata: {said}\n\n", headers=headers | {"content-type": "text/event-stream"})


def test_what_a_tool_gives_is_shown_whatever_its_size() -> None:
    """An image of 2 MB, and a file that it names."""
    image = {"type": "image", "data": "A" * 2_000_000, "mimeType": "image/png"}
    link = {"type": "resource_link", "name": "report", "uri": "file:///r.csv"}
    engine = actions(tool_call("look"))
    with serving(lambda seen: answered(seen, [{"type": "text", "text": "seen"}, image, link], {})) as (url, _):
        rollout, _ = one(served(f"{url}/mcp"), engine)
    assert rollout.error is None
    assert "<tool_response>\nseen\n[image]\nreport file:///r.csv\n</tool_response>" in engine.prompts[1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("status", "said"), LOST)
def test_a_session_that_an_address_has_lost_is_no_error_of_the_tool(status: int, said: Any, shared: bool) -> None:
    """A second use within a session fails; the next rollout gets a new one."""
    uses: Counted[str | None] = Counted()

    def page(seen: Seen) -> Page:
        session = seen.headers["mcp-session-id"]
        uses[session] += seen.method == "POST" and seen.body["method"] == "tools/call"
        if uses[session] > 1 and "id" in seen.body:
            error = {"jsonrpc": "2.0", "id": seen.body["id"], "error": said}
            return Page(error, status, JSON) if isinstance(said, dict) else Page(said, status)
        return answered(seen, [{"type": "text", "text": "7"}], {"mcp-session-id": f"s{len(uses)}"})

    with serving(page) as (url, _):
        task = served(f"{url}/mcp", tools_shared=shared)
        rollout, _ = one(task, actions(tool_call("look"), tool_call("look")))
        assert (rollout.error, rollout.reward) == ("tool", None)
        assert "has lost the session during look: " in rollout.error_message
        assert one(task, actions(tool_call("look")))[0].reward == 7.0
        task.close()


@pytest.mark.parametrize("code", [-32600, -32001, -32601, -32603])
def test_an_error_of_a_tool_is_an_observation_whatever_its_number(code: int) -> None:
    """Published servers answer with the protocol's own numbers where a model asks for what is not there."""

    def page(seen: Seen) -> Page:
        if seen.method == "POST" and seen.body.get("method") == "tools/call":
            error = {"code": code, "message": "Monster 'dragn' not found"}
            return Page({"jsonrpc": "2.0", "id": seen.body["id"], "error": error}, 200, JSON)
        return answered(seen, [], {})

    with serving(page) as (url, _):
        rollout, _ = one(served(f"{url}/mcp"), actions(tool_call("look")))
    assert rollout.error is None and rollout.metrics["tool_errors"] == 1


def test_an_action_has_a_time_limit(where: str) -> None:
    before, started = len(running()), time.monotonic()
    rollout, _ = one(served(where, action_timeout_s=0.5), actions(tool_call("wait", seconds=60)))
    assert rollout.error == "tool" and "task.action_timeout_s=0.5" in rollout.error_message
    assert len(running()) == before and time.monotonic() - started < 30


KILLED = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(TOP)!r})
from mmrl.system.portal import Job, rollout_loop
from mmrl.tasks.environments.mcp import McpSource
source = McpSource("task.tools", sys.argv[1])
session = Job(source.open(None), rollout_loop()).ended.result()
print("open", flush=True)
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else None
"""
DEAF = """
import os, subprocess, sys
# It keeps stdin open for another one, and hears of no end.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "DEAF"], start_new_session=True)
sys.argv.pop(0)
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_processes_end_with_mmrl(end: str, tmp_path: Path) -> None:
    """Also what they have started, in a session of its own."""
    (tmp_path / "deaf.py").write_text(DEAF)
    command = shlex.join([sys.executable, str(tmp_path / "deaf.py"), mcp_server.__file__])
    done = subprocess.run([sys.executable, "-c", KILLED, command, end], capture_output=True, text=True, check=False)
    assert done.stdout == "open\n", done.stderr

    def left() -> list[Any]:
        words = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
        return [line for line in words if str(tmp_path / "deaf.py") in line or line[-1:] == ["DEAF"]]

    ends = time.monotonic() + 20
    while left() and time.monotonic() < ends:
        time.sleep(0.1)
    assert not left()


def test_64_at_once(url: str) -> None:
    forest = rolled_out(served(url), actions(*[tool_call("add", step=1)] * 4), independent(64), timeout_s=120)
    assert [rollout.reward for rollout in forest.rollouts] == [4.0] * 64


def test_settings_by_which_nothing_can_be_played_again(url: str) -> None:
    assert served(url).unrepeatable == []
    assert served(url, tools_shared=True).unrepeatable == [
        "task.tools_shared: got true, and add, fail, wait, die, key may have state"
    ]
    assert served(url, tools_shared=True, tools_stateless="all").unrepeatable == []
    task = served(url, once=("die", "key"), tools_stateless=("key",))
    assert task.unrepeatable == ["task.once: got die"]
    sections: dict[str, Any] = {"name": "environment", "environment": "a:B", "metric": "a:b"}
    for key, value in (("tools_shared", True), ("step_rewards", "sum"), ("environment_python", "python")):
        with pytest.raises(ValueError, match=f"{key}: got .* has no effect without task"):
            EnvironmentConfig(**sections | {key: value})


def test_arguments_that_are_no_names_are_an_observation(url: str) -> None:
    engine = actions('<tool_call>\n{"name": "add", "arguments": 3}\n</tool_call>')
    rollout, _ = one(served(url), engine)
    assert rollout.error is None and rollout.metrics["tool_errors"] == 1
    assert "got 3, expected names" in engine.prompts[1]


POINT = {"type": "object", "properties": {"lat": {"type": "number"}}}


def properties(of: Any, **further: Any) -> dict[str, Any]:
    return {"type": "object", "properties": of, **further}


NODE = properties({"next": {"$ref": "#/$defs/Node"}})
TREE = properties({"to": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": NODE}})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (properties({"to": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": POINT}}), properties({"to": POINT})),
        (properties({"to": {"$ref": "#/definitions/P"}}, definitions={"P": POINT}), properties({"to": POINT})),
        # as zod writes what it has written before
        (properties({"a/b": POINT, "to": {"$ref": "#/properties/a~1b"}}), properties({"a/b": POINT, "to": POINT})),
        (properties({"x": {"anyOf": [POINT]}, "to": {"$ref": "#/properties/x/anyOf/0"}}), None),
        (TREE, properties({"to": NODE}, **{"$defs": {"Node": NODE}})),
        (properties({"to": {"$ref": "#"}}), properties({"to": {"$ref": "#"}})),
    ],
)
def test_what_a_schema_refers_to_is_put_there(given: Any, told: Any) -> None:
    told = told or properties({"x": {"anyOf": [POINT]}, "to": POINT})
    assert function_schema("go", "", given)["function"]["parameters"] == told


def refusal(tool: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        served(tool, **options)
    return str(refused.value)


def test_what_is_no_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no" not in refusal("no_such_program x")
    assert "a command line whose program is here" in refusal("no_such_program x")
    assert "a command line whose program is here" in refusal("python 'open")
    assert "All connection attempts failed" in refusal("http://127.0.0.1:1/mcp")
    with serving([Page("hello")]) as (url, _):
        assert "did not begin a session" in refusal(url)
    assert "it said: oh no" in refusal(shlex.join([sys.executable, "-c", "raise SystemExit('oh no')"]))
    assert "did not begin a session" in refusal(shlex.join([sys.executable, "-c", "print('hello')"]))
    without = "from mcp.server import MCPServer; MCPServer('x', log_level='CRITICAL').run()"
    assert "lists no tools" in refusal(shlex.join([sys.executable, "-c", without]))
    assert "task.once: got walk, the tools are add, fail" in refusal(COMMAND, once=("walk",))
    monkeypatch.setattr(mcp, "OPEN_S", 1.0)
    assert "did not begin a session in 1 s" in refusal(
        shlex.join([sys.executable, "-c", "import time; time.sleep(60)"])
    )
    monkeypatch.setattr(mcp, "version", lambda name: "1.30.0")
    assert "needs mcp 2, and there is 1.30.0; pip install 'mmrl[mcp]'" in refusal(COMMAND)
