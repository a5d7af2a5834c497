"""The OpenAI-compatible application over an engine: models, chat completions, completions, streams, health.

Concurrent requests wait in the engine, whose batcher decodes them together. Text streams as it is sampled where the
engine says so (`Request.on_token`: the embedded engine), else in one piece when it is complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mmrl import rng
from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.errors import LengthFailure, RequestFailure, RolloutError
from mmrl.models.chat import decode_text, render_prompt
from mmrl.serve.protocol import (
    LARGEST_REQUEST,
    ChatRequest,
    CompletionRequest,
    Refused,
    SamplingRequest,
    error_object,
    parse_request,
)
from mmrl.system.http_server import BodyRefused, read_body, require_token

if TYPE_CHECKING:
    from fastapi import FastAPI, Response
    from fastapi import Request as HttpRequest
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("mmrl.serve")
T = TypeVar("T")

MOST_REQUESTS = 256
"""Requests in flight; further ones are refused with 429."""
LOOKS_S = 0.5
"""Pause between looks whether a client is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A policy to serve."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    models: Mapping[str, str]
    """Model name in the protocol -> module of the policy (empty where all modules share its weights)."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The request and the objects of one kind of completion."""

    schema: type[ChatRequest] | type[CompletionRequest]
    prefix: str
    kind: str
    chunk_kind: str
    content: Callable[[str], dict[str, object]]
    delta: Callable[[str], dict[str, object]]
    first: Mapping[str, object]
    """Further fields of the first part of a stream."""


CHAT = _Shape(
    ChatRequest,
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}, "logprobs": None},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)
PLAIN = _Shape(
    CompletionRequest,
    *("cmpl", "text_completion", "text_completion"),
    lambda text: {"text": text, "logprobs": None},
    lambda text: {"text": text, "logprobs": None},
    {},
)


