"""The HTTP front of a served policy and of recorded rollouts: requests in, replies and streams out.

A dialect is how a client speaks (`serve.openai_dialect`, `serve.anthropic_dialect`); a backend makes the replies: an
engine (`serve.policy`), or a rollout (`serve.gateway`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmrl.errors import LengthFailure, RequestFailure, RolloutError
from mmrl.records import EMPTY
from mmrl.serve.protocol import LARGEST_REQUEST, Refused, SamplingRequest, error_object
from mmrl.system.http_server import BodyRefused, read_body

if TYPE_CHECKING:
    from fastapi import Request as HttpRequest
    from fastapi import Response

log = logging.getLogger("mmrl.serve")

MODULE_HEADER = "x-mmrl-module"
GONE = 499
"""Status of a reply that nobody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Choice of a reply."""

    text: str
    finish: str
    """OpenAI's finish reason: `stop`, `length` or `tool_calls`."""
    stop: str | None = None
    """Stop string of the request before which the text ends."""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """As in OpenAI's protocol, the arguments as JSON text."""
    reasoning: str = ""
    logprobs: Sequence[tuple[str, float]] | None = None
    """Text and log-probability of each token."""


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that string; the engine stops at the token in which it ends."""
    found = [(start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return (text[: min(found)[0]], min(found)[1]) if found else (text, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Complete reply."""

    id: str
    answers: Sequence[Answer]
    tokens: tuple[int, int]
    """Of prompt and completion."""


@dataclass(kw_only=True)
class Running:
    """Reply under way."""

    parsed: SamplingRequest
    task: asyncio.Future[Finished]
    released: Callable[[Running], None] = lambda running: None
    """Called when the request has ended."""
    created: int = 0
    """Seconds since 1970."""
    begun: asyncio.Future[None] | None = None
    """Done with the first token, where the text of the only answer is sent in pieces, as it comes."""
    sending: bool = field(default=False, init=False)
    """The client's connection took something of the reply."""
    sent: bool = field(default=False, init=False)
    """It took the whole reply."""

    @property
    def id(self) -> str:
        """Id of the reply."""
        return self.finished.id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as soon as anything can be sent."""
        return self.finished.tokens[0]

    @property
    def finished(self) -> Finished:
        """The reply, once complete; raises what it failed with."""
        return self.task.result()

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text as it comes."""
        return
        yield

    def release(self) -> None:
        """Note that the request has ended, however it ended."""
        self.released(self)


class Backend(ABC):
    """Maker of replies.

    Args:
        modules: of the policy; none where their names make no difference.
        name: begins the name of each as a model.
    """

    final: bool = False
    """True for a rollout: what failed has ended it, so that a client must not repeat its request."""

    def __init__(self, modules: Sequence[str], name: str = "policy"):
        self.modules, self.name = modules, name

    @property
    def models(self) -> Sequence[str]:
        """Models to choose from."""
        return [f"{self.name}/{module}" for module in self.modules] or [self.name]

    def named(self, model: str, headers: Mapping[str, str] = EMPTY) -> str | None:
        """Return the module that a request names, by its model or a header; None where it names none.

        Raises:
            Refused: there is no such module.
        """
        prefix = f"{self.name}/"
        named = model.removeprefix(prefix) if model.startswith(prefix) else headers.get(MODULE_HEADER)
        if named is not None and self.modules and named not in self.modules:
            text = f"model: got '{named[:100]}', expected one of {', '.join(self.modules)}"
            raise Refused(404, text, "model", "model_not_found")
        return named

    @abstractmethod
    def refuse_crowd(self) -> None:
        """Refuse a request too many; called before a body is read, and again after it."""

    @abstractmethod
    async def begin(self, parsed: SamplingRequest, headers: Mapping[str, str], body: bytes) -> Running:
        """Begin a reply.

        Raises:
            Refused: it cannot be had.
        """


