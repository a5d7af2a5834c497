"""Prompt stages where something is off: unusable proposals, rollouts that fail, nothing better, too few examples."""

import copy
import itertools
import json
from dataclasses import replace
from typing import Any

import dspy
import pytest

from mmrl.cli import main
from mmrl.config import DataConfig
from mmrl.config.tasks import DspyProgramConfig, PluginTaskConfig
from mmrl.errors import EngineFailure, LengthFailure, TooManyFailures
from mmrl.report.console import show_run
from mmrl.report.overview import Overview
from mmrl.rollout import with_program
from mmrl.stages.prompts.loop import Loop
from mmrl.stages.prompts.split import prompt_problems, split
from mmrl.stages.prompts.students import _distinguish
from mmrl.store.rundir import RunDir
from mmrl.system.memo import Memo
from mmrl.system.objects import register
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.own import ImportedTask, OwnTask
from tests.dspy.test_threads import Other
from tests.helpers.programs import filled
from tests.helpers.servers import Scripted, chat_reply, serving
from tests.helpers.stages import (
    MIPRO,
    OPTIONS,
    Cut,
    ScriptedEngine,
    banking,
    better_with_demonstrations,
    field,
    labelled,
    lines,
    optimised,
    prompt_command,
    prompt_stage,
    proposal,
    share,
    text_in,
)

SMALL_MIPRO: dict[str, Any] = {"auto": None, "num_candidates": 4, "minibatch": False}


@pytest.fixture(scope="module")
def task():
    return banking()


def changed(task, **attributes):
    """The config and a task with other attributes."""
    config, built = task
    made = copy.copy(built)
    vars(made).update(attributes)
    return config, made


def searched(folder, task, answer, monkeypatch):
    """A stage that has run to its end, and what the display noted."""
    notes: list[str] = []
    stage = prompt_stage(folder, task, ScriptedEngine(answer), "miprov2", **MIPRO)
    monkeypatch.setattr(stage.log.progress, "note", notes.append)
    with stage.rundir:
        stage.result = stage.search()
    return stage, notes


def test_rows_of_a_file_may_be_sorted(tmp_path):
    """As Banking77's official one by intent: prompts would be chosen by the last intent alone."""
    file = tmp_path / "sorted.csv"
    labels = [f"intent_{n // 20:02}" for n in range(200)]
    file.write_text("text,category\n" + "".join(f"message {n},{label}\n" for n, label in enumerate(labels)))
    chosen, built = banking(data={"train": str(file)}, sample="all")
    examples, limits = built.examples("train"), {"validation_items": 40, "train_items": 40}
    config, other_seed = (prompt_command(chosen, "miprov2", seed, **limits) for seed in (3, 4))
    parts = split(config, examples)
    assert [len(part) for part in parts] == [40, 40]
    assert not {example.id for example in parts[0]} & {example.id for example in parts[1]}
    # Of 40 drawn of ten times 20, each intent is missing with a probability of 0.9 %.
    assert all(len({example.metadata["label"] for example in part}) >= 8 for part in parts)
    assert split(config, examples) == parts
    assert split(other_seed, examples) != parts


def test_where_nothing_is_better_the_prompts_stay(tmp_path, task):
    gold = {e.inputs["text"]: e.metadata["label"] for e in task[1].examples("train")}

    def all_right(messages, temperature, seed):
        made = proposal(messages, seed)
        return made or labelled(task[1], gold[messages[-1]["content"].split("]]\n")[1].split("\n\nRespond")[0]])

    result, _ = optimised(tmp_path / "run", task, answer=all_right, **MIPRO)
    assert (result.improved, result.start, result.best) == (False, 1.0, 1.0)
    saved = json.loads(result.prompts.read_text())["classify.predict"]
    assert saved["demos"] == [] and "nothing better than the start" in result.facts["prompts"]


