"""Hand-written fakes for the tests of retrieval: a real HTTP server in a thread, which misbehaves on demand."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mmrl.retrieval.base import Document
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.serving import make_app

TEXTS = {
    "Lisbon": "Lisbon is the capital of Portugal, on the river Tagus.",
    "Porto": "Porto is a city on the river Douro.",
    "Tagus": "The Tagus is a river of Iberia.",
}
DOCUMENTS = [Document(id=f"d{n}", title=title, text=text) for n, (title, text) in enumerate(TEXTS.items())]


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port; yields its address."""
    import uvicorn

    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
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


def good_app(documents: list[Document] | None = None) -> Any:
    """mmrl's own server over BM25."""
    kept = DOCUMENTS if documents is None else documents
    return make_app(Bm25Retriever(kept), {"documents": len(kept)})


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
