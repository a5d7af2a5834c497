"""A long run, watched: `python -m scripts.soak [steps=2000] [work=FOLDER] [out=FILE] [key=value of mmrl train ...]`.

One `mmrl train` of the shipped tiny model in a process of its own. Every half second its memory, open files and threads
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
from statistics import linear_regression, median

import psutil

from mmrl.system.conf import later_wins
from scripts.bench.common import Bar, finish, options

RUN = (
    *("algo=grpo", "task=qa_direct", "seed=0", "hardware.threads=1", "run.progress=false", "train.lr=1e-9"),
    *("train.batch_size=2", "algo.group_size=2", "algo.beta=0.001", "train.save_every=100", "train.keep=2"),
    *("eval.items=4", "eval.every=500", "eval.bootstrap=100"),
)
WARM_SHARE = 0.1
"""Of the run: what is read before it counts as warming up."""
SPEED_STEPS = 100
PERIOD_S = 0.5
Sample = dict[str, float]


def watch(steps: int, folder: Path, extra: Sequence[str]) -> list[Sample]:
    """Run, and return what was read of the process.

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
                        "step": float(_lines(metrics)),
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


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def bars_of(samples: Sequence[Sample], step_seconds: Sequence[float], journal: Sequence[int], steps: int) -> list[Bar]:
    """The bars: what grows, and whether the end is as quick as the beginning.

    Args:
        samples: of the process, in order.
        step_seconds, journal: seconds and bytes of each step.
        steps: of the run.
    """
    # What is read while models load, and in the first tenth, in which caches and allocators fill, is no growth.
    warm = [s for s in samples if WARM_SHARE * steps < s["step"] <= steps] or list(samples)
    bars = []
    for name, limit, unit in (("rss_mb", 0.02, " MB"), ("files", 0.0, ""), ("threads", 0.0, "")):
        slope = _slope([s["step"] for s in warm], [s[name] for s in warm])
        first, last = _ends([s[name] for s in warm])
        bars.append(Bar(what=f"{name}, first tenth", value=first, bar=None, unit=unit))
        bars.append(Bar(what=f"{name}, last tenth", value=last, bar=first * (1 + limit), at_most=True, unit=unit))
        bars.append(Bar(what=f"{name}, slope per 1000 steps", value=1000 * slope, bar=None, unit=unit))
    count = min(SPEED_STEPS, max(1, len(step_seconds) // 2))
    first, last = median(step_seconds[:count]), median(step_seconds[-count:])
    bars.append(Bar(what=f"s of a step, first {count}", value=first, bar=None, unit=" s"))
    bars.append(Bar(what=f"s of a step, last {count}", value=last, bar=1.05 * first, at_most=True, unit=" s"))
    half = len(journal) // 2
    first, last = (sum(part) / max(1, len(part)) for part in (journal[:half], journal[half:]))
    bars.append(Bar(what="journal bytes a step, first half", value=first, bar=None, unit=""))
    bars.append(Bar(what="journal bytes a step, second half", value=last, bar=1.05 * first, at_most=True, unit=""))
    return bars


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    return linear_regression(xs, ys).slope if len(set(xs)) > 1 else 0.0


def _ends(values: Sequence[float]) -> tuple[float, float]:
    tenth = max(1, len(values) // 10)
    return median(values[:tenth]), median(values[-tenth:])


def main(arguments: Sequence[str]) -> int:
    """Run, measure, print; 1 when a bar is missed."""
    own = ("steps=", "work=", "out=", "threads=")
    given = options([word for word in arguments if word.startswith(own)], {"steps": "2000", "work": ""})
    extra = [word for word in arguments if not word.startswith(own)]
    steps, started = int(given["steps"]), time.monotonic()
    folder = Path(given["work"] or tempfile.mkdtemp(prefix="mmrl-soak-"))
    samples = watch(steps, folder, extra)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["time/step"] for record in records if "time/step" in record]
    journal = [path.stat().st_size for path in sorted((folder / "run" / "journal").glob("step-*.jsonl.gz"))]
    bars = bars_of(samples, seconds, journal, steps)
    out = given["out"] or f"outputs/soak/{time.strftime('%Y%m%d_%H%M%S')}.json"
    kept = samples[:: max(1, len(samples) // 500)]
    code = finish(
        "soak", bars, out, steps=steps, wall_s=time.monotonic() - started, settings=[*RUN, *extra], samples=kept
    )
    if not given["work"]:
        shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