def test_a_proposal_that_cannot_be_used_is_noted_and_changes_nothing(tmp_path, task):
    answer = better_with_demonstrations(task[1])

    def garbage(messages, temperature, seed):
        made = proposal(messages, seed)
        return answer(messages, temperature, seed) if made is None else ["", "hm", "[[ ## proposed"][seed % 3]

    result, _ = optimised(tmp_path / "run", task, answer=garbage, **MIPRO)
    proposals = [one for one in lines(tmp_path / "run" / "prompts" / "proposals.jsonl") if one["module"] is not None]
    assert len(proposals) == 3 and not any(one["usable"] for one in proposals)
    assert all(one["problem"].startswith("AdapterParseError: ") for one in proposals)
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    assert {trial["modules"]["classify.predict"]["instructions"] for trial in trials} == {
        trials[0]["modules"]["classify.predict"]["instructions"]
    }
    assert result.improved, "demonstrations alone"


def test_what_miprov2_proposes_and_does_not_try_is_noted(tmp_path):
    """DSPy puts the start's instructions in the place of the first that is proposed for each module."""

    def answer(messages, temperature, seed):
        return proposal(messages, seed) or filled(label="yes")

    options = {**SMALL_MIPRO, "num_instruct_candidates": 3, "num_trials": 12, "max_labeled_demos": 1}
    result, _ = optimised(tmp_path / "run", own(tmp_path / "own", Twice), "miprov2", answer, **options)
    proposals = lines(tmp_path / "run" / "prompts" / "proposals.jsonl")
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    for name in ("first", "second"):
        one, *others = [line for line in proposals if line["module"] == name]
        assert (one["usable"], one["problem"][:9]) == (False, "not tried") and one["instructions"]
        assert len(others) == 2 and all(line["usable"] for line in others)
        tried = {trial["modules"][name]["instructions"] for trial in trials}
        assert one["instructions"] not in tried
        assert tried - {trials[0]["modules"][name]["instructions"]} <= {line["instructions"] for line in others}
    assert result.facts["proposals"] == "4 of 6 instructions became candidates"


def test_instructions_of_a_file_are_tried_and_no_model_writes_any(tmp_path, task):
    file = tmp_path / "instructions.yaml"
    file.write_text("classify.predict:\n- Do well, please.\n- Name the intent.\n")
    options: dict[str, Any] = {
        **MIPRO,
        "num_instruct_candidates": None,
        "max_bootstrapped_demos": 0,
        "max_labeled_demos": 0,
    }
    result, _ = optimised(tmp_path / "run", task, **options, instructions=str(file))
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    tried = [trial["modules"]["classify.predict"]["instructions"] for trial in trials]
    assert set(tried) == {tried[0], "Do well, please.", "Name the intent."}
    assert (result.improved, result.requests) == (True, 0)
    assert "Do well" in json.loads(result.prompts.read_text())["classify.predict"]["signature"]["instructions"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- Name the intent.", "got list, expected module: [text, ...]"),
        ("classify.predikt: [Name it.]", "got 'classify.predikt', expected one of classify.predict"),
        ("classify.predict: Name it.", "classify.predict: got Name it., expected a list of texts"),
        ("classify.predict: [Name it., ' ']", "classify.predict: got [Name it., ], expected a list of texts"),
        ("classify.predict: [", "1: cannot be read: not YAML"),
    ],
)
def test_a_file_of_instructions_that_cannot_be_used_is_refused(tmp_path, task, text, says):
    file = tmp_path / "instructions.yaml"
    file.write_text(text)
    options: dict[str, Any] = {"max_bootstrapped_demos": 0, "max_labeled_demos": 0, "instructions": str(file)}
    (problem,) = prompt_problems(prompt_command(task[0], "miprov2", **options), task[1])
    assert problem.startswith(f"algo.instructions: {file}") and says in problem


