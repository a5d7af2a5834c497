"""A local HTTP server that answers from a script, for tests of clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Scripted:
    """One reply: status, body (a dict is sent as JSON), headers, and how long to wait first."""

    body: Any = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: Any
    time: float


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
            with state.lock:
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            body = json.loads(raw) if raw else None
            reply = state.reply(Seen(self.path, dict(self.headers), body, time.monotonic()))
            time.sleep(reply.delay)
            with state.lock:
                state.in_flight -= 1
            data = json.dumps(reply.body) if not isinstance(reply.body, str) else reply.body
            try:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data.encode())))
                self.end_headers()
                self.wfile.write(data.encode())
            except OSError:
                pass  # the client has given up waiting

        do_GET = do_POST

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
