"""Prompt stages: DSPy's optimisers on mmrl's rollouts; a killed one goes on, and asks nothing twice."""

import asyncio
import copy
import itertools
import json
import sys
import time
from typing import Any

import dspy
import pytest

from mmrl.config.endpoint import EndpointConfig
from mmrl.config.tasks import task_schema
from mmrl.engines.completions import Reply
from mmrl.engines.openai import OpenAIChat
from mmrl.records import Example
from mmrl.report.console import show_run
from mmrl.report.trials import prompts_text
from mmrl.run.build import build_task
from mmrl.stages.prompts.loop import Loop
from mmrl.stages.prompts.rollouts import Rollouts, TrainExample
from mmrl.store.rundir import RunDir
from mmrl.system import memo
from mmrl.system.files import append_jsonl, read_jsonl
from mmrl.system.memo import Memo
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.built_in import Banking77
from scripts.chaos.compare import comparable
from tests.helpers.programs import filled
from tests.helpers.stages import (
    MIPRO,
    OPTIMISERS,
    OPTIONS,
    ScriptedEngine,
    banking,
    better_with_demonstrations,
    lines,
    optimised,
    prompt_stage,
    proposal,
    share,
)

FILES = ("prompts.json", "prompts/trials.jsonl", "prompts/proposals.jsonl")
COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")


@pytest.fixture(scope="module")
def task():
    return banking()


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


class SlowEngine(ScriptedEngine):
    """Answers once no other request has come for a while, however slow the machine is."""

    async def generate(self, request):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        self.newest = time.monotonic()
        # One request alone is mostly a proposer's, which nobody joins.
        while time.monotonic() < self.newest + (0.3 if self.waiting > 1 else 0.1):
            await asyncio.sleep(0.01)
        self.waiting -= 1
        return await super().generate(request)


@pytest.mark.parametrize(("algo", "most"), [("miprov2", 19), ("bootstrap_fewshot", 19), ("gepa", 12)])
def test_rollouts_of_an_evaluation_are_in_flight_at_once(tmp_path, task, algo, most):
    engine = SlowEngine(better_with_demonstrations(task[1]))
    optimised(tmp_path / "run", task, algo, engine=engine, **OPTIONS[algo])
    assert engine.most == most


def test_what_is_paid_for_is_what_was_sent(whole):
    folder, result, engine = whole
    assert result.calls + result.requests == len(engine.requests)
    history = RunDir.read(folder).history()
    assert sum(r["prompts/calls"] + r["prompts/writer/requests"] for r in history) == len(engine.requests)


def test_what_a_search_asks_of_endpoints_is_logged(tmp_path, task):
    class Endpoint(ScriptedEngine):
        def endpoint_usage(self):
            return {"endpoint/requests": float(len(self.requests))}

    engine = Endpoint(better_with_demonstrations(task[1]))
    optimised(tmp_path / "run", task, "bootstrap_fewshot", engine=engine, **OPTIMISERS["bootstrap_fewshot"])
    records = RunDir.read(tmp_path / "run").history()
    assert 0 < records[0]["endpoint/requests"] < records[-1]["endpoint/requests"] == len(engine.requests)


def kill_at(monkeypatch, number, when):
    """Kill the process before or right after it stores its n-th reply."""
    stored = itertools.count(1)

    def killing(path, records):
        due = next(stored) == number
        if due and when == "before":
            raise KeyboardInterrupt
        written = append_jsonl(path, records)
        if due:
            raise KeyboardInterrupt
        return written

    monkeypatch.setattr(memo, "append_jsonl", killing)


def keys(folder):
    """The requests in a memo."""
    return [line["key"] for line in read_jsonl(folder / "prompts" / "memo.jsonl")]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("algo", OPTIONS)