def test_failed_rollouts_are_counted_and_never_demonstrations(tmp_path, task):
    answer = better_with_demonstrations(task[1])

    def broken(messages, temperature, seed):
        text = answer(messages, temperature, seed)
        unread = proposal(messages, seed) is None and share(text_in(messages)) < 0.25
        return "no field at all" if unread else text

    # the best reward there is, for what could not be parsed
    optimised(tmp_path / "run", changed(task, failure_score=1.0), answer=broken, **MIPRO)
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    unread = sum(share(e.inputs["text"]) < 0.25 for e in task[1].examples("train")[-19:])
    assert trials[0]["failed"] == {"parse": unread} and unread
    texts = {
        demo["text"]
        for t in trials
        for demo in t["modules"]["classify.predict"]["demonstrations"]
        if "augmented" in demo
    }
    assert texts and all(share(text) >= 0.25 for text in texts)
    history = RunDir.read(tmp_path / "run").history()
    assert history[0]["rollouts/failed/parse"] == unread and history[0]["rollouts/failed_share"] == 0


def test_trials_in_which_every_rollout_fails_ring_an_alarm_with_a_reply(tmp_path, task, monkeypatch):
    answer = better_with_demonstrations(task[1])

    def lost_by_demonstrations(messages, temperature, seed):
        shown = proposal(messages, seed) is None and any(m["role"] == "assistant" for m in messages)
        return "no field \x1b[31m at all" if shown else answer(messages, temperature, seed)

    stage, notes = searched(tmp_path / "run", task, lost_by_demonstrations, monkeypatch)
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    lost = [trial for trial in trials if trial["failed"] == {"parse": trial["items"]}]
    assert 1 < len(lost) == stage.unusable < len(trials) and trials[0] not in lost
    example = {"module": "classify.predict", "reply": "no field \x1b[31m at all"}
    for trial in trials:
        assert ("unusable" in trial) == (trial in lost)
        assert trial not in lost or trial["unusable"].items() >= example.items()
    assert f"{len(lost)} of {len(trials)}" in stage.describe()["failed trials"]
    assert len(notes) == len(lost)
    assert r"classify.predict wrote, for example: no field \x1b[31m at all (output fields missing" in notes[0]
    seen = Overview.from_run(RunDir.read(tmp_path / "run"))
    assert {alarm.name for alarm in seen.alarms} == {"trials_fail", "never_parses"}, "the failure, and its kind"
    failing = [alarm for alarm in seen.alarms if alarm.name == "trials_fail"]
    steps = [step for alarm in failing for step in range(alarm.step, (alarm.until or len(trials)) + 1)]
    assert steps == [trial["trial"] for trial in lost]
    assert "trials_fail from step" in " ".join(show_run(tmp_path / "run").split())


@pytest.mark.parametrize("algo", ["bootstrap_fewshot", "miprov2"])
def test_a_metric_calls_the_lm_that_is_configured_and_not_the_optimisers(tmp_path, task, algo):
    verdict, lm = dspy.Predict("text -> fine: bool"), Other()
    made = changed(task, score=lambda example, *_: Score(reward=float(verdict(text=example.inputs["text"]).fine)))
    dspy.configure(lm=lm)
    try:
        result, _ = optimised(tmp_path / "run", made, algo, **OPTIONS[algo])
        assert dspy.settings.lm is lm
    finally:
        dspy.configure(lm=None)
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    assert {kind for trial in trials for kind in trial["failed"]} <= {"parse"}
    assert result.start == 1.0 and len(lm.sent) >= sum(t["items"] - t["failed"].get("parse", 0) for t in trials)


def test_a_reward_that_raises_or_is_no_number_ends_the_stage_with_its_place(tmp_path, task):
    for number, score in enumerate((lambda *_: 1 / 0, lambda *_: Score(reward=float("nan")))):
        engine = ScriptedEngine(better_with_demonstrations(task[1]))
        with pytest.raises(TooManyFailures, match=r"eval\.max_failed_share=50%; the first: reward in"):
            optimised(tmp_path / f"{number}", changed(task, score=score), engine=engine, **MIPRO)
        assert len(engine.requests) <= 8, "not all that bootstrapping would try"


