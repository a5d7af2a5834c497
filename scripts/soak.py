"""A long run, watched: `python -m scripts.soak [steps=2000] [work=FOLDER] [out=FILE] [key=value of mmrl train ...]`.

One `mmrl train` of the shipped tiny model in a separate process. Every half second its memory, open files and threads
are read, and which step it has done. Then its journal's bytes per step and the times of its first and last hundred
steps are compared. The learning rate is next to nothing, so that the policy, and with it the work of a step, stays as
it is. One table of bars, all samples in `outputs/soak/<time>.json`; exit code 1 when a bar is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import psutil

from mmrl.system.conf import later_wins
from scripts.bench.common import Bar, finish, options

RUN = (
    *("algo=grpo", "task=qa_direct", "seed=0", "hardware.threads=1", "run.progress=false", "train.lr=1e-9"),
    *("train.batch_size=2", "algo.group_size=2", "algo.beta=0.001", "train.save_every=100", "train.keep=2"),
    *("eval.items=4", "eval.every=500", "eval.bootstrap=100"),
)
WARM_SHARE = 0.1
"""Share of the run that counts as warming up."""
SPEED_STEPS = 100
PERIOD_S = 0.5
Sample = dict[str, float]


def watch(steps: int, folder: Path, extra: Sequence[str]) -> list[Sample]:
    """Run, and return samples of the process.

    Raises:
        SystemExit: the run failed.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = ["train", *later_wins([*RUN, f"train.steps={steps}", f"run.dir={folder / 'run'}", *extra])]
    samples: list[Sample] = []
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen([sys.executable, "-m", "mmrl", *words], env=environment, stdout=log, stderr=log)
        process, metrics = psutil.Process(run.pid), folder / "run" / "metrics.jsonl"
        while run.poll() is None:
            time.sleep(PERIOD_S)
            try:
                samples.append(
                    {
                        "step": float(metrics.read_bytes().count(b"\n") if metrics.is_file() else 0),
                        "rss_mb": process.memory_info().rss / 1e6,
                        "files": float(process.num_fds()),
                        "threads": float(process.num_threads()),
                    }
                )
            except psutil.Error:  # it has just ended
                break
        run.wait()
    if run.returncode:
        raise SystemExit(f"the run ended with code {run.returncode}\n{(folder / 'log').read_text()[-2000:]}")
    return samples


def bars_of(samples: Sequence[Sample], step_seconds: Sequence[float], journal: Sequence[int], steps: int) -> list[Bar]:
    """Bars of growth, and of the speed at the end against that at the beginning.

    Args:
        samples: of the process, in order.
        step_seconds, journal: seconds and bytes of each step.
        steps: of the run.
    """
    # Samples while models load, and of the first tenth, in which caches and allocators fill, are no growth.
    warm = [s for s in samples if WARM_SHARE * steps < s["step"] <= steps] or list(samples)
    bars = []

    def compare(what: str, first: str, last: str, values: tuple[float, float], growth: float, unit: str = "") -> None:
        limit = values[0] * (1 + growth)
        bars.append(Bar(what=f"{what}, {first}", value=values[0], bar=None, unit=unit))
        bars.append(Bar(what=f"{what}, {last}", value=values[1], bar=limit, at_most=True, unit=unit))

    for name, growth, unit in (("rss_mb", 0.02, " MB"), ("files", 0.0, ""), ("threads", 0.0, "")):
        values = [s[name] for s in warm]
        compare(name, "first tenth", "last tenth", _ends(values, max(1, len(values) // 10)), growth, unit)
    count = min(SPEED_STEPS, max(1, len(step_seconds) // 2))
    compare("s of a step", f"first {count}", f"last {count}", _ends(step_seconds, count), 0.05, " s")
    half = len(journal) // 2
    means = (fmean(journal[:half] or [0]), fmean(journal[half:] or [0]))
    compare("journal bytes a step", "first half", "second half", means, 0.05)
    return bars


def _ends(values: Sequence[float], count: int) -> tuple[float, float]:
    return median(values[:count]), median(values[-count:])


def main(arguments: Sequence[str]) -> int:
    """Run, measure, print; 1 when a bar is missed."""
    names = ("steps=", "work=", "out=", "threads=")
    args = options([word for word in arguments if word.startswith(names)], {"steps": "2000", "work": ""})
    extra = [word for word in arguments if not word.startswith(names)]
    steps, started = int(args["steps"]), time.monotonic()
    folder = Path(args["work"] or tempfile.mkdtemp(prefix="mmrl-soak-"))
    samples = watch(steps, folder, extra)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["time/step"] for record in records if "time/step" in record]
    journal = [path.stat().st_size for path in sorted((folder / "run" / "journal").glob("step-*.jsonl.gz"))]
    bars = bars_of(samples, seconds, journal, steps)
    out = args["out"] or f"outputs/soak/{time.strftime('%Y%m%d_%H%M%S')}.json"
    kept = samples[:: max(1, len(samples) // 500)]
    spent = time.monotonic() - started
    code = finish("soak", bars, out, steps=steps, wall_s=spent, settings=[*RUN, *extra], samples=kept)
    if not args["work"]:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
