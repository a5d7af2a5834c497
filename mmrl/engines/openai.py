"""Any OpenAI-compatible endpoint: text in, text out, for frozen policies, external models, judges and teachers.

`OpenAIChat` is the client that tasks and engines share. The library `openai` sends and retries. Keys come from the
environment alone: they are in no config, no log and no error.

    chat = OpenAIChat(EndpointConfig(model="gpt-4.1-mini"))
    text = await chat.complete([{"role": "user", "content": "…"}], temperature=0.0, max_tokens=200)
    chat.usage.metrics()        # requests, retries, tokens, USD
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.config.endpoint import Endpoint, EndpointConfig
from mmrl.engines.completions import (
    LIMITS,
    Reply,
    Usage,
    asks_for_the_other_limit,
    check_length,
    cut_at_the_limit,
    listed_models,
    read_completion,
    remedy,
    request_body,
)
from mmrl.errors import ConfigError, EngineFailure
from mmrl.secrets import add_secret, hide
from mmrl.system.breaker import Breaker
from mmrl.system.portal import IoScope
from mmrl.system.replies import ACCEPTED, QUOTED, ReplyTooLarge, ReplyUnreadable, retry_after, whole

if TYPE_CHECKING:
    import httpx
    from openai import AsyncOpenAI

LOG = logging.getLogger("mmrl.engines")

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may succeed."""
LARGEST_REPLY = 4 * 2**20
"""Bytes of a reply beyond which it is refused."""
LIBRARY_WAITS_S = 120.0
"""Longest pause that the library `openai` makes at a server's request."""
PROBE_S = 20.0
"""Longest wait for an endpoint that is probed before a run."""


