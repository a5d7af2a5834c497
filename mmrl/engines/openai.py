"""Any OpenAI-compatible endpoint: text in, text out, for frozen policies, external models, judges and teachers.

`OpenAIChat` is the client that tasks and engines share. Keys come from the environment alone: they are in no config,
no log and no error.

    chat = OpenAIChat(EndpointConfig(model="gpt-4.1-mini"))
    text = await chat.complete([{"role": "user", "content": "…"}], temperature=0.0, max_tokens=200)
    chat.usage.metrics()        # requests, retries, tokens, USD
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmrl.config.endpoint import EndpointConfig
from mmrl.errors import ConfigError, EngineFailure
from mmrl.system.portal import Background

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

LOG = logging.getLogger("mmrl.engines")

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which the same request may succeed."""
QUOTED = 300
"""Characters of a server's reply that an error quotes."""
LOOK_S = 20.0
"""Longest wait for an endpoint that is looked at before a run."""


@dataclass(slots=True)
class Usage:
    """What an endpoint was asked and what it cost; written by the client's own loop alone."""

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
        names = ("requests", "retries", "failures", "prompt_tokens", "completion_tokens", "cost")
        return {f"{prefix}/{name}": float(getattr(self, name)) for name in names}


class _Retry(Exception):
    """One try failed; `after` is the pause that the server asks for, in seconds."""

    def __init__(self, message: str, after: float | None = None):
        super().__init__(message)
        self.after = after


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
        self._key = key_of(settings, path)
        self._background = Background("mmrl-openai")
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
        extra: Mapping[str, Any] | None = None,
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
            stop=stop,
            seed=seed,
            extra=extra,
        )
        return text

    async def complete_with_finish(self, messages: Sequence[Mapping[str, str]], **options: Any) -> tuple[str, str]:
        """As `complete`, with the endpoint's finish reason (`stop`, `length`, …)."""
        body: dict[str, Any] = {"model": self.settings.model, "messages": [dict(message) for message in messages]}
        extra = options.pop("extra", None)
        stop = options.pop("stop", ())
        body |= {name: value for name, value in options.items() if value is not None}
        if stop:
            body["stop"] = list(stop)
        body |= extra or {}
        return await self._background.run(self._ask(body))

    def unreachable(self) -> list[str]:
        """Why no request can succeed: nobody there, a refused key, an unknown model. Blocks; asks at most one token.

        One sentence per problem, with the config key. What may pass (429, 500, a slow reply) is no problem.
        """
        return self._background.wait(self._look())

    def forget_counts(self) -> None:
        """A new run begins: `usage` starts anew."""
        self.usage = Usage()

    def close(self) -> None:
        """Close the connections."""
        self._background.close()

    async def _look(self) -> list[str]:
        """Is the model among those that the server lists? If not, or if it lists none: does it answer one token?"""
        import httpx

        client: httpx.AsyncClient = self._background.client(self._make_client)
        settings, wait = self.settings, min(self.settings.timeout_s, LOOK_S)
        body = {"model": settings.model, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
        try:
            async with asyncio.timeout(wait):
                if settings.model in listed_models(await client.get("models")):
                    return []
            async with asyncio.timeout(wait):
                reply = await client.post("chat/completions", json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            said = f"{type(error).__name__}: {self._safe(str(error))}"
            return [
                f"{self.path}.url: nobody answers at {settings.url} ({said}); expected an OpenAI-compatible server "
                "there, up to and with /v1"
            ]
        except (httpx.HTTPError, TimeoutError):
            return []  # there, but slow or broken for now: a request is tried more than once
        if reply.status_code < 400 or reply.status_code in RETRIED or reply.status_code >= 500:
            return []
        key = "key_env" if reply.status_code in (401, 403) else "model"
        return [
            f"{self.path}.{key}: {self._who()} refuses every request: HTTP {reply.status_code}: "
            f"{self._safe(reply.text)}"
        ]

    async def _ask(self, body: dict[str, Any]) -> tuple[str, str]:
        """Runs in the background loop."""
        from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Retry),
            stop=stop_after_attempt(self.settings.attempts),
            wait=self._pause,
            before_sleep=self._count_retry,
        )
        async with self._background.slots(self.settings.concurrency):
            try:
                async for attempt in retrying:
                    with attempt:
                        found = await self._try(body)
            except RetryError as error:
                last = error.last_attempt.exception()
                failure = EngineFailure(f"{self._who()}: {last} ({self.settings.attempts} tries)")
                self._count_failure(failure)
                raise failure from None
            except EngineFailure as failure:
                self._count_failure(failure)
                raise
            except asyncio.CancelledError:  # whoever asked has run out of time (task.timeout_s)
                self.usage.failures += 1
                raise
        return found

    async def _try(self, body: dict[str, Any]) -> tuple[str, str]:
        import httpx

        client: httpx.AsyncClient = self._background.client(self._make_client)
        await self._wait_for_rate()
        try:
            async with asyncio.timeout(self.settings.timeout_s):  # httpx limits each pause, not the whole request
                response = await client.post("chat/completions", json=body)
        except (httpx.TimeoutException, TimeoutError):
            raise _Retry(f"no reply within {self.settings.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _Retry(f"{type(error).__name__}: {self._safe(str(error))}") from None
        if response.status_code in RETRIED:
            raise self._with_pause(response)
        if response.status_code != 200:
            raise EngineFailure(f"{self._who()}: HTTP {response.status_code}: {self._safe(response.text)}")
        return self._read(response)

    def _read(self, response: httpx.Response) -> tuple[str, str]:
        try:
            reply = response.json()
            choice = reply["choices"][0]
            text = choice["message"]["content"]
            if text is None:
                text = choice["message"].get("refusal") or ""
            if not isinstance(text, str):
                raise TypeError("the content is not text")
            # JSON can spell half of an emoji (a reply cut within one); no tokenizer or file can.
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            tokens = [_count(reply.get("usage"), name) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise _Retry(f"the reply is no chat completion ({error!r}): {self._safe(response.text)}") from None
        self.usage.requests += 1
        self.usage.prompt_tokens += tokens[0]
        self.usage.completion_tokens += tokens[1]
        self.usage.cost += (tokens[0] * self.settings.price_in + tokens[1] * self.settings.price_out) / 1e6
        return text, str(choice.get("finish_reason") or "stop")

    def _with_pause(self, response: httpx.Response) -> Exception:
        after = retry_after(response.headers)
        message = f"HTTP {response.status_code}: {self._safe(response.text)}"
        if after is not None and after > self.settings.max_wait_s:
            return EngineFailure(
                f"{self._who()}: {message} (asks to wait {after:g} s, longer than max_wait_s="
                f"{self.settings.max_wait_s:g})"
            )
        return _Retry(message, after)

    def _pause(self, state: RetryCallState) -> float:
        """What the server asks for; else a random part of 0.5 s, doubled with each try."""
        from tenacity import wait_random_exponential

        error = state.outcome.exception() if state.outcome else None
        asked = error.after if isinstance(error, _Retry) else None
        if asked is not None:
            return asked
        return float(wait_random_exponential(multiplier=0.5, max=self.settings.max_wait_s)(state))

    def _count_retry(self, state: RetryCallState) -> None:
        self.usage.retries += 1
        LOG.info("%s: %s; trying again", self._who(), state.outcome.exception() if state.outcome else "")

    def _count_failure(self, failure: EngineFailure) -> None:
        self.usage.failures += 1
        if worth_telling(self.usage.failures):
            LOG.warning("%s: request given up (%d so far): %s", self.path, self.usage.failures, failure)

    async def _wait_for_rate(self) -> None:
        """Requests start at even intervals; each takes the next free start."""
        if self.settings.requests_per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.settings.requests_per_minute
        await asyncio.sleep(start - now)

    def _make_client(self) -> httpx.AsyncClient:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return httpx.AsyncClient(
            base_url=self.settings.url.rstrip("/") + "/",
            headers=headers,
            timeout=self.settings.timeout_s,
            limits=httpx.Limits(max_connections=self.settings.concurrency),
        )

    def _who(self) -> str:
        return f"{self.settings.model} at {self.settings.url}"

    def _safe(self, text: str) -> str:
        """A server's words, cut short, without the key: some servers quote it."""
        text = " ".join(text.split())
        if self._key:
            text = text.replace(self._key, "[key]")
        return text[:QUOTED]


def described(settings: EndpointConfig, chat: Any, *further: str, **counts: int) -> str:
    """An endpoint for a result's facts: model, address, what was counted so far, and `further` words."""
    usage = getattr(chat, "usage", None)
    if usage is not None:
        counts = {"requests": usage.requests, "retries": usage.retries, "failures": usage.failures} | counts
    told = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count] + list(further)
    told += [f"{usage.cost:.2f} USD"] if usage is not None and usage.cost else []
    return f"{settings.model} at {settings.url}" + (f" ({', '.join(told)})" if told else "")


def worth_telling(count: int) -> bool:
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
    return key


def _count(usage: Any, name: str) -> int:
    """A number of tokens as the endpoint counts them; 0 where it says none."""
    count = usage.get(name) if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) and count > 0 else 0


def listed_models(response: httpx.Response) -> set[str]:
    """Names in the reply to GET /models; empty where it is no such list."""
    try:
        return {str(model["id"]) for model in response.json()["data"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `Retry-After` (seconds or an HTTP date), or None."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
