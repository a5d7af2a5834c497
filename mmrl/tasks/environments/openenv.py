"""Environments behind OpenEnv's servers: `openenv:URL`, or `openenv:package`, whose server mmrl starts and ends.

Spoken here, and not by OpenEnv's own client, whose pins (mcp<2, gradio) clash with those of others: a server may run in
an interpreter of its own. As of OpenEnv 0.10 a WebSocket (`/ws`) is a session, with an environment of its own:

    {"type": "reset", "data": {"seed": 3, …}}  -> {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": the action}       -> the same
    what fails                                 -> {"type": "error", "data": {"message", "code"}}

Environments with tools (`list_tools`, `call_tool` as actions) have those; others have one, whose arguments are the
fields of their action (`/schema`). A session that a server has no room for is refused, and waits for another's end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from mmrl import rng
from mmrl.errors import ConfigError, EngineFailure, ToolFailure
from mmrl.system.child_process import ChildProcess
from mmrl.system.http_client import HttpClient, HttpFailure
from mmrl.system.portal import Job, io_loop
from mmrl.system.user_code import in_thread
from mmrl.tasks.base import Context, Message
from mmrl.tasks.environments.base import Observation, Session, Source
from mmrl.tasks.environments.schema import function_schema, part_text

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

STEP = "step"
"""Name of the only tool of an environment that lists none."""
CONNECT_S, START_S, CLOSE_S = 10.0, 120.0, 5.0
"""Longest waits: for a connection, for a server to start, for the end of a session."""
LARGEST_MESSAGE = 2**24
"""Bytes of an observation."""
SESSIONS = "256"
"""Sessions that a server which mmrl starts may have, where its package reads $MAX_CONCURRENT_ENVS."""
_FULL = "CAPACITY_REACHED"
_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors that an action has caused; others end the session."""
_NO_TEXT = ("metadata", "reward", "done")
"""Fields of an observation that the model does not see."""
_FIND = """
import importlib.util, pathlib, sys
top, *rest = sys.argv[1].split(".")
spec = importlib.util.find_spec(top)
folders = [pathlib.Path(place, *rest) for place in spec.submodule_search_locations or ()] if spec else []
served = any(pathlib.Path(folder, "server", "app.py").is_file() for folder in folders)
print(sys.argv[1] + (".server.app" if served else "") if spec else "")
"""
"""Prints the module of a package's server, or nothing; imports none of it, which takes seconds."""


class Refusal(Exception):
    """What a server says in place of an observation."""

    def __init__(self, data: Mapping[str, Any]):
        self.code = data.get("code")
        said = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in data.get("errors", ())]
        super().__init__("; ".join([str(data.get("message")), *said]))


