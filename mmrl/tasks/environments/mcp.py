"""Tools of an MCP server: `mcp:COMMAND`, a process for each session, or `mcp:http://…/mcp`, a session of a server.

By the `mcp` package (version 2), on the loop of rollouts: of two loops in one process each waits for the other's turn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mmrl.errors import ConfigError, ToolFailure, reason_of
from mmrl.system.command import marked_environment
from mmrl.system.portal import Job, rollout_loop
from mmrl.tasks.base import Context, Message
from mmrl.tasks.environments.base import Observation, Session, Source
from mmrl.tasks.environments.schema import function_schema, part_text

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

OPEN_S, CLOSE_S = 60.0, 10.0
"""Longest waits for a session to begin and to end."""
MOST_PAGES = 100
"""Pages of a list of tools."""
LONGEST_LOG = 500
"""Bytes of what a process has written on stderr, from its end, that a failure quotes."""


class McpSource(Source):
    """An MCP server, asked for its tools at once.

    Args:
        key: what the user has typed, for messages.
        where: a command line, or an address of the streamable HTTP transport.
        shared: one session for all rollouts.

    Raises:
        ConfigError: there is no such server, or no package `mcp`.
    """

    def __init__(self, key: str, where: str, shared: bool = False):
        super().__init__(key)
        try:
            has = version("mcp")
        except PackageNotFoundError:
            has = "none"
        if not has.startswith("2."):
            raise ConfigError(f"{key}: mcp:{where} needs mcp 2, and there is {has}; pip install 'mmrl[mcp]'")
        self._words: list[str] = []
        if not where.startswith(("http://", "https://")):
            with suppress(ValueError):  # an open quotation mark
                self._words = shlex.split(where)
            if not self._words or shutil.which(self._words[0]) is None:
                raise ConfigError(
                    f"{key}: got 'mcp:{where}', expected mcp:http(s)://…, or mcp: and a command line whose program is "
                    "here"
                )
        # It logs a traceback for each line on stdout that is no message; what matters is raised.
        logging.getLogger("mcp").setLevel(logging.CRITICAL)
        self.where, self.is_shared = where, shared
        # Since 2026-07-28 the protocol knows no sessions; servers still have them for who begins one.
        self.modes: Sequence[str] = ("legacy", "auto")
        self._shared: Connection | None = None
        self._opening = asyncio.Lock()
        try:
            self.tools = Job(self._listed(), rollout_loop()).ended.result()
        except ToolFailure as error:
            raise ConfigError(str(error)) from None

    @override
    async def open(self, ctx: Context) -> Session:
        """Return a session.

        Raises:
            ToolFailure: the server did not begin one.
        """
        if not self.is_shared:
            connection = Connection(self, self.modes[0])
            await connection.begin()
            return McpSession(connection, shared=False)
        async with self._opening:
            if self._shared is None or self._shared.over:
                self._shared = Connection(self, self.modes[0])
                await self._shared.begin()
            return McpSession(self._shared, shared=True)

    @override
    def close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            Job(shared.end(), rollout_loop()).ended.result()

    @property
    def is_process(self) -> bool:
        """True of a command; False of an address."""
        return bool(self._words)

    def transport(self, log: Any) -> Any:
        """Return what a client of the package is made with."""
        if not self.is_process:
            from mcp.client.streamable_http import streamable_http_client

            # A process's results have no limit either.
            return streamable_http_client(self.where, max_sse_event_size=None)
        from mcp import StdioServerParameters, stdio_client

        command, *args = self._words
        return stdio_client(
            StdioServerParameters(command=command, args=args, env=marked_environment(os.environ)), errlog=log
        )

    async def _listed(self) -> Sequence[Message]:
        for mode in self.modes:
            connection = Connection(self, mode)
            try:
                await connection.begin()
                self.modes = (mode,)
                return await connection.listed()
            except ToolFailure:
                if mode == self.modes[-1]:
                    raise
            finally:
                await connection.end()
        raise AssertionError  # one of them has returned or raised


class Connection:
    """A session of a server's; begun and ended by one task, as the package's scopes must be.

    Args:
        source: whose session it is.
        mode: how the version of the protocol is found, as the package names it.
    """

    def __init__(self, source: McpSource, mode: str):
        self._source, self._mode = source, mode
        self._log: Any = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `end`)
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """True once it ends, or is lost."""
        return self._end.is_set() or self._task is None or self._task.done()

    async def begin(self) -> None:
        """Connect.

        Raises:
            ToolFailure: no server answers.
        """
        self._task = asyncio.create_task(self._hold())
        try:
            async with asyncio.timeout(OPEN_S):
                await asyncio.shield(self._client)
        except TimeoutError:
            raise self._failure(f"did not begin a session in {OPEN_S:g} s") from None
        except (Exception, BaseExceptionGroup) as error:
            raise self._failure(f"did not begin a session: {_innermost(error)}") from None
        finally:
            if not self._client.done() or self._client.cancelled() or self._client.exception() is not None:
                await self.end()

    async def end(self) -> None:
        """End it, and a process of its own; called once or more."""
        self._end.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_S)
            self._task.cancel()
        self._log.close()

    async def listed(self) -> Sequence[Message]:
        """Return the server's tools.

        Raises:
            ToolFailure: it has none.
        """
        client, cursor, found = await self._client, None, list[Message]()
        try:
            for _ in range(MOST_PAGES):
                page = await client.list_tools(cursor=cursor)
                found += [function_schema(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
                if (cursor := page.next_cursor) is None:
                    break
        except Exception as error:  # also what it says in place of a list
            raise self._failure(f"lists no tools: {reason_of(error)}") from None
        if not found:
            raise self._failure("lists no tools")
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Use a tool; what the tool or the server refuses is an observation.

        Raises:
            ToolFailure: the session is lost.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, REQUEST_TIMEOUT

        client = await self._client
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            # Where it knows no such session, a server in Python answers INVALID_REQUEST, and one in TypeScript with the
            # number that is REQUEST_TIMEOUT here. Tools answer with these numbers too, of what a model asks for.
            known = error.code not in (INVALID_REQUEST, REQUEST_TIMEOUT) or "session" not in error.message.lower()
            # What the package's client makes of an HTTP error without a message of the server's.
            of_http = (error.code, error.message) in (
                (INTERNAL_ERROR, "Server returned an error response"),
                (METHOD_NOT_FOUND, "Not Found"),
            )
            if error.code == CONNECTION_CLOSED or ((of_http or not known) and not self._source.is_process):
                failure = self._failure(f"has lost the session during {name}: {error}")
                await self.end()
                raise failure from None
            return Observation(text=str({"error": str(error)}), failed=True)
        except Exception as error:  # a result that is none by the protocol, or by the tool's own schema
            raise self._failure(f"gave no result of {name}: {reason_of(error)}") from None
        text = _text(result)
        return Observation(text=str({"error": text}) if result.is_error else text, failed=bool(result.is_error))

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with Client(self._source.transport(self._log), mode=self._mode) as client:
                self._client.set_result(client)
                await self._end.wait()
        except asyncio.CancelledError:
            self._client.cancel()
        except (Exception, BaseExceptionGroup) as error:
            if not self._client.done():
                self._client.set_exception(error)

    def _failure(self, what: str) -> ToolFailure:
        """Return the failure of a session that is lost, with the last that its process has said."""
        said = ""
        if not self._log.closed:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LONGEST_LOG))
            said = self._log.read().strip()
        return ToolFailure(f"{self._source.key}: mcp:{self._source.where} {what}{f'; it said: {said}' if said else ''}")


class McpSession(Session):
    """A session of an MCP server.

    Args:
        connection: what it goes over.
        shared: other rollouts use it too.
    """

    def __init__(self, connection: Connection, shared: bool):
        self._connection, self._shared = connection, shared

    @override
    async def act(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        return await self._connection.call(name, arguments)

    @override
    async def close(self) -> None:
        if not self._shared:
            await self._connection.end()


def _text(result: CallToolResult) -> str:
    """Return what a tool gave: its texts, and a mark where there is something else."""
    texts = [part_text(part.model_dump(mode="json")) for part in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return reason_of(error)
