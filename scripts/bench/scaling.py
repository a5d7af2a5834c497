"""Time against unique tokens: `python -m scripts.bench.scaling [shape=fof] [model=1M] [threads=1] [repeats=3]`.

The update of one, two, four and eight groups of the same rollouts, alternating, the best of each; a straight line
through the four times must explain them (R²). Its slope is the cost of a unique token. Log-probabilities and gradients
of the smallest size are compared with padded rows first.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.common import MODELS, Bar, clock, finish, make_model, options, timed
from scripts.bench.sides import Ours, Plain, check
from scripts.bench.update_shapes import GROUP, SHAPES, Dice, calls

BAR = 0.98
SIZES = (1, 2, 4, 8)
"""Groups of rollouts."""


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept and R² of the least-squares line through the points."""
    count = len(x)
    mx, my = sum(x) / count, sum(y) / count
    sxx = sum((a - mx) ** 2 for a in x)
    sxy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    slope = sxy / sxx
    intercept = my - slope * mx
    left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((b - my) ** 2 for b in y)
    return slope, intercept, 1 - left / spread if spread else 0.0


def main(arguments: list[str]) -> int:
    """Print the points, write the JSON; returns 1 when the bar is missed."""
    given = options(arguments, {"shape": "fof", "model": "1M", "repeats": "3", "quick": ""})
    if given["shape"] not in SHAPES:
        raise SystemExit(f"shape: got {given['shape']}, expected one of {','.join(SHAPES)}")
    size, threads = "test" if given["quick"] else given["model"], int(given["threads"])
    rows = SHAPES[given["shape"]](Dice(MODELS[size][-1], scale=32 if given["quick"] else 1))
    parts = {groups: rows[: groups * GROUP] for groups in SIZES}
    folder = Path(tempfile.mkdtemp())
    sides = {groups: Ours(make_model(size), calls(part), folder / str(groups)) for groups, part in parts.items()}
    agreement = check(sides[SIZES[0]], Plain(make_model(size), parts[SIZES[0]], GROUP))
    counts = clock(threads)
    found = timed({str(groups): side.run for groups, side in sides.items()}, int(given["repeats"]))
    seconds = [min(one[counts] for one in found[str(groups)]) for groups in SIZES]
    tokens = [sides[groups].tokens for groups in SIZES]
    slope, intercept, fit = line([float(n) for n in tokens], seconds)
    for unique, spent in zip(tokens, seconds, strict=True):
        print(f"{unique:8} unique tokens {spent:8.3f} s")
    print(f"slope {slope * 1e6:.1f} s per million tokens, intercept {intercept:.3f} s")
    real = sum(len(row.prompt) + len(row.completion) for row in rows)
    bars = [Bar(what=f"scaling: R² of {given['shape']}", value=fit, bar=BAR, unit="", real=real, unique=tokens[-1])]
    points = [{"unique": unique, "seconds": spent} for unique, spent in zip(tokens, seconds, strict=True)]
    return finish(
        "scaling", bars, given["out"], model=size, slope=slope, intercept=intercept, points=points, **agreement
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