def test_a_killed_search_goes_on_and_asks_nothing_twice(tmp_path, task, monkeypatch, algo, when):
    folder, killed, runs, again = tmp_path / "whole", tmp_path / "killed", 0, None
    result, engine = optimised(folder, task, algo, **OPTIONS[algo])
    assert result.improved and result.best > result.start
    assert result.calls + result.requests == len(engine.requests) == len(keys(folder))
    while again is None:
        kill_at(monkeypatch, 20, when)
        before = len(keys(killed)) if runs else 0
        try:
            again, rest = optimised(killed, task, algo, **OPTIONS[algo])
        except KeyboardInterrupt:
            runs += 1
            with open(killed / "prompts" / "memo.jsonl", "a") as file:
                file.write('{"key": "torn')
    assert runs > (2 if algo == "miprov2" else 1)
    assert len(rest.requests) == len(keys(killed)) - before < 20
    assert sorted(keys(killed)) == sorted(keys(folder)), "each request of the whole search, once"
    for name in FILES:
        assert (killed / name).exists() == (folder / name).exists()
        assert not (folder / name).exists() or (killed / name).read_bytes() == (folder / name).read_bytes(), name
    assert vars(again) == {**vars(result), "prompts": again.prompts}
    metrics = [[comparable(record) for record in RunDir.read(path).history()] for path in (folder, killed)]
    assert metrics[0] == metrics[1]


def test_a_search_that_goes_on_notes_after_which_trial(tmp_path, task, monkeypatch):
    """What endpoints cost is counted from 0 by each process: `mmrl compare` adds up what each has paid."""
    kill_at(monkeypatch, 60, "after")
    with pytest.raises(KeyboardInterrupt):
        optimised(tmp_path / "run", task, **MIPRO)
    monkeypatch.undo()
    logged = [record["step"] for record in RunDir.read(tmp_path / "run").history()]
    RunDir.open(tmp_path / "run", ["mmrl", "train"]).close()
    result, _ = optimised(tmp_path / "run", task, **MIPRO)
    (start,) = RunDir.read(tmp_path / "run").environment["resumed"]
    assert 0 < start["step"] == max(logged) < result.trials


def test_equal_rollouts_are_as_many_samples_also_after_a_kill(tmp_path, task):
    """What is tried again at a temperature above 0 is sampled again; a resume has the same samples."""

    def made():
        engine = ScriptedEngine(
            lambda messages, temperature, seed: filled(reasoning=f"{seed}", label=task[1].labels[0])
        )
        stage = prompt_stage(tmp_path / "run", task, engine, "miprov2", **MIPRO)
        with stage.rundir:
            loop = Loop()
            rollouts = Rollouts(stage, Memo(tmp_path / "memo.jsonl"), loop, stage.paid)
            example = TrainExample.from_example(task[1].examples("train")[0])

            def played():
                with dspy.context(lm=dspy.LM("mmrl", temperature=1.0)):
                    return [rollouts.student.module(**example.inputs()).reasoning for _ in range(5)]

            return loop.run(played), len(engine.requests), stage.paid["calls"]

    labels, sent, used = made()
    assert (len(set(labels)), sent, used) == (5, 5, 5)
    assert made() == (labels, 0, 5)


def test_a_field_called_base_is_a_label_and_an_input_like_any_other():
    metadata = {"text": "t", "base": "b", "label": "l"}
    label = TrainExample.from_example(Example(id="i", inputs={"text": "t"}, metadata=metadata))
    assert (label.inputs().text, label.labels().toDict()) == ("t", {"base": "b", "label": "l"})
    given = TrainExample.from_example(Example(id="i", inputs={"text": "t", "base": "b"}, metadata=metadata))
    assert (given.inputs().base, given.labels().toDict()) == ("b", {"label": "l"})


