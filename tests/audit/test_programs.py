"""Audits of real programs: tasks of the mini world, a DSPy program, an agent by HTTP, a trained run with its critic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.cli import main

LEAST = ("examples=3", "decisions=2", "continuations=2", "batches=3", "budgets=1", "reference=32")
MACHINE = ("hardware=cpu", "hardware.threads=1")
AGENT = [
    f"task.{key}=tests.helpers.agents:{name}"
    for key, name in {"agent": "planner_worker", "metric": "right", "data.train": "TRAIN", "data.dev": "DEV"}.items()
]
PROGRAMS = {
    "search_agent": ("algo=grpo,mt_grpo,igpo,tree_grpo,c3", [f"{a}.algo.group_size=2" for a in ("grpo", "mt_grpo")]),
    "banking77": ("algo=grpo,mmgrpo", ["grpo.algo.group_size=3", "mmgrpo.algo.rollouts=3"]),
    "agent": (
        "algo=grpo,ccpo,mhgpo_fof",
        [*AGENT, "task.inputs=[question]", "task.modules=[planner,worker]", "algo.group_size=2"],
    ),
}


def audited(folder: Path, *words: str) -> dict[str, Any]:
    assert main(["audit", *words, *LEAST, *MACHINE, f"out={folder / 'audit'}"]) == 0
    found: dict[str, Any] = json.loads((folder / "audit/audit.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("task", PROGRAMS)
def test_any_program_is_audited(task: str, tmp_path: Path) -> None:
    rows, words = PROGRAMS[task]
    result = audited(tmp_path, rows, f"task={task}", *words)
    assert list(result["rows"]) == rows.removeprefix("algo=").split(",")
    assert result["decisions"] and result["dropped"] == 0
    if task == "search_agent":  # gains are scored by the policy
        assert result["rows"]["igpo"]["scored"] > 0 == result["rows"]["grpo"]["scored"]
    if task == "agent":  # each rollout is played again without its planner
        assert result["rows"]["ccpo"]["calls"] > result["rows"]["grpo"]["calls"]


@pytest.mark.slow
def test_a_critic_is_that_of_the_audited_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train = ["train", "algo=mappo", "task=hotpotqa", "train.steps=1", "train.batch_size=2", "eval.items=2"]
    assert main([*train, *MACHINE, f"run.dir={run}"]) == 0
    result = audited(tmp_path, "algo=mappo,grpo", f"policy={run}", "grpo.algo.group_size=2")
    assert result["rows"]["mappo"]["scored"] > 0 and result["rows"]["mappo"]["explained_variance"] is not None
    assert result["rows"]["mappo"]["not_credited"] == 0
    assert result["rows"]["mappo"]["critic"] is None
    capsys.readouterr()
    assert main(["audit", "algo=mappo", f"policy={run}", "algo.value_clip=1", *LEAST, *MACHINE]) == 2
    assert "algo.value_clip: has no effect" in capsys.readouterr().err


@pytest.mark.slow
def test_a_critic_of_another_algorithms_run_is_none_of_this_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.audit.critic.ROUNDS", 1)
    run = tmp_path / "run"
    train = ["train", "algo=grpo", "algo.group_size=2", "task=search_agent", "train.steps=1", "train.batch_size=2"]
    assert main([*train, "eval.items=2", *MACHINE, f"run.dir={run}"]) == 0
    rows = audited(tmp_path, "algo=mt_ppo,grpo", f"policy={run}", "grpo.algo.group_size=2")["rows"]
    assert rows["mt_ppo"]["critic"]["calls"] > 0 and rows["grpo"]["critic"] is None


@pytest.mark.slow
def test_the_optimised_reward_has_penalties(tmp_path: Path) -> None:
    words = ("algo=mhgpo_fof,mhgpo_rr", "task=hotpotqa", "algo.group_size=2")
    outcome = audited(tmp_path / "o", *words)
    reward = audited(tmp_path / "r", *words, "truth=reward")
    assert reward["outcome"] < outcome["outcome"]  # penalties are below 0
    calls = [one["call"] for one in outcome["decisions"]]
    assert calls == [one["call"] for one in reward["decisions"]]
