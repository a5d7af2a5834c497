"""The CPU suite: `python -m scripts.bench [only=update,step] [threads=1]` (`make bench`), under ten minutes when idle.

With `model=smollm2_135m` those of a real model's shape, with random weights: about an hour (`make bench model=…`); with
`model=hybrid` those of a small Qwen 3.5.
`python -m scripts.bench NAME [option=value ...]` runs one bench alone, with the options of its file.

Every bench of the suite runs in a separate process, so that none sees another's memory or settings. One table at the
end, and all results in `outputs/bench/<time>.json`; exit code 1 when a bar is missed or a bench failed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import expect_some_of
from scripts.bench.common import Bar, finish, options

SUITE: dict[str, list[str]] = {
    "update": ["repeats=1", "micro=4"],
    "step": ["steps=1", "micro=4"],
    "rollout": ["repeats=1"],
    "overhead": ["steps=8", "repeats=2"],
    "fleet": [],
    "gateway": [],
    "environment": [],
}
"""Bench -> options that fit the suite into its time; alone each measures longer, and tunes its peers."""
LARGE: dict[str, list[str]] = {
    "update": [
        *("shape=is,fof,search,demonstrations", "groups=2", "repeats=1", "micro=4"),
        *("matmul=torch,onednn", "budget=8192", "model=smollm2_135m"),
    ],
    "rollout": ["shapes=shared,one", "repeats=1", "brief=1", "model=smollm2_135m"],
}
"""Options with `model=smollm2_135m`: two groups of a shape, of which a peer's update takes minutes."""
HYBRID: dict[str, list[str]] = {
    "update": ["shape=is,fof,search,long", "repeats=1", "micro=4", "model=hybrid"],
    "rollout": ["shapes=short,fork,shared", "repeats=1", "model=hybrid"],
}
"""Options with `model=hybrid`, whose numbers have no bars."""
SUITES = {"1M": SUITE, "smollm2_135m": LARGE, "hybrid": HYBRID}
BENCHES = (*SUITE, "retrieval")


def run_bench(name: str, arguments: Sequence[str]) -> int:
    """Run a bench in this process, print its table, write its JSON; returns 1 when a bar is missed."""
    bench = importlib.import_module(f"scripts.bench.{name}")
    args = options(arguments, bench.OPTIONS)
    bars, details = bench.measure(args)
    return finish(name, bars, args["out"], **details)


def result_of(bench: str, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """The JSON of a bench in a separate process; of one that failed, an `error`."""
    out = folder / f"{bench}.json"
    command = [sys.executable, "-m", "scripts.bench", bench, *arguments, f"out={out}"]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=sys.stdout, stderr=subprocess.PIPE, text=True, check=False)
    spent = {"wall_s": time.perf_counter() - started}
    if not out.is_file():
        return {"bench": bench, "error": done.stderr[-4000:] or f"exit code {done.returncode}", "bars": [], **spent}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found | spent


def bars_of(results: Sequence[dict[str, Any]]) -> list[Bar]:
    """The bars of all benches; one that failed counts as missed."""
    bars = []
    for result in results:
        bars += [Bar(**{name: value for name, value in bar.items() if name != "met"}) for bar in result["bars"]]
        if "error" in result:
            bars.append(Bar(f"{result['bench']}: FAILED, see above", float("nan"), 1.0, unit=""))
    return bars


def main(arguments: list[str]) -> int:
    """Run the suite, print one table, write one JSON; or run one bench. Returns 1 when a bar is missed."""
    if arguments[:1] and arguments[0] in BENCHES:
        return run_bench(arguments[0], arguments[1:])
    args = options(arguments, {"model": "1M", "only": ""})
    (model,) = expect_some_of("model", args["model"], SUITES)
    suite = SUITES[model]
    chosen = expect_some_of("only", args["only"], suite)
    results, before, started = [], os.getloadavg(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for bench in chosen:
            print(f"\n{bench}", flush=True)
            results.append(result_of(bench, [*suite[bench], f"threads={args['threads']}"], Path(folder)))
            if "error" in results[-1]:
                print(results[-1]["error"], file=sys.stderr, flush=True)
    spent = time.perf_counter() - started
    print(f"\nall, in {spent / 60:.1f} minutes, load before {', '.join(f'{one:.1f}' for one in before)}")
    out = args["out"] or f"outputs/bench/{time.strftime('%Y%m%d_%H%M%S')}.json"
    return finish("suite", bars_of(results), out, wall_s=spent, load_before=before, results=results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
