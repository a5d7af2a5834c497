"""`engine.*`: who generates, one schema per engine, so that a key which has no effect with an engine is not there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmrl.config.base import Section
from mmrl.config.endpoint import Endpoint, EndpointConfig


class EngineConfig(Section):
    """Settings of every engine."""

    name: Literal["auto", "transformers", "vllm_server", "vllm_colocated", "openai"] = Field(
        "auto", description="auto: hardware.engine, whose keys `engine.*` has then"
    )
    # Beside every engine: a module that an endpoint answers for never reaches the engine itself.
    endpoints: dict[str, EndpointConfig] | None = Field(
        None, description="modules that an OpenAI-compatible endpoint answers for; they are out of the loss"
    )

    @property
    def in_process(self) -> TransformersConfig:
        """Settings of decoding in this process: this section's, else the defaults."""
        return TransformersConfig()

    @property
    def as_vllm(self) -> VllmConfig | None:
        """This section, where vLLM samples."""
        return None

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of servers that run already, so that mmrl starts none and knows nothing of their devices."""
        return getattr(self, "urls", ())


class TransformersConfig(EngineConfig):
    """In process, on the device that trains."""

    schedule: Literal["deterministic", "greedy"] = Field(
        "deterministic", description="deterministic: a batch starts when every live program has sent a request or ended"
    )
    loop: Literal["auto", "own", "hf"] = Field(
        "auto",
        description="own: what prompts share once, where attention is plain, fastest for Llama and Qwen families; "
        "hf: any model",
    )
    batch_tokens: int = Field(65536, ge=64, description="prompt tokens (padded) generated for at once")

    @property
    def in_process(self) -> TransformersConfig:
        """See `EngineConfig.in_process`."""
        return self


class VllmConfig(EngineConfig):
    """Settings of the two engines that run vLLM."""

    logprobs: Literal["auto", "raw", "processed"] = Field(
        "auto", description="vLLM's --logprobs-mode; auto: what the run's sampling needs, raw at engine.urls"
    )
    gpu_memory: float = Field(0.4, gt=0, le=1, description="share of a GPU's memory")
    kv_cache_gb: int = Field(1, ge=1, description="on the CPU: memory of the KV cache")
    args: tuple[str, ...] = Field((), description="further arguments of vLLM: \"engine.args=['--max-num-seqs=64']\"")

    @property
    def as_vllm(self) -> VllmConfig:
        """See `EngineConfig.as_vllm`."""
        return self


class VllmServerConfig(VllmConfig):
    """vLLM servers, started by mmrl or running already, with vllm-router before several."""

    urls: tuple[str, ...] = Field((), description="running servers of one model; []: mmrl starts them")
    replicas: int = Field(1, ge=1, description="servers that mmrl starts, each on its share of the GPUs")
    router: str | None = Field(
        None, description="a running vllm-router before the servers; null: mmrl starts one where there are several"
    )
    timeout_s: float = Field(600.0, gt=0, description="limit of one HTTP request")
    concurrency: int = Field(128, ge=1, description="requests in flight at once")
    python: str | None = Field(None, description="interpreter that has vLLM; null: the one that runs mmrl")
    start_timeout_s: float = Field(900.0, gt=0, description="seconds until the server is healthy")
    restarts: int = Field(2, ge=0, description="starts of each server that died, per policy version")
    sync_timeout_s: float = Field(300.0, gt=0, description="limit of one push of new weights")


class VllmColocatedConfig(VllmConfig):
    """vLLM in the training process."""

    # null is decided by the device, which is settled later than this section
    sleep: bool | None = Field(None, description="vLLM frees its GPU memory while the trainer works; null: on a GPU")


class OpenAIConfig(EngineConfig):
    """An OpenAI-compatible endpoint, for evaluations."""

    endpoint: Endpoint = Field(Endpoint(), description="where requests go; the model is what policy= names")


# Without `auto`, which is no engine: by the time one is built, the name is settled.
ENGINE_SCHEMAS: dict[str, type[EngineConfig]] = {
    "transformers": TransformersConfig,
    "vllm_server": VllmServerConfig,
    "vllm_colocated": VllmColocatedConfig,
    "openai": OpenAIConfig,
}
"""`engine.name` -> schema; `auto` has that of `hardware.engine`. The same names are in `mmrl.engines.ENGINES`."""
