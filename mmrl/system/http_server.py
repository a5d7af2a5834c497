"""An HTTP server of this process: its address, who is let in, bounded bodies, and its end.

FastAPI and uvicorn are imported when they are needed.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmrl.config.base import is_loopback

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request
    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Receive, Scope, Send

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


def guard(app: FastAPI, token: str | None, refusal: Callable[[int, str], object]) -> None:
    """Let in who may ask, before anything of a request is read: 401 for others, 403 for web pages.

    Args:
        token: token of `Authorization: Bearer …`, or of `X-Api-Key`; None: whoever is on this machine may ask, but no
            page that a browser on it shows. A page asks by its own address (`Origin`), or under a name of its own that
            it points at this machine (`Host`; DNS rebinding).
        refusal: status and reason -> what is sent as JSON.
    """
    app.add_middleware(_Guard, token=token, refusal=refusal)


class _Guard:
    """ASGI middleware of `guard`; not Starlette's function, which stands between a request and its client's leaving."""

    def __init__(self, app: ASGIApp, token: str | None, refusal: Callable[[int, str], object]):
        self._app, self._token, self._refusal = app, token, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        headers = Headers(scope=scope)
        problem = _foreign(headers) if self._token is None else _unknown(headers, self._token)
        if problem is None:
            await self._app(scope, receive, send)
            return
        status, reason = problem
        authenticate = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        await JSONResponse(self._refusal(status, reason), status, headers=authenticate)(scope, receive, send)


def _unknown(headers: Headers, token: str) -> tuple[int, str] | None:
    for name, expected in (("authorization", f"Bearer {token}"), ("x-api-key", token)):
        # as long for a wrong first letter as for a wrong last one
        if hmac.compare_digest(headers.get(name, "").encode("utf-8", "replace"), expected.encode()):
            return None
    return 401, "a token is needed: Authorization: Bearer TOKEN"


def _foreign(headers: Headers) -> tuple[int, str] | None:
    addresses = [("Host", f"//{host}") for host in headers.getlist("host")]
    for name, address in [*addresses, *(("Origin", origin) for origin in headers.getlist("origin"))]:
        try:
            parts = urlsplit(address)
            # A host has no user, path or tab; where there is one, it is another server's way to read the name.
            local = is_loopback(parts.hostname or "") and "@" not in address and address.endswith(f"//{parts.netloc}")
        except ValueError:
            local = False
        if not local:
            shown = address.removeprefix("//")[:100]
            return 403, f"{name}: got '{shown}', expected localhost or 127.0.0.1; a server with a token takes any"
    return None


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
    bound = listening(host, port)
    address = f"[{host}]" if ":" in host else host
    if announce:
        print(announce.replace("{url}", f"http://{address}:{bound.getsockname()[1]}"), flush=True)
    make_server(app, log_level="warning", timeout_graceful_shutdown=grace_s).run(sockets=[bound])


def listening(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError: see `serve`.
    """
    # By its protocol asyncio knows whose small writes must not wait: else each reply takes 40 ms more (Nagle).
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A server that was just stopped leaves its port in TIME_WAIT for a minute.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    # Listen before the address is told: a reader may connect at once.
    bound.listen(1024)
    return bound


def make_server(app: ASGIApp, **options: Any) -> uvicorn.Server:
    """Return a server of this process, to be run with a socket.

    Args:
        options: of `uvicorn.Config`.
    """
    import uvicorn

    from mmrl.system.http_connection import Connection

    return uvicorn.Server(uvicorn.Config(app, http=Connection, access_log=False, lifespan="off", **options))
