"""Inputs chosen by coverage: atheris feeds the random source of the targets, and so learns which choices lead where."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from random import Random

INSTRUMENTED = (
    "mmrl.report.forest",
    "mmrl.report.journal",
    "mmrl.tasks.agents.tags",
    "mmrl.tasks.agents.judge",
    "mmrl.tasks.agents.rewards",
    "mmrl.tasks.data.layouts",
    "mmrl.tasks.data.rows",
    "mmrl.retrieval.protocols",
    "mmrl.tasks.metrics",
)


class FedRandom(Random):
    """A random source whose bits are given; zeros once they are used up."""

    def __init__(self, data: bytes):
        super().__init__(0)
        self._bits, self._left = int.from_bytes(data, "little"), 8 * len(data)

    def getrandbits(self, k: int, /) -> int:
        """The next `k` bits."""
        bits = self._bits & ((1 << k) - 1)
        self._bits >>= k
        return bits

    def random(self) -> float:
        """The next 53 bits, as a fraction."""
        return float(self.getrandbits(53) / (1 << 53))


def guide(chosen: Sequence[str], inputs: int, seed: int) -> int:
    """Let atheris run `inputs` inputs on the chosen targets, all in one; it ends the process at the first finding."""
    import atheris  # type: ignore[import-not-found,unused-ignore]

    with atheris.instrument_imports(include=list(INSTRUMENTED), enable_loader_override=False):
        for name in INSTRUMENTED:
            importlib.import_module(name)
    from scripts.fuzz.__main__ import bounded
    from scripts.fuzz.targets import TARGETS

    names = list(chosen)

    def one(data: bytes) -> None:
        noise = FedRandom(data[1:])
        target = TARGETS[names[(data[0] if data else 0) % len(names)]]
        made = target.make(noise)
        problem = bounded(target, made)
        if problem is not None:
            raise AssertionError(f"{problem}\n{made!r}"[:2000])

    atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=512", "-print_final_stats=1"], one)
    atheris.Fuzz()
    return 0
