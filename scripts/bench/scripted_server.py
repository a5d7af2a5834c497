"""A server that answers like vLLM after a time, for `scripts.bench.fleet`: `… scripted_server INDEX LATENCY_S PORT`.

A file of its own, without mmrl: each process of a fleet would import torch else.
"""

from __future__ import annotations

import asyncio
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

AT_ONCE = 8
"""Completions that it answers at a time."""
FIRST_ID = 20
"""Token id that server 0 replies with; the next server's is the next."""


def serve(index: int, latency_s: float, port: int) -> None:
    """Answer like vLLM, with one token that says which server it is."""
    places = asyncio.Semaphore(AT_ONCE)

    async def completion(request: HttpRequest) -> JSONResponse:
        body = await request.json()
        if "prompt_logprobs" in body:
            rows = [None, *[{str(token): {"logprob": -1.0}} for token in body["prompt"][1:]]]
            return JSONResponse({"choices": [{"prompt_logprobs": rows}]})
        if latency_s:
            async with places:
                await asyncio.sleep(latency_s * body["max_tokens"])
        choice = {"token_ids": [FIRST_ID + index], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        return JSONResponse({"choices": [choice]})

    async def anything(request: HttpRequest) -> JSONResponse:
        return JSONResponse({"data": [{"id": "base", "max_model_len": 4096}]})

    routes = [
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/{path:path}", anything, methods=["GET", "POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
