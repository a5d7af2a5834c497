"""Overhead of mmrl in a step, and start-up time of commands: `python -m scripts.bench overhead [steps=8]`.

The first steps of the default run (`mmrl train`, shipped tiny model) in a separate process: the share of their time
that is neither engine nor tools nor models nor update. The very first, in which all is loaded and packs are compared
with padded rows, counts only where it is the only one. Start-up: CPU seconds of a whole process (its wall-clock time on
an idle machine), commands alternating, the best of `repeats` each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.common import Bar, Measured

OPTIONS = {"steps": "8", "repeats": "3"}
OVERHEAD_BAR, HELP_BAR = 5.0, 0.5
"""Percent of a step; seconds."""
FOREST = Path(__file__).parents[2] / "docs" / "forests" / "program.json"
TASK = """
from mmrl.run import check as prepare
from mmrl.cli.configs import train_configs
from mmrl.cli.overrides import read_line
(config,) = train_configs(read_line([]))
prepare.build_task(config.task, config.seed)
"""
"""Work of a default run before it loads a model."""
STARTS = {
    "mmrl --help": ["-m", "mmrl", "--help"],
    "mmrl credit": ["-m", "mmrl", "credit", "algo=grpo", f"rollouts={FOREST}"],
    "mmrl train --cfg job": ["-m", "mmrl", "train", "--cfg", "job"],
    "task built, mini world": ["-c", TASK],
}
"""Name -> arguments of Python."""


def share(steps: Sequence[Mapping[str, float]], part: str) -> float:
    """Percent of all steps' time that went into `part`.

    Raises:
        SystemExit: no step was timed.
    """
    total = sum(step.get("time/step", 0.0) for step in steps)
    if not total:
        raise SystemExit("overhead: the run has no timed step")
    return 100 * sum(step.get(f"time/{part}", 0.0) for step in steps) / total


def cpu_seconds(arguments: Sequence[str]) -> float:
    """CPU seconds of a Python process.

    Raises:
        SystemExit: it failed.
    """
    before = os.times()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"overhead: python {' '.join(arguments)} failed\n{done.stderr[-2000:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(args: dict[str, str]) -> Measured:
    """Measure starts and steps."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(int(args["repeats"])):
        for what, command in STARTS.items():
            seconds[what].append(cpu_seconds(command))
    with tempfile.TemporaryDirectory() as name:
        run = [f"run.dir={name}/run", f"train.steps={args['steps']}", f"hardware.threads={args['threads']}"]
        cpu_seconds(["-m", "mmrl", "train", *run, "eval.every=0", "eval.items=1", "run.progress=false"])
        lines = (Path(name) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    timed = [step for step in map(json.loads, lines) if "time/step" in step]
    timed = timed[1:] or timed
    parts = {part: share(timed, part) for part in ("generate", "retrieve", "annotate", "credit", "update", "overhead")}
    print(f"{len(timed)} steps: " + ", ".join(f"{part} {percent:.1f} %" for part, percent in parts.items()))
    bars = [Bar("overhead of a default step", parts["overhead"], OVERHEAD_BAR, at_most=True, unit="%")]
    for what, several in seconds.items():
        bar = HELP_BAR if what == "mmrl --help" else None
        bars.append(Bar(f"start: {what}", min(several), bar, at_most=True, unit="s"))
    return bars, {"shares": parts, "steps": len(timed)}
