"""Local HTTP servers for tests: one that answers from a script, a retrieval server that misbehaves, a hub."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mmrl.retrieval.base import Document
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.serving import make_app
from mmrl.system import http_server
from tests.helpers.programs import DOCUMENTS as PASSAGES


@dataclass
class Scripted:
    """One reply: status, body (text, bytes, or what is sent as JSON), headers, and how long to wait first."""

    body: Any = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: Message
    raw: bytes
    time: float

    @property
    def body(self) -> Any:
        return json.loads(self.raw) if self.raw else None


class ScriptedServer:
    """Replies in turn (the last one for ever), or by a function of the request."""

    def __init__(self, script: list[Scripted] | Callable[[Seen], Scripted]):
        self.script = script
        self.seen: list[Seen] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()

    def reply(self, seen: Seen) -> Scripted:
        with self.lock:
            self.seen.append(seen)
            if callable(self.script):
                return self.script(seen)
            return self.script[min(len(self.seen), len(self.script)) - 1]


def chat_reply(text: str | None, prompt: int = 10, completion: int = 5, finish: str = "stop") -> Scripted:
    message = {"role": "assistant", "content": text}
    return Scripted(
        {
            "choices": [{"message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
        }
    )


@contextmanager
def serving(script: list[Scripted] | Callable[[Seen], Scripted]) -> Iterator[tuple[str, ScriptedServer]]:
    """A running server: its base URL and what it saw."""
    state = ScriptedServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen = Seen(self.command, self.path, self.headers, raw, time.monotonic())
            with state.lock:
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            reply = state.reply(seen)
            time.sleep(reply.delay)
            with state.lock:
                state.in_flight -= 1
            text = reply.body if isinstance(reply.body, str | bytes) else json.dumps(reply.body)
            data = text if isinstance(text, bytes) else text.encode()
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client has given up waiting

        do_GET = do_PUT = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", state
    finally:
        server.shutdown()
        server.server_close()


DOCUMENTS = [Document(id=f"d{n}", title=fields["title"], text=fields["text"]) for n, fields in enumerate(PASSAGES)]


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port; yields its address."""
    bound = http_server.listening()
    server = http_server.make_server(app, log_level="error", timeout_graceful_shutdown=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        bound.close()


def good_app() -> Any:
    """mmrl's own server over BM25."""
    return make_app(Bm25Retriever(DOCUMENTS), {"documents": len(DOCUMENTS)})


class Faulty:
    """An ASGI application in front of another: `plan(n)` names what happens to the n-th search.

    `ok` passes it on; `hang` answers too late; `garbage`, `empty`, `html`, `list`, `nan`, `less` (fewer results than
    queries) and `long` answer 200 with something else; a number answers with that status; `drop` closes the connection.
    """

    def __init__(self, inner: Any, plan: Callable[[int], str], hang_s: float = 1.0):
        self.inner, self.plan, self.seen, self.hang_s = inner, plan, 0, hang_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in ("/health", "/metrics"):
            await self.inner(scope, receive, send)
            return
        fault, self.seen = self.plan(self.seen), self.seen + 1
        if fault == "ok":
            await self.inner(scope, receive, send)
            return
        if fault == "drop":
            raise RuntimeError("dropped on purpose")
        if fault == "hang":
            await asyncio.sleep(self.hang_s)
        bodies = {
            "garbage": b'{"result": [[{"document": {"contents": "Lisb',
            "empty": b"",
            "html": b"<html>504 Gateway Time-out</html>",
            "list": b"[1, 2]",
            "nan": b'{"result": [[{"document": {"contents": "a\\nb"}, "score": NaN}]]}',
            "less": b'{"result": []}',
            "long": b'{"result": [[], [], []]}',
        }
        status = int(fault) if fault.isdigit() else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": bodies.get(fault, b"Internal Server Error")})


def fetch_json(url: str, **body: Any) -> tuple[int, Any]:
    """Status and JSON of a GET, or of a POST where there is a body."""
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