class OpenEnvSource(Source):
    """An OpenEnv server, asked for its tools at once.

    Args:
        key: what the user has typed, for messages.
        where: an address, or the name of a package with `server.app`, or of a module with `app`.
        python: interpreter for that server; None: this one.
        rewards: the episode's reward: of the last step that had one, as TRL's examples and OpenEnv's own trainer
            interface take it, or of all.

    Raises:
        ConfigError: there is no such server.
    """

    has_reward = True

    def __init__(self, key: str, where: str, python: str | None = None, rewards: Literal["last", "sum"] = "last"):
        super().__init__(key)
        if importlib.util.find_spec("websockets") is None:
            raise ConfigError(f"{key}: openenv:{where} needs the package websockets; pip install 'mmrl[openenv]'")
        self.has_turn_rewards = self.turns_add_up = rewards == "sum"
        self._url = where.rstrip("/")
        self._starting = threading.Lock()
        self._sessions = self._ended = 0
        """Sessions that there are, or that are being opened; and those that have ended."""
        self._waiting: list[asyncio.Future[None]] = []
        """Rollouts that wait for the end of another one's session."""
        self._python = python or sys.executable
        self._process = None if "://" in where else self._server(where, self._python)
        if self._process is None and not where.startswith(("http://", "https://")):
            raise ConfigError(f"{key}: got openenv:{where}, expected openenv:http(s)://host:port or openenv:package")
        try:
            self._start()
            action = self._action()
            self.lists_tools, self.tools = Job(self._listed(action), io_loop()).ended.result()
        except (HttpFailure, ToolFailure) as error:
            self.close()
            raise ConfigError(f"{key}: openenv:{where}: {str(error).removeprefix(f'{key}: ')}") from None

    @override
    async def open(self, ctx: Context) -> Session:
        """Return a session; waits for the end of another one where the server has no room.

        Raises:
            ToolFailure: the server does not answer, or others have all of its sessions.
        """
        if self._process is not None:
            await in_thread(self._start)
        while True:
            ended = self._ended
            self._sessions += 1
            try:
                return await Job(self._connected(), io_loop()).awaited()
            except Refusal as refusal:
                self._sessions -= 1
                if ended == self._ended and not self._sessions:
                    self._wake()  # who finds the same out
                    raise ToolFailure(f"{self.key}: {refusal}, and none of them is mmrl's") from None
            except BaseException:
                self.left()
                raise
            if ended == self._ended:
                await self._end_of_another(ctx)

    @override
    def close(self) -> None:
        if self._process is not None:
            self._process.stop()

    def left(self) -> None:
        """Note the end of a session."""
        self._sessions -= 1
        self._ended += 1
        self._wake()

    async def _end_of_another(self, ctx: Context) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        ctx.leave()  # who has the session may wait for a batch
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._wake()
            raise
        finally:
            ctx.enter()

    def _wake(self) -> None:
        while self._waiting:
            if not (first := self._waiting.pop(0)).done():
                first.set_result(None)
                return

    def _server(self, name: str, python: str) -> ChildProcess:
        """Return the server of a package, not yet started."""
        # What PYTHONPATH names is for this interpreter; a server's own folder is still found.
        alone = [] if python == sys.executable else ["-E"]
        try:
            found = subprocess.run(
                [python, *alone, "-c", _FIND, name], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"{self.key}: openenv:{name}: cannot run {python}: {error}") from None
        if not found:
            raise ConfigError(
                f"{self.key}: openenv:{name}: {python} finds no package of that name; install it there, such as with "
                f"pip install git+https://huggingface.co/spaces/openenv/{name}"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="mmrl-openenv-")  # until this source, or the process, ends
        return ChildProcess(
            lambda port: [python, *alone, "-m", "uvicorn", f"{found}:app", "--host", "127.0.0.1", "--port", str(port)],
            log=Path(self._folder.name) / "server.log",
            timeout_s=START_S,
            env={"MAX_CONCURRENT_ENVS": os.environ.get("MAX_CONCURRENT_ENVS", SESSIONS)},
        )

    def _start(self) -> None:
        """Start the server where it is mmrl's and does not run; blocks."""
        with self._starting:
            if self._process is not None and not self._process.alive:
                try:
                    self._process.start()
                except EngineFailure as error:
                    lacks = self._python == sys.executable and "No module named" in str(error)
                    hint = "; task.environment_python=PYTHON names an interpreter that has its packages"
                    raise ToolFailure(f"{self.key}: {error}{hint if lacks else ''}") from None
                self._url = self._process.url

    def _action(self) -> Mapping[str, Any] | None:
        """Return the JSON schema of the environment's actions, as far as a model fills them in; None: of several."""
        client = HttpClient(self._url, timeout_s=CONNECT_S, concurrency=1)
        try:
            answer = client.wait(client.attempt("GET", f"{self._url}/schema", limit=LARGEST_MESSAGE))
            action: Mapping[str, Any] = json.loads(answer)["action"]
            if "oneOf" in action or "anyOf" in action:
                return None
            return {**action, "properties": {n: p for n, p in action["properties"].items() if n not in _NO_TEXT}}
        except (ValueError, TypeError, LookupError, AttributeError):
            raise ToolFailure(f"{self._url}/schema has no schema of an action; expected a server of OpenEnv") from None
        finally:
            client.close()

    # -- in the I/O loop, which nothing holds up: a server takes a connection that does not answer pings for lost

    async def _listed(self, action: Mapping[str, Any] | None) -> tuple[bool, Sequence[Message]]:
        """Return whether the environment lists tools, and the tools."""
        try:
            session = await self._connected()
        except Refusal as refusal:
            raise ToolFailure(str(refusal)) from None
        tools: Sequence[Message] = ()
        try:
            # The server says by what it answers: an environment's action may have any fields, and its class any name.
            tools = await session.tools()
            if not tools:  # some have tools once an episode has begun
                await session.ask("reset", {})
                tools = await session.tools()
        except (Refusal, LookupError, TypeError):
            pass
        finally:
            await session.leave()
        if not tools and action is None:
            raise ToolFailure("lists no tools, and its action is one of several; expected tools, or an action's fields")
        return bool(tools), tools or [function_schema(STEP, str((action or {}).get("description", "")), action or {})]

    async def _connected(self) -> OpenEnvSession:
        """Return a session that the server has room for.

        Raises:
            Refusal: it has none.
            ToolFailure: it does not answer.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        address = f"ws{self._url.removeprefix('http')}/ws"
        try:
            socket = await connect(address, open_timeout=CONNECT_S, max_size=LARGEST_MESSAGE, proxy=None)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise ToolFailure(f"{address} does not answer: {error}; expected a server of OpenEnv") from None
        session = OpenEnvSession(self, socket)
        try:
            # Of no type that it knows: whatever it says, there is a session, and no code of the environment's ran.
            await session.ask("hello", {})
        except Refusal as refusal:
            if refusal.code == "UNKNOWN_TYPE":
                return session
            socket.transport.abort()
            if refusal.code == _FULL:
                raise
            raise ToolFailure(f"{address}: {refusal}") from None
        except BaseException:  # whoever wanted it has run out of time
            socket.transport.abort()
            raise
        return session


class OpenEnvSession(Session):
    """One connection, which is one environment of the server's."""

    def __init__(self, source: OpenEnvSource, socket: ClientConnection):
        self._source, self._socket = source, socket
        self._rewards: list[float] | None = None
        """Of the steps that had one; None: there was no step."""
        self._over = False
        """The episode was over when it began, as a game of cards may be."""

    @override
    async def reset(self, row: Mapping[str, Any]) -> str:
        # The record's own, or always the same: all rollouts of a record play the same episode.
        seed = rng.digest("openenv", json.dumps(row, sort_keys=True, default=str)) % 2**31
        try:
            begun = await self._asked("reset", {"seed": seed, **row})
        except Refusal as refusal:
            raise ToolFailure(f"reset: {refusal}") from None
        if begun.get("done"):
            self._over, self._rewards = True, _rewards(begun)
        return _text(begun["observation"])

    @override
    async def act(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        if self._over:
            return Observation(text="The episode was over when it began.", done=True)
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            answer = await self._asked(STEP, action if self._source.lists_tools else arguments)
        except Refusal as refusal:
            if refusal.code not in _ACTION:
                raise ToolFailure(f"{name}: {refusal}") from None
            return Observation(text=str({"error": str(refusal)}), failed=True)
        reward = answer.get("reward")
        self._rewards = [*(self._rewards or ()), *_rewards(answer)]
        text, failed = _text(answer["observation"]), False
        if self._source.lists_tools:
            text, failed = _result(answer["observation"])
        return Observation(
            text=text,
            failed=failed,
            done=bool(answer.get("done")),
            turn_reward=float(reward or 0.0) if self._source.turns_add_up else None,
        )

    @override
    async def reward(self) -> float | None:
        if self._rewards is None:
            return 0.0
        if not self._rewards:
            return None
        return sum(self._rewards) if self._source.turns_add_up else self._rewards[-1]

    @override
    async def close(self) -> None:
        try:
            await Job(self.leave(), io_loop()).awaited()
        finally:
            self._source.left()

    async def tools(self) -> Sequence[Message]:
        """Return the tools that the environment lists, in the I/O loop.

        Raises:
            Refusal: it lists none; as LookupError and TypeError.
        """
        listed = (await self.ask(STEP, {"type": "list_tools"}))["observation"]["tools"]
        return [function_schema(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]

    async def leave(self) -> None:
        """End the session; the server has room for another one then."""
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.send(json.dumps({"type": "close"}))
                    await self._socket.wait_closed()  # once the environment has closed
        finally:
            self._socket.transport.abort()

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return what the answer has, in the I/O loop.

        Raises:
            Refusal: an error.
            ToolFailure: the connection is lost, or the answer is none of OpenEnv's.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed):  # a refusal may be there already
                await self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
            answer = json.loads(await self._socket.recv())
            said: Mapping[str, Any] = answer["data"]
            if answer["type"] == "error":
                raise Refusal(said)
            return said
        except ConnectionClosed as closed:
            raise ToolFailure(f"{self._source.key}: the server has closed the connection ({closed})") from None
        except (ValueError, TypeError, LookupError) as error:
            raise ToolFailure(f"{self._source.key}: an answer that is none of OpenEnv's ({error!r})") from None

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await Job(self.ask(kind, data), io_loop()).awaited()
        if not isinstance(answer.get("observation"), Mapping):
            raise ToolFailure(f"{self._source.key}: {kind} was answered without an observation: {answer!r:.100}")
        return answer


def _text(observation: Mapping[str, Any]) -> str:
    """Return the fields of an observation as JSON, less reward, done and metadata; empty where there are no others."""
    fields = {name: value for name, value in observation.items() if name not in _NO_TEXT}
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def _rewards(answer: Mapping[str, Any]) -> list[float]:
    return [] if answer.get("reward") is None else [float(answer["reward"])]


def _result(observation: Mapping[str, Any]) -> tuple[str, bool]:
    """Return what a tool gave as text, and whether it failed."""
    if (error := observation.get("error")) is not None:
        return str({"error": error.get("message") if isinstance(error, Mapping) else error}), True
    if "result" not in observation:  # an observation of the environment's own
        return _text({name: value for name, value in observation.items() if name not in ("tool_name", "error")}), False
    result = observation["result"]
    if isinstance(result, Mapping) and isinstance(parts := result.get("content"), list):  # of FastMCP
        text = "\n".join(map(part_text, parts))
        return (str({"error": text}), True) if result.get("is_error") else (text, False)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), False
