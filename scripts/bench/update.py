"""The update against TRL: `python -m scripts.bench.update [shape=is,fof|all] [threads=1] [repeats=3] [micro=4,8,32]`.

All sides train on the same rollouts from the same random weights: TRL's GRPOTrainer through `rollout_func` (its best of
micro-batches of 4, 8 and 32 rows), a plain padded loop with `logits_to_keep` (likewise), and mmrl. One update is
everything between given rollouts and changed weights: packing or padding, forward, backward, clipping, AdamW. Before
anything is timed, log-probabilities must agree to 1e-4 and gradients to a cosine of 0.9999 on two groups of each shape.
Runs alternate (A B C A B C ...); the best of each counts. With one thread the clock is CPU time (see `rollout`).
`matmul=torch,onednn` runs mmrl's packed side with each of these as `model.matmul`; the bars hold for the last, but for
that against mmrl's own padded rows, which run with the first.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from scripts.bench.common import MODELS, Bar, clock, finish, make_model, once, options
from scripts.bench.sides import Ours, Plain, Trl, check
from scripts.bench.update_shapes import GROUP, SHAPES, Dice, Row, calls

TRL_BARS = {"is": 7.0, "fof_converged": 7.0, "long": 1.0, "demonstrations": 7.0}
PLAIN_BARS = {"is": 4.0, "long": 1.0, "demonstrations": 4.0}
TRL_BAR, PLAIN_BAR = 3.0, 1.5
CHECKED = 2
"""Groups of a shape on which the sides are compared."""
MICRO = (4, 8, 32)
KINDS = ("trl", "plain")


Seconds = dict[str, list[tuple[float, float]]]
"""By side, (CPU seconds, wall-clock seconds) of each run."""


@dataclass(frozen=True)
class Sides:
    """The sides of one shape: mmrl packed (with each `matmul`) and padded, and both peers at each micro-batch."""

    rows: list[Row]
    size: str
    budget: int | None
    micro: list[int]
    folder: Path
    matmul: tuple[str, ...] = ("torch",)
    """`model.matmul` of mmrl's packed side; the padded one takes the first."""

    def makers(self) -> dict[str, Callable[[], Ours | Trl | Plain]]:
        """Name -> makes it; peers by their micro-batches."""
        batch = calls(self.rows)

        def ours(packing: str, matmul: str) -> Ours:
            return Ours(make_model(self.size, matmul), batch, self.folder / packing, packing, self.budget)

        def peer(kind: str, many: int) -> Trl | Plain:
            model = make_model(self.size)
            return (
                Plain(model, self.rows, many) if kind == "plain" else Trl(model, self.rows, many, self.folder / "trl")
            )

        peers = {f"{kind}{many}": partial(peer, kind, many) for kind in KINDS for many in self.micro}
        packed = {f"ours {matmul}": partial(ours, "auto", matmul) for matmul in self.matmul}
        return {**packed, "padded": partial(ours, "padded", self.matmul[0]), **peers}

    def agree(self) -> dict[str, float]:
        """What `check` finds on these rollouts; it costs each side an update."""
        made, many = self.makers(), self.micro[0]
        peers = (f"plain{many}", f"trl{many}")
        found = [check(*(cast("Any", made[name]()) for name in (f"ours {own}", *peers))) for own in self.matmul]
        worst = {key: min(one[key] for one in found) for key in found[0]}
        return worst | {"max_logprob_difference": max(one["max_logprob_difference"] for one in found)}

    def seconds(self, repeats: int, counts: int) -> tuple[Seconds, dict[str, str], int]:
        """Runs of all sides in turn, one side in memory at a time.

        Returns:
            Seconds by side, of a peer with its best micro-batches; which those are; mmrl's tokens.
        """
        found: Seconds = defaultdict(list)
        tokens = 0
        for _ in range(repeats):
            for name, make in self.makers().items():
                side = make()
                found[name].append(once(side.run))
                tokens = side.tokens if isinstance(side, Ours) and name != "padded" else tokens
                del side
                gc.collect()
        peers = {kind: [name for name in found if name.startswith(kind)] for kind in KINDS}
        best = {kind: min(names, key=lambda name: min(found[name])[counts]) for kind, names in peers.items()}
        for kind, name in best.items():
            found[kind] = found[name]
        return {name: runs for name, runs in found.items() if name in KINDS or not name.startswith(KINDS)}, best, tokens


