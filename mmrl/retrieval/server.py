"""A retriever served over HTTP, so that one index in memory serves many workers: `mmrl serve-retriever`.

- `POST /retrieve` {"queries": [...], "topk": 3, "return_scores": true}: Search-R1's protocol.
- `GET /?query=…&k=…`, also `/api/search` and as a POST: DSPy's ColBERT-server protocol.
- `GET /health`: what is served; `GET /metrics`: counts and times in Prometheus' text format.

Queries that arrive while a search runs are answered together by the next one. FastAPI and uvicorn are imported when
the server is made.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mmrl.retrieval.base import Document, Retriever

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_QUERIES = 1024
"""Queries of one request, and of one search."""
MAX_TOPK = 1000
MAX_QUERY_CHARS = 20_000
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of request times, in seconds."""

log = logging.getLogger("mmrl.retrieval")


class Batches:
    """Joins concurrent queries into searches, one search at a time in a worker thread.

    Args:
        retriever: searched from that thread alone.
        max_batch: queries of one search.
    """

    def __init__(self, retriever: Retriever, max_batch: int = 64):
        self._retriever, self._max_batch = retriever, max_batch
        self._waiting: list[tuple[str, int, asyncio.Future[list[Document]]]] = []
        self._driver: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mmrl-search")
        self.counts: Counter[str] = Counter()
        """Searches, and queries searched."""

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Results of each query. Raises what the retriever raised."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in queries]
        self._waiting += [(query, k, future) for query, future in zip(queries, futures, strict=True)]
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return list(await asyncio.gather(*futures))

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            batch = [item for item in batch if not item[2].done()]  # whoever asked may have gone
            if not batch:
                continue
            self.counts["searches"] += 1
            self.counts["queries"] += len(batch)
            try:
                found = await loop.run_in_executor(
                    self._thread, self._retriever.search, [query for query, _, _ in batch], [k for _, k, _ in batch]
                )
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), documents in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(documents)

    @property
    def waiting(self) -> int:
        """Queries that wait for the search that runs."""
        return len(self._waiting)


class Meter:
    """Counts of requests by path and status, and a histogram of their times."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[float] = Counter()
        self._seconds = 0.0

    def add(self, path: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests[path, status] += 1
        self._seconds += seconds
        for bound in BUCKETS:
            self._buckets[bound] += seconds <= bound

    def text(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> str:
        """Prometheus' text format."""
        total = sum(self._requests.values())
        lines = ["# TYPE mmrl_retriever_requests_total counter"]
        lines += [
            f'mmrl_retriever_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        lines.append("# TYPE mmrl_retriever_request_seconds histogram")
        lines += [f'mmrl_retriever_request_seconds_bucket{{le="{b:g}"}} {self._buckets[b]}' for b in BUCKETS]
        lines.append(f'mmrl_retriever_request_seconds_bucket{{le="+Inf"}} {total}')
        lines += [
            f"mmrl_retriever_request_seconds_sum {self._seconds:.6f}",
            f"mmrl_retriever_request_seconds_count {total}",
        ]
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines += [f"# TYPE mmrl_retriever_{name} {kind}", f"mmrl_retriever_{name} {value:g}"]
        return "\n".join(lines) + "\n"


def make_app(retriever: Retriever, facts: Mapping[str, Any], *, max_batch: int = 64) -> FastAPI:
    """The HTTP application.

    Args:
        retriever: what it serves.
        facts: what `/health` tells beside the status; `documents` (a number) is shown by `/metrics` too.
        max_batch: queries of one search.
    """
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response

    app = FastAPI(title="mmrl retriever", docs_url=None, redoc_url=None)
    batches, meter = Batches(retriever, max_batch), Meter()

    async def answered(path: str, work: Any) -> Response:
        started, status = time.perf_counter(), 200
        try:
            reply: Any = await work
        except BadRequest as error:
            status, reply = 422, {"error": True, "message": str(error)}
        except Exception as error:
            log.exception("search failed")
            status, reply = 500, {"error": True, "message": f"{type(error).__name__}: {error}"}
        try:
            response: Response = JSONResponse(reply, status_code=status)
        except UnicodeEncodeError:  # half of a UTF-16 pair in a query or passage: JSON has it as an escape alone
            response = Response(json.dumps(reply), status_code=status, media_type="application/json")
        meter.add(path, status, time.perf_counter() - started)
        return response

    async def retrieve(request: Request) -> Response:
        async def work() -> dict[str, Any]:
            queries, k, scored = read_retrieve(await _json(request))
            found = await batches.search(queries, k)
            return {"result": [[_search_r1(document, scored) for document in result] for result in found]}

        return await answered("/retrieve", work())

    async def dspy(request: Request) -> Response:
        async def work() -> dict[str, Any]:
            fields = dict(request.query_params) if request.method == "GET" else await _json(request)
            query, k = read_query(fields)
            (found,) = await batches.search([query], k)
            return {"topk": [_dspy(document, rank) for rank, document in enumerate(found, 1)]}

        return await answered("/api/search", work())

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **facts})

    async def metrics(request: Request) -> Response:
        gauges = {"waiting_queries": float(batches.waiting), "documents": float(facts.get("documents", 0))}
        counters = {"searches_total": batches.counts["searches"], "queries_total": batches.counts["queries"]}
        return PlainTextResponse(meter.text(gauges, counters))

    app.add_route("/retrieve", retrieve, methods=["POST"])
    for path in ("/", "/api/search"):
        app.add_route(path, dspy, methods=["GET", "POST"])
    app.add_route("/health", health)
    app.add_route("/metrics", metrics)
    return app


