"""The update against TRL: `python -m scripts.bench update [shape=is,fof] [threads=1] [repeats=3] [micro=4,8,32]`.

All sides train on the same rollouts from the same random weights: TRL's GRPOTrainer through `rollout_func` (its best of
micro-batches of 4, 8 and 32 rows), a plain padded loop with `logits_to_keep` (likewise), and mmrl. One update is
everything between rollouts and changed weights: packing or padding, forward, backward, clipping, AdamW. Before
anything is timed, log-probabilities must agree to 1e-4 and gradients to a cosine of 0.9999 on two groups of each shape.
Runs alternate (A B C A B C ...); the best of each counts. With one thread the clock is CPU time (`common.summary`).
`matmul=torch,onednn` runs mmrl's packed side with each of these as `model.matmul`; the bars hold for the last, but for
that against mmrl's padded rows, which run with the first.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from scripts import expect_some_of
from scripts.bench.common import MODELS, Bar, Measured, Seconds, make_model, once, show, summary, token_counts
from scripts.bench.sides import Ours, Plain, Side, Trl, check
from scripts.bench.update_shapes import GROUP, SHAPES, Dice, Row, calls

TRL_BARS = {"is": 7.0, "fof_converged": 7.0, "long": 1.0, "demonstrations": 7.0}
PLAIN_BARS = {"is": 4.0, "long": 1.0, "demonstrations": 4.0}
TRL_BAR, PLAIN_BAR = 3.0, 1.5
CHECKED = 2
"""Groups of a shape on which the sides are compared."""
KINDS = ("trl", "plain")
OPTIONS = {"shape": "", "repeats": "3", "model": "1M", "budget": "", "micro": "4,8,32", "groups": "", "matmul": "torch"}


@dataclass(frozen=True)
class Sides:
    """The sides of one shape: mmrl packed (with each `matmul`) and padded, and both peers at each micro-batch."""

    rows: list[Row]
    size: str
    budget: int | None
    micro: list[int]
    folder: Path
    matmul: list[str]
    """`model.matmul` of mmrl's packed side; the padded one takes the first."""

    def makers(self) -> dict[str, Callable[[], Side]]:
        """Name -> builds the side; peers by their micro-batches."""
        batch = calls(self.rows)

        def ours(packing: str, matmul: str) -> Ours:
            return Ours(make_model(self.size, matmul), batch, self.folder / packing, packing, self.budget)

        def peer(kind: str, many: int) -> Side:
            model = make_model(self.size)
            if kind == "plain":
                return Plain(model, self.rows, many)
            return Trl(model, self.rows, many, self.folder / "trl")

        peers = {f"{kind}{many}": partial(peer, kind, many) for kind in KINDS for many in self.micro}
        packed = {f"ours {matmul}": partial(ours, "auto", matmul) for matmul in self.matmul}
        return {**packed, "padded": partial(ours, "padded", self.matmul[0]), **peers}

    def agree(self) -> dict[str, float]:
        """Compare the sides on these rollouts (`check`), which costs each an update; returns the worst agreement."""
        makers, many = self.makers(), self.micro[0]
        names = [(f"ours {matmul}", f"plain{many}", f"trl{many}") for matmul in self.matmul]
        found = [check(*(cast("Any", makers[name]()) for name in three)) for three in names]
        worst = {"max_logprob_difference": max, "cosine_plain": min, "cosine_trl": min}
        return {key: pick(one[key] for one in found) for key, pick in worst.items()}

    def seconds(self, repeats: int) -> tuple[Seconds, int]:
        """Seconds of all sides in turn, one side in memory at a time; and the tokens that mmrl forwards."""
        found: Seconds = defaultdict(list)
        tokens = 0
        for _ in range(repeats):
            for name, make in self.makers().items():
                side = make()
                found[name].append(once(side.run))
                if isinstance(side, Ours) and name != "padded":
                    tokens = side.tokens
                del side
                gc.collect()
        return found, tokens


def measure_shape(name: str, args: dict[str, str], matmul: list[str]) -> dict[str, Any]:
    """Measure a shape, on its first `groups` groups where that is set."""
    size, groups = args["model"], int(args["groups"] or 0)
    rows = SHAPES[name](Dice(MODELS[size].vocab, scale=32 if size == "test" else 1))
    rows = rows[: groups * GROUP or None]
    micro = [many for many in map(int, args["micro"].split(",")) if many <= len(rows)]
    budget = int(args["budget"]) if args["budget"] else None
    sides = Sides(rows, size, budget, micro, Path(tempfile.mkdtemp()), matmul)
    # A large model is checked on a group less: the check costs each side an update of what it is made on.
    agreement = replace(sides, rows=rows[: (CHECKED - bool(groups)) * GROUP]).agree()
    gc.collect()
    seconds, unique = sides.seconds(int(args["repeats"]))
    line = summary(seconds, int(args["threads"]))
    best = line["seconds"]
    # A peer counts with its best micro-batches.
    peers = {kind: min(spent for side, spent in best.items() if side.startswith(kind)) for kind in (*KINDS, "padded")}
    show(name, best)
    return line | {
        "shape": name,
        "tokens": token_counts([(len(row.prompt), len(row.completion)) for row in rows], unique),
        "ratios": {
            product: {peer: spent / best[f"ours {product}"] for peer, spent in peers.items()} for product in matmul
        },
        **agreement,
    }


def measure(args: dict[str, str]) -> Measured:
    """Measure the shapes."""
    matmul = expect_some_of("matmul", args["matmul"], ("torch", "onednn"))
    print(f"{args['model']}, {args['threads']} threads, load {os.getloadavg()}", flush=True)
    lines = [measure_shape(name, args, matmul) for name in expect_some_of("shape", args["shape"], SHAPES)]
    limited = args["model"] != "hybrid"  # there are no bars for it
    bars = [
        Bar(
            f"update: {words} / mmrl{f' ({product})' if len(matmul) > 1 else ''}, {line['shape']}",
            ratios[against],
            bar if product == (matmul[0] if against == "padded" else matmul[-1]) and limited else None,
            **line["tokens"],
        )
        for line in lines
        for product, ratios in line["ratios"].items()
        for against, words, bar in (
            ("trl", "TRL", TRL_BARS.get(line["shape"], TRL_BAR)),
            ("plain", "plain padding", PLAIN_BARS.get(line["shape"], PLAIN_BAR)),
            ("padded", "sorted padding", 1.0),
        )
    ]
    return bars, {"model": args["model"], "lines": lines}