def test_a_search_that_is_run_again_sends_nothing(whole, task):
    folder, result, _ = whole
    before = (folder / "metrics.jsonl").read_bytes()
    again, engine = optimised(folder, task, **MIPRO)
    assert (again, engine.requests) == (result, [])
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_judges_and_external_models_are_not_asked_twice_either(tmp_path, task):
    asked = []

    class Judge(OpenAIChat):
        async def _reply(self, messages, options):
            asked.append(messages)
            return Reply(text="1", finish="stop", unanswered=False, **dict.fromkeys(COUNTED, 1))

    async def score(example, prediction, path, reward_set):
        return Score(reward=float(await judge.complete([{"role": "user", "content": path[-1].text}])))

    judge = Judge(EndpointConfig(model="judge", url="http://127.0.0.1:9/v1", key_env=None))
    made = copy.copy(task[1])
    made.score, made.endpoints = score, {"judge": judge}
    _, engine = optimised(tmp_path / "run", (task[0], made), **MIPRO)
    assert len(asked) >= len(engine.requests) / 2 and judge.memo is None
    before = len(asked)
    (tmp_path / "run" / "prompts" / "trials.jsonl").unlink()
    _, engine = optimised(tmp_path / "run", (task[0], made), **MIPRO)
    assert (len(asked), engine.requests) == (before, [])


class InThreads(Banking77):
    """As plain DSPy runs it."""

    def forward(self, text):
        return self.classify(text=text)


def test_the_result_is_that_of_plain_dspy(tmp_path, task):
    built = task[1]
    answer = better_with_demonstrations(built)

    def fixed(messages, temperature, seed):
        return answer(messages, 0.0, int(1000 * share("".join(m["content"] for m in messages))))

    class Scripted(dspy.BaseLM):
        def __call__(self, prompt=None, *, messages=None, **options):
            return [fixed(messages, 0.0, 0)]

    examples = [dspy.Example(**e.inputs, **e.metadata).with_inputs(*e.inputs) for e in built.examples("train")]
    lm = Scripted("scripted", cache=False)
    with dspy.context(lm=lm, track_usage=False):
        optimiser = dspy.MIPROv2(
            metric=lambda gold, prediction, trace=None: float(gold.label == prediction.label),
            prompt_model=lm,
            task_model=lm,
            max_labeled_demos=2,
            auto=None,
            num_candidates=5,
            seed=3,
            num_threads=1,
        )
        optimiser.num_instruct_candidates = 3
        options = {
            "num_trials": 6,
            "minibatch_size": 8,
            "minibatch_full_eval_steps": 3,
            "program_aware_proposer": False,
        }
        theirs = optimiser.compile(InThreads(built.labels), trainset=examples, **options)
    ours, _ = optimised(tmp_path / "run", task, answer=fixed, **MIPRO, program_aware_proposer=False)
    saved = json.loads(ours.prompts.read_text())
    del saved["metadata"]
    assert saved == json.loads(json.dumps(theirs.dump_state()))
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    logs = [log.get("full_eval_score", log.get("mb_score")) for _, log in sorted(theirs.trial_logs.items())]
    assert [round(100 * trial["score"], 2) for trial in trials] == logs


@pytest.mark.parametrize(("temperature", "requests"), [(0.0, 1), (1.0, 2)])
def test_an_equal_request_to_the_prompt_model_is_sent_again_only_where_it_may_differ(
    tmp_path, task, temperature, requests
):
    def made():
        engine = ScriptedEngine(lambda messages, temperature, seed: f"{seed}")
        stage = prompt_stage(tmp_path / "run", task, engine, "miprov2", **MIPRO)
        with stage.rundir:
            lm = stage._make_writer(Memo(tmp_path / "memo.jsonl"), loop := Loop()).lm(temperature)
            texts = loop.run(lambda: [lm("Propose.")[0] for _ in range(2)])
        return texts, stage.paid["writer/requests"], len(engine.requests)

    texts, used, sent = made()
    assert len(set(texts)) == used == sent == requests
    assert made() == (texts, requests, 0), "a resume has the same, and sends nothing"


