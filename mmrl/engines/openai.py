"""Any OpenAI-compatible endpoint: text in, text out, for frozen policies, external models, judges and teachers.

`OpenAIChat` is the client that tasks and engines share. Keys come from the environment alone: they are in no config, no
log and no error.

    chat = OpenAIChat(EndpointConfig(model="gpt-4.1-mini"))
    text = await chat.complete([{"role": "user", "content": "…"}], temperature=0.0, max_tokens=200)
    chat.usage.metrics()        # requests, retries, tokens, USD
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mmrl.config.endpoint import EndpointConfig
from mmrl.engines.completions import (
    LIMITS,
    Reply,
    Usage,
    asks_for_the_other_limit,
    check_length,
    check_unfiltered,
    cut_at_the_limit,
    read_completion,
    refuses_this_one,
    remedy,
    request_body,
)
from mmrl.errors import ConfigError, EngineFailure, RequestFailure
from mmrl.secrets import add_secret
from mmrl.system.http_client import HttpClient, HttpFailure
from mmrl.system.memo import Memo

LOG = logging.getLogger("mmrl.engines")

LARGEST_REPLY = 4 * 2**20
"""Bytes of a reply beyond which it is refused."""
PROBE_TOKENS = 16
"""Limit of new tokens of a probe: some endpoints take no lower one."""
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
        self.memo: Memo | None = None
        """Replies of a search that was killed; those that come from it are not counted in `usage`."""
        key = key_of(settings, path)
        headers = {
            "OpenAI-Organization": settings.organization,
            "OpenAI-Project": settings.project,
            "Authorization": key and f"Bearer {key}",
            **settings.extra_headers,
        }
        self._http = HttpClient(
            path,
            timeout_s=settings.timeout_s,
            concurrency=settings.concurrency,
            retries=settings.attempts - 1,
            waits_s=(0.5, settings.max_wait_s),
            headers={name: value for name, value in headers.items() if value is not None},
            proxies=True,
        )
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._next_start = 0.0
        field = settings.max_tokens_field
        self._limit = LIMITS[0] if field == "auto" else field

    async def complete(self, messages: Sequence[Mapping[str, str]], **options: object) -> str:
        """Return the assistant's text for `messages` (role and content).

        Args:
            options: fields of the request's body (`temperature`, `max_tokens`, …); those that are None are the
                endpoint's own.

        Raises:
            EngineFailure: no usable reply within `attempts` tries, or a refusal that no retry can mend.
        """
        return (await self.reply(messages, **options)).text

    async def reply(self, messages: Sequence[Mapping[str, str]], **options: object) -> Reply:
        """Complete as `complete` does, and return all that the reply says."""
        return await self._http.run(self._remembered(messages, options))

    def unreachable(self) -> list[str]:
        """Return reasons why no request can succeed: no server, a refused key, an unknown model. Blocks; 16 tokens.

        One sentence per problem, with the config key. What may pass (429, 500, a slow reply) is no problem.
        """
        return self._http.wait(self._probe())

    def forget_counts(self) -> None:
        """Reset `usage` for a new run."""
        self.usage = Usage()

    def describe(self) -> str:
        """Return the endpoint for a result's facts: model, address, and what was counted so far."""
        counts = asdict(self.usage)
        cost = counts.pop("cost")
        facts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
        facts += [f"{cost:.2f} USD"] if cost else []
        return self._name() + (f" ({', '.join(facts)})" if facts else "")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    async def _probe(self) -> list[str]:
        """Check that it answers a short request."""
        # Not the list of models: that is not offered, or not allowed, everywhere.
        settings = self.settings
        body = request_body(settings, [{"role": "user", "content": "ping"}], {"max_tokens": PROBE_TOKENS}, self._limit)
        try:
            async with asyncio.timeout(min(settings.timeout_s, PROBE_S)):
                await self._http.attempt("POST", self._url, body=body, limit=LARGEST_REPLY)
        except TimeoutError:
            return []  # there, but slow for now: a request is tried more than once
        except HttpFailure as failure:
            if not failure.reached:
                expected = "expected an OpenAI-compatible server there, up to and with /v1"
                return [f"{self.path}.url: nobody answers at {settings.url} ({failure.reason}); {expected}"]
            if self._renamed(body, failure):
                return await self._probe()
            if failure.cause != "status" or failure.transient or cut_at_the_limit(failure.status, failure.text):
                return []
            key = "key_env" if failure.status in (401, 403) else "model"
            return [f"{self.path}.{key}: {self._name()} refuses every request: {failure.reason}"]
        return []

    async def _remembered(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, object]) -> Reply:
        """Complete as `_reply` does, from the memo where there is one and it has the reply."""
        if self.memo is None:
            return await self._reply(messages, options)

        async def ask(number: int) -> dict[str, object]:
            return asdict(await self._reply(messages, options))

        asked = {"endpoint": self.settings.url, "model": self.settings.model, "messages": messages, **options}
        return Reply(**await self.memo.reply(asked, ask))

    async def _reply(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, object]) -> Reply:
        """Request a completion, again if the server wants another name of the limit. Runs in the I/O loop."""
        settings = self.settings
        body = request_body(settings, messages, options, self._limit)
        try:
            reply = await self._http.request(
                "POST",
                self._url,
                lambda content: read_completion(content, settings.reasoning),
                body=body,
                limit=LARGEST_REPLY,
                before=self._before,
            )
            check_length(reply.text, body)
            check_unfiltered(reply)
        except HttpFailure as failure:
            if self._renamed(body, failure):
                return await self._reply(messages, options)
            failure.reason += remedy(self.path, body, failure.status, failure.text)
            raise self._failed(failure) from None
        except asyncio.CancelledError:  # whoever waited has run out of time (task.timeout_s)
            self.usage.failures += 1
            raise
        # Only whole replies count, in the I/O loop alone, so the counters need no lock.
        self.usage.add(reply, self.settings)
        if reply.unanswered and worth_logging(self.usage.unanswered):
            LOG.warning(
                "%s: a reply ended within its reasoning, without an answer (%d so far); raise the limit of new tokens",
                *(self.path, self.usage.unanswered),
            )
        return reply

    async def _before(self, number: int) -> None:
        """Count a retry; attempts start at even intervals, each takes the next free start."""
        self.usage.retries += number > 0
        if self.settings.requests_per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.settings.requests_per_minute
        await asyncio.sleep(start - now)

    def _renamed(self, body: Mapping[str, object], failure: HttpFailure) -> bool:
        """Return True if the server asks for another name of the limit of new tokens, which later requests have."""
        asks = asks_for_the_other_limit(body, failure.status, failure.text)
        if not asks or self.settings.max_tokens_field != "auto":
            return False
        # of several requests in flight, the first that is refused says it
        if self._limit == LIMITS[0]:
            LOG.warning(
                "%s: the server takes %s in the place of %s; %s.max_tokens_field=%s sends it from the start",
                *(self.path, LIMITS[1], LIMITS[0], self.path, LIMITS[1]),
            )
        self._limit = LIMITS[1]
        return True

    def _failed(self, failure: HttpFailure) -> EngineFailure:
        """Count the failure of a request and return it."""
        tries = f" ({failure.tries} tries)" if failure.transient else ""
        kind = RequestFailure if refuses_this_one(failure.status, failure.text) else EngineFailure
        failed = kind(f"{self._name()}: {failure.reason}{tries}")
        self.usage.failures += 1
        if worth_logging(self.usage.failures):
            LOG.warning("%s: request given up (%d so far): %s", self.path, self.usage.failures, failed)
        return failed

    def _name(self) -> str:
        return f"{self.settings.model} at {self.settings.url}"


def worth_logging(count: int) -> bool:
    """Return True if occurrence number `count` (from 1) is shown: 1, 10, 100, …; all of them would fill the screen."""
    return str(count).strip("0") == "1"


def key_of(settings: EndpointConfig, path: str = "engine") -> str | None:
    """Return the key from the environment; None where none is to be sent.

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