@pytest.mark.parametrize("algo", OPTIONS)
@pytest.mark.parametrize("working", [3, 40])
def test_an_engine_that_fails_ends_the_stage_and_is_no_score(tmp_path, task, algo, working):
    answer, requests = better_with_demonstrations(task[1]), itertools.count()

    def failing(messages, temperature, seed):
        if proposal(messages, seed) is None and next(requests) >= working:
            return EngineFailure("no server")
        return answer(messages, temperature, seed)

    options = OPTIONS[algo]
    stage = prompt_stage(tmp_path / "run", task, ScriptedEngine(failing), algo, **options)
    none = stage.config.eval.model_copy(update={"max_failed_share": 0.0})
    stage.config = stage.config.model_copy(update={"eval": none})
    with stage.rundir, pytest.raises(TooManyFailures, match=r"the first: engine in .*no server"):
        stage.search()
    table = tmp_path / "run" / "prompts" / "trials.jsonl"
    assert not any(trial["failed"] for trial in (lines(table) if table.exists() else ()))
    again, _ = optimised(tmp_path / "run", task, algo, **options)
    undisturbed, _ = optimised(tmp_path / "undisturbed", task, algo, **options)
    assert vars(again) == {**vars(undisturbed), "prompts": again.prompts}


@pytest.mark.parametrize("algo", ["miprov2", "gepa"])
def test_a_prompt_model_that_fails_ends_the_stage_and_is_no_proposal(tmp_path, task, algo):
    answer = better_with_demonstrations(task[1])

    def failing(messages, temperature, seed):
        failed = "proposed_instruction ## ]]" in messages[-1]["content"] or "`new_inst" in messages[0]["content"]
        return EngineFailure("no server") if failed else answer(messages, temperature, seed)

    with pytest.raises(EngineFailure, match="no server"):
        optimised(tmp_path / "run", task, algo, failing, **OPTIONS[algo])
    assert not (tmp_path / "run" / "prompts" / "proposals.jsonl").exists()


@pytest.mark.parametrize("algo", ["miprov2", "gepa"])
@pytest.mark.parametrize("what", ["too long", "cut", "refused"])
def test_a_request_to_the_prompt_model_that_cannot_be_answered_costs_one_proposal(tmp_path, task, algo, what):
    """Beyond the policy's context, beyond that of an endpoint, or an answer that ends in the middle of a sentence."""
    answer = better_with_demonstrations(task[1])

    def failing(messages, temperature, seed):
        made = proposal(messages, seed)
        if made is None:
            return answer(messages, temperature, seed)
        return LengthFailure("4097 tokens, of 4096") if what == "too long" else Cut(made)

    refusal = {"error": {"code": "context_length_exceeded", "message": "This model's context is 2048 tokens"}}
    with serving([Scripted(refusal, status=400)]) as (url, _):
        model = {"prompt_model": {"url": url, "model": "big", "key_env": None}} if what == "refused" else {}
        options = {**OPTIONS[algo], **model}
        result, _ = optimised(tmp_path / "run", task, algo, failing, **options)
    proposals = [one for one in lines(tmp_path / "run" / "prompts" / "proposals.jsonl") if one["module"] is not None]
    said = {"too long": "4097 tokens", "cut": "cut at algo.prompt_max_tokens=", "refused": "context_length_exceeded"}
    assert proposals and all(said[what] in one["problem"] and not one["usable"] for one in proposals)
    assert result.facts["proposals"].startswith(f"0 of {len(proposals)} instructions became candidates; ")


THOUGHTS = "<think>\n[[ ## proposed_instruction ## ]]\nA draft.\n[[ ## completed ## ]]\nToo short.\n</think>\n\n"


