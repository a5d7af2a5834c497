"""Tools of an MCP server for DSPy programs: `dspy.ReAct("question -> answer", tools=mcp_tools("python server.py"))`.

DSPy's own bridge (`dspy.Tool.from_mcp_tool`) has one session, of whoever made it; these have one for each rollout, and
a rollout that goes on from another one does the recorded calls again in its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import dspy
from dspy.adapters.types.tool import convert_input_schema_to_tool_args
from dspy.utils.callback import with_callbacks
from pydantic import PrivateAttr
from typing_extensions import override

from mmrl.tasks.dspy import tools as tape
from mmrl.tasks.environments.base import Source
from mmrl.tasks.environments.episode import Episode
from mmrl.tasks.environments.mcp import McpSource

Stateless = Collection[str] | Literal["all"]


def mcp_tools(where: str, *, stateless: Stateless = (), timeout_s: float = 60.0) -> list[dspy.Tool]:
    """Return the tools of an MCP server, which is asked for them at once.

    Args:
        where: a command line, started for each rollout, or an address (`http://…/mcp`).
        stateless: names of tools whose recorded results stand in rollouts that go on from others; `all`: each.
        timeout_s: longest time of one call.

    Raises:
        ConfigError: there is no such server, or no package `mcp`.
    """
    sessions = _Sessions(McpSource("mcp_tools", where), stateless, timeout_s)
    return [_made(tool["function"], sessions) for tool in sessions.source.tools]


class _Sessions:
    """A session for each rollout that uses the server."""

    def __init__(self, source: Source, stateless: Stateless, timeout_s: float):
        self.source, self._stateless, self._timeout_s = source, stateless, timeout_s
        self._episodes: WeakKeyDictionary[tape.Host, tuple[Episode, asyncio.Lock]] = WeakKeyDictionary()

    def __deepcopy__(self, memo: object) -> _Sessions:
        return self  # of a copy of the program too

    async def call(self, host: tape.Host, name: str, arguments: Mapping[str, Any]) -> str:
        """Use a tool in the session of a rollout, one call after another; on its event loop."""
        if host not in self._episodes:
            tools = dict.fromkeys(self.source.names, self.source)
            stateless = self._stateless
            ctx: Any = host  # which has the part of it that an episode of tools alone uses
            episode = Episode(
                ctx, {}, None, tools, lambda name: stateless == "all" or name in stateless, self._timeout_s
            )
            self._episodes[host] = episode, asyncio.Lock()
            host.at_end(episode.close)
        episode, lock = self._episodes[host]
        async with lock:
            observation = await episode.act(name, arguments)
        if observation.failed:  # which agents show to their model
            raise RuntimeError(observation.text)
        return observation.text


class McpTool(dspy.Tool):
    """A tool of an MCP server, in the session of the rollout that uses it."""

    _sessions: _Sessions = PrivateAttr()

    @with_callbacks
    @override
    def __call__(self, **arguments: Any) -> Any:
        host = tape.of_rollout(str(self.name))
        return host.wait(self._sessions.call(host, str(self.name), arguments))

    @with_callbacks
    @override
    async def acall(self, **arguments: Any) -> Any:
        host = tape.of_rollout(str(self.name))
        return await host.awaited(self._sessions.call(host, str(self.name), arguments))


def _made(function: Mapping[str, Any], sessions: _Sessions) -> dspy.Tool:
    args, types, descriptions = convert_input_schema_to_tool_args(function["parameters"])
    tool = McpTool(
        func=lambda **arguments: None,  # `__call__` and `acall` are here
        name=function["name"],
        desc=function["description"],
        args=args,
        arg_types=types,
        arg_desc=descriptions,
    )
    tool._sessions = sessions
    return tool
