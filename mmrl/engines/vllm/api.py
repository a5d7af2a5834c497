"""vLLM's HTTP interface: completions by token ids, adapters, weights, probes. Knows no policy.

Under `vllm_server`; checked against vLLM 0.31 and 0.32 (`vllm/entrypoints`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from mmrl.engines.vllm.command import ENDS, RESET_TRIES, RESET_WAIT_S
from mmrl.errors import EngineFailure
from mmrl.system.files import dumps
from mmrl.system.http_client import HttpClient, HttpFailure
from mmrl.system.replies import quoted

LARGEST_REPLY = 256 * 2**20
"""Bytes of a reply: log-probabilities of a probe's every token are some 100 bytes each."""


NO_NUMBER = -9999.0
"""What vLLM writes for a log-probability of minus infinity."""
SESSION = "X-Session-ID"
"""Header by which vllm-router keeps requests together."""


class VllmApi:
    """Client of a vLLM server. Coroutines run in the I/O loop: `api.io.run(api.models())` or `api.io.wait(…)`."""

    def __init__(self, url: str, timeout_s: float, concurrency: int, retries: int = 0):
        self.url = url
        self.io = HttpClient(f"vLLM at {url}", timeout_s=timeout_s, concurrency=concurrency, retries=retries)

    async def completion(
        self, model: str, prompt_ids: Sequence[int], fields: Mapping[str, Any], session: str = ""
    ) -> tuple[list[int], list[float], str]:
        """Return the sampled ids, their log-probabilities in the server's mode, and its finish reason.

        Args:
            fields: `command.sampling_fields`.
            session: a router sends all requests of one to the same server; "": there is no router.

        Raises:
            HttpFailure: no reply, or a completion that the server cut off.
            EngineFailure: a refusal, or a reply that is no completion.
        """
        body = {
            "model": model,
            "prompt": list(prompt_ids),
            **fields,
            # Named, or the generation config of the served model would decide.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        async with self.io.slots:
            reply = await self.request("/v1/completions", body, {SESSION: session} if session else None)
        try:
            choice = reply["choices"][0]
            finish = str(choice["finish_reason"])
            if finish not in ENDS:
                raise HttpFailure(
                    "garbage", f"a completion that was cut off (finish_reason '{finish}')", transient=True
                )
            ids = [int(token) for token in choice["token_ids"]]
            logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineFailure(
                f"the server's reply lacks token ids or log-probabilities ({error!r:.60}): {quoted(dumps(reply))}"
            ) from None
        if not ids or len(ids) != len(logprobs):
            raise EngineFailure(f"the server sent {len(ids)} token ids and {len(logprobs)} log-probabilities")
        return ids, logprobs, finish

    async def models(self) -> dict[str, Any]:
        """Return served name -> its card (`max_model_len`, …)."""
        reply = await self.request("/v1/models")
        return {card["id"]: card for card in reply.get("data", [])}

    async def finish_session(self, session: str) -> None:
        """Have a router forget where a session's requests went."""
        await self.request(f"/finish_session?session_id={quote(session, safe='')}", {})

    async def reload(self, folder: str) -> None:
        """Replace the base weights by those in `folder`, in place, and forget every cached prefix.

        Raises:
            EngineFailure: it refused, or keeps prefixes of the weights before.
        """
        await self.request("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        for _ in range(RESET_TRIES):
            # Older versions answer without a body.
            if await self.request("/reset_prefix_cache", {}) != {"success": False}:
                return
            await asyncio.sleep(RESET_WAIT_S)
        raise EngineFailure("the prefix cache was not emptied (POST /reset_prefix_cache: success=false)")

    async def probe(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `ids` but the first, at temperature 1; never from the prefix cache."""
        return _prompt_logprobs(await self.request("/v1/completions", _scoring(model, ids)), ids)

    async def score(self, model: str, ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of `probe`, in a slot and with the client's retries.

        Raises:
            HttpFailure: of the last attempt: no reply, or none with a finite number for each token.
        """

        def parse(content: bytes) -> list[float]:
            found = _prompt_logprobs(json.loads(content), ids)
            if bad := [value for value in found if not NO_NUMBER < value <= 0]:
                raise ValueError(f"a prompt_logprobs of {bad[0]:g}")
            return found

        body, url = _scoring(model, ids), self.url + "/v1/completions"
        return await self.io.request("POST", url, parse, body=body, limit=LARGEST_REPLY)

    async def listens(self) -> bool:
        """Return True if a server answers at the address, whatever it says."""
        try:
            await self.io.attempt("GET", self.url + "/health", limit=LARGEST_REPLY)
        except HttpFailure as failure:
            return failure.reached
        return True

    async def check_loads_adapters(self) -> None:
        """Raise `EngineFailure` where the server loads no adapters while it runs."""
        try:
            # By GET, which changes nothing: a server that has the page answers 405.
            await self.request("/v1/load_lora_adapter")
        except EngineFailure as failure:
            if "HTTP 404" in str(failure):
                raise EngineFailure(
                    f"engine.urls: the server at {self.url} loads no LoRA adapters (POST /v1/load_lora_adapter: 404); "
                    "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
                ) from None

    async def request(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Post `body`, or get where there is none; the reply as JSON, or as text where it is no JSON.

        Raises:
            HttpFailure: no connection, no reply in time, or HTTP 5xx; the same request may succeed later.
            EngineFailure: HTTP 4xx, with the server's words.
        """
        method = "GET" if body is None else "POST"
        try:
            content = await self.io.attempt(method, self.url + path, body=body, headers=headers, limit=LARGEST_REPLY)
        except HttpFailure as failure:
            if failure.transient:
                raise
            raise EngineFailure(f"{method} {path}: {failure.reason}") from None
        try:
            return json.loads(content)
        except ValueError:
            return content.decode(errors="replace")


def _scoring(model: str, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "add_special_tokens": False,
    }


def _prompt_logprobs(reply: Any, ids: Sequence[int]) -> list[float]:
    rows = reply["choices"][0]["prompt_logprobs"]
    return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], ids[1:], strict=True)]
