"""Evaluation: per-item results, failures as zeros, resuming, independence of chunks."""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.config import EvalConfig
from mmrl.config.tasks import task_schema
from mmrl.errors import ConfigError, LengthFailure, LimitFailure, ParseFailure, ToolFailure, TooManyFailures
from mmrl.records import Example
from mmrl.stages import evaluate as module
from mmrl.stages.evaluate import (
    Evaluations,
    drop_failed,
    evaluate,
    evaluation_metrics,
    infrastructure_failures,
    too_many_failed,
    without_scores,
)
from mmrl.stages.step_log import StepLog
from mmrl.store.rundir import RunDir
from mmrl.tasks import TASKS
from tests.helpers.programs import Chain, FakeEngine, FakeTask, environment, seeded_letter

SETTINGS = EvalConfig(samples=2, bootstrap=100)
TOLERANT = EvalConfig(samples=2, bootstrap=100, max_failed_share=1.0)


def run(tmp_path, task=None, answer=seeded_letter, chunk=3, settings=SETTINGS, monkeypatch=None):
    task = task or FakeTask(Chain())
    engine = FakeEngine(answer)
    monkeypatch.setattr(module, "CHUNK", chunk)
    items = evaluate(
        lambda key: environment(task, engine, key=key),
        task.examples("dev"),
        settings,
        0,
        "outcome",
        tmp_path / "items.jsonl" if tmp_path else None,
    )
    return items, engine


def failing(when=lambda call: True, error=ToolFailure, message="down"):
    """A task whose tool fails at some of its calls."""
    calls = itertools.count()

    def echo(text):
        if when(next(calls)):
            raise error(message)
        return text

    return FakeTask(Chain(), tools={"echo": echo})


def test_results_do_not_depend_on_the_chunks(monkeypatch):
    assert run(None, chunk=1, monkeypatch=monkeypatch)[0] == run(None, chunk=8, monkeypatch=monkeypatch)[0]


def test_a_stopped_evaluation_continues_where_it_was_and_gives_the_same(tmp_path, monkeypatch):
    whole, _ = run(tmp_path, monkeypatch=monkeypatch)
    path = tmp_path / "items.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])  # killed while writing the fourth item
    again, engine = run(tmp_path, monkeypatch=monkeypatch)
    assert again == whole
    assert len(engine.requests) == 5 * 2 * 3, "three of eight items were there already"
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [item["id"] for item in whole]


def test_items_are_means_over_samples_and_the_interval_holds_the_mean(monkeypatch):
    items, _ = run(None, monkeypatch=monkeypatch)
    metrics = evaluation_metrics(items, SETTINGS, 0)
    mean = sum(item["metrics"]["score"] for item in items) / len(items)
    assert metrics["score"] == pytest.approx(mean)
    assert metrics["score_low"] <= mean <= metrics["score_high"]
    assert metrics["n"] == 8
    assert "module/a/length" in metrics
    told = [{**item, "modules": item["modules"] | {"a/tool_calls": 2.0}} for item in items]
    metrics = evaluation_metrics(told, SETTINGS, 0)
    assert metrics["module/a/tool_calls"] == 2 and "module/a/calls" not in metrics


def test_failed_rollouts_score_zero_and_are_counted(monkeypatch):
    items, _ = run(None, failing(message="\x1b[2J down\n"), settings=TOLERANT, monkeypatch=monkeypatch)
    metrics = evaluation_metrics(items, SETTINGS, 0)
    assert metrics["reward"] == metrics["score"] == metrics["score_high"] == 0, "the main metric is there all the same"
    assert (metrics["failed_share"], metrics["model_failed"]) == (1, 0)
    assert all(item["errors"] == ["tool", "tool"] for item in items)
    first = items[0]["id"]
    assert infrastructure_failures(items) == f"tool {2 * len(items)}; the first, item {first}: [2J down", (
        "and not only how many"
    )


