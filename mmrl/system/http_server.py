"""An HTTP server of this process: its address, the token that lets a request in, bounded bodies, and its end.

FastAPI and uvicorn are imported when they are needed.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response


BODY_S = 10.0
"""Seconds for the whole body of a request."""


class BodyRefused(Exception):
    """A request whose body is not read; what was read of it is dropped.

    Args:
        status: HTTP status.
        message: the reason.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def require_token(app: FastAPI, token: str, refusal: object) -> None:
    """Answer 401 to whatever does not bring the token, before anything of the request is read.

    Args:
        token: token of `Authorization: Bearer …`.
        refusal: sent as JSON.
    """
    from fastapi.responses import JSONResponse

    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        header = request.headers.get("authorization", "").encode("utf-8", "replace")
        # as long for a wrong first letter as for a wrong last one
        if not hmac.compare_digest(header, expected):
            return JSONResponse(refusal, status_code=401, headers={"WWW-Authenticate": "Bearer"})
        return await call_next(request)


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body of a request, of at most `limit` bytes.

    Raises:
        BodyRefused: it has more, by its header (then nothing is read) or as soon as they have come; or its end does
            not come in `BODY_S`.
    """
    from starlette.requests import ClientDisconnect

    too_large = BodyRefused(413, f"the body has more than {limit} bytes")
    body = bytearray()
    # The client's own length first: nothing of a body that is too large is read then.
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise too_large
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except (TimeoutError, ClientDisconnect):
        raise BodyRefused(408, f"the body did not come to its end in {BODY_S:g} seconds") from None
    return bytes(body)


def serve(app: FastAPI, host: str, port: int, *, announce: str = "", grace_s: int | None = None) -> None:
    """Serve until SIGINT or SIGTERM; blocks.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        announce: printed when it listens; `{url}` becomes the address.
        grace_s: seconds for requests under way when it is to end; None: as long as they take.

    Raises:
        OSError: the address is taken, or not of this machine.
    """
    import socket

    import uvicorn

    # By its protocol asyncio knows whose small writes must not wait: else each reply takes 40 ms more (Nagle).
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A server that was just stopped leaves its port in TIME_WAIT for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    # Listen before the address is printed: a reader may connect at once.
    listening.listen(1024)
    address = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=grace_s
    )
    if announce:
        print(announce.replace("{url}", f"http://{address}:{listening.getsockname()[1]}"), flush=True)
    uvicorn.Server(config).run(sockets=[listening])