def make_app(served: Served, token: str | None = None) -> FastAPI:
    """Build the HTTP application.

    Args:
        token: every request must bring it (`Authorization: Bearer …`); None: anybody may ask.
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    app = FastAPI(title="mmrl policy", docs_url=None, redoc_url=None, openapi_url=None)
    if token is not None:
        refusal = error_object(401, "a token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        require_token(app, token, refusal)
    server, started = _Server(served), int(time.time())

    async def models(request: HttpRequest) -> Response:
        data = [{"id": name, "object": "model", "created": started, "owned_by": "mmrl"} for name in served.models]
        return JSONResponse({"object": "list", "data": data})

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "models": list(served.models), "requests": server.in_flight})

    async def missing(request: HttpRequest, error: Exception) -> Response:
        status = getattr(error, "status_code", 500)
        return JSONResponse(error_object(status, f"{request.method} {request.url.path}: not here"), status_code=status)

    # Plain routes, not FastAPI's typed ones: its own 422 bodies are not errors as OpenAI's clients read them.
    app.add_route("/v1/chat/completions", partial(server.answer, CHAT), methods=["POST"])
    app.add_route("/v1/completions", partial(server.answer, PLAIN), methods=["POST"])
    app.add_route("/v1/models", models)
    app.add_route("/health", health)
    for status in (404, 405):
        app.add_exception_handler(status, missing)
    return app


class _Server:
    """Answers requests; all of it runs in the server's event loop but rendering."""

    def __init__(self, served: Served):
        self.served = served
        self.in_flight = 0
        # One thread: the renderer keeps what it has rendered, and is not made for several.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="mmrl-render")
        # As the vocabulary spells tokens: a byte is at least one character there, so no token stands for more text.
        self._longest = max(map(len, served.tokenizer.get_vocab()))

    async def answer(self, shape: _Shape, request: HttpRequest) -> Response:
        """Return the reply to a request, or its refusal as an OpenAI error object."""
        from fastapi.responses import JSONResponse

        try:
            # Also before the body is read: a refusal costs next to nothing then. A body on its way holds no place.
            self._refuse_crowd()
            body = await read_body(request, LARGEST_REQUEST)
            self._refuse_crowd()
            return await self._reply(request, shape, parse_request(shape.schema, body))
        # Whatever goes wrong must reach the client as a status, and the server must go on.
        except Exception as error:
            status, refusal = _failed(error)
            return JSONResponse(refusal, status, headers={"Retry-After": "1"} if status == 429 else None)

    async def _reply(self, request: HttpRequest, shape: _Shape, parsed: ChatRequest | CompletionRequest) -> Response:
        from fastapi.responses import JSONResponse

        self.in_flight += 1
        running: _Running | None = None
        streams = False

        def release() -> None:
            self.in_flight -= 1
            if running is not None:
                running.task.cancel()

        try:
            running = _Running(self.served, parsed, await self._generation(parsed))
            # Once a stream has begun its status is sent, so what is refused at once must come before.
            await running.raise_refusal()
            if parsed.stream:
                streams = True
                return _stream_response(self._stream(running, shape), release)
            await _until_done(running.task, request)
            return JSONResponse(_response_body(running, shape))
        finally:
            if not streams:
                release()

    async def _generation(self, parsed: ChatRequest | CompletionRequest) -> Request:
        """Return the request to the engine.

        Raises:
            Refused: an unknown model, messages that the chat template does not take, or several prompts.
        """
        if parsed.model not in self.served.models:
            text = f"model: got '{parsed.model[:100]}', expected one of {', '.join(self.served.models)}"
            raise Refused(404, text, "model", "model_not_found")
        ids = await (self._chat(parsed) if isinstance(parsed, ChatRequest) else self._encode_prompt(parsed.prompt))
        # Without a seed a repeated request must give another completion; with one, the same.
        seed = secrets.randbits(64) if parsed.seed is None else parsed.seed
        sampling = Sampling(
            max_tokens=parsed.limit,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            stop=parsed.stops,
            seed=rng.digest("serve", seed),
        )
        return Request(prompt_ids=tuple(ids), sampling=sampling, module=self.served.models[parsed.model])

    async def _chat(self, parsed: ChatRequest) -> Sequence[int]:
        from jinja2 import TemplateError

        messages = parsed.rendered()
        self._refuse_endless(sum(len(message["content"]) for message in messages))
        try:
            # A long conversation takes a while to encode, in which no other request's token could be sent.
            return await self._in_thread(lambda: render_prompt(self.served.tokenizer, messages))
        except TemplateError as error:
            raise Refused(400, f"messages: the model's chat template refuses them: {error}", "messages") from None

    async def _encode_prompt(self, prompt: str | list[int] | list[str]) -> Sequence[int]:
        # OpenAI's clients send one text as a list of one as often as they send it bare.
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            text = prompt
            self._refuse_endless(len(text))
            return await self._in_thread(lambda: self.served.tokenizer.encode(text))
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) < len(prompt):
            raise Refused(400, "prompt: got several texts, expected one", "prompt")
        return ids

    def _refuse_crowd(self) -> None:
        if self.in_flight >= MOST_REQUESTS:
            raise Refused(429, f"more than {MOST_REQUESTS} requests at once")

    def _refuse_endless(self, characters: int) -> None:
        """Refuse a prompt that no context could hold before it is encoded, which takes seconds for all others too."""
        context = self.served.engine.max_context
        if context is not None and characters > context * self._longest:
            raise LengthFailure(
                f"a prompt of {characters:,} characters leaves no room in a context of {context} tokens of at most "
                f"{self._longest} characters"
            )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._renderer, work)

    async def _stream(self, running: _Running, shape: _Shape) -> AsyncIterator[str]:
        """Yield the parts of a completion as server-sent events."""
        head = running.head(shape.prefix, shape.chunk_kind)
        try:
            if shape.first:
                yield _event(head, choices=[{"index": 0, **shape.first, "finish_reason": None}])
            async for text in running.pieces():
                yield _event(head, choices=[{"index": 0, **shape.delta(text), "finish_reason": None}])
            _, finish = running.result()
            yield _event(head, choices=[{"index": 0, **shape.delta(""), "finish_reason": finish}])
            options = running.parsed.stream_options
            if options is not None and options.include_usage:
                yield _event(head, choices=[], usage=running.usage())
        except Exception as error:  # the status is sent already
            yield f"data: {json.dumps(_failed(error)[1])}\n\n"
        yield "data: [DONE]\n\n"


def _stream_response(events: AsyncIterator[str], release: Callable[[], None]) -> Response:
    """Return a response of server-sent events.

    Args:
        release: called when it ends, however it ends. Not the generator's own `finally`: of a client that leaves before
            the first event the generator never starts.
    """
    from fastapi.responses import StreamingResponse

    class Stream(StreamingResponse):
        async def __call__(self, *arguments: Any) -> None:
            try:
                await super().__call__(*arguments)
            finally:
                release()

    return Stream(events, media_type="text/event-stream")


