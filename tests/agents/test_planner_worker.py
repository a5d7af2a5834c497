"""The planner and worker of docs/agents/planner_worker.py: by scripted replies, and trained with `tiny_agent`."""

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("agents")
from docs.agents import planner_worker
from mmrl.algorithms import ALGORITHMS, assign_credit
from mmrl.cli import main
from mmrl.config import ALGO_SCHEMAS, ModelConfig
from mmrl.models.load import load_model, load_tokenizer
from mmrl.records import Example
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.rollout.plans import fork_on
from mmrl.stages.sft import encode
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from mmrl.tasks.mini.examples import mini_corpus
from mmrl.tasks.mini.teach import demonstrations
from scripts.chaos.compare import differences
from scripts.tiny_model import build
from scripts.tiny_model.mini.world import WORLD_SEED
from scripts.tiny_model.recipes import RECIPES
from scripts.tiny_model.traces import call, traced
from tests.helpers import TOP
from tests.helpers.gateway import Scripted, agent_task, one, rolled_out
from tests.helpers.watch import killed_when

TINY_AGENT = ModelConfig(name="tiny", path="tiny_agent")
MODULES = ("planner", "worker")
QUESTION = Example(id="q0", inputs={"question": "What is played?"}, metadata={"answers": ["harp"]})


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_AGENT)


def of_two(**options):
    return agent_task(planner_worker.run, metric=planner_worker.metric, modules=MODULES, **options)


def test_the_traces_that_tiny_agent_learns_have_the_ids_of_a_run(tokenizer):
    task, seen = of_two(), set()
    for row in traced("dev", Bm25Retriever(mini_corpus()))[:30]:
        if not row["searches"]:
            continue
        example = Example(id=row["id"], inputs={"question": row["question"]}, metadata=row)
        wanted = [encode(tokenizer, demonstration) for demonstration in demonstrations(task, example)]
        planned = "" if row["passed"] is None else call("transfer_to_worker", plan=row["passed"])
        replies = iter([planned, *(tokenizer.decode(call.completion_ids[:-1]) for call in wanted[1:])])
        _, calls = one(task, Scripted(lambda prompt: next(replies), tokenizer), examples=[example])  # noqa: B023
        assert [(c.module, c.prompt_ids) for c in calls] == [(c.module, c.prompt_ids) for c in wanted]
        assert [c.completion_ids for c in calls[1:]] == [c.completion_ids for c in wanted[1:]]
        assert all(not c.facts["rewritten_history"] for c in calls)
        seen.add("none" if row["passed"] is None else "question" if row["passed"] == row["question"] else "queries")
    assert seen == {"none", "question", "queries"}


def answer(reply, prompt):
    return "" if "Plan the" in prompt else reply


def test_a_call_of_no_tool_and_no_end_are_the_models_doing(tokenizer):
    for reply in (call("sing", song="x"), call("search", query="x")):
        engine = Scripted(partial(answer, reply), tokenizer)
        rollout, _ = one(of_two(), engine, examples=[QUESTION])
        assert (rollout.error, rollout.reward) == (None, 0.0), rollout.error_message


class OfRollouts(Scripted):
    """The worker is right in the first rollout and wrong in the others; without a plan half right in the first."""

    def reply(self, request):
        prompt = self.tokenizer.decode(list(request.prompt_ids))
        if request.module == "planner":
            return call("transfer_to_worker", plan="Which instrument")
        if not request.order[0].startswith("q0/0"):
            return "horn"
        return "harp" if "Which instrument" in prompt else "harp or horn"


def test_a_counterfactual_and_the_credit_from_it_are_those_of_a_hand_computation(tokenizer):
    """F1 without the plan: a third precise, all recalled, so 0.5. By difference the planner's rewards are 1 - 0.5 and
    0 - 0, the worker's 1 and 0."""
    algo = ALGO_SCHEMAS["ccpo"].model_validate({"name": "ccpo", "group_size": 2, "credit": "difference"})
    plan = ALGORITHMS["ccpo"].plan(algo, MODULES, (0, 0, "q0"))
    forest = rolled_out(of_two(), OfRollouts(str, tokenizer), plan, [QUESTION])
    assert [rollout.reward for rollout in forest.rollouts] == [1.0, 0.0]
    assert [dict(rollout.counterfactuals) for rollout in forest.rollouts] == [{"planner": 0.5}, {"planner": 0.0}]
    advantages = {entry.call: set(entry.advantages) for entry in assign_credit(forest, algo, 0).entries}
    assert advantages == {"q0/0#0": {0.25}, "q0/1#0": {-0.25}, "q0/0#1": {0.5}, "q0/1#1": {-0.5}}


def test_a_fork_at_the_worker_asks_the_planner_once(tokenizer):
    engine = OfRollouts(str, tokenizer)
    forest = rolled_out(of_two(), engine, fork_on("worker", 3), [QUESTION])
    assert [request.module for request in engine.requests] == ["planner", *["worker"] * 3]
    assert len(forest.rollouts) == 3 and not any(rollout.error for rollout in forest.rollouts)


def test_tiny_agent_calls_its_tools_and_leaves_room_to_learn(tokenizer):
    (task,) = build.build_tasks(("agent",), WORLD_SEED)
    assert set(task.program.modules) <= set(RECIPES["tiny_agent"].phases[0].mix)
    found = build.play(load_model(TINY_AGENT, "cpu").eval(), tokenizer, task, 30)
    assert 0.05 < found["score"] < 0.6, found


def words(*more):
    """A short run as docs/agents.md has it."""
    names = {"agent": "run", "metric": "metric", "data.train": "TRAIN", "data.dev": "DEV"}
    return [
        *("train", "task=agent", "task.inputs=[question]", "task.modules=[planner,worker]", "model.path=tiny_agent"),
        *(f"task.{key}={planner_worker.__name__}:{name}" for key, name in names.items()),
        *("hardware.threads=1", "run.dir=run", "run.doctor=false", "eval.items=4", *more),
    ]


def test_tiny_agent_is_credited_by_agent(tmp_path, monkeypatch, output_of):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TOP))
    assert main(words("algo=ccpo", "algo.group_size=4", "train.steps=1", "train.batch_size=4")) == 0
    printed = output_of("credit", "run=run", "step=1")
    assert "without=" in printed and ":planner" in printed and ":worker" in printed
    forest, _ = read_step(RunDir(Path("run")), 1)
    assert not [rollout.error for rollout in forest.rollouts if rollout.error]
    assert {call.module for call in forest.calls.values()} == set(MODULES)


def test_a_killed_run_with_a_fork_at_the_worker_continues_to_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOP))
    typed = words("algo=mhgpo_rr", "algo.fork_probs=[0,1]", "algo.group_size=3", "train.steps=3", "train.batch_size=2")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    assert main(typed) == 0
    monkeypatch.chdir(tmp_path / "killed")
    killed_when(lambda: list(Path("run/journal").glob("*2.jsonl.gz")), *typed)
    assert main(["train", "resume=run"]) == 0
    assert differences(tmp_path / "whole" / "run", tmp_path / "killed" / "run") == []
