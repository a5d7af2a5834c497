"""Peak memory of an update: `python -m scripts.bench.memory [shape=is,search] [model=1M] [micro=4]`.

Each side runs two updates in a process of its own, and what counts is how far its resident memory rises above what it
held before the first (so imports, weights and the trainer's own objects do not). The gradient's norm must be the same
on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from scripts.bench.common import MODELS, Bar, finish, make_model, options
from scripts.bench.sides import Ours, Plain, Trl
from scripts.bench.update_shapes import SHAPES, Dice, calls

BAR = 0.7
"""Most that mmrl may take, as a share of TRL's."""
SIDES = ("trl", "plain", "mmrl")
MIB = 2**20


class Peak:
    """Highest resident memory of this process inside the `with`, by looking every millisecond; bytes."""

    def __enter__(self) -> Peak:
        self.before = self.bytes = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, resident())

    @property
    def growth(self) -> int:
        """Above what was held before."""
        return self.bytes - self.before


def resident() -> int:
    """Resident bytes of this process."""
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # no /proc: its highest value so far, in KiB (bytes on a Mac)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * resource.getpagesize()


def one_side(side: str, shape: str, size: str, micro: int, quick: bool) -> dict[str, float]:
    """Two updates of one side in this process."""
    rows = SHAPES[shape](Dice(MODELS[size][-1], scale=32 if quick else 1))
    folder = Path(tempfile.mkdtemp())
    made: Ours | Plain | Trl
    if side == "mmrl":
        made = Ours(make_model(size), calls(rows), folder)
    elif side == "trl":
        made = Trl(make_model(size), rows, micro, folder)
    else:
        made = Plain(make_model(size), rows, micro)
    with Peak() as peak:
        norm = float(torch.stack([gradient.norm() for gradient in made.gradients().values()]).norm())
        made.run()
    return {
        "bytes": float(peak.growth),
        "gradient": norm,
        "padded": len(rows) * (max(len(r.prompt) for r in rows) + max(len(r.completion) for r in rows)),
        "real": sum(len(row.prompt) + len(row.completion) for row in rows),
        "unique": made.tokens if isinstance(made, Ours) else 0,
    }


def apart(side: str, shape: str, given: dict[str, str]) -> dict[str, float]:
    """`one_side` in a process of its own.

    Raises:
        SystemExit: the process failed.
    """
    asked = [f"{name}={given[name]}" for name in ("model", "micro", "threads", "quick")]
    command = [sys.executable, "-m", "scripts.bench.memory", f"side={side}", f"shape={shape}", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"memory: {side} on {shape} failed\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def bars_of(shape: str, found: dict[str, dict[str, float]]) -> list[Bar]:
    """mmrl's share of the others' memory.

    Raises:
        SystemExit: the sides' gradients differ.
    """
    norms = [one["gradient"] for one in found.values()]
    if max(norms) - min(norms) > 1e-3 * max(norms):
        raise SystemExit(f"{shape}: the sides' gradients differ: { {n: v['gradient'] for n, v in found.items()} }")
    ours = found["mmrl"]
    tokens = {name: int(ours[name]) for name in ("padded", "real", "unique")}
    return [
        Bar(
            what=f"memory: mmrl / {words}, {shape}",
            value=ours["bytes"] / max(found[name]["bytes"], 1.0),
            bar=bar,
            at_most=True,
            **tokens,
        )
        for name, words, bar in (("trl", "TRL", BAR), ("plain", "plain padding", None))
        if name in found
    ]


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    given = options(
        arguments,
        {"shape": "is,search", "model": "1M", "micro": "4", "sides": ",".join(SIDES), "side": "", "quick": ""},
    )
    shapes = given["shape"].split(",")
    if set(shapes) - set(SHAPES):
        raise SystemExit(f"shape: got {given['shape']}, expected some of {','.join(SHAPES)}")
    sides = given["sides"].split(",")
    if "mmrl" not in sides or set(sides) - set(SIDES):
        raise SystemExit(f"sides: got {given['sides']}, expected mmrl and some of {','.join(SIDES)}")
    if given["side"]:
        size = "test" if given["quick"] else given["model"]
        print(json.dumps(one_side(given["side"], shapes[0], size, int(given["micro"]), bool(given["quick"]))))
        return 0
    bars, lines = [], {}
    for shape in shapes:
        lines[shape] = {side: apart(side, shape, given) for side in sides}
        bars += bars_of(shape, lines[shape])
        print(
            f"{shape}: " + ", ".join(f"{s} {one['bytes'] / MIB:.0f} MiB" for s, one in lines[shape].items()), flush=True
        )
    return finish("memory", bars, given["out"], model=given["model"], micro=int(given["micro"]), lines=lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