@pytest.mark.parametrize("algo", OPTIONS)
def test_what_dspy_says_is_in_a_file_and_not_on_the_screen(tmp_path, task, algo, capfd):
    before = sys.modules["dspy.teleprompt.bootstrap"].tqdm
    optimised(tmp_path / "run", task, algo, **OPTIONS[algo])
    shown = "".join(capfd.readouterr())
    assert not [bar for bar in ("it/s", "rollouts/s", "%|") if bar in shown], shown
    said = {"miprov2": "Bootstrapping set 1/", "bootstrap_fewshot": "Scores so far", "gepa": "Iteration 1"}[algo]
    assert said not in shown
    assert said in (tmp_path / "run" / "prompts" / "optimiser.log").read_text()
    assert sys.modules["dspy.teleprompt.bootstrap"].tqdm is before, "other uses of DSPy show what they did"


def test_the_seed_decides_what_is_tried(tmp_path, task, whole):
    optimised(tmp_path / "run", task, seed=4, **MIPRO)
    one, two = (lines(folder / "prompts" / "trials.jsonl") for folder in (whole[0], tmp_path / "run"))
    assert [trial["modules"] for trial in one] != [trial["modules"] for trial in two]


def test_show_prints_trials_and_the_difference_to_the_start(whole):
    folder, result, _ = whole
    text = prompts_text(folder)
    assert text.startswith(
        f"prompts: reward {result.start:.4f} at the start, {result.best:.4f} with the best candidate"
    )
    assert "  1      " in text and "19 (all)" in text
    assert "\n\nclassify.predict\n  " in text and "\n  +demonstration: " in text
    (folder / "summary.json").write_text("{}")
    assert text in show_run(folder)


@pytest.fixture(scope="module")
def search():
    config = task_schema("hotpotqa").model_validate(
        {"name": "hotpotqa", "dataset": "hotpotqa", "data": {"train_items": 20}}
    )
    return config, build_task(config, 0)


@pytest.mark.parametrize("algo", ["miprov2", "gepa"])
def test_agents_without_dspy_are_optimised_too(tmp_path, search, algo):
    config, built = search
    gold = {e.inputs["question"]: e.metadata["answers"][0] for e in built.examples("train")}
    start = built.all_prompts.by_module()

    def answer(messages, temperature, seed):
        made = proposal(messages, seed)
        if made is not None:
            return made
        question = next(q for q in gold if q in messages[-1]["content"])
        if messages[0]["content"].startswith("Choose"):
            return "Document1, Document0"
        shown = sum(m["role"] == "assistant" for m in messages)
        right = share(question) < 0.3 + 0.2 * shown + 0.4 * ("Do well" in messages[0]["content"])
        return gold[question] if right else "### nothing ###"

    # Their examples hold no replies of modules.
    options = {name: value for name, value in OPTIONS[algo].items() if name != "max_labeled_demos"}
    result, engine = optimised(tmp_path / "run", search, algo, answer, **options)
    assert result.improved and result.prompts.name == "prompts.yaml"
    task_again: Any = build_task(config.model_copy(update={"prompts": str(result.prompts)}), 0)
    again = task_again.all_prompts.by_module()
    trials = [trial for trial in lines(tmp_path / "run/prompts/trials.jsonl") if trial["full"]]
    best = next(trial for trial in trials if trial["score"] == result.best)["modules"]
    for module, prompt in again.items():
        shots = [{"prompt": s.user, "reply": s.assistant} for s in prompt.shots]
        assert [{k: d[k] for k in ("prompt", "reply")} for d in best[module]["demonstrations"]] == shots
        assert best[module]["instructions"] == prompt.instructions
    assert again != start
    system = again["answerer"].instructions
    sent = [request.messages for request in engine.requests if request.messages[0]["content"] == system]
    turns = [
        m["content"] for shot in again["answerer"].shots for m in ({"content": shot.user}, {"content": shot.assistant})
    ]
    assert any([m["content"] for m in messages[1:-1]] == turns for messages in sent)
