"""An MCP server for tests, by the `mcp` package: `python mcp_server.py [streamable-http PORT]`."""

import asyncio
import os
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context

server = MCPServer("counter", log_level="CRITICAL")
counts: dict[str | None, int] = {}
"""By session; a process is one."""


def note(call: str) -> None:
    """Write a call into a file, where a test has named one."""
    if path := os.environ.get("MMRL_TEST_CALLS"):
        with open(path, "a") as file:
            file.write(f"{call}\n")


@server.tool()
def add(step: int, ctx: Context[Any, Any]) -> int:
    """Adds to the counter of this session."""
    note("add")
    key = (ctx.headers or {}).get("mcp-session-id")
    counts[key] = counts.get(key, 0) + step
    return counts[key]


@server.tool()
def fail(text: str) -> str:
    """Fails."""
    raise ValueError(text)


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    note("wait")
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """Ends the server."""
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def key() -> str:
    """Says a variable of the environment."""
    return os.environ["MMRL_TEST_KEY"]


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
