"""Prompt stages: DSPy's optimisers on whole batches of rollouts, resumed to the same files, nothing paid for twice."""

import asyncio
import json

import dspy
import pytest

from mmrl.config import EvalConfig
from mmrl.models.chat import encode_text
from mmrl.report.rundir import RunDir, comparable
from mmrl.rollout.environment import make_environment, sampling_settings
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import sample
from mmrl.run.build import build_task
from mmrl.stages.prompts import store
from mmrl.tasks.dspy.built_in import Banking77
from tests.helpers.prompts import ScriptedEngine, banking, better_with_demonstrations, labelled, prompt_stage, proposal

FILES = ("prompts.json", *(f"prompts/{n}.jsonl" for n in ("trials", "proposals", "rollouts", "completions")))
SMALL = {"auto": None, "num_candidates": 5, "num_instruct_candidates": 3, "num_trials": 6}
MIPRO = {**SMALL, "minibatch": True, "minibatch_size": 8, "minibatch_full_eval_steps": 3, "max_labeled_demos": 2}


@pytest.fixture(scope="module")
def task():
    return banking()


def optimised(folder, task, algo="miprov2", answer=None, **options):
    engine = ScriptedEngine(answer or better_with_demonstrations(task[1]))
    stage = prompt_stage(folder, task, engine, algo, **options)
    with stage.rundir:
        return stage.run(), engine


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, task):
    folder = tmp_path_factory.mktemp("prompts") / "run"
    result, engine = optimised(folder, task, **MIPRO)
    return folder, result, engine


def test_the_best_candidate_on_all_validation_examples_is_the_result(whole):
    folder, result, _ = whole
    trials = lines(folder / "prompts" / "trials.jsonl")
    # the start, six trials on minibatches, and the best of them on all examples after every three
    assert [trial["full"] for trial in trials] == [True, *[False] * 3, True, *[False] * 3, True][: len(trials)]
    assert [trial["items"] for trial in trials] == [19 if trial["full"] else 8 for trial in trials]
    full = [trial for trial in trials if trial["full"]]
    assert result.start == full[0]["score"] < result.best == max(trial["score"] for trial in full) == trials[-1]["best"]
    assert (result.improved, result.trials, result.validation) == (True, len(trials), 19)
    best = next(trial for trial in full if trial["score"] == result.best)["modules"]["classify.predict"]
    saved = json.loads(result.prompts.read_text())["classify.predict"]
    assert saved["signature"]["instructions"] == best["instructions"]
    assert saved["demos"] == best["demonstrations"] != []
    assert [record["step"] for record in RunDir.read(folder).history()] == list(range(1, len(trials) + 1))


def test_all_programs_of_a_batch_are_in_flight_at_once(whole):
    assert whole[2].most == 19


def test_what_is_paid_for_is_what_was_sent(whole):
    folder, result, engine = whole
    assert result.student.calls + result.writer.requests == len(engine.requests)
    history = RunDir.read(folder).history()
    assert sum(r["prompts/calls"] + r["prompts/writer/requests"] for r in history) == len(engine.requests)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stage_killed_at_any_batch_goes_on_to_the_same_files(tmp_path, task, whole, monkeypatch, when):
    folder, result, engine = whole
    append, sent, runs = store.append_jsonl, 0, 0

    def killing(path, records):
        # after some batches: before the last of them is stored, or right after it
        if path.name in ("rollouts.jsonl", "completions.jsonl"):
            killing.left -= 1
            if killing.left == 0 and when == "before":
                raise KeyboardInterrupt
        written = append(path, records)
        if killing.left == 0:
            killing.left = -1
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(store, "append_jsonl", killing)
    killed = tmp_path / "run"
    again = None
    while again is None:
        killing.left = 6
        own = ScriptedEngine(better_with_demonstrations(task[1]))
        stage = prompt_stage(killed, task, own, "miprov2", **MIPRO)
        with stage.rundir:
            try:
                again = stage.run()
            except KeyboardInterrupt:
                runs += 1
        sent += len(own.requests)
    assert runs > 2
    for name in FILES:
        assert (killed / name).read_bytes() == (folder / name).read_bytes(), name
    assert again == type(again)(**{**{f: getattr(result, f) for f in result.__slots__}, "prompts": again.prompts})
    metrics = [[comparable(record) for record in RunDir.read(path).history()] for path in (folder, killed)]
    assert metrics[0] == metrics[1]
    if when == "after":
        assert sent == len(engine.requests), "nothing that was stored is paid for again"


def test_a_stage_that_is_run_again_sends_nothing(whole, task):
    folder, result, _ = whole
    before = (folder / "metrics.jsonl").read_bytes()
    again, engine = optimised(folder, task, **MIPRO)
    assert (again, engine.requests) == (result, [])
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_rollouts_with_the_saved_prompts_send_what_dspys_adapter_renders(whole, task):
    path, (config, built) = str(whole[1].prompts), task
    plain = Banking77(built.labels)
    plain.load(path)
    predictor = plain.classify.predict
    assert predictor.demos
    again = build_task(config.model_copy(update={"prompts": path}), 0)
    engine = ScriptedEngine(better_with_demonstrations(built))
    settings = sampling_settings(EvalConfig(), config)
    env = make_environment(again, engine, engine.tokenizer, settings, (0,))
    examples = built.examples("train")[:5]
    forest = asyncio.run(sample(env, [(example, (Tree(),)) for example in examples], "outcome"))
    expected = [
        dspy.ChatAdapter().format(predictor.signature, predictor.demos, dict(example.inputs)) for example in examples
    ]
    assert [list(map(dict, request.messages)) for request in engine.requests] == expected
    assert [call.completion_ids for call in forest.calls.values()] == [
        (*encode_text(engine.tokenizer, call.text), engine.tokenizer.eos_token_id) for call in forest.calls.values()
    ], "what is trained on is what was sampled"


def test_where_nothing_is_better_the_prompts_stay(tmp_path, task):
    gold = {e.inputs["text"]: e.metadata["label"] for e in task[1].examples("train")}

    def all_right(messages, temperature, seed):
        made = proposal(messages, seed)
        return made or labelled(task[1], gold[messages[-1]["content"].split("]]\n")[1].split("\n\nRespond")[0]])

    result, _ = optimised(tmp_path / "run", task, answer=all_right, **MIPRO)
    assert (result.improved, result.start, result.best) == (False, 1.0, 1.0)
    saved = json.loads(result.prompts.read_text())["classify.predict"]
    assert saved["demos"] == [] and "nothing better than the start" in result.describe()["prompts"]