@pytest.mark.parametrize("who", ["policy", "endpoint"])
@pytest.mark.parametrize(
    ("reply", "read"),
    [
        (THOUGHTS + "The answer.", "The answer."),
        (THOUGHTS.removeprefix("<think>\n") + "The answer.", "The answer."),
        ("Think in <think> and </think>.", "Think in <think> and </think>."),
    ],
)
def test_thoughts_of_the_prompt_model_are_no_part_of_what_it_says(tmp_path, task, who, reply, read):
    with serving([chat_reply(reply)]) as (url, _):
        model = {"prompt_model": {"url": url, "model": "big", "key_env": None}} if who == "endpoint" else {}
        engine = ScriptedEngine(lambda messages, temperature, seed: reply)
        stage = prompt_stage(tmp_path / "run", task, engine, "miprov2", **{**MIPRO, **model})
        with stage.rundir:
            writer = stage._make_writer(Memo(tmp_path / "memo.jsonl"), loop := Loop())
            (text,) = loop.run(lambda: writer.lm(1.0)("Propose."))
            writer.close()
    assert text == read


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("observations", "data summary"),
        ("summary", "data summary"),
        ("program_description", "description of the program"),
        ("module_description", "description of a module"),
    ],
)
def test_a_description_that_the_prompt_model_does_not_give_is_noted(tmp_path, task, monkeypatch, asked, name):
    answer = better_with_demonstrations(task[1])

    def cut(messages, temperature, seed):
        *_, last = messages[-1]["content"].split("Respond with")
        return Cut("I wonder") if f"[[ ## {asked} ## ]]" in last else answer(messages, temperature, seed)

    stage, notes = searched(tmp_path / "run", task, cut, monkeypatch)
    proposals = lines(tmp_path / "run" / "prompts" / "proposals.jsonl")
    missing = [one["problem"] for one in proposals if one["module"] is None]
    assert {problem.split(":")[0] for problem in missing} == {name}
    assert all("cut at algo.prompt_max_tokens=1024" in problem for problem in missing)
    (note,) = notes
    assert note.startswith(f"warning: the prompt model gave no {name}, and proposes without it (")
    assert stage.describe()["proposals"] == "2 of 3 instructions became candidates", "of descriptions it says nothing"


def test_options_of_miprov2_without_effect_are_refused(tmp_path, task):
    config, built = task

    def problems(**options):
        return prompt_problems(prompt_command(config, "miprov2", **options), built)

    (size,) = problems(minibatch_size=15)
    assert size.startswith("algo.minibatch_size: has no effect: trials are on all of 19 validation examples")
    assert problems(auto=None, num_candidates=3, num_trials=3, minibatch=True, minibatch_size=15) == []
    with pytest.raises(ValueError, match="num_instruct_candidates: got 10, and MIPROv2 writes no more"):
        prompt_command(config, "miprov2", auto=None, num_candidates=3, num_trials=3, num_instruct_candidates=10)


def test_too_few_examples_are_refused_with_their_numbers():
    def problems(items, **options):
        config, built = banking(items)
        return prompt_problems(prompt_command(config, "miprov2", **options), built)

    assert problems(24) == [] == problems(24, **MIPRO)
    (few,) = problems(1)
    assert few.startswith(
        "task.data.train: has 1 examples, of which algo.validation=0.8 leaves 0 to learn from and 1 to"
    )
    (large,) = problems(24, **{**MIPRO, "minibatch_size": 20})
    assert large.startswith("algo.minibatch_size: got 20, more than the 19 validation examples")


class Twice(dspy.Module):
    """Two predictors with one signature."""

    def __init__(self):
        super().__init__()
        self.first = dspy.Predict("text -> label")
        self.second = dspy.Predict("text -> label")

    def forward(self, text):
        return self.second(text=self.first(text=text).label)


