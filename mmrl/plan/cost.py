"""Memory by part and time by phase of one step: parameters, FLOPs and bytes over the device's speeds.

GPUs are rows of a table; this machine's CPU is measured.
"""

from __future__ import annotations

import math
import re
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from mmrl.config import RlRunConfig, RootConfig
from mmrl.config.engines import VllmConfig
from mmrl.config.teacher import INITIAL, POLICY
from mmrl.errors import ConfigError
from mmrl.plan.shapes import Shape
from mmrl.plan.workload import Load

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Speeds and memory of a device."""

    name: str
    flops: float
    """Matrix products that it reaches in the training dtype, FLOP/s."""
    bandwidth: float
    """Memory traffic that it reaches, bytes/s."""
    memory: float
    """Bytes."""
    utilisation: float
    """Share of `flops` that the update is expected to reach on unique tokens."""


# A data sheet's peak is never reached; plans made with it would be wrong by a third before anything else is.
GPUS = {
    "h200": Device(name="h200", flops=790e12, bandwidth=4.3e12, memory=139 * GIB, utilisation=0.34),
    "h100": Device(name="h100", flops=790e12, bandwidth=3.0e12, memory=79 * GIB, utilisation=0.34),
    "a100": Device(name="a100", flops=270e12, bandwidth=1.8e12, memory=79 * GIB, utilisation=0.34),
}
"""bf16 products and traffic that are reached in practice, not the data sheet's peaks. Utilisation is that of LoRA on 8B
on one H200 (docs/performance.md), assumed for all."""
NAMES = ("cpu", *GPUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine."""

    name: str
    memory: int
    """Bytes."""
    free: int
    """Bytes that nothing holds now."""
    capability: str
    """CUDA compute capability."""


def gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows this process, in its order."""
    import torch

    if not torch.cuda.is_available():
        return []
    listed = []
    for index in range(torch.cuda.device_count()):
        properties, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        listed.append(Gpu(name=properties.name, memory=total, free=free, capability=capability))
    return listed


def known_gpu(gpu: Gpu) -> Device:
    """Return the speed of a GPU of this machine by the table, with the memory that it has.

    Raises:
        ConfigError: it is none of the table; a slice of one (MIG) has a share that is not known.
    """
    # Matched by words: a GH200 is not an H200.
    words = set(re.findall(r"\w+", gpu.name.lower()))
    row = next((device for key, device in GPUS.items() if key in words and "mig" not in words), None)
    if row is None:
        raise ConfigError(
            f"device: the speed of this machine's GPU, {gpu.name}, is not known; expected one of {', '.join(NAMES)}"
        )
    return replace(row, memory=gpu.memory)


def device(name: str, threads: int = 1, matmul: str = "torch") -> Device:
    """Return the device called `name`, one of `NAMES`; `cpu` is measured (a quarter of a second).

    That is a float32 matrix product and a copy, best of several.

    Args:
        matmul: `model.matmul`, whose products a CPU is measured with.
    """
    if name != "cpu":
        return GPUS[name]
    import torch

    from mmrl.models.linear import onednn

    # Shapes larger than any cache, or caches would be measured; the best of several, as other load only slows.
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    # A separate generator, so that the global one's state stays as it is for a run that follows.
    draws = torch.Generator()
    try:
        first, second = (torch.randn(512, 512, generator=draws) for _ in range(2))
        block = torch.zeros(8_000_000)
        multiply = (lambda: onednn(first, second, None)) if matmul == "onednn" else (lambda: first @ second)
        product = min(timeit.repeat(multiply, number=1, repeat=20))
        copy = min(timeit.repeat(block.clone, number=1, repeat=8))
    finally:
        torch.set_num_threads(before)
    return Device(
        name="cpu",
        flops=2 * 512**3 / product,
        bandwidth=2 * block.nbytes / copy,
        memory=psutil.virtual_memory().total,
        utilisation=0.35,
    )


CHUNK = 1024
"""Scored positions whose logits are held at once."""
DECODE_OVERHEAD_S = {"cpu": 1.1e-3}
"""Seconds per layer and decode step that no arithmetic accounts for (kernel starts, Python); measured on the CPU."""
PREFILL_UTILISATION = {"cpu": 0.2}
"""Share of the device's FLOP/s in the prefill; measured on the CPU with the tiny model, 0.5 assumed elsewhere."""
SHARDED = {
    "none": frozenset[str](),
    "fsdp2": frozenset({"weights", "reference", "adapter", "gradients", "optimizer", "critic"}),
    "zero2": frozenset({"gradients", "optimizer"}),
    "zero3": frozenset({"weights", "adapter", "gradients", "optimizer"}),
}
"""Parts of `states` that processes share, by `hardware.sharding`; `hardware.cpu_offload` moves the same to the host."""
GATHERED_LAYERS = 2
"""Layers whose sharded weights are whole at once: the one that computes, and the next one."""
CACHED = ("prompt_unique", "completion", "continued")
"""Parts of a `Load` whose keys and values a cache holds."""
TRAINED_WIDTH = 4
"""Bytes of a trained number, its gradient and each of its two moments: float32 (`trainer.trl_trainer`)."""


