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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mmrl.config.endpoint import Endpoint, EndpointConfig
from mmrl.errors import ConfigError, EngineFailure
from mmrl.secrets import add_secret, hide_reply
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
CHARS_PER_TOKEN = 256
"""Characters of a completion for each token of the limit, beyond which it is refused; few tokens have so many."""
MOST_TOKENS = 10**9
"""A reply that counts more has miscounted."""
LIBRARY_WAITS_S = 120.0
"""Longest pause that the library `openai` makes at a server's request."""
PROBE_S = 20.0
"""Longest wait for an endpoint that is probed before a run."""


@dataclass(slots=True)
class Usage:
    """Requests to an endpoint and what they cost; written in the I/O loop alone."""

    requests: int = 0
    """Completions received."""
    retries: int = 0
    failures: int = 0
    """Completions given up."""
    prompt_tokens: int = 0
    """As the endpoint counts them."""
    completion_tokens: int = 0
    cost: float = 0.0
    """USD by the configured prices."""

    def metrics(self, prefix: str = "endpoint") -> dict[str, float]:
        """All counters so far, by metric name."""
        return {f"{prefix}/{name}": float(count) for name, count in asdict(self).items()}


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
        body: dict[str, object] = {"model": self.settings.model, "messages": [dict(message) for message in messages]}
        body |= {name: value for name, value in options.items() if value is not None}
        return await self._io.run(self._complete(body))

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
        body = {"model": settings.model, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
        try:
            async with asyncio.timeout(limit):
                with contextlib.suppress(APIStatusError):
                    if settings.model in listed_models(await client.get("/models", cast_to=httpx.Response)):
                        return []
            async with asyncio.timeout(limit):
                await client.post("/chat/completions", cast_to=httpx.Response, body=body)
        except APIStatusError as error:
            status = error.status_code
            if status in RETRIED or status >= 500:
                return []
            key = "key_env" if status in (401, 403) else "model"
            reply = self._safe(error.response.text)
            return [f"{self.path}.{key}: {self._who()} refuses every request: HTTP {status}: {reply}"]
        except APIConnectionError as error:
            cause = error.__cause__
            if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
                return [
                    f"{self.path}.url: nobody answers at {settings.url} ({type(cause).__name__}: "
                    f"{self._safe(str(cause))}); expected an OpenAI-compatible server there, up to and with /v1"
                ]
        except TimeoutError:
            pass
        return []  # there, but slow or broken for now: a request is tried more than once

    async def _complete(self, body: Mapping[str, object]) -> tuple[str, str]:
        """Runs in the I/O loop."""
        import httpx
        from openai import OpenAIError

        # Held during pauses between tries too: a server that refuses for its load is not sent more meanwhile.
        async with self._io.slots:
            if self._breaker.refuses():
                raise self._failed("not sent, since too many requests in a row got no reply")
            try:
                reply = await self._io.client.post("/chat/completions", cast_to=httpx.Response, body=body)
                text, finish, tokens = read_completion(reply)
                _check_length(text, body.get("max_tokens"))
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
        self.usage.requests += 1
        self.usage.prompt_tokens += tokens[0]
        self.usage.completion_tokens += tokens[1]
        self.usage.cost += (tokens[0] * self.settings.price_in + tokens[1] * self.settings.price_out) / 1e6
        return text, finish

    def _reason(self, error: Exception) -> str:
        """What the last try died of, and how many there were."""
        from openai import APIStatusError, APITimeoutError

        tries = f" ({self.settings.attempts} tries)"
        if isinstance(error, APIStatusError):
            reason = f"HTTP {error.status_code}: {self._safe(error.response.text)}"
            if error.status_code not in RETRIED:
                return reason
            after, limit = retry_after(error.response.headers), self.settings.max_wait_s
            if after is not None and after > limit:
                return f"{reason} (asks to wait {after:g} s, longer than max_wait_s={limit:g})"
            return reason + tries
        if isinstance(error, APITimeoutError):
            return f"no reply within {self.settings.timeout_s:g} s{tries}"
        cause = error.__cause__ or error
        name = "" if isinstance(cause, _NoCompletion) else f"{type(cause).__name__}: "
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
        unwanted = ["OpenAI-Organization", "OpenAI-Project", *(["Authorization"] if self._key is None else [])]

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
        return hide_reply(text)[:QUOTED]


class _NoCompletion(Exception):
    """A reply of status 200 that is no chat completion; the same request may get a better one."""


def _is_silence(error: Exception) -> bool:
    """Whether the last try got no reply at all."""
    from openai import APIConnectionError

    return isinstance(error, APIConnectionError) and not isinstance(error.__cause__, _NoCompletion)


def _check_length(text: str, max_tokens: object) -> None:
    """Refuse a completion of many times the limit of tokens: tokenizing megabytes takes seconds."""
    if isinstance(max_tokens, int) and len(text) > CHARS_PER_TOKEN * max_tokens:
        raise _NoCompletion(f"a completion of {len(text)} characters for max_tokens={max_tokens}")


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


def read_completion(response: httpx.Response) -> tuple[str, str, tuple[int, int]]:
    """Text, finish reason, and tokens of prompt and completion.

    Raises:
        ValueError: it is no chat completion; with the reply's text.
    """
    try:
        reply = response.json()
        choice = reply["choices"][0]
        text = choice["message"]["content"]
        text = choice["message"].get("refusal") or "" if text is None else text
        if not isinstance(text, str):
            raise TypeError("the content is not text")
        # JSON can spell half of an emoji (a reply cut within one); no tokenizer or file can.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokens = _count(reply.get("usage"), "prompt_tokens"), _count(reply.get("usage"), "completion_tokens")
        # after decoding: a server may have spelled the key in escapes
        return hide_reply(text), hide_reply(str(choice.get("finish_reason") or "stop")), tokens
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        # not its repr: that of a decoding error holds the whole reply
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the reply is no chat completion ({reason}): {response.text}") from None


def described(settings: EndpointConfig, chat: object, *further: str, **counts: int) -> str:
    """An endpoint for a result's facts: model, address, what was counted so far, and `further` words."""
    usage = chat.usage if isinstance(chat, OpenAIChat) else None
    if usage is not None:
        counts = {"requests": usage.requests, "retries": usage.retries, "failures": usage.failures} | counts
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


def _count(usage: object, name: str) -> int:
    """A number of tokens as the endpoint counts them; 0 where it says none."""
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and 0 < count <= MOST_TOKENS else 0


def listed_models(response: httpx.Response) -> set[str]:
    """Names in the reply to GET /models; empty where it is no such list."""
    try:
        return {str(model["id"]) for model in response.json()["data"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()