def test_predictors_that_share_a_signature_are_modules_of_their_own():
    module = Twice()
    _distinguish(module)
    first, second = module.first.signature, module.second.signature
    assert not first.equals(second), "GEPA tells a predictor's part of a trace by its signature"
    assert module.dump_state() == Twice().dump_state() | {
        name: {**state, "signature": module.dump_state()[name]["signature"]}
        for name, state in Twice().dump_state().items()
    }
    adapter = dspy.ChatAdapter()
    assert adapter.format(first, [], {"text": "a"}) == adapter.format(Twice().first.signature, [], {"text": "a"})


def own(folder, program):
    """The config and the task of a DSPy program of one's own that is right where it says "yes"."""
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(f'{{"text": "t{number}"}}\n' for number in range(8)))
    config = PluginTaskConfig(name="own", data=DataConfig(train=str(folder / "train.jsonl")))
    task = OwnTask(program, lambda example, prediction: prediction.label == "yes", inputs=["text"])
    return config, with_program(task(config, 0))


class Awaited(dspy.Module):
    """With `aforward` alone."""

    def __init__(self):
        super().__init__()
        self.steps = [dspy.Predict("text -> label")]

    async def aforward(self, text):
        return await self.steps[0].acall(text=text)


class Retrieves(dspy.Module):
    """With a part that has a state and is no predictor."""

    def __init__(self):
        super().__init__()
        self.retrieve, self.answer = dspy.Retrieve(k=1), dspy.Predict("text -> label")

    def forward(self, text):
        return self.answer(text=text)


def refined():
    return dspy.Refine(dspy.ChainOfThought("text -> label"), 2, lambda inputs, output: output.label == "yes", 1.0)


@pytest.mark.parametrize(
    ("program", "module"),
    [
        (dspy.Predict("text -> label"), "self"),
        (dspy.ChainOfThought("text -> label"), "predict"),
        (Awaited, "steps[0]"),
        (Retrieves, "answer"),
        (refined, "module.predict"),
    ],
)
def test_programs_of_every_form_are_optimised(tmp_path, program, module):
    """Right where "Do well" is in the instructions; of `Refine`, the second attempt is."""

    def answer(messages, temperature, seed):
        if (made := proposal(messages, seed)) is not None:
            return made
        names = [name for name in ("reasoning", "label") if f"[[ ## {name} ## ]]" in messages[0]["content"]]
        if "advice" in messages[0]["content"]:
            return filled(discussion="none", advice="{}")
        right = "Do well" in messages[0]["content"]
        return filled(**dict.fromkeys(names, "yes" if right else "no"))

    options = {"auto": None, "max_metric_calls": 24, "use_merge": False}
    result, _ = optimised(tmp_path / "run", own(tmp_path / "own", program), "gepa", answer, **options)
    assert (result.improved, result.start, result.best) == (True, 0.0, 1.0)
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    assert "Do well" in trials[-1]["modules"][module]["instructions"]
    assert not any(trial["failed"] for trial in trials)
    assert "Do well" in result.prompts.read_text()


def test_demonstrations_of_predictors_that_share_a_signature_are_their_own(tmp_path):
    def answer(messages, temperature, seed):
        label = "yes" if text_in(messages).startswith("of ") else f"of {text_in(messages)}"
        return field("label", label) + "[[ ## completed ## ]]"

    options = {"num_candidate_programs": 1, "max_labeled_demos": 0}
    result, _ = optimised(tmp_path / "run", own(tmp_path / "own", Twice), "bootstrap_fewshot", answer, **options)
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    assert {tuple(trial["modules"]) for trial in trials} == {("first", "second")}
    shown = {name: [d["text"] for d in trials[-1]["modules"][name]["demonstrations"]] for name in ("first", "second")}
    assert shown["first"] and {f"of {text}" for text in shown["first"]} == set(shown["second"])
    assert not result.improved and result.start == 1.0


