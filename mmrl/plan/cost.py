"""Memory by part and time by phase of one step: parameters, FLOPs and bytes over what a device can do.

GPUs are rows of a table; this machine's CPU is measured.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mmrl.config import RootConfig, TrainCommandConfig
from mmrl.config.engines import VllmConfig
from mmrl.errors import ConfigError, unknown
from mmrl.plan.shapes import Shape
from mmrl.plan.workload import Load

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device."""

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
    "h200": Device(name="h200", flops=790e12, bandwidth=4.3e12, memory=139 * GIB, utilisation=0.45),
    "h100": Device(name="h100", flops=790e12, bandwidth=3.0e12, memory=79 * GIB, utilisation=0.45),
    "a100": Device(name="a100", flops=270e12, bandwidth=1.8e12, memory=79 * GIB, utilisation=0.45),
}
"""bf16 products and traffic that are reached in practice, not the data sheet's peaks. Utilisation is an assumption."""
NAMES = ("cpu", *GPUS)


def device(name: str, threads: int = 1) -> Device:
    """The device called `name`; `cpu` is measured (a quarter of a second).

    Raises:
        ConfigError: an unknown name.
    """
    if name == "cpu":
        return measured_cpu(threads)
    if name not in GPUS:
        raise ConfigError(unknown("device", name, NAMES))
    return GPUS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of this machine."""

    name: str
    memory: int
    """Bytes."""
    free: int
    """Bytes that nothing holds now."""
    capability: str
    """CUDA compute capability."""


def gpus() -> list[Gpu]:
    """The GPUs that CUDA shows this process, in its order."""
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
    """What a GPU of this machine reaches, with its own memory.

    Raises:
        ConfigError: it is none of the table; a slice of one (MIG) has a share that is not known.
    """
    # Words: a GH200 is no H200.
    words = set(re.findall(r"\w+", gpu.name.lower()))
    row = next((device for key, device in GPUS.items() if key in words and "mig" not in words), None)
    if row is None:
        raise ConfigError(
            f"device: the speed of this machine's GPU, {gpu.name}, is not known; expected one of {', '.join(NAMES)}"
        )
    return replace(row, memory=gpu.memory)


def measured_cpu(threads: int) -> Device:
    """This machine's CPU: a float32 matrix product and a copy, best of several."""
    import torch

    # Shapes that fit no cache, or caches would be measured; the best of several, since other work only slows down.
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    # A generator of its own: a run that is about to begin keeps the state of the global one.
    draws = torch.Generator()
    try:
        left, right = (torch.randn(512, 512, generator=draws) for _ in range(2))
        block = torch.zeros(8_000_000)
        product = min(_seconds(lambda: left @ right) for _ in range(20))
        copy = min(_seconds(block.clone) for _ in range(8))
    finally:
        torch.set_num_threads(before)
    return Device(
        name="cpu",
        flops=2 * 512**3 / product,
        bandwidth=2 * block.nbytes / copy,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        utilisation=0.35,
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


CHUNK = 1024
"""Scored positions whose logits are held at once."""
DECODE_OVERHEAD_S = {"cpu": 1.1e-3}
"""Seconds per layer and decode step that no arithmetic accounts for (kernel starts, Python); measured on the CPU."""
PREFILL_UTILISATION = {"cpu": 0.2}
"""Share of the device's FLOP/s in the prefill; measured on the CPU with the tiny model, 0.5 assumed elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """What the config says about weights."""

    width: int
    """Bytes of a number that the model computes with, and of frozen weights."""
    trained_parameters: int
    weights_width: int
    """Bytes of a number of the policy's weights: trained ones are float32 (`trainer.trl_trainer`)."""
    copies: int
    """Frozen copies of the whole model (the reference of full fine-tuning)."""
    critic: str | None
    """`separate`, `adapter`, `head`, or None."""
    processes: int
    """Of all nodes."""
    weights_over: int
    """Processes that share the trained weights (FSDP2, ZeRO 3)."""
    states_over: int
    """Processes that share gradients and optimizer (FSDP2, ZeRO)."""
    others_over: int
    """Processes that share the reference and the critic (FSDP2)."""
    generating: int
    """Devices that generate: those for rollouts alone, else those that train (of the main node, with one server)."""
    offloaded: frozenset[str]
    """Parts of `memory` that wait in host memory (`hardware.cpu_offload`)."""


OFFLOADED = {
    "fsdp2": frozenset({"weights", "reference", "adapter", "gradients", "optimizer", "critic"}),
    "zero2": frozenset({"gradients", "optimizer"}),
    "zero3": frozenset({"weights", "adapter", "gradients", "optimizer"}),
}
"""What `hardware.cpu_offload` moves under each way of sharding (FSDP2's policy; ZeRO's optimizer and parameters)."""
GATHERED_LAYERS = 2
"""Layers whose sharded weights are whole at once: the one that computes, and the next one."""


TRAINED_WIDTH = 4
"""Bytes of a trained number, its gradient and each of its two moments: float32."""


def computing_width(config: RootConfig) -> int:
    """Bytes of a number that the model computes with."""
    dtype, on_gpu = config.model.dtype, config.hardware.device != "cpu"
    return (2 if on_gpu else 4) if dtype == "auto" else 4 if dtype == "float32" else 2


def generating_devices(config: RootConfig) -> int:
    """Devices that generate: those for rollouts alone, else those that train (of the main node, with one server)."""
    hardware = config.hardware
    nodes = 1 if config.engine.name == "vllm_server" else hardware.nodes
    return hardware.rollout_devices or hardware.processes * nodes


def weight_layout(config: TrainCommandConfig, shape: Shape) -> WeightLayout:
    """Read a config."""
    lora, width = config.model.lora, computing_width(config)
    # Frozen weights stay in the computing dtype; trained ones are float32, whatever computes with them.
    parameters = shape.parameters if lora is None else shape.lora_parameters(lora.r, lora.targets)
    processes = config.hardware.processes * config.hardware.nodes
    hardware, sharding = config.hardware, config.hardware.sharding
    return WeightLayout(
        width=width,
        trained_parameters=parameters,
        weights_width=TRAINED_WIDTH if lora is None else width,
        copies=1 if lora is None and config.algo.beta > 0 else 0,
        critic=getattr(config.algo, "critic", None),
        processes=processes,
        weights_over=processes if sharding in ("fsdp2", "zero3") else 1,
        states_over=processes if sharding != "none" else 1,
        others_over=processes if sharding == "fsdp2" else 1,
        generating=generating_devices(config),
        offloaded=OFFLOADED.get(sharding, frozenset()) if hardware.cpu_offload else frozenset(),
    )


def memory(config: TrainCommandConfig, shape: Shape, load: Load, longest: float, device: Device) -> dict[str, float]:
    """Bytes per training device by part, as the trainer holds them, and the engine where it has no devices of its own.

    A colocated vLLM that sleeps during the update is in here only where it needs more than the update's own parts do,
    which are then left out.

    Args:
        load: of a whole step.
        longest: tokens of the longest call.
    """
    made = weight_layout(config, shape)
    # A pack holds at least the longest call, since a call is never cut; and no more than a process has to forward.
    budget = pack_tokens(config, shape, device, made)
    if 2 * longest > budget and load.trained > 2 * load.trained_unique:
        # Calls share most of what they have, and a pack of the budget would repeat it for every few of them.
        budget = pack_tokens(config, shape, device, made, wide=True)
    pack = max(min(float(budget), load.trained_unique / made.processes), longest)
    trained = made.trained_parameters * TRAINED_WIDTH
    parts = {part: size for part, size in _states(config, shape, made).items() if part not in made.offloaded}
    lora, checkpointed = config.model.lora, config.model.gradient_checkpointing
    dropped = lora.targets if lora is not None and lora.dropout else ()
    update = {
        "gradients": 0.0 if "gradients" in made.offloaded else trained / made.states_over,
        "activations": pack * shape.activation_bytes(made.width, checkpointed, dropped),
        # Logits, their softmax and its gradient, in float32, of one chunk of scored positions.
        "logits": min(CHUNK, pack) * shape.vocab * 4.0 * 3,
    }
    if made.weights_over > 1:
        outer = shape.parameters - shape.block_parameters
        layers = shape.block_parameters * min(GATHERED_LAYERS, shape.layers) / shape.layers
        update["gathered layers"] = (layers + outer) * made.width
    engine = {} if config.hardware.rollout_devices else engine_memory(config, shape, load, device)
    if sleeps(config):
        # Whichever phase is larger: a sleeping vLLM has given its memory back while the update runs.
        parts |= update if sum(update.values()) >= sum(engine.values()) else engine
    else:
        parts |= update | engine
    return {part: float(size) for part, size in parts.items() if size}


def host_memory(config: TrainCommandConfig, shape: Shape) -> float:
    """Bytes of host memory that offloaded parts of all processes of one machine take."""
    made = weight_layout(config, shape)
    gradients = made.trained_parameters * TRAINED_WIDTH / made.states_over
    parts = _states(config, shape, made) | {"gradients": gradients}
    return config.hardware.processes * sum(size for part, size in parts.items() if part in made.offloaded)


def sleeps(config: TrainCommandConfig) -> bool:
    """Whether vLLM gives its memory back during the update."""
    return config.hardware.device != "cpu" and getattr(config.engine, "sleep", False) is not False


def _states(config: TrainCommandConfig, shape: Shape, made: WeightLayout) -> dict[str, float]:
    """Bytes per device of what stays between steps."""
    trained = made.trained_parameters * TRAINED_WIDTH
    return {
        "weights": shape.parameters * made.weights_width / made.weights_over,
        "reference": made.copies * shape.parameters * made.width / made.others_over,
        "adapter": trained / made.weights_over if config.model.lora else 0.0,
        "optimizer": 2 * trained / made.states_over,
        "critic": _critic_bytes(config, shape, made) / made.others_over,
    }


def engine_memory(config: TrainCommandConfig, shape: Shape, load: Load, device: Device) -> dict[str, float]:
    """Bytes per generating device by part: vLLM has the whole weights on each of them, `transformers` the trainer's.

    vLLM fills the rest of its share of the memory with its KV cache, whatever the step asks for. A server that is given
    (`engine.urls`) has devices that nobody here knows.
    """
    engine = config.engine
    if engine.servers:
        return {}
    made = weight_layout(config, shape)
    if (vllm := engine.as_vllm) is None:
        held = min((load.prompt_unique + load.completion) / made.generating, float(engine.in_process.batch_tokens))
        return {"KV cache": held * shape.kv_bytes(made.width)}
    # Whole on each device that generates: mmrl's vLLM uses no tensor parallelism.
    copy = float(shape.parameters * made.width)
    return {"KV cache": max(0.0, cache_room(vllm, device, copy)), "engine's copy": copy}


def cache_room(vllm: VllmConfig, device: Device, weights: float) -> float:
    """Bytes of vLLM's KV cache on a device."""
    return float(vllm.kv_cache_gb * GIB) if device.name == "cpu" else vllm.gpu_memory * device.memory - weights


def pack_tokens(
    config: TrainCommandConfig, shape: Shape, device: Device, made: WeightLayout, wide: bool = False
) -> int:
    """Tokens forwarded at once: as typed, else by the trainer's rule from the device's memory.

    Args:
        wide: of a pack that would otherwise repeat more than it adds.
    """
    if config.train.microbatch_tokens is not None:
        return config.train.microbatch_tokens
    # Here: it loads torch, and a plan that is refused need not wait for it.
    from mmrl.trainer.packing import CPU_SHARE, CPU_TOKENS, GPU_SHARE, GPU_TOKENS, LEAST_TOKENS, WIDER_ON_CPU

    # The same rule as `trainer.packing`, from the device's memory instead of what happens to be free here.
    cpu = device.name == "cpu"
    memory, most = (CPU_SHARE, CPU_TOKENS) if cpu else (GPU_SHARE, GPU_TOKENS)
    layer = made.width * (12 * shape.hidden + 4 * shape.intermediate)
    checkpointed = layer + shape.layers * made.width * shape.hidden
    per_token = checkpointed if config.model.gradient_checkpointing else shape.layers * layer
    budget = max(LEAST_TOKENS, min(most, int(memory * device.memory / per_token) // LEAST_TOKENS * LEAST_TOKENS))
    return WIDER_ON_CPU * budget if wide and cpu else budget


def _critic_bytes(config: TrainCommandConfig, shape: Shape, made: WeightLayout) -> float:
    if made.critic == "separate":
        # Weights, gradient and AdamW's two moments.
        return 4.0 * TRAINED_WIDTH * shape.parameters
    if made.critic == "adapter":
        rank = config.model.lora.r if config.model.lora else 16
        targets = config.model.lora.targets if config.model.lora else ("q_proj", "v_proj")
        return 16.0 * shape.lora_parameters(rank, targets)
    return 0.0


def seconds(
    config: TrainCommandConfig, shape: Shape, loads: Mapping[str, Load], step: Load, device: Device
) -> dict[str, float]:
    """Expected seconds of one step by phase, on the devices that generate and those that train."""
    made = weight_layout(config, shape)
    forward = 2.0 * shape.block_parameters * step.trained_unique + 2.0 * shape.vocab * shape.hidden * step.completion
    # A backward costs two forwards, one with frozen weights (no gradient of them); checkpointing forwards once more.
    times = (2 if config.model.lora else 3) + (1 if config.model.gradient_checkpointing else 0)
    passes = times * config.algo.epochs + (1 if config.algo.beta > 0 else 0)
    passes += {"separate": times + 1, "adapter": times + 1, "head": 0}.get(made.critic or "", 0)
    reach = device.flops * device.utilisation * made.processes
    generated = generation_seconds(shape, loads, device, made.width, made.generating)
    return {**generated, "update": passes * forward / reach}


def generation_seconds(
    shape: Shape, loads: Mapping[str, Load], device: Device, width: int, devices: int
) -> dict[str, float]:
    """Expected seconds of what `devices` generate, by phase.

    Args:
        width: bytes of a number that the model computes with.
    """
    prompts = sum(load.prompt_unique for load in loads.values())
    reach = device.flops * PREFILL_UTILISATION.get(device.name, 0.5) * devices
    decode = _decode(shape, loads, device, width, devices)
    return {"prefill": 2.0 * shape.block_parameters * prompts / reach, "decode": decode}


def _decode(shape: Shape, loads: Mapping[str, Load], device: Device, width: int, devices: int) -> float:
    """Each module's calls together, one token after the other: weights and caches are read once per step."""
    spent = 0.0
    for load in loads.values():
        if not load.calls:
            continue
        turns = max(1.0, load.decode_steps / max(1.0, load.completion / load.calls))
        # Decoding is bound by memory: each step reads all weights once, and the caches of all rows that decode.
        rows = load.calls / turns / devices
        context = (load.prompt + load.completion) / load.calls
        traffic = shape.parameters * width + rows * context * shape.kv_bytes(width)
        arithmetic = 2.0 * shape.parameters * rows / device.flops
        floor = DECODE_OVERHEAD_S.get(device.name, 0.0) * shape.layers
        spent += load.decode_steps * (max(traffic / device.bandwidth, arithmetic) + floor)
    return spent
