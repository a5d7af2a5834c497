"""What a device can do: arithmetic, memory traffic, memory. GPUs from a table; this machine's CPU is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from mmrl.errors import ConfigError, unknown

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
    found = []
    for index in range(torch.cuda.device_count()):
        properties, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append(Gpu(name=properties.name, memory=total, free=free, capability=capability))
    return found


def nearest_gpu(name: str) -> Device:
    """What is assumed of a GPU by the name that CUDA gives it: its own row of the table, or that of an H100."""
    return next((device for key, device in GPUS.items() if key in name.lower()), GPUS["h100"])


SLOW_CPU = Device(name="cpu", flops=5e9, bandwidth=2e9, memory=GIB, utilisation=0.35)
"""Slower than a core of any machine in use: what is short on it need not be measured."""


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