def measure(
    name: str,
    size: str,
    threads: int,
    repeats: int,
    budget: int | None,
    micro: list[int],
    groups: int | None,
    matmul: tuple[str, ...] = ("torch",),
) -> dict[str, Any]:
    """One line of the table, on the first `groups` groups of the shape (None: all)."""
    rows = SHAPES[name](Dice(MODELS[size].vocab, scale=32 if size == "test" else 1))
    rows = rows[: groups * GROUP] if groups else rows
    folder = Path(tempfile.mkdtemp())
    micro, counts = [many for many in micro if many <= len(rows)], clock(threads)
    # A large model is checked on a group less: the check costs each side an update of what it is made on.
    sides = Sides(rows, size, budget, micro, folder, matmul)
    agreement = replace(sides, rows=rows[: (CHECKED - (groups is not None)) * GROUP]).agree()
    gc.collect()
    seconds, best, tokens = sides.seconds(repeats, counts)
    counted = {key: sorted(one[counts] for one in several) for key, several in seconds.items()}
    least = {key: several[0] for key, several in counted.items()}
    widths = max(len(row.prompt) for row in rows) + max(len(row.completion) for row in rows)
    return {
        "shape": name,
        "rows": len(rows),
        "padded_tokens": widths * len(rows),
        "real_tokens": sum(len(row.prompt) + len(row.completion) for row in rows),
        "unique_tokens": tokens,
        "seconds": least,
        "median": {key: several[len(several) // 2] for key, several in counted.items()},
        "wall_clock": {key: min(wall for _, wall in several) for key, several in seconds.items()},
        "clock": ("cpu", "wall")[counts],
        "best_micro_batches": best,
        "ratios": {
            own: {peer: least[peer] / least[f"ours {own}"] for peer in ("trl", "plain", "padded")} for own in matmul
        },
        **agreement,
    }


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    known = {
        "shape": "all",
        "repeats": "3",
        "model": "1M",
        "budget": "",
        "micro": ",".join(map(str, MICRO)),
        "groups": "",
        "matmul": "torch",
        "quick": "",
    }
    given = options(arguments, known)
    names = list(SHAPES) if given["shape"] == "all" else given["shape"].split(",")
    if set(names) - set(SHAPES):
        raise SystemExit(f"shape: got {given['shape']}, expected all or some of {','.join(SHAPES)}")
    threads, size = int(given["threads"]), "test" if given["quick"] else given["model"]
    micro = [int(many) for many in given["micro"].split(",")]
    budget, groups = (int(given[name]) if given[name] else None for name in ("budget", "groups"))
    print(f"{size}, {threads} threads, load {os.getloadavg()}")
    matmul = tuple(given["matmul"].split(","))
    if set(matmul) - {"torch", "onednn"}:
        raise SystemExit(f"matmul: got {given['matmul']}, expected torch, onednn or both")
    print(
        f"{'shape':14}{'padded':>8}{'real':>8}{'unique':>8}{'TRL s':>8}{'plain s':>9}{'rows s':>8}"
        f"{'matmul':>8}{'ours s':>8}{'TRL/ours':>10}{'plain/ours':>12}{'rows/ours':>11}"
    )
    lines = []
    for name in names:
        line = measure(name, size, threads, int(given["repeats"]), budget, micro, groups, matmul)
        lines.append(line)
        s = line["seconds"]
        for own, ratios in line["ratios"].items():
            print(
                f"{name:14}{line['padded_tokens']:8}{line['real_tokens']:8}{line['unique_tokens']:8}{s['trl']:8.2f}"
                f"{s['plain']:9.2f}{s['padded']:8.2f}{own:>8}{s[f'ours {own}']:8.2f}{ratios['trl']:10.2f}"
                f"{ratios['plain']:12.2f}{ratios['padded']:11.2f}",
                flush=True,
            )
    bars = [
        Bar(
            what=f"update: {words} / mmrl{f' ({own})' if len(matmul) > 1 else ''}, {line['shape']}",
            value=ratios[against],
            bar=bar if own == (matmul[0] if against == "padded" else matmul[-1]) else None,
            padded=line["padded_tokens"],
            real=line["real_tokens"],
            unique=line["unique_tokens"],
        )
        for line in lines
        for own, ratios in line["ratios"].items()
        for against, words, bar in (
            ("trl", "TRL", TRL_BARS.get(line["shape"], TRL_BAR)),
            ("plain", "plain padding", PLAIN_BARS.get(line["shape"], PLAIN_BAR)),
            ("padded", "sorted padding", 1.0),
        )
    ]
    return finish("update", bars, given["out"], model=size, lines=lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
