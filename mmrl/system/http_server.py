"""An HTTP server of this process: its address, the token that lets a request in, bounded bodies, and its end.

FastAPI and uvicorn are imported when they are needed.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request, Response


BODY_S = 10.0
"""Seconds for the whole body of a request."""


class BodyTooLarge(Exception):
    """A request with a body beyond the limit; what was read of it is dropped."""


class BodyTooSlow(Exception):
    """A request whose body has not come in `BODY_S`, or whose client has left before its end."""


def require_token(app: FastAPI, token: str, refusal: object) -> None:
    """Answer 401 to whatever does not bring the token, before anything of the request is read.

    Args:
        token: of `Authorization: Bearer …`.
        refusal: sent as JSON.
    """
    from fastapi.responses import JSONResponse

    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        # as long for a wrong first letter as for a wrong last one
        if not hmac.compare_digest(given, expected):
            return JSONResponse(refusal, status_code=401, headers={"WWW-Authenticate": "Bearer"})
        return await call_next(request)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, of at most `limit` bytes.

    Raises:
        BodyTooLarge: it has more; by its header (then nothing is read), or as soon as they have come.
        BodyTooSlow: its end does not come.
    """
    from starlette.requests import ClientDisconnect

    body = bytearray()
    # What the client says first: nothing of a body that is too large is read then.
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise BodyTooLarge
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise BodyTooLarge
    except (TimeoutError, ClientDisconnect):
        raise BodyTooSlow from None
    return bytes(body)


def serve(
    app: FastAPI, host: str, port: int, *, parent: int | None = None, announce: str = "", grace_s: int | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; blocks.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        parent: process id; the server ends when its parent is no longer this one.
        announce: printed when it listens; `{url}` becomes the address.
        grace_s: seconds for requests under way when it is to end; None: as long as they take.

    Raises:
        OSError: the address is taken, or not of this machine.
    """
    import socket

    import uvicorn

    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # A server that was just stopped leaves its port in TIME_WAIT for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    # Listening before the address is printed: whoever reads it may connect at once.
    listening.listen(1024)
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=grace_s
    )
    server = uvicorn.Server(config)
    if parent is not None:
        threading.Thread(target=_watch, args=(parent, server), daemon=True).start()
    if announce:
        print(announce.replace("{url}", f"http://{shown}:{listening.getsockname()[1]}"), flush=True)
    server.run(sockets=[listening])


def _watch(parent: int, server: uvicorn.Server) -> None:
    """Stop the server when the process that started it has gone, however it went."""
    # `end_with_parent` does this by a signal on Linux; polling works on every system.
    while os.getppid() == parent:
        time.sleep(0.5)
    server.should_exit = True
