"""`engine.*`: who generates, and how a server that does is reached, started and kept in step with the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmrl.config.base import Section
from mmrl.config.endpoint import Endpoint, EndpointConfig

EMBEDDED = frozenset({"schedule", "loop", "batch_tokens"})
CLIENT = frozenset({"url", "timeout_s", "concurrency"})
VLLM = frozenset({"logprobs", "gpu_memory", "kv_cache_gb", "args"})
OPTIONS: dict[str, frozenset[str]] = {
    "transformers": EMBEDDED,
    "vllm_server": CLIENT | VLLM | {"python", "start_timeout_s", "restarts", "sync_timeout_s"},
    "vllm_colocated": VLLM | {"sleep"},
    "openai": frozenset({"endpoint"}),
}
"""Which options have an effect with which engine."""


class EngineConfig(Section):
    """Generation."""

    name: Literal["auto", "transformers", "vllm_server", "vllm_colocated", "openai"] = Field(
        "auto", description="auto: hardware.engine"
    )
    schedule: Literal["deterministic", "greedy"] = Field(
        "deterministic", description="deterministic: a batch starts when every live program has asked or ended"
    )
    loop: Literal["auto", "own", "hf"] = Field(
        "auto", description="decode loop of transformers: own (fast, Llama and Qwen families), hf (any model)"
    )
    batch_tokens: int = Field(65536, ge=64, description="prompt tokens (padded) generated for at once")
    url: str | None = Field(None, description="vllm_server: a running server, null: mmrl starts one")
    timeout_s: float = Field(600.0, gt=0, description="vllm_server: limit of one HTTP request")
    concurrency: int = Field(128, ge=1, description="vllm_server: requests in flight at once")
    python: str | None = Field(None, description="vllm_server: interpreter that has vLLM; null: the one that runs mmrl")
    start_timeout_s: float = Field(900.0, gt=0, description="vllm_server: until the server is healthy")
    restarts: int = Field(2, ge=0, description="vllm_server: starts of a server that died, per policy version")
    sync_timeout_s: float = Field(300.0, gt=0, description="vllm_server: limit of one push of new weights")
    logprobs: Literal["auto", "raw", "processed"] = Field(
        "auto", description="vLLM's --logprobs-mode; auto: what the run's sampling needs, raw with a given url"
    )
    gpu_memory: float = Field(0.4, gt=0, le=1, description="vLLM: share of a GPU's memory")
    sleep: bool | None = Field(
        None, description="vllm_colocated: vLLM frees its GPU memory while the trainer works; null: true on a GPU"
    )
    kv_cache_gb: int = Field(1, ge=1, description="vLLM on the CPU: memory of its KV cache")
    args: tuple[str, ...] = Field((), description="further arguments of vLLM, e.g. [--max-num-seqs=64]")
    endpoint: Endpoint = Field(Endpoint(), description="openai: who is asked; its model is what policy= names")
    endpoints: dict[str, EndpointConfig] | None = Field(
        None, description="modules that an OpenAI-compatible endpoint answers for; they are out of the loss"
    )


def engine_options() -> dict[str, list[str]]:
    """Option -> the engines with which it has an effect."""
    keys = [key for key in EngineConfig.model_fields if key not in ("name", "endpoints")]
    return {key: [engine for engine, options in OPTIONS.items() if key in options] for key in keys}
