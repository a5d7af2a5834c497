"""A retriever served over HTTP (`mmrl serve-retriever`), so that one index in memory serves many workers.

- `POST /retrieve`: Search-R1's protocol (see `protocols`).
- `GET /health`: what is served.

Queries that arrive while a search runs are answered together by the next one. FastAPI and uvicorn are imported when
the server is made.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.protocols import LARGEST_REQUEST, BadRequest, read_request, search_r1_item
from mmrl.system.http_server import BodyRefused, guard, read_body
from mmrl.system.user_code import carried

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

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

    # No lock: everything but the search itself runs on the server's one event loop.
    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Search each query. Raises what the retriever raised."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in queries]
        self._waiting += [(query, k, future) for query, future in zip(queries, futures, strict=True)]
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return list(await asyncio.gather(*futures))

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        # One search at a time: encoders and indexes are not faster in two threads, and larger batches are.
        while self._waiting:
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            # A client that has gone has cancelled its future.
            batch = [item for item in batch if not item[2].done()]
            if not batch:
                continue
            try:
                results = await loop.run_in_executor(
                    self._thread, carried(self._retriever.search), [q for q, _, _ in batch], [k for _, k, _ in batch]
                )
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), documents in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(documents)


def make_app(
    retriever: Retriever, facts: Mapping[str, str | int], *, max_batch: int = 64, token: str | None = None
) -> FastAPI:
    """Build the HTTP application.

    Args:
        retriever: retriever to serve.
        facts: fields of `/health` beside the status.
        max_batch: queries of one search.
        token: every request must bring it (`Authorization: Bearer …`); None: anybody on this machine may ask, but
            no web page (`http_server.guard`).
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, Response

    app = FastAPI(title="mmrl retriever", docs_url=None, redoc_url=None)
    batches = Batches(retriever, max_batch)
    guard(app, token, lambda status, reason: {"error": True, "message": reason})

    # Requests are validated in here, not by FastAPI's parameters, whose refusals have a form of their own.
    async def retrieve(request: Request) -> Response:
        status = 200
        reply: dict[str, object]
        try:
            parsed = read_request(await _json(request))
            results = await batches.search(parsed.queries, parsed.topk)
            reply = {"result": [[search_r1_item(d, parsed.return_scores) for d in result] for result in results]}
        except (BadRequest, BodyRefused) as error:
            status, reply = error.status, {"error": True, "message": str(error)}
        # Whatever a retriever raises must reach the client as a status, and the server must go on.
        except Exception as error:
            log.exception("search failed")
            status, reply = 500, {"error": True, "message": f"{type(error).__name__}: {error}"}
        # Not FastAPI's own JSON: half of a UTF-16 pair in a passage can be held as an escape alone.
        return Response(json.dumps(reply), status_code=status, media_type="application/json")

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **facts})

    app.add_route("/retrieve", retrieve, methods=["POST"])
    app.add_route("/health", health)
    return app


async def _json(request: Request) -> object:
    try:
        return json.loads(await read_body(request, LARGEST_REQUEST))
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None
