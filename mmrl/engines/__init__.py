"""Engines: prompt token ids in, sampled token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import TYPE_CHECKING, cast

from mmrl.config import EngineConfig
from mmrl.engines.base import Completion, Engine, EngineSetup, Request, Sampling
from mmrl.errors import unknown

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from mmrl.config.engines import VllmServerConfig

ENGINES: dict[str, str] = {
    "transformers": "mmrl.engines.embedded.transformers_engine:TransformersEngine",
    "vllm_server": "mmrl.engines.vllm.server:VllmServerEngine",
    "vllm_colocated": "mmrl.engines.vllm.colocated:VllmColocatedEngine",
    "openai": "mmrl.engines.endpoint_engine:EndpointEngine",
}
"""Name in `engine.name` -> `module:class`, imported when it is needed, since engines import torch."""


def engine_class(name: str) -> Callable[..., Engine]:
    """Return the class of one engine of `ENGINES`."""
    module, _, attribute = ENGINES[name].partition(":")
    kind: Callable[..., Engine] = getattr(import_module(module), attribute)
    return kind


def build_engine(
    config: EngineConfig, model: nn.Module | None, tokenizer: PreTrainedTokenizerBase, setup: EngineSetup
) -> Engine:
    """Return the engine of a run.

    Args:
        model: the trainer's model; None for engines that need none in this process (`needs_model`).
    """
    from mmrl.engines.endpoint_engine import EndpointEngine, with_endpoints, with_model

    if config.name == "openai":
        engine: Engine = EndpointEngine(with_model(config, setup.served), tokenizer, "engine.endpoint")
    elif serves_all(config.name) and not setup.processes.main:
        from mmrl.engines.vllm.client import SharedServersEngine

        engine = SharedServersEngine(model, tokenizer, cast("VllmServerConfig", config), setup)
    else:
        engine = engine_class(config.name)(model, tokenizer, config, setup)
    return with_endpoints(engine, config, tokenizer)


def problems(
    config: EngineConfig,
    name: str,
    *,
    training: bool,
    copied: bool = False,
    device: str = "auto",
    rank: int = 0,
    adapters: Collection[str] = (),
) -> list[str]:
    """Return problems of `engine.*` for engine `name`, one sentence each; loads nothing.

    Args:
        name: `engine.name`, or the hardware profile's engine where that is `auto`.
        training: False in an evaluation.
        copied: some modules use a copy of the initial weights beside the trained ones.
        device: `hardware.device`.
        rank: of the LoRA adapters that are trained; 0: none.
        adapters: folders of the LoRA adapters that are served.
    """
    if name not in ENGINES:
        return [unknown("hardware.engine" if config.name == "auto" else "engine.name", name, ENGINES)]
    if name == "openai" and training:
        return [
            "engine: openai, an endpoint, has no weights that could be trained; use it with mmrl eval, or for modules "
            "that are not trained (engine.endpoints.<module>.url=… .model=…) beside another engine"
        ]
    sentences: list[str] = []
    # vLLM holds one set of base weights; adapters beside it are no second set of full weights.
    if copied and name not in ("transformers", "openai"):
        sentences.append(
            f"engine: {name} serves one set of full weights, and some modules keep the initial ones; use "
            "engine=transformers, or train adapters (model.lora)"
        )
    if (vllm := config.as_vllm) is not None:
        from mmrl.engines.vllm.command import vllm_problems
        from mmrl.engines.vllm.router import router_problems

        sentences += vllm_problems(vllm.model_copy(update={"name": name}), device, rank, adapters)
        sentences += router_problems(vllm)
    return sentences


def staleness_problems(
    config: EngineConfig, name: str, staleness: int, adapters: bool, sampling: tuple[float, float, int]
) -> list[str]:
    """Return reasons why engine `name` cannot sample while the trainer trains; loads nothing.

    Args:
        staleness: `train.staleness`, at least 1.
        adapters: adapters are trained, so that versions of the policy can be served beside each other.
        sampling: (temperature, top_p, top_k) of the calls that are trained on.
    """
    # Sampling ahead needs weights that stand still while the trainer's move: a copy, on a device of its own.
    if name in ("transformers", "vllm_colocated"):
        return [
            f"train.staleness: got {staleness} with engine={name}, which samples from the weights, or on the device, "
            "that are being trained; use engine=vllm_server, or train.staleness=0"
        ]
    if staleness > 1 and not adapters:
        return [
            f"train.staleness: got {staleness} without an adapter: full weights cannot change under a batch that is "
            "being sampled; use model.lora, or train.staleness=1"
        ]
    if unrecorded := unrecorded_logprobs(config, sampling):
        return [
            f"train.staleness: got {staleness}, which is corrected by recorded log-probabilities, and {unrecorded}, or "
            "train.staleness=0"
        ]
    return []


def unrecorded_logprobs(config: EngineConfig, sampling: tuple[float, float, int]) -> str:
    """Return the reason why an engine records no log-probabilities with this (temperature, top_p, top_k), or ""."""
    if (vllm := config.as_vllm) is None:
        return ""
    from mmrl.engines.vllm.command import exact, logprobs_mode

    temperature, top_p, top_k = sampling
    if exact(
        logprobs_mode(vllm, [sampling]), Sampling(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k)
    ):
        return ""
    return (
        f"vLLM can record none with algo.temperature={temperature:g}, algo.top_p={top_p:g}, algo.top_k={top_k} and "
        f"engine.logprobs={vllm.logprobs} (docs/engines.md); use algo.top_p=1 and algo.top_k=0"
    )


def serves_all(name: str) -> bool:
    """Return True if the servers of the main process generate for all processes of a run."""
    return name == "vllm_server"


def needs_model(name: str) -> bool:
    """Return True if an evaluation with this engine has to load the weights into this process."""
    return name == "transformers"


# Re-exported from `base`; what is defined here needs no entry.
__all__ = ["Completion", "Engine", "EngineSetup", "Request", "Sampling"]