def computing_width(config: RootConfig) -> int:
    """Return the bytes of a number that the model computes with, and of frozen weights."""
    dtype, on_gpu = config.model.dtype, config.hardware.device != "cpu"
    return (2 if on_gpu else 4) if dtype == "auto" else 4 if dtype == "float32" else 2


def generating_devices(config: RootConfig) -> int:
    """Count the devices that generate: those for rollouts alone, else those that train (of the main node)."""
    hardware = config.hardware
    nodes = 1 if config.engine.name == "vllm_server" else hardware.nodes
    return hardware.rollout_devices or hardware.processes * nodes


def training_processes(config: RlRunConfig) -> int:
    """Return the processes of all nodes, each with a device."""
    return config.hardware.processes * config.hardware.nodes


def trained_parameters(config: RlRunConfig, shape: Shape) -> int:
    """Return the parameters of the policy that the update changes."""
    lora = config.model.lora
    return shape.parameters if lora is None else shape.adapters * shape.lora_parameters(lora.r, lora.targets)


def states(config: RlRunConfig, shape: Shape) -> dict[str, float]:
    """Return the bytes per process of what the trainer holds of weights, critic, gradients and optimizer, by part."""
    lora, critic, width = config.model.lora, getattr(config.algo, "critic", None), computing_width(config)
    trained = trained_parameters(config, shape) * TRAINED_WIDTH
    taught_by_start = INITIAL in (config.algo.distill or {}).values()
    critic_parameters = shape.parameters if critic == "separate" else 0
    if critic == "adapter":
        rank, targets = (lora.r, lora.targets) if lora else (16, ("q_proj", "v_proj"))
        critic_parameters = shape.lora_parameters(rank, targets)
    sizes = {
        "weights": shape.parameters * (width if lora else TRAINED_WIDTH),
        # Full fine-tuning keeps a frozen copy of the whole model; without its adapter a model is its own reference.
        "reference": shape.parameters * width if not lora and (config.algo.beta > 0 or taught_by_start) else 0,
        "teachers": sum(teacher.parameters for teacher, _ in shape.teachers if teacher is not None) * width,
        "initial weights": shape.copies * shape.parameters * width,
        "adapter": trained if lora else 0,
        "optimizer": 2 * trained,
        # Weights, gradient and AdamW's two moments.
        "critic": 4 * TRAINED_WIDTH * critic_parameters,
        "gradients": trained,
    }
    shared, processes = SHARDED[config.hardware.sharding], training_processes(config)
    return {part: size / processes if part in shared else float(size) for part, size in sizes.items()}


def host_memory(config: RlRunConfig, shape: Shape) -> dict[str, float]:
    """Return the bytes per process of the parts that wait in host memory (`hardware.cpu_offload`)."""
    moved = SHARDED[config.hardware.sharding] if config.hardware.cpu_offload else ()
    return {part: size for part, size in states(config, shape).items() if part in moved}


def memory(config: RlRunConfig, shape: Shape, load: Load, longest: float, device: Device) -> dict[str, float]:
    """Return the bytes per training device by part: the trainer's, and the engine's if it has no own devices.

    A colocated vLLM that sleeps during the update is in here only where it needs more than the update's own parts do,
    which are then left out.

    Args:
        load: of a whole step.
        longest: tokens of the longest call.
    """
    # A pack holds at least the longest call, since a call is never cut; and no more than a process has to forward.
    budget = pack_tokens(config, shape, device)
    if 2 * longest > budget and load.trained > 2 * load.trained_unique:
        # Calls share most of what they have, and a pack of the budget would repeat it for every few of them.
        budget = pack_tokens(config, shape, device, wide=True)
    processes, width = training_processes(config), computing_width(config)
    pack = max(min(float(budget), load.trained_unique / processes), longest)
    offloaded = host_memory(config, shape)
    parts = {part: size for part, size in states(config, shape).items() if part not in offloaded}
    lora, checkpointed = config.model.lora, config.model.gradient_checkpointing
    dropped = lora.targets if lora is not None and lora.dropout else ()
    update = {
        "gradients": parts.pop("gradients", 0.0),
        "activations": pack * shape.activation_bytes(width, checkpointed, dropped),
        # Logits, their softmax and its gradient, in float32, of one chunk of scored positions.
        "logits": min(CHUNK, pack) * shape.vocab * 4.0 * 3,
    }
    if config.algo.distill_kl == "exact":
        # What teachers' heads see of all tokens of the step, and the head that teaches while its own is trained.
        hidden = max(((teacher or shape).hidden for teacher, _ in shape.teachers), default=0)
        update["teachers' states"] = load.completion / processes * hidden * width
        trained = lora is None and POLICY in (config.algo.distill or {}).values()
        if trained and config.algo.epochs * config.algo.minibatches > 1:
            update["teacher's head"] = float(shape.vocab * shape.hidden * TRAINED_WIDTH)
    if processes > 1 and "weights" in SHARDED[config.hardware.sharding]:
        outer = shape.parameters - shape.layer_parameters
        layers = shape.layer_parameters * min(GATHERED_LAYERS, shape.layers) / shape.layers
        update["gathered layers"] = (layers + outer) * width
    engine = {} if config.hardware.rollout_devices else engine_memory(config, shape, load, device)
    if sleeps(config):
        # Whichever phase is larger: a sleeping vLLM has given its memory back while the update runs.
        parts |= update if sum(update.values()) >= sum(engine.values()) else engine
    else:
        parts |= update | engine
    return {part: float(size) for part, size in parts.items() if size}


