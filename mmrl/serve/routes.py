"""The routes of a served policy and of recorded rollouts: the same for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mmrl.records import EMPTY
from mmrl.serve.anthropic_dialect import Messages
from mmrl.serve.front import Backend, Dialect, respond
from mmrl.serve.openai_dialect import ChatCompletions
from mmrl.serve.protocol import Refused, error_object
from mmrl.serve.responses_dialect import Responses

if TYPE_CHECKING:
    from fastapi import FastAPI, Response
    from fastapi import Request as HttpRequest

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
"""By path."""

Find = Callable[["HttpRequest"], Backend]
"""Returns the backend of a request, or raises `Refused`."""


def add_routes(app: FastAPI, find: Find, more: Mapping[str, Dialect] = EMPTY) -> None:
    """Add a route for each dialect, and those that list models.

    Args:
        more: dialects beside `DIALECTS`.
    """
    from fastapi.responses import JSONResponse

    # Plain routes, not FastAPI's typed ones: its own 422 bodies are not errors as OpenAI's clients read them.
    for path, dialect in {**DIALECTS, **more}.items():
        app.add_route(path, partial(respond, dialect, find), methods=["POST"])

    async def models(request: HttpRequest) -> Response:
        name = request.path_params.get("name")
        try:
            backend = find(request)
            if name is None:
                return JSONResponse({"object": "list", "data": [_model(name) for name in backend.models]})
            if name not in backend.models and backend.named(name) is None:
                text = f"model: got '{name[:100]}', expected one of {', '.join(backend.models)}"
                raise Refused(404, text, "model", "model_not_found")
            return JSONResponse(_model(name))
        except Refused as refused:
            return JSONResponse(refused.body(), refused.status)

    async def missing(request: HttpRequest, error: Exception) -> Response:
        status = getattr(error, "status_code", 500)
        return JSONResponse(error_object(status, f"{request.method} {request.url.path}: not here"), status_code=status)

    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{name:path}", models)
    for status in (404, 405):
        app.add_exception_handler(status, missing)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "mmrl"}
