"""Servers of `scripts.bench.environment`: `python -m scripts.bench.tool_servers mcp|openenv PORT`.

One tool, or one kind of step, that does nothing, so that what is measured is the way to it.
"""

from __future__ import annotations

import sys
from typing import Any

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from mcp.server import MCPServer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mmrl.system.http_server import serve


def mcp(port: int) -> None:
    """Serve a tool by MCP."""
    server = MCPServer("bench", log_level="CRITICAL")

    @server.tool()
    def step(number: int) -> str:
        """Do nothing."""
        return "done"

    @server.custom_route("/health", methods=["GET"])
    async def health(request: Request) -> Response:
        return JSONResponse({})

    server.run("streamable-http", port=port)


def openenv(port: int) -> None:
    """Serve a step by OpenEnv's messages."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        return {"action": {"type": "object", "properties": {"number": {"type": "integer"}}}}

    @app.websocket("/ws")
    async def session(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while (message := await socket.receive_json())["type"] != "close":
                unknown = message["type"] not in ("reset", "step") or message["data"].get("type") == "list_tools"
                error = {"type": "error", "data": {"message": "", "code": "UNKNOWN_TYPE"}}
                done = {"observation": {"text": "done"}, "reward": 0.0, "done": False}
                await socket.send_json(error if unknown else {"type": "observation", "data": done})
            await socket.close()
        except WebSocketDisconnect:
            pass

    serve(app, "127.0.0.1", port)


if __name__ == "__main__":
    {"mcp": mcp, "openenv": openenv}[sys.argv[1]](int(sys.argv[2]))
