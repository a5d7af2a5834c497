"""The gateway: the HTTP server of this process for agents whose calls are recorded, one for all of its rollouts.

It lives in the I/O loop, listens on the loopback alone, and knows rollouts by their random keys. What a call is,
the rollout says (`tasks.gateway.recorder`), in its own event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from mmrl.serve.front import Backend, Finished, Running, failed
from mmrl.serve.protocol import LARGEST_REQUEST, ChatRequest, Refused, SamplingRequest
from mmrl.serve.routes import add_routes
from mmrl.system.http_server import listening, make_server, read_body
from mmrl.system.portal import io_loop

if TYPE_CHECKING:
    from fastapi import Request as HttpRequest
    from fastapi import Response

MOST_OPEN = 64
"""Requests of a rollout in flight; further ones are refused with 429."""
MOST_FILES = 65_536
"""Files that this process may open, as far as the system lets it."""
RETRY_S = 5.0
"""A client that has gone may come back for its reply within this time; then the call ends, and its slot is free."""
ENDED = "there is no rollout of this key, or it has ended"


class _Lost(NamedTuple):
    """Call that nobody waits for."""

    task: asyncio.Future[Finished]
    expiry: asyncio.TimerHandle
    unread: bool
    """Nothing of its reply was sent."""


Chat = Callable[[ChatRequest, str | None], Coroutine[Any, Any, Finished]]
"""Makes the call of a request, and of the module that it names; runs in the rollout's event loop."""
Post = Callable[[object], None]
"""Takes the result that an agent posts."""


class Session(Backend):
    """Rollout behind its key: retries and clients that leave; all of it runs in the I/O loop.

    Args:
        loop: the rollout's event loop.
        modules: of the program.
    """

    final = True

    def __init__(self, chat: Chat, post: Post, loop: asyncio.AbstractEventLoop, modules: Sequence[str]):
        super().__init__(modules)
        self.post = post
        self._chat, self._loop = chat, loop
        self._open = 0
        self._lost: dict[bytes, list[_Lost]] = {}
        """Request -> its calls whose clients have gone."""

    @override
    def refuse_crowd(self) -> None:
        if self._open >= MOST_OPEN:
            raise Refused(429, f"more than {MOST_OPEN} requests of one rollout at once")

    @override
    async def begin(self, parsed: SamplingRequest, headers: Mapping[str, str], body: bytes) -> Running:
        """What a client repeats is one call, with one reply."""
        assert isinstance(parsed, ChatRequest)
        module = self.named(parsed.model, headers)
        key = hashlib.sha256(body + b"\0" + (module or "").encode()).digest()
        # The same question a second time is a call of its own: only a client that did not get its reply repeats one.
        # Whatever a header says of retries, a call whose client still waits belongs to that client.
        if lost := self._lost.get(key):
            task, expiry, _ = lost.pop(0)
            expiry.cancel()
        else:
            task = self.run(self._chat(parsed, module))
        self._open += 1
        return Running(parsed=parsed, task=task, released=partial(self._left, key))

    def run(self, work: Coroutine[Any, Any, Finished]) -> asyncio.Future[Finished]:
        """Start work in the rollout's event loop."""
        try:
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except RuntimeError:  # its loop is closed
            work.close()
            raise Refused(401, ENDED, code="invalid_api_key") from None

    def unread(self) -> list[str]:
        """Return the ids of replies whose clients went before anything was sent, and did not come back."""
        tasks = [lost.task for calls in list(self._lost.values()) for lost in list(calls) if lost.unread]
        return [task.result().id for task in tasks if task.done() and not (task.cancelled() or task.exception())]

    def _left(self, key: bytes, running: Running) -> None:
        """Note that a client has its reply, or has gone: then the call waits for a retry, and ends."""
        self._open -= 1
        task = running.task
        if running.sent or task.cancelled():
            return

        def expire() -> None:
            # A reply that is there already was recorded, and stays for whoever asks the same again.
            if not task.done():
                lost.remove(entry)
                task.cancel()

        lost = self._lost.setdefault(key, [])
        entry = _Lost(task, asyncio.get_running_loop().call_later(RETRY_S, expire), not running.sending)
        lost.append(entry)


class Gateway:
    """Server of the process; see `gateway`."""

    def __init__(self) -> None:
        self._address = ""
        self._numbers = itertools.count(1)
        self._sessions: dict[str, Session] = {}
        self._results: dict[str, Session] = {}
        """Sessions by the credential for their result."""
        self._serving: asyncio.Task[None] | None = None

    def open(self, session: Session) -> tuple[str, str, str]:
        """Let a rollout's requests in; returns its base URL, its key, and the credential for its result."""
        # Some clients are kept by their address (LangChain's), and belong to the event loop that used them first: an
        # agent that runs a loop of its own needs an address of its own.
        url = f"{self._address}/{next(self._numbers)}/v1"
        key, credential = f"mmrl-{secrets.token_urlsafe(24)}", f"mmrl-result-{secrets.token_urlsafe(24)}"
        self._sessions[key], self._results[credential] = session, session
        return url, key, credential

    def close(self, key: str, credential: str) -> None:
        """Let nothing of a rollout in any more."""
        del self._sessions[key], self._results[credential]

    async def start(self) -> None:
        """Listen, in the I/O loop."""
        import resource  # Windows has none

        from fastapi import FastAPI
        from starlette.applications import Starlette
        from starlette.routing import Mount

        # Each agent has a connection with two ends here: the usual 1024 files are too few for a large batch.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        app = FastAPI(title="mmrl gateway", docs_url=None, redoc_url=None, openapi_url=None)
        add_routes(app, partial(_of, self._sessions))
        app.add_route("/v1/mmrl/result", self._take_result, methods=["POST"])
        bound = listening()
        self._address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        # An agent may work for long between two calls; uvicorn would close its connection after five seconds.
        served = Starlette(routes=[Mount("/{number}", app)])
        server = make_server(served, log_level="error", timeout_keep_alive=3600)
        self._serving = asyncio.get_running_loop().create_task(server.serve(sockets=[bound]))

    async def _take_result(self, request: HttpRequest) -> Response:
        from fastapi.responses import JSONResponse

        try:
            session = _of(self._results, request)
            body = await read_body(request, LARGEST_REQUEST)
            session.post(json_value(body))
            return JSONResponse({"status": "ok"})
        except Exception as error:
            status, refusal = failed(error)
            return JSONResponse(refusal, status)


def json_value(text: bytes) -> object:
    """Parse the result of an agent.

    Raises:
        Refused: it is no JSON.
    """
    try:
        value: object = json.loads(text)
        return value
    except (ValueError, RecursionError):
        raise Refused(400, f"the result is not JSON: {text[:100]!r}") from None


def _of(sessions: Mapping[str, Session], request: HttpRequest) -> Session:
    key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
    session = sessions.get(key)
    if session is None:
        raise Refused(401, ENDED, code="invalid_api_key")
    return session


_LOCK = threading.Lock()
_GATEWAYS: dict[int, Gateway] = {}
"""By process id: after a fork the child has the object but not the thread that serves it."""


def gateway() -> Gateway:
    """Return the gateway of this process, which listens from the first use on until the process ends."""
    with _LOCK:
        server = _GATEWAYS.get(os.getpid())
        if server is None:
            server = Gateway()
            asyncio.run_coroutine_threadsafe(server.start(), io_loop()).result()
            _GATEWAYS[os.getpid()] = server
        return server