class OpenAIChat:
    """A client of one endpoint and model, usable from any event loop; keep one and share it.

    Args:
        settings: the endpoint.
        path: where `settings` stand in the config, for errors (`task.judge`).

    Raises:
        ConfigError: `settings.key_env` names a variable that is not set.
    """

    def __init__(self, settings: EndpointConfig, path: str = "engine"):
        self.settings = settings
        self.path = path
        self.usage = Usage()
        self._breaker = Breaker()
        self._key = key_of(settings, path)
        self._io: IoScope[AsyncOpenAI] = IoScope(self._connect, lambda client: client.close(), settings.concurrency)
        self._next_start = 0.0
        named = settings.max_tokens_field
        self._limit = LIMITS[0] if named == "auto" else named

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The assistant's text for `messages` (role and content). Settings that are None are the endpoint's own.

        Args:
            extra: further fields of the request's body, for servers that know more than OpenAI's.

        Raises:
            EngineFailure: no usable reply within `attempts` tries, or a refusal that no retry can mend.
        """
        text, _ = await self.complete_with_finish(
            messages,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=stop or None,
            seed=seed,
            **(extra or {}),
        )
        return text

    async def complete_with_finish(self, messages: Sequence[Mapping[str, str]], **options: object) -> tuple[str, str]:
        """As `complete`, with the endpoint's finish reason (`stop`, `length`, …)."""
        reply = await self._io.run(self._complete(messages, options))
        return reply.text, reply.finish

    def unreachable(self) -> list[str]:
        """Why no request can succeed: nobody there, a refused key, an unknown model. Blocks; asks at most one token.

        One sentence per problem, with the config key. What may pass (429, 500, a slow reply) is no problem.
        """
        return self._io.wait(self._probe())

    def forget_counts(self) -> None:
        """A new run begins: `usage` starts anew."""
        self.usage = Usage()

    def close(self) -> None:
        """Close the connections."""
        self._io.close()

    async def _probe(self) -> list[str]:
        """Is the model among those that the server lists? If not, or if it lists none: does it answer one token?"""
        import httpx
        from openai import APIConnectionError, APIStatusError

        # Listing models is free but not offered, or not allowed, everywhere; a request for one token is the proof.
        settings, limit = self.settings, min(self.settings.timeout_s, PROBE_S)
        client = self._io.client.with_options(max_retries=0)
        try:
            async with asyncio.timeout(limit):
                with contextlib.suppress(APIStatusError):
                    if settings.model in listed_models(await client.get("/models", cast_to=httpx.Response)):
                        return []
            async with asyncio.timeout(limit):
                await self._post(client, [{"role": "user", "content": "ping"}], {"max_tokens": 1})
        except APIStatusError as error:
            status, text = error.status_code, error.response.text
            if status in RETRIED or status >= 500 or cut_at_the_limit(status, text):
                return []
            key = "key_env" if status in (401, 403) else "model"
            return [f"{self.path}.{key}: {self._who()} refuses every request: HTTP {status}: {self._safe(text)}"]
        except APIConnectionError as error:
            cause = error.__cause__
            if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
                return [
                    f"{self.path}.url: nobody answers at {settings.url} ({type(cause).__name__}: "
                    f"{self._safe(str(cause))}); expected an OpenAI-compatible server there, up to and with /v1"
                ]
        except (TimeoutError, ValueError):
            pass
        return []  # there, but slow or broken for now: a request is tried more than once

    async def _complete(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, object]) -> Reply:
        """Runs in the I/O loop."""
        from openai import OpenAIError

        # Held during pauses between tries too: a server that refuses for its load is not sent more meanwhile.
        async with self._io.slots:
            if self._breaker.refuses():
                raise self._failed("not sent, since too many requests in a row got no reply")
            try:
                reply = await self._post(self._io.client, messages, options)
            except (OpenAIError, ValueError, _NoCompletion) as error:
                # A refusal or a broken reply is an answer: only silence is a reason to send nothing for a while.
                (self._breaker.failure if _is_silence(error) else self._breaker.success)()
                raise self._failed(self._reason(error)) from None
            except asyncio.CancelledError:  # whoever waited has run out of time (task.timeout_s)
                self._breaker.abandoned()
                self.usage.failures += 1
                raise
            self._breaker.success()
        # Only whole replies count, in the I/O loop alone, so the counters need no lock.
        self.usage.add(reply, self.settings)
        if reply.unanswered and worth_logging(self.usage.unanswered):
            LOG.warning(
                "%s: a reply ended within its reasoning, without an answer (%d so far); raise the limit of new tokens",
                *(self.path, self.usage.unanswered),
            )
        return reply

    async def _post(
        self, client: AsyncOpenAI, messages: Sequence[Mapping[str, str]], options: Mapping[str, object]
    ) -> Reply:
        """One completion; once more where the server asks for another name of the limit of new tokens."""
        import httpx
        from openai import APIStatusError

        while True:
            body = request_body(self.settings, messages, options, self._limit)
            try:
                response = await client.post("/chat/completions", cast_to=httpx.Response, body=body)
            except APIStatusError as error:
                status, text = error.status_code, error.response.text
                if self.settings.max_tokens_field == "auto" and asks_for_the_other_limit(body, status, text):
                    self._rename_limit()
                    continue
                hint = remedy(self.path, body, status, text)
                if hint:
                    error.add_note(hint)
                raise
            reply = read_completion(response, self.settings.reasoning)
            check_length(reply.text, body)
            return reply

    def _rename_limit(self) -> None:
        # of several requests in flight, the first that is refused says it
        if self._limit == LIMITS[0]:
            LOG.warning(
                "%s: the server takes %s in the place of %s; %s.max_tokens_field=%s sends it from the start",
                *(self.path, LIMITS[1], LIMITS[0], self.path, LIMITS[1]),
            )
        self._limit = LIMITS[1]

    def _reason(self, error: Exception) -> str:
        """What the last try died of, and how many there were."""
        from openai import APIStatusError, APITimeoutError

        tries = f" ({self.settings.attempts} tries)"
        if isinstance(error, APIStatusError):
            hints = "".join(getattr(error, "__notes__", ()))
            reason = f"HTTP {error.status_code}: {self._safe(error.response.text)}{hints}"
            if error.status_code not in RETRIED:
                return reason
            after, limit = retry_after(error.response.headers), self.settings.max_wait_s
            if after is not None and after > limit:
                return f"{reason} (asks to wait {after:g} s, longer than max_wait_s={limit:g})"
            return reason + tries
        if isinstance(error, APITimeoutError):
            return f"no reply within {self.settings.timeout_s:g} s{tries}"
        cause = error.__cause__ or error
        name = "" if isinstance(cause, _NoCompletion | ValueError) else f"{type(cause).__name__}: "
        return f"{name}{self._safe(str(cause))}{tries}"

    def _failed(self, reason: str) -> EngineFailure:
        """The failure of a request, counted."""
        failure = EngineFailure(f"{self._who()}: {reason}")
        self.usage.failures += 1
        if worth_logging(self.usage.failures):
            LOG.warning("%s: request given up (%d so far): %s", self.path, self.usage.failures, failure)
        return failure

    async def _wait_for_rate(self) -> None:
        """Requests start at even intervals; each takes the next free start."""
        if self.settings.requests_per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.settings.requests_per_minute
        await asyncio.sleep(start - now)

    def _connect(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        settings = self.settings
        return AsyncOpenAI(
            api_key=self._key or "none",
            organization=settings.organization,
            project=settings.project,
            default_headers=settings.extra_headers,
            base_url=settings.url.rstrip("/") + "/",
            max_retries=settings.attempts - 1,
            timeout=settings.timeout_s,
            http_client=self._http_client(),
        )

    def _http_client(self) -> httpx.AsyncClient:
        """What the library sends with: it leaves these to us, and repeats whatever fails in here."""
        import httpx

        settings, chat = self.settings, self
        # The library insists on a key, and sends what OPENAI_ORG_ID and the like hold to whatever address this is.
        given = {"OpenAI-Organization": settings.organization, "OpenAI-Project": settings.project}
        given["Authorization"] = self._key or next(
            (value for name, value in settings.extra_headers.items() if name.lower() == "authorization"), None
        )
        unwanted = [name for name, value in given.items() if value is None]

        class HttpClient(httpx.AsyncClient):
            async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
                for name in unwanted:
                    request.headers.pop(name, None)
                await chat._wait_for_rate()
                chat.usage.retries += request.headers.get("x-stainless-retry-count", "0") != "0"
                try:
                    async with asyncio.timeout(settings.timeout_s):  # httpx limits each pause, not the whole request
                        reply = await super().send(request, **{**options, "stream": True})
                        response = await whole(reply, LARGEST_REPLY)
                except TimeoutError:
                    raise httpx.ReadTimeout("the reply took too long", request=request) from None
                except (ReplyTooLarge, ReplyUnreadable) as error:
                    raise _NoCompletion(str(error)) from None
                if response.status_code >= 400:
                    await _steer_retry(response, settings)
                elif request.method == "POST":
                    try:
                        read_completion(response)
                    except ValueError as error:
                        raise _NoCompletion(chat._safe(str(error))) from None
                return response

        limits = httpx.Limits(max_connections=settings.concurrency)
        return HttpClient(timeout=settings.timeout_s, limits=limits, headers=ACCEPTED)

    def _who(self) -> str:
        return f"{self.settings.model} at {self.settings.url}"

    def _safe(self, text: str) -> str:
        """The text of a server's reply, cut short, without the key: some servers quote it."""
        text = " ".join(text.split())
        return hide(text)[:QUOTED]


class _NoCompletion(Exception):
    """A reply of status 200 that is no chat completion; the same request may get a better one."""


def _is_silence(error: Exception) -> bool:
    """Whether the last try got no reply at all."""
    from openai import APIConnectionError

    return isinstance(error, APIConnectionError) and not isinstance(error.__cause__, _NoCompletion)


async def _steer_retry(response: httpx.Response, settings: Endpoint) -> None:
    """Whether to try again and after what pause, in the headers by which a server would tell the library."""
    attempt = int(response.request.headers.get("x-stainless-retry-count", "0"))
    pause = retry_after(response.headers)
    repeat = response.status_code in RETRIED and (pause is None or pause <= settings.max_wait_s)
    response.headers["x-should-retry"] = "true" if repeat else "false"
    if not repeat or attempt == settings.attempts - 1:
        return
    if pause is None:
        # Random: after equal pauses, requests that were refused together would come back together.
        pause = random.uniform(0.0, min(settings.max_wait_s, 0.5 * 2.0**attempt))
    await asyncio.sleep(max(0.0, pause - LIBRARY_WAITS_S))
    response.headers["retry-after-ms"] = f"{1000.0 * min(max(pause, 0.001), LIBRARY_WAITS_S):.3f}"


def described(settings: EndpointConfig, chat: object, *further: str, **counts: int) -> str:
    """An endpoint for a result's facts: model, address, what was counted so far, and `further` words."""
    usage = chat.usage if isinstance(chat, OpenAIChat) else None
    if usage is not None:
        counts = {"requests": usage.requests, "retries": usage.retries, "failures": usage.failures} | counts
        counts |= {"unanswered": usage.unanswered, "prompt tokens": usage.prompt_tokens}
        counts |= {"of them cached": usage.cached_tokens, "completion tokens": usage.completion_tokens}
        counts |= {"of them reasoning": usage.reasoning_tokens}
    facts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count] + list(further)
    facts += [f"{usage.cost:.2f} USD"] if usage is not None and usage.cost else []
    return f"{settings.model} at {settings.url}" + (f" ({', '.join(facts)})" if facts else "")


def worth_logging(count: int) -> bool:
    """Whether occurrence number `count` (from 1) is shown: 1, 10, 100, …; all of them would fill the screen."""
    return str(count).strip("0") == "1"


def key_of(settings: EndpointConfig, path: str = "engine") -> str | None:
    """The key from the environment; None where none is to be sent.

    Raises:
        ConfigError: the variable is not set, or holds no key.
    """
    if settings.key_env is None:
        return None
    key = os.environ.get(settings.key_env, "").strip()
    if not key:
        raise ConfigError(
            f"{path}.key_env: the environment variable {settings.key_env} is not set, expected the key of "
            f"{settings.url} in it ({path}.key_env=null for an endpoint without keys)"
        )
    if not all("!" <= character <= "~" for character in key):  # the HTTP client's error would quote it
        raise ConfigError(
            f"{path}.key_env: the environment variable {settings.key_env} holds something that no HTTP header can "
            "(a line break, a space, a letter beyond ASCII); expected a key"
        )
    add_secret(settings.key_env, key, anyway=True)
    return key
