"""`mmrl --version`: versions and devices."""

from __future__ import annotations

import platform

from mmrl.store.machine import cpu_name, usable_cores, versions


def versions_and_devices() -> list[tuple[str, str]]:
    """Return the rows of `mmrl --version`: Python, the packages that mmrl uses, and the devices."""
    rows = [("python", platform.python_version()), *(pair for pair in versions().items() if pair[0] != "mmrl")]
    try:
        import torch

        rows.append(("CUDA of torch", torch.version.cuda or "none: a build for CPUs"))
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            rows.append((f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"))
    # A broken installation may raise anything on import, and this is where people look first.
    except Exception as error:
        rows.append(("torch cannot be used", f"{type(error).__name__}: {error}"))
    rows.append(("CPU", f"{cpu_name()}, {usable_cores()} usable cores"))
    return rows
