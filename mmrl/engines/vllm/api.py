"""vLLM's HTTP interface: completions by token ids, adapters, weights, probes. Knows no policy.

Under `vllm_server`; checked against vLLM 0.31 (`vllm/entrypoints`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.engines.base import Sampling
from mmrl.errors import EngineFailure
from mmrl.system.files import dumps
from mmrl.system.portal import IoScope
from mmrl.system.replies import ACCEPTED, ReplyTooLarge, ReplyUnreadable, quoted, whole

if TYPE_CHECKING:
    import httpx

LARGEST_REPLY = 256 * 2**20
"""Bytes of a reply: log-probabilities of a probe's every token are some 100 bytes each."""
SEED_BITS = 63


class Unreachable(Exception):
    """The server did not answer, or answered that it is broken; the same request may succeed later."""


class Refused(EngineFailure):
    """The server answered that the request is wrong."""


class VllmApi:
    """All coroutines run in the I/O loop: `api.io.run(api.models())` or `api.io.wait(…)`."""

    def __init__(self, url: str, timeout_s: float, concurrency: int):
        self.url = url
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.io: IoScope[httpx.AsyncClient] = IoScope(self._connect, lambda client: client.aclose(), concurrency)

    async def completion(
        self, model: str, prompt_ids: Sequence[int], sampling: Sampling, limit: int, stop_ids: Sequence[int]
    ) -> tuple[list[int], list[float], str]:
        """Sampled ids, their log-probabilities in the server's mode, and its finish reason."""
        body = {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # Named, or the generation config of the served model would decide.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": sampling.seed & ((1 << SEED_BITS) - 1),
            "stop": list(sampling.stop),
            "stop_token_ids": list(stop_ids),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
        }
        async with self.io.slots:
            reply = await self.post("/v1/completions", body)
        try:
            choice = reply["choices"][0]
            ids = [int(token) for token in choice["token_ids"]]
            logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            finish = str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(
                f"the server's reply lacks token ids or log-probabilities ({error!r:.60}): {quoted(dumps(reply))}"
            ) from None
        if not ids or len(ids) != len(logprobs):
            raise Refused(f"the server sent {len(ids)} token ids and {len(logprobs)} log-probabilities")
        return ids, logprobs, finish

    async def models(self) -> dict[str, Any]:
        """Served name -> its card (`max_model_len`, …)."""
        reply = await self.request("GET", "/v1/models")
        return {card["id"]: card for card in reply.get("data", [])}

    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve the LoRA adapter in `folder` under `name`."""
        await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def reload(self, folder: str) -> None:
        """Replace the base weights by those in `folder`, in place, and forget every cached prefix."""
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await self.post("/reset_prefix_cache", {})

    async def probe(self, model: str, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of `ids` but the first, at temperature 1; never from the prefix cache."""
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        reply = await self.post("/v1/completions", {**body, "add_special_tokens": False})
        rows = reply["choices"][0]["prompt_logprobs"]
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], ids[1:], strict=True)]

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """See `request`."""
        return await self.request("POST", path, body)

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The reply as JSON, or as text where it is none.

        Raises:
            Unreachable: no connection, no reply in time, or HTTP 5xx.
            Refused: HTTP 4xx, with the server's words.
        """
        import httpx

        client = self.io.client
        try:
            request = client.build_request(method, self.url + path, json=body, headers=ACCEPTED)
            response = await whole(await client.send(request, stream=True), LARGEST_REPLY)
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__} {quoted(str(error))}".strip()) from None
        except (ReplyTooLarge, ReplyUnreadable) as error:
            raise Refused(f"{method} {path}: {error}") from None
        # 429 says nothing against this request, which may succeed later.
        if response.status_code >= 500 or response.status_code == 429:
            raise Unreachable(f"{method} {path}: HTTP {response.status_code}: {quoted(response.text)}")
        if response.status_code >= 400:
            raise Refused(f"{method} {path}: HTTP {response.status_code}: {quoted(response.text)}")
        try:
            return response.json()
        except ValueError:
            return response.text

    def _connect(self) -> httpx.AsyncClient:
        import httpx

        limits = httpx.Limits(max_connections=self.concurrency + 8, max_keepalive_connections=self.concurrency)
        return httpx.AsyncClient(timeout=self.timeout_s, limits=limits, trust_env=False)
