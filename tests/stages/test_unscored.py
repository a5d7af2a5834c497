"""Runs of `algo=distill` on tasks that have nothing to score by: no reward is made up, none is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.cli import main
from mmrl.errors import ParseFailure
from mmrl.records import Example
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from mmrl.tasks.base import Context
from tests.helpers.lines import refused
from tests.helpers.runs import command, contents

DATA = ["task.data.train=tests.helpers.agents:TRAIN", "task.data.dev=tests.helpers.agents:DEV"]
PROGRAM = ["task=dspy", f"task.program={__name__}:answer", "task.modules=[writer,reader]", "task.inputs=[question]"]
AGENT = ["task=agent", "task.agent=tests.helpers.agents:planner_worker", "task.modules=[planner,worker]"]
AGENT += ["task.inputs=[question]"]
WORLD = ["task=environment", "task.environment=tests.helpers.worlds:Bare"]


def short(text: str) -> str:
    """Fails for some of a random model's texts."""
    if sum(text.encode()) % 2:
        raise ParseFailure("an odd text")
    return text


async def answer(example: Example, ctx: Context) -> str:
    """Two modules, the second of which may fail."""
    draft = await ctx.call("writer", [{"role": "user", "content": example.inputs["question"]}])
    return (await ctx.call("reader", [{"role": "user", "content": f"Read: {draft.text}"}], parse=short)).text


def metric(record: Any, prediction: Any) -> float:
    return float(len(prediction))


def run_of(model: str, folder: Path, *words: str) -> RunDir:
    line = command(model, folder, "algo=distill", "train.steps=2", "eval.every=1", "train.batch_size=4", *words)
    drop = ("algo.group_size", "algo.beta", "task.retriever")
    assert main([word for word in line if not word.startswith(drop)]) == 0
    return RunDir.read(folder)


def test_a_task_without_a_metric_trains_as_one_with_it(
    random_model: str, tmp_path: Path, output_of: Callable[..., str]
) -> None:
    """Rewards have no part in distillation, so weights are the same; what fails by the model's doing is taught, too."""
    words = [*PROGRAM, *DATA, "algo.distill={writer: policy, reader: policy}", "algo.privileged={writer: answers}"]
    scored = run_of(random_model, tmp_path / "scored", *words, f"task.metric={__name__}:metric")
    run = run_of(random_model, tmp_path / "run", *words)
    states = [contents(folder)[2] for folder in (scored.path, run.path)]
    weights = [{k: v for k, v in state.items() if k.endswith(".safetensors")} for state in states]
    assert weights[0] and weights[0] == weights[1]
    forest, entries = read_step(run, 2)
    failed = {rollout.leaf for rollout in forest.rollouts if rollout.error == "parse"}
    assert failed and len(failed) < len(forest.rollouts)
    assert failed <= {entry["call"] for entry in entries}
    assert all(rollout.reward is None for rollout in forest.rollouts)
    keys = {key for record in run.history() for key in record}
    assert not [key for key in keys if "reward" in key]
    assert run.history()[2]["task/finished"] < 1 and "eval/dev/module/writer/length" in keys
    assert list(run.summary["comparison"]) == ["finished"] and run.summary["facts"]["metric"] == "none"
    example = forest.examples[0]
    said = output_of("show", str(run.path), "step=2", f"example={example}")
    assert f"{example}/0 no reward" in said and "reward -" not in said
    assert main(["credit", f"run={run.path}", "step=2"]) == 0
    assert main(["export", str(run.path), f"out={tmp_path / 'out'}"]) == 0
    assert "by on-policy distillation (`distill`)" in (tmp_path / "out" / "README.md").read_text()
    assert "finished" in output_of("eval", f"policy={run.path}", "eval.items=2", f"run.dir={tmp_path / 'eval'}")


@pytest.mark.parametrize("task", [[*AGENT, *DATA, "task.reward=none"], WORLD], ids=["agent", "environment"])
def test_agents_and_environments_without_a_score_train(task: list[str], tmp_path: Path) -> None:
    module = "worker" if "task=agent" in task else "agent"
    words = [*task, f"algo.distill={{{module}: policy}}", "train.steps=1", "eval.every=0", "eval.items=2"]
    run = run_of("tiny_agent", tmp_path / "run", *words, "model=tiny", "task.max_tokens=24")
    forest, _ = read_step(run, 1)
    assert all(rollout.reward is None and not rollout.failed_outside for rollout in forest.rollouts)
    assert any(call.distillation for call in forest.calls.values())
    assert run.history()[-1]["eval/dev/finished_low"] >= 0


REFUSED = {
    "algo=grpo": "task.metric: missing, and algo=grpo needs rewards, as all but algo=distill do; expected task.metric=",
    "algo=mmgrpo algo.distill={writer:policy}": "task.metric: missing, and algo=mmgrpo needs rewards",
    "algo=sft algo.source=rollouts": "task.metric: missing, and algo=sft needs rewards",
    "algo=distill algo.distill={writer:policy} task.reward=outcome": "task.reward: got 'outcome', expected one of none",
    "algo=distill algo.distill={writer:policy} task.failure_score=-1": "task.failure_score: got -1.0, which has no eff",
    "algo=distill algo.distill={writer:policy} task.reward=privileged algo.privileged={writer:answers}": "reads none",
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_algorithms_need_a_metric(words: str) -> None:
    (problem,) = refused(*words.split(), *PROGRAM, *DATA, "model=tiny")
    assert REFUSED[words] in problem


def test_an_agents_rewards_are_left_out_where_asked_alone() -> None:
    (problem,) = refused("algo=grpo", "task.reward=none", *AGENT, *DATA, "model=tiny")
    assert problem.startswith("task.reward: got none, and algo=grpo needs rewards")


def test_feedback_is_refused_where_nothing_scores() -> None:
    words = ["algo=distill", "algo.distill={writer: policy}", "algo.privileged={writer: '{feedback}'}", "model=tiny"]
    (problem,) = refused(*words, *PROGRAM, *DATA)
    assert problem.startswith("algo.privileged.writer: got '{feedback}', and a task without a metric")
    assert refused(*words, *PROGRAM, *DATA, f"task.metric={__name__}:metric") == []
