"""Runs of an agent that knows nothing of mmrl: from the command line, killed and continued, and their credit."""

import json
from pathlib import Path

import pytest

from mmrl.cli import main
from scripts.chaos.compare import differences
from tests.helpers.agents import DEV, TRAIN
from tests.helpers.watch import killed_when

AGENT = "tests.helpers.agents"


def words(folder, run, *more):
    """A short run of the planner and its worker on the mini world."""
    for name, rows in (("train", TRAIN), ("dev", DEV)):
        if not (folder / f"{name}.jsonl").exists():
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:40]))
    return [
        *("train", "task=agent", f"task.agent={AGENT}:planner_worker", f"task.metric={AGENT}:right"),
        *("task.inputs=[question]", "task.modules=[planner,worker]", "algo=mhgpo_rr", "hardware.threads=1"),
        *(f"task.data.train={folder}/train.jsonl", f"task.data.dev={folder}/dev.jsonl", f"run.dir={run}"),
        *("train.steps=3", "train.batch_size=2", "eval.items=4", "algo.group_size=3", "run.doctor=false", *more),
    ]


@pytest.mark.slow
def test_a_killed_run_of_an_agent_continues_to_the_same_numbers(tmp_path, monkeypatch, output_of):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    # The same path from where each runs, since a checkpoint has it.
    monkeypatch.chdir(tmp_path / "whole")
    assert main(words(tmp_path, "run")) == 0
    monkeypatch.chdir(tmp_path / "killed")
    killed_when(lambda: list(Path("run/journal").glob("*2.jsonl.gz")), *words(tmp_path, "run"))
    assert main(["train", "resume=run"]) == 0
    assert differences(tmp_path / "whole" / "run", tmp_path / "killed" / "run") == []
    for step in (1, 2, 3):
        assert "as trained" in output_of("credit", "run=run", f"step={step}")


@pytest.mark.parametrize("algo", ["mhgpo_rr", "ccpo", "tree_grpo"])
def test_algorithms_that_play_an_agent_again_refuse_one_that_differs_each_time(algo, tmp_path, errors_of):
    typed = [
        word for word in words(tmp_path, tmp_path / "run", "task.deterministic=false") if not word.startswith("algo")
    ]
    assert f"task.deterministic: got false, and algo={algo} plays an agent again" in errors_of(*typed, f"algo={algo}")
    assert not (tmp_path / "run").exists()