def sleeps(config: RlRunConfig) -> bool:
    """True where vLLM gives its memory back during the update."""
    return config.hardware.device != "cpu" and getattr(config.engine, "sleep", False) is not False


def engine_memory(config: RlRunConfig, shape: Shape, load: Load, device: Device) -> dict[str, float]:
    """Return bytes per generating device by part: with vLLM all weights on each, with `transformers` the trainer's.

    The embedded engine stores what later turns go on from (`PrefixStore`), up to `engine.batch_tokens` once more.

    vLLM fills the rest of its share of the memory with its KV cache, whatever the step asks for. A server that is given
    (`engine.urls`) has devices that nobody here knows.
    """
    engine, width = config.engine, computing_width(config)
    if engine.servers:
        return {}
    if (vllm := engine.as_vllm) is None:
        devices, most = generating_devices(config), float(engine.in_process.batch_tokens)
        tokens = {"KV cache": load.prompt_unique + load.completion, "stored turns": load.continued}
        parts = {part: min(held / devices, most) * shape.kv_bytes(width) for part, held in tokens.items()}
        # Projections side by side: in float32 with an adapter added, so one copy for each, else one for all.
        parts["fused weights"] = float(shape.layer_parameters * width * (shape.adapters if width == 4 else 1))
        return {"KV cache": parts["KV cache"]} if engine.in_process.loop == "hf" else parts
    # Whole on each device that generates: mmrl's vLLM uses no tensor parallelism.
    copy = float(shape.parameters * width)
    return {"KV cache": max(0.0, cache_room(vllm, device, copy)), "engine's copy": copy}


def cache_room(vllm: VllmConfig, device: Device, weights: float) -> float:
    """Return the bytes of vLLM's KV cache on a device."""
    return float(vllm.kv_cache_gb * GIB) if device.name == "cpu" else vllm.gpu_memory * device.memory - weights