class BadRequest(ValueError):
    """A request that is not the protocol's; answered with status 422 and the reason."""


async def _json(request: Any) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None


def read_retrieve(body: Any) -> tuple[list[str], int, bool]:
    """Queries, number and whether scores are wanted, from the body of `/retrieve`.

    Raises:
        BadRequest: another shape, or beyond the limits.
    """
    if not isinstance(body, dict):
        raise BadRequest("expected an object with queries, topk and return_scores")
    queries = body.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequest("queries: expected a list of texts")
    if len(queries) > MAX_QUERIES:
        raise BadRequest(f"queries: got {len(queries)}, expected at most {MAX_QUERIES}")
    scored = body.get("return_scores", False)
    if not isinstance(scored, bool):
        raise BadRequest("return_scores: expected true or false")
    return [query[:MAX_QUERY_CHARS] for query in queries], _number(body.get("topk", 3), "topk"), scored


def read_query(fields: Any) -> tuple[str, int]:
    """Query and number of DSPy's protocol.

    Raises:
        BadRequest: another shape, or beyond the limits.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("query"), str):
        raise BadRequest("query: expected a text")
    return fields["query"][:MAX_QUERY_CHARS], _number(fields.get("k", 10), "k")


def _number(value: Any, field: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:9])
    if value is None:  # Search-R1 sends null for the server's own number
        value = 3
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOPK:
        raise BadRequest(f"{field}: got {value!r}, expected a number from 1 to {MAX_TOPK}")
    return value


def _search_r1(document: Document, scored: bool) -> dict[str, Any]:
    contents = f"{document.title}\n{document.text}"
    fields = {"id": document.id, "title": document.title, "text": document.text, "contents": contents}
    return {"document": fields, "score": document.score} if scored else fields


def _dspy(document: Document, rank: int) -> dict[str, Any]:
    text = f"{document.title} | {document.text}"
    return {"text": text, "pid": document.id, "rank": rank, "score": document.score}


def serve(app: FastAPI, host: str, port: int, *, parent: int | None = None, announce: str = "") -> None:
    """Serve until SIGINT or SIGTERM; blocks.

    Args:
        app: from `make_app`.
        host: address to listen on.
        port: 0 takes a free one.
        parent: process id; the server ends when its parent is no longer this one.
        announce: printed when it listens; `{url}` becomes the address.

    Raises:
        OSError: the address cannot be had.
    """
    import socket

    import uvicorn

    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen(1024)
    shown = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    if parent is not None:
        threading.Thread(target=_watch, args=(parent, server), daemon=True).start()
    if announce:
        print(announce.format(url=f"http://{shown}:{listening.getsockname()[1]}"), flush=True)
    server.run(sockets=[listening])


def _watch(parent: int, server: Any) -> None:
    """Stop the server when the process that started it has gone, however it went."""
    while os.getppid() == parent:
        time.sleep(0.5)
    server.should_exit = True