def test_an_evaluation_of_which_too_much_failed_stops_and_has_no_scores(tmp_path, monkeypatch):
    half = failing(lambda call: call % 8 == 0)
    items, _ = run(tmp_path, half, monkeypatch=monkeypatch, settings=EvalConfig(max_failed_share=0.5, samples=2))
    assert len(items) == 8 and not too_many_failed(items, EvalConfig(max_failed_share=0.5))
    assert 0 < sum(item["failed_share"] for item in items) <= 4, "and the others have scores"
    items, _ = run(None, failing(), monkeypatch=monkeypatch)
    assert len(items) == 3, "one chunk shows what is broken"
    said = too_many_failed(items, SETTINGS)
    assert said.startswith(
        "100% of the rollouts failed from outside causes, more than eval.max_failed_share=50% (tool 6;"
    )
    kept = without_scores(evaluation_metrics(items, SETTINGS, 0))
    assert not {"score", "score_low", "reward", "reward_high"} & set(kept)
    assert (kept["failed_share"], kept["n"]) == (1, 3)


def quiet_progress():
    """Stands for progress and trackers; keeps what is noted."""
    said = []
    silent = dict.fromkeys(("status", "log", "evaluation"), lambda *_: None)
    return SimpleNamespace(said=said, note=said.append, **silent)


def evaluations(rundir, task, engine, quiet, examples, settings=SETTINGS):
    """The evaluations of a run of two steps whose task and engine are fakes."""
    collector: Any = SimpleNamespace(
        log=StepLog(rundir=rundir, progress=quiet, trackers=quiet),
        config=SimpleNamespace(seed=0, eval=settings, run=SimpleNamespace(baseline=None)),
        task=task,
        reward_set="outcome",
        sync=lambda step: None,
        environment=lambda settings, key: environment(task, engine, key=key),
    )
    return Evaluations(examples=examples, last_step=2, stage=collector)


def test_the_evaluations_of_a_run_go_without_scores_where_too_much_failed_and_the_last_is_made_again(tmp_path):
    down = [False]
    task, engine = failing(lambda call: down[0]), FakeEngine(seeded_letter)
    quiet = quiet_progress()
    with RunDir.create(tmp_path / "run", {"algo": {}}, []) as rundir:
        run = evaluations(rundir, task, engine, quiet, task.examples("dev"))
        down[0] = True
        with pytest.raises(TooManyFailures, match=r"^evaluation before training: 100% of .*tool 16; the first"):
            run.baseline()
        assert rundir.history() == [] and not list(rundir.path.glob("eval/*")), "a resume evaluates again"
        down[0] = False
        assert len(run.baseline()) == 8
        down[0] = True
        found = run.metrics(2)
        assert found["eval/dev/failed_share"] == 1 and "eval/dev/score" not in found
        assert "no scores: 100% of the rollouts failed" in quiet.said[-1]
        rundir.append_metrics(2, found)
        with pytest.raises(TooManyFailures, match=r"^evaluation after training: 100%"):
            run.final()
        down[0] = False
        assert len(run.final()) == 8
        assert rundir.history()[-1]["eval/dev/score"] > 0 and rundir.history()[-1]["eval/dev/failed_share"] == 0
        before = len(engine.requests)
        assert len(run.final()) == 8 and len(engine.requests) == before, "read back"


def test_an_evaluation_in_or_after_training_says_what_was_lost(tmp_path):
    letter = ["a"]
    task, engine = FakeTask(Chain()), FakeEngine(lambda request: letter[0])
    examples = [Example(id=f"q{n}", inputs={"text": f"{n}"}) for n in range(24)]
    with RunDir.create(tmp_path / "run", {"algo": {}}, []) as rundir:
        run = evaluations(rundir, task, engine, quiet_progress(), examples)
        run.baseline()
        assert not any("lost/" in key for key in rundir.history()[0])
        letter[0] = "z"
        found = run.metrics(2)
    # Each item alike: three letters of which none counts any more.
    assert found["eval/dev/lost/score"] == pytest.approx(0.3)
    assert found["eval/dev/lost/reward"] == pytest.approx(0.3)


