"""The update against TRL: `python -m scripts.bench.update [shape=is,fof|all] [threads=1] [repeats=3] [micro=4,8,32]`.

All sides train on the same rollouts from the same random weights: TRL's GRPOTrainer through `rollout_func` (its best of
micro-batches of 4, 8 and 32 rows), a plain padded loop with `logits_to_keep` (likewise), and mmrl. One update is
everything between given rollouts and changed weights: packing or padding, forward, backward, clipping, AdamW. Before
anything is timed, log-probabilities must agree to 1e-4 and gradients to a cosine of 0.9999 on two groups of each shape.
Runs alternate (A B C A B C ...); the best of each counts. With one thread the clock is CPU time (see `rollout`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.common import MODELS, Bar, clock, finish, make_model, once, options
from scripts.bench.sides import Ours, Plain, Trl, check
from scripts.bench.update_shapes import GROUP, SHAPES, Dice, Row, calls

TRL_BARS = {"is": 7.0, "fof_converged": 7.0, "long": 1.0}
PLAIN_BARS = {"is": 4.0, "long": 1.0}
TRL_BAR, PLAIN_BAR = 3.0, 1.5
CHECKED = 2
"""Groups of a shape on which the sides are compared."""
MICRO = (4, 8, 32)
KINDS = ("trl", "plain")


def agree(rows: list[Row], size: str, micro: int, budget: int | None, folder: Path) -> dict[str, float]:
    """What `check` finds on some of the rollouts, at their full lengths; it costs each side an update."""
    ours = Ours(make_model(size), calls(rows), folder / "check", "auto", budget)
    return check(ours, Plain(make_model(size), rows, micro), Trl(make_model(size), rows, micro, folder / "trl"))


def measure(
    name: str, size: str, threads: int, repeats: int, budget: int | None, micro: list[int], groups: int | None
) -> dict[str, Any]:
    """One line of the table, on the first `groups` groups of the shape (None: all)."""
    rows = SHAPES[name](Dice(MODELS[size][-1], scale=32 if size == "test" else 1))
    rows = rows[: groups * GROUP] if groups else rows
    batch = calls(rows)
    folder = Path(tempfile.mkdtemp())
    micro = [many for many in micro if many <= len(rows)]
    # A large model is checked on a group less: the check costs each side an update of what it is made on.
    agreement = agree(rows[: (CHECKED - (groups is not None)) * GROUP], size, micro[0], budget, folder)
    ours, sorted_rows = (Ours(make_model(size), batch, folder / p, p, budget) for p in ("auto", "padded"))
    peers = {f"trl{many}": Trl(make_model(size), rows, many, folder / "trl") for many in micro}
    plains = {f"plain{many}": Plain(make_model(size), rows, many) for many in micro}
    counts = clock(threads)
    everyone: dict[str, Any] = {**peers, **plains}
    tuning = {key: once(side.run)[counts] for key, side in everyone.items()} if len(micro) > 1 else {}
    best = {
        kind: min((key for key in everyone if key.startswith(kind)), key=lambda key: tuning.get(key, 0))
        for kind in KINDS
    }
    runs: dict[str, Callable[[], object]] = {
        "ours": ours.run,
        "trl": everyone[best["trl"]].run,
        "padded": sorted_rows.run,
        "plain": everyone[best["plain"]].run,
    }
    ours.run()  # the others have run calls of their sizes in the check
    seconds: dict[str, list[tuple[float, float]]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, run in runs.items():
            seconds[key].append(once(run))
    counted = {key: sorted(one[counts] for one in several) for key, several in seconds.items()}
    least = {key: several[0] for key, several in counted.items()}
    widths = max(len(row.prompt) for row in rows) + max(len(row.completion) for row in rows)
    least |= {kind: min(least[kind], tuning.get(best[kind], least[kind])) for kind in KINDS}
    return {
        "shape": name,
        "rows": len(rows),
        "padded_tokens": widths * len(rows),
        "real_tokens": sum(len(row.prompt) + len(row.completion) for row in rows),
        "unique_tokens": ours.tokens,
        "seconds": least,
        "median": {key: several[len(several) // 2] for key, several in counted.items()},
        "wall_clock": {key: min(wall for _, wall in several) for key, several in seconds.items()},
        "clock": ("cpu", "wall")[counts],
        "best_micro_batches": best,
        "ratio_trl": least["trl"] / least["ours"],
        "ratio_plain": least["plain"] / least["ours"],
        "ratio_padded": least["padded"] / least["ours"],
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
    print(
        f"{'shape':14}{'padded':>8}{'real':>8}{'unique':>8}{'TRL s':>8}{'plain s':>9}{'rows s':>8}{'ours s':>8}"
        f"{'TRL/ours':>10}{'plain/ours':>12}{'rows/ours':>11}"
    )
    lines = []
    for name in names:
        line = measure(name, size, threads, int(given["repeats"]), budget, micro, groups)
        lines.append(line)
        s = line["seconds"]
        print(
            f"{name:14}{line['padded_tokens']:8}{line['real_tokens']:8}{line['unique_tokens']:8}{s['trl']:8.2f}"
            f"{s['plain']:9.2f}{s['padded']:8.2f}{s['ours']:8.2f}{line['ratio_trl']:10.2f}{line['ratio_plain']:12.2f}"
            f"{line['ratio_padded']:11.2f}",
            flush=True,
        )
    bars = [
        Bar(
            what=f"update: {words} / mmrl, {line['shape']}",
            value=line[f"ratio_{against}"],
            bar=bar,
            padded=line["padded_tokens"],
            real=line["real_tokens"],
            unique=line["unique_tokens"],
        )
        for line in lines
        for against, words, bar in (
            ("trl", "TRL", TRL_BARS.get(line["shape"], TRL_BAR)),
            ("plain", "plain padding", PLAIN_BARS.get(line["shape"], PLAIN_BAR)),
            ("padded", "sorted padding", 1.0),
        )
    ]
    return finish("update", bars, given["out"], model=size, lines=lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