def strict(gold, pred, trace=None):
    """Partial credit; all or nothing where it reads a trace, as `dspy.evaluate.SemanticF1`."""
    reward = 1.0 if pred.label == "yes" else 0.25
    if trace is None:
        return reward
    ((_, inputs, outputs),) = trace
    assert inputs == {"text": gold.text} and outputs.label == pred.label
    return reward >= 0.9


class Strict(dspy.Module):
    """The same as a module."""

    def forward(self, example, pred, trace=None):
        return dspy.Prediction(score=float(strict(example, pred, trace)))


def of_form(gold, pred, trace):
    return 0.0 if trace else 1.0


def lenient(gold, pred, weight=0.25):
    """With an option of its own, which is no trace."""
    return 1.0 if pred.label == "yes" else weight


@pytest.mark.parametrize(
    ("metric", "threshold", "shown"),
    [
        (strict, None, {"yes"}),
        (Strict(), None, {"yes"}),
        ([strict, of_form], None, {"yes"}),
        (lenient, None, {"yes", "no"}),
        (lenient, 0.5, {"yes"}),
        (strict, 0.5, {"yes"}),
    ],
)
@pytest.mark.parametrize("algo", ["bootstrap_fewshot", "miprov2"])
def test_a_metric_that_takes_a_trace_says_what_may_be_a_demonstration(tmp_path, algo, metric, threshold, shown):
    rows = [{"text": f"t{number}"} for number in range(16)]
    several = isinstance(metric, list)
    paths = tuple(register(f"metric{number}", one) for number, one in enumerate(metric if several else [metric]))
    config = DspyProgramConfig(
        name="dspy",
        program=register("labels", dspy.Predict("text -> label")),
        metric=paths if several else paths[0],
        inputs=("text",),
        data=DataConfig(train=register("rows", rows)),
    )

    def answer(messages, temperature, seed):
        right = int(text_in(messages).removeprefix("t")) % 2 == 0 if proposal(messages, seed) is None else False
        return proposal(messages, seed) or filled(label="yes" if right else "no")

    options = {"max_labeled_demos": 0, "max_bootstrapped_demos": 4, "metric_threshold": threshold}
    options |= {"num_candidate_programs": 1} if algo == "bootstrap_fewshot" else {"num_trials": 3, **SMALL_MIPRO}
    optimised(tmp_path / "run", (config, with_program(ImportedTask(config, 0))), algo, answer, **options)
    trials = lines(tmp_path / "run" / "prompts" / "trials.jsonl")
    assert {demo["label"] for trial in trials for demo in trial["modules"]["self"]["demonstrations"]} == shown


def test_two_examples_with_the_same_inputs_differ_by_their_labels(tmp_path, task):
    first, second, *rest = task[1].examples("train")
    twin = replace(first, id="twin", metadata={"label": second.metadata["label"]})
    scored = set()

    def score(example, *_):
        scored.add((example.id, example.metadata["label"]))
        return Score(reward=0.0)

    made = changed(task, examples=lambda split: [twin, first, *rest], score=score)
    optimised(tmp_path / "run", made, "bootstrap_fewshot", num_candidate_programs=0)
    assert {("twin", twin.metadata["label"]), (first.id, first.metadata["label"])} <= scored


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("memo.jsonl", "/prompts/memo.jsonl:1: damaged, expected a key and a reply with their digest; restore "),
        ("rollouts.jsonl", ": an earlier version of mmrl began this search, and what it stored does not fit any more"),
    ],
)
def test_a_search_that_cannot_go_on_is_refused_before_a_model_loads(name, says, tmp_path, capsys):
    config = prompt_command(banking()[0], "miprov2").model_dump(mode="json")
    with RunDir.create(tmp_path / "run", config, ["mmrl"]) as run:
        (run.path / "prompts").mkdir()
        (run.path / "prompts" / name).write_text('{"key": 1}\n{"key": "to')
    assert main(["train", f"resume={run.path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run.path}{says}" in line