class Dialect(ABC):
    """A client's protocol: its requests, replies, streams and errors."""

    @abstractmethod
    def parse(self, body: bytes) -> SamplingRequest:
        """Parse and check a request.

        Raises:
            Refused: it is none, or asks for what cannot be had.
        """

    @abstractmethod
    def reply(self, running: Running) -> dict[str, Any]:
        """Return the object of a complete reply."""

    @abstractmethod
    def events(self, running: Running) -> AsyncIterator[str]:
        """Yield the server-sent events of a reply."""

    def error(self, status: int, refusal: dict[str, Any]) -> dict[str, Any]:
        """Return an error, of which `refusal` is OpenAI's object."""
        return refusal


async def respond(dialect: Dialect, find: Callable[[HttpRequest], Backend], request: HttpRequest) -> Response:
    """Return the reply to a request, or its refusal.

    Args:
        find: returns the backend of a request, or raises `Refused`.
    """
    from fastapi.responses import JSONResponse

    final = False
    try:
        backend = find(request)
        final = backend.final
        # Also before the body is read: a refusal costs next to nothing then. A body on its way holds no place.
        backend.refuse_crowd()
        body = await read_body(request, LARGEST_REQUEST)
        backend.refuse_crowd()
        running = await backend.begin(dialect.parse(body), request.headers, body)
        streams = False
        try:
            await _until_ready(running, request)
            if running.parsed.stream:
                streams = True
                return _stream_response(_all_sent(dialect, running), running.release)
            reply = JSONResponse(dialect.reply(running))
            running.sending = running.sent = True
            return reply
        finally:
            if not streams:
                running.release()
    # Whatever goes wrong must reach the client as a status, and the server must go on.
    except Exception as error:
        status, refusal = failed(error, recorded=final)
        headers = {"x-should-retry": "false"} if final else {}
        if status == 429:
            headers = {"Retry-After": "1"}
        return JSONResponse(dialect.error(status, refusal), status, headers=headers)


async def _until_ready(running: Running, request: HttpRequest) -> None:
    """Wait until a status can be sent: a client that has gone away ends the wait.

    Raises:
        Refused: nobody is there to read the reply.
    """
    # Decoding on for a client that has gone would keep a place in the batch. After the body only its leaving can come;
    # noticed at once, so that a client that repeats its request at once finds its reply under way.
    gone = asyncio.ensure_future(request.receive())
    ready: asyncio.Future[Any] = running.begun or running.task
    try:
        await asyncio.wait([ready, running.task, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    # Also where its reply has come meanwhile: nobody reads it, and a repeated request must find it.
    if gone.done():
        raise Refused(GONE, "the client has gone")
    if running.task.cancelled():
        raise Refused(GONE, "the rollout has ended, or another client left this call")
    if running.task.done():
        running.task.result()


async def _all_sent(dialect: Dialect, running: Running) -> AsyncIterator[str]:
    running.sending = True
    async for event in dialect.events(running):
        yield event
    running.sent = True


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


def failed(error: Exception, *, recorded: bool = False) -> tuple[int, dict[str, Any]]:
    """Return status and OpenAI error object of a refusal, or of an engine's exception.

    Args:
        recorded: the failure of a rollout, which says so itself.
    """
    if isinstance(error, Refused):
        return error.status, error.body()
    if isinstance(error, BodyRefused):
        return error.status, error_object(error.status, str(error))
    if isinstance(error, LengthFailure):
        return 400, error_object(400, str(error), "messages", "context_length_exceeded")
    if isinstance(error, RequestFailure):
        return 400, error_object(400, str(error))
    if isinstance(error, RolloutError):
        if not recorded:
            log.warning("request failed: %s", error)
        return 500, error_object(500, str(error))
    # The message may quote paths or code of this machine: the client gets the type alone, the log the rest.
    log.error("request failed", exc_info=error)
    return 500, error_object(500, type(error).__name__)