def pack_tokens(config: RlRunConfig, shape: Shape, device: Device, wide: bool = False) -> int:
    """Return the tokens forwarded at once: `train.microbatch_tokens`, else by the trainer's rule from memory.

    Args:
        wide: of a pack that would otherwise repeat more than it adds.
    """
    if config.train.microbatch_tokens is not None:
        return config.train.microbatch_tokens
    # Imported here: it loads torch, and a refused plan should not wait for it.
    from mmrl.trainer.packing import CPU_SHARE, CPU_TOKENS, GPU_SHARE, GPU_TOKENS, LEAST_TOKENS, WIDER_ON_CPU

    # The same rule as `trainer.packing`, from the device's memory instead of what happens to be free here.
    cpu, width = device.name == "cpu", computing_width(config)
    share, limit = (CPU_SHARE, CPU_TOKENS) if cpu else (GPU_SHARE, GPU_TOKENS)
    layer = width * (12 * shape.hidden + 4 * shape.intermediate)
    checkpointed = layer + shape.layers * width * shape.hidden
    per_token = checkpointed if config.model.gradient_checkpointing else shape.layers * layer
    budget = max(LEAST_TOKENS, min(limit, int(share * device.memory / per_token) // LEAST_TOKENS * LEAST_TOKENS))
    return WIDER_ON_CPU * budget if wide and cpu else budget


def seconds(
    config: RlRunConfig, shape: Shape, loads: Mapping[str, Load], step: Load, device: Device
) -> dict[str, float]:
    """Return the expected seconds of one step by phase, on the devices that generate and those that train."""
    forward = 2.0 * shape.block_parameters * step.trained_unique + 2.0 * shape.vocab * shape.hidden * step.completion
    # A backward costs two forwards, one with frozen weights (no gradient of them); checkpointing forwards once more.
    times = (2 if config.model.lora else 3) + (1 if config.model.gradient_checkpointing else 0)
    passes = times * config.algo.epochs + (1 if config.algo.beta > 0 else 0)
    if getattr(config.algo, "critic", None) in ("separate", "adapter"):
        passes += times + 1
    reach = device.flops * device.utilisation * training_processes(config)
    generated = generation_seconds(shape, loads, device, computing_width(config), generating_devices(config))
    spent = {**generated, "update": passes * forward / reach}
    if shape.teachers:
        # Each distilled call is forwarded by the policy and by its teacher; for the exact divergence once more by this,
        # where another process scores it than updates on it.
        asked = 2 if config.algo.distill_kl == "exact" and training_processes(config) > 1 else 1
        spent["teachers"] = sum(
            (asked * _scoring(model or shape, loads, modules) + _scoring(shape, loads, modules)) / reach
            for model, modules in shape.teachers
        )
    return spent


def _scoring(shape: Shape, loads: Mapping[str, Load], modules: Sequence[str]) -> float:
    """Return the FLOPs of a model that scores the calls of some modules."""
    own = [loads[module] for module in modules]
    tokens, completion = sum(load.prompt_unique + load.completion for load in own), sum(load.completion for load in own)
    return 2.0 * shape.block_parameters * tokens + 2.0 * shape.vocab * shape.hidden * completion


def generation_seconds(
    shape: Shape, loads: Mapping[str, Load], device: Device, width: int, devices: int
) -> dict[str, float]:
    """Return the expected seconds of what `devices` generate, by phase.

    Each module's calls decode together, one token after the other: weights and caches are read once per token.

    Args:
        width: bytes of a number that the model computes with.
    """
    prompts = sum(load.prompt_unique for load in loads.values())
    reach = device.flops * PREFILL_UTILISATION.get(device.name, 0.5) * devices
    floor = DECODE_OVERHEAD_S.get(device.name, 0.0) * shape.layers
    decode = 0.0
    for load in loads.values():
        if not load.calls:
            continue
        turns = max(1.0, load.decode_steps / max(1.0, load.completion / load.calls))
        # Decoding is bound by memory: each step reads all weights once, and the caches of all rows that decode.
        rows = load.calls / turns / devices
        context = (load.prompt + load.completion) / load.calls
        traffic = shape.parameters * width + rows * context * shape.kv_bytes(width)
        arithmetic = 2.0 * (shape.parameters - shape.idle) * rows / device.flops
        decode += load.decode_steps * (max(traffic / device.bandwidth, arithmetic) + floor)
    return {"prefill": 2.0 * shape.block_parameters * prompts / reach, "decode": decode}


def evaluation_seconds(
    config: RootConfig, shape: Shape, rollout: Mapping[str, Load], rollouts: int, device: Device, devices: int
) -> float:
    """Return the expected seconds of an evaluation's `rollouts` on `devices`; 0 where an outside server answers.

    Args:
        rollout: of one of them, by module.

    Raises:
        ConfigError: the weights leave no room for the cache of one call.
    """
    engine, width = config.engine, computing_width(config)
    if engine.servers or engine.name == "openai":
        return 0.0
    copy, vllm = float(shape.parameters * width), engine.as_vllm
    if vllm is not None and any("tensor-parallel-size" in word for word in vllm.args):
        # All devices are counted as a single one.
        fields = {name: devices * getattr(device, name) for name in ("memory", "bandwidth", "flops")}
        device, devices = replace(device, **fields), 1
    spent = 0.0
    for load in rollout.values():
        if not load.calls:
            continue
        longest = (load.prompt + load.completion) / load.calls
        if vllm is None:
            room = max(longest, engine.in_process.batch_tokens)
        else:
            room = cache_room(vllm, device, copy) / shape.kv_bytes(width)
        if room < longest:
            key = "kv_cache_gb" if device.name == "cpu" else "gpu_memory"
            raise ConfigError(
                f"engine.{key}: got {getattr(engine, key):g}, which leaves no room for a call beside weights of "
                f"{copy / GIB:.0f} GiB; raise it, or spread them (\"engine.args=['--tensor-parallel-size=8']\")"
            )
        # What does not fit in the KV cache waits, and the weights are read again for it.
        rounds = max(1, math.ceil(rollouts / devices * longest / room))
        all_rows = replace(load.scaled(rollouts), decode_steps=load.decode_steps * rounds)
        spent += sum(generation_seconds(shape, {"": all_rows}, device, width, devices).values())
    return spent