def test_rollouts_that_the_model_spoilt_are_counted_apart(monkeypatch):
    items, _ = run(None, failing(error=ParseFailure), monkeypatch=monkeypatch)
    metrics = evaluation_metrics(items, SETTINGS, 0)
    assert (metrics["failed_share"], metrics["model_failed"]) == (0, 16)
    assert infrastructure_failures(items) == ""


def test_items_that_failed_from_outside_can_be_evaluated_again(tmp_path, monkeypatch):
    whole, _ = run(tmp_path, monkeypatch=monkeypatch)
    path = tmp_path / "items.jsonl"
    path.unlink()
    broken, _ = run(tmp_path, failing(lambda call: call == 5), monkeypatch=monkeypatch)
    assert sum(item["failed_share"] > 0 for item in broken) == 1
    assert drop_failed(path) == 1
    again, engine = run(tmp_path, monkeypatch=monkeypatch)
    assert again == whole
    assert len(engine.requests) == 1 * 2 * 3, "the others are kept"
    assert drop_failed(path) == drop_failed(tmp_path / "none") == 0


def test_a_task_says_what_a_failed_rollout_counts_in_its_official_metrics(monkeypatch):
    task = failing(lambda call: call % 3 == 0)
    task.failed_metrics = {"score": 0.0, "leakage": 1.0}
    items, _ = run(None, task, monkeypatch=monkeypatch)
    assert {len(item["errors"]) for item in items} > {1}
    assert all(item["metrics"]["leakage"] == len(item["errors"]) / 2 for item in items)


@pytest.mark.parametrize(
    ("error", "failure_score", "counted"),
    [(LimitFailure, -1.0, -1.0), (LimitFailure, 0.5, 0.0), (ToolFailure, -1.0, 0.0)],
)
def test_a_rollout_that_breaks_looks_no_better_than_one_that_loses(error, failure_score, counted, monkeypatch):
    task = failing(error=error)
    task.failure_score = failure_score
    items, _ = run(None, task, settings=TOLERANT, monkeypatch=monkeypatch)
    assert all(item["metrics"] == {"reward": counted, "score": counted} for item in items)
    # A metric beside the reward, which may have no values below 0.
    assert FakeTask(Chain(), main_metric="em", failure_score=-1.0).failed_metrics == {"em": 0.0}


NEEDED: dict[str, dict[str, Any]] = {
    "search_agent": {"dataset": "hotpotqa"},
    "environment": {"environment": "tests.helpers.worlds:Counter"},
    "reasoning_gym": {"dataset": "chain_sum"},
    "textarena": {"game": "GuessTheNumber-v0"},
}


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"agent", "dspy"}))
def test_each_built_in_task_names_its_official_metrics(name):
    if name in ("reasoning_gym", "textarena"):
        pytest.importorskip(name)
    task = TASKS[name](task_schema(name)(name=name, **NEEDED.get(name, {})), 0)
    assert task.main_metric in task.failed_metrics


def test_only_the_first_items_are_evaluated_when_asked(monkeypatch):
    items, _ = run(None, settings=EvalConfig(items=2, bootstrap=100), monkeypatch=monkeypatch)
    assert [item["id"] for item in items] == ["q0", "q1"]


def test_a_context_in_which_no_prompt_fits_is_refused():
    engine = FakeEngine(seeded_letter)

    async def too_long(request):
        raise LengthFailure("a prompt of 99 tokens")

    engine.generate = too_long
    task = FakeTask(Chain())
    with pytest.raises(ConfigError, match=r"task\.max_context: the first prompt of none of the \d+ examples fits"):
        evaluate(lambda key: environment(task, engine, key=key), task.examples("dev"), SETTINGS, 0, "outcome")