class _Running:
    """Completion under way."""

    def __init__(self, served: Served, parsed: SamplingRequest, generation: Request):
        self.parsed = parsed
        self._tokenizer = served.tokenizer
        self._stops = generation.sampling.stop
        self._prompt_tokens = len(generation.prompt_ids)
        self._new: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        if parsed.stream:
            # from the decoder's thread
            def on_token(token: int) -> None:
                with suppress(RuntimeError):  # the server has ended meanwhile
                    loop.call_soon_threadsafe(self._new.put_nowait, token)

            # Only for streams: otherwise each token would wake the event loop in vain.
            generation = replace(generation, on_token=on_token)
        self.task: asyncio.Task[Completion] = loop.create_task(served.engine.generate(generation))
        # Also where it fails or is cancelled: `pieces` must not wait for a token that never comes.
        self.task.add_done_callback(lambda task: self._new.put_nowait(None))
        self._created = int(time.time())
        self._id = secrets.token_hex(12)

    async def raise_refusal(self) -> None:
        """Raise what the engine refuses at once (a prompt that is too long), before a status is sent."""
        # After one turn of the loop the task has passed the engine's checks of the prompt.
        await asyncio.sleep(0)
        if self.task.done():
            self.task.result()

    def head(self, prefix: str, kind: str) -> dict[str, object]:
        """Return the fields that all objects of this completion begin with."""
        return {"id": f"{prefix}-{self._id}", "object": kind, "created": self._created, "model": self.parsed.model}

    def result(self) -> tuple[str, str]:
        """Return the text up to the first stop string, and OpenAI's finish reason."""
        completion = self.task.result()
        text = decode_text(self._tokenizer, completion.ids)
        # The engine stops at the token in which a stop string ends; OpenAI's text ends before the string.
        ends = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text, "length" if completion.finish == "length" else "stop"

    def usage(self) -> dict[str, int]:
        """Return OpenAI's `usage`: numbers of tokens."""
        new = len(self.task.result().ids)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self._prompt_tokens + new,
        }

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text in parts, as tokens come; together they are `result`'s."""
        # So many characters may be the beginning of a stop string, which must not be sent.
        held = max((len(stop) for stop in self._stops), default=1) - 1
        ids: list[int] = []
        # Text is decoded from a token before the new ones on: some tokenizers drop a space at the left edge.
        context, decoded, text, sent = 0, 0, "", 0
        while (token := await self._new.get()) is not None:
            ids.append(token)
            before = decode_text(self._tokenizer, ids[context:decoded])
            after = decode_text(self._tokenizer, ids[context:])
            if len(after) <= len(before) or after.endswith("\ufffd"):  # half of a character
                continue
            text, context, decoded = text + after[len(before) :], decoded, len(ids)
            ends = [start for stop in self._stops if (start := text.find(stop, max(0, sent - held))) >= 0]
            until = min(ends) if ends else len(text) - held
            if until > sent:
                yield text[sent:until]
                sent = until
            if ends:
                break
        final, _ = await self._result()
        if final[:sent] == text[:sent] and len(final) > sent:
            yield final[sent:]

    async def _result(self) -> tuple[str, str]:
        await asyncio.wait([self.task])
        return self.result()


async def _until_done(task: asyncio.Task[Completion], request: HttpRequest) -> None:
    """Wait for a completion; a client that has gone away cancels it.

    Raises:
        Refused: nobody is there to read this.
    """
    # Nothing tells a handler that its client has gone; decoding on would keep a place in the batch.
    while not (await asyncio.wait([task], timeout=LOOKS_S))[0]:
        if await request.is_disconnected():
            raise Refused(499, "the client has gone")


def _response_body(running: _Running, shape: _Shape) -> dict[str, object]:
    text, finish = running.result()
    choice = {"index": 0, **shape.content(text), "finish_reason": finish}
    return {**running.head(shape.prefix, shape.kind), "choices": [choice], "usage": running.usage()}


def _event(head: Mapping[str, object], **fields: object) -> str:
    return f"data: {json.dumps({**head, **fields})}\n\n"


def _failed(error: Exception) -> tuple[int, dict[str, object]]:
    """Return status and OpenAI error object of a refusal, or of an engine's exception."""
    if isinstance(error, Refused):
        return error.status, error.body()
    if isinstance(error, BodyRefused):
        return error.status, error_object(error.status, str(error))
    if isinstance(error, LengthFailure):
        return 400, error_object(400, str(error), "messages", "context_length_exceeded")
    if isinstance(error, RequestFailure):
        return 400, error_object(400, str(error))
    if isinstance(error, RolloutError):
        log.warning("request failed: %s", error)
        return 500, error_object(500, str(error))
    # The message may quote paths or code of this machine: the client gets the type alone, the log the rest.
    log.error("request failed", exc_info=error)
    return 500, error_object(500, type(error).__name__)
