"""Command lines and damaged run directories as targets: made elsewhere in this package, run by `in_process`."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random

from scripts.fuzz import command_lines, in_process, run_dirs

FOREST = Path(__file__).parents[1] / "guard_forests" / "trees_rr.json"
STEPS = 3


def make_line(random: Random) -> list[str]:
    """The words of a command line."""
    return command_lines.command_line(random)


def run_line(words: list[str]) -> str | None:
    """It is served, or refused in words."""
    return in_process.run(words)


def make_damage(random: Random) -> int:
    """A seed of damage."""
    return random.getrandbits(64)


def run_damage(seed: int) -> str | None:
    """Every command that looks at a run is served on a damaged one, or refuses in words."""
    folder, example = _run_dir()
    return run_dirs.copy_and_run(folder, Random(seed), example)


@cache
def _run_dir() -> tuple[Path, str]:
    """A small finished run, and one of its examples."""
    from dataclasses import replace

    import matplotlib.font_manager  # noqa: F401  # lists the fonts when it is first used, in a file of its own

    from mmrl.cli.configs import configured
    from mmrl.report.forest import parse_forest
    from mmrl.report.journal import write_step
    from mmrl.report.rundir import RunDir
    from mmrl.system.files import append_jsonl

    forest = parse_forest(FOREST.read_text(), "forest")
    folder = Path(tempfile.mkdtemp(prefix="mmrl-fuzz-")) / "run"
    config = configured(["algo=mhgpo_rr"], None).model_dump(mode="json")
    with RunDir.create(folder, config, ["mmrl", "train", "algo=mhgpo_rr"]) as run:
        for step in range(STEPS + 1):
            items = [{"id": f"d{n}", "metrics": {"f1": 0.5, "reward": 0.5}} for n in range(4)]
            append_jsonl(run.eval_path(step, "dev"), items)
            metrics = {"eval/dev/f1": 0.5, "eval/dev/n": 4.0}
            if step:
                metrics |= {"reward/mean": 0.1 * step, "train/loss": 0.0, "time/step": 1.0}
                write_step(run, replace(forest, step=step))
            run.append_metrics(step, metrics)
        run.write_summary({"name": "x", "algo": "mhgpo_rr", "task": "hotpotqa", "steps": STEPS, "seed": 0})
    return folder, json.loads(FOREST.read_text())["calls"][0]["example"]
