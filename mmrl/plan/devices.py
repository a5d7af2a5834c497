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


def measured_cpu(threads: int) -> Device:
    """This machine's CPU: a float32 matrix product and a copy, best of several."""
    import torch

    # Shapes that fit no cache, or caches would be measured; the best of several, since other work only slows down.
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.randn(512, 512), torch.randn(512, 512)
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
