"""`mmrl doctor`: each trouble is found in exactly its case, and none in a healthy run."""

import json
from dataclasses import dataclass, replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl import rng
from mmrl.cli import main
from mmrl.cli.hydra import composed
from mmrl.errors import EngineFailure, LengthFailure, MmrlError, ParseFailure
from mmrl.report.alarms import alarms
from mmrl.report.doctor import find
from mmrl.run.checkup import doctor_runs
from mmrl.stages.checkup import examine
from mmrl.tasks.base import Score
from tests.helpers.configs import config_of, rl_stage_of
from tests.helpers.programs import Chain, FakeEngine, seeded_letter
from tests.helpers.runs import command

TURN = cycle((0.0, 1.0, 0.5))
"""Rewards that differ although replies are the same."""
OPTIONS = {"train.batch_size": 4, "algo.group_size": 4}


@dataclass
class Searcher(Chain):
    """Searches, then answers one letter."""

    modules: tuple[str, ...] = ("a",)
    tool: str = "search"
    words: Any = None

    async def run(self, example, ctx):
        await ctx.tool(self.tool, query=example.inputs["text"])
        reply = await ctx.call("a", [{"role": "user", "content": example.inputs["text"]}], parse=self.words)
        return reply.text


@dataclass
class Shown(Searcher):
    """Asks with an example of the form in its instruction."""

    async def run(self, example, ctx):
        await ctx.tool(self.tool, query=example.inputs["text"])
        content = f"{example.inputs['text']}: numbers, such as no, one"
        return (await ctx.call("a", [{"role": "user", "content": content}])).text


@dataclass
class Engine(FakeEngine):
    """A letter per request; `finish` is why it ended."""

    finish: str = "eos"
    logprob: float = -0.5

    async def generate(self, request):
        completion = await super().generate(request)
        return replace(completion, finish=self.finish, logprobs=(self.logprob,) * len(completion.ids))


def stage_of(engine, program, options=None, **task):
    """A weight stage around fakes, whose trainer has the log-probabilities of `Engine`."""
    options = options or {}
    stage: Any = rl_stage_of(config_of(options if "algo" in options else {**OPTIONS, **options}), engine)
    stage.task.program = program
    stage.task.tools = {"search": lambda query: [{"title": query}]}
    for name, value in task.items():
        setattr(stage.task, name, value)
    forwards = SimpleNamespace(
        accelerator=SimpleNamespace(is_fsdp2=False),
        tries=False,
        policy_logprobs=lambda calls: [(-0.5,) * len(call.completion_ids) for call in calls],
    )
    stage.trainer = SimpleNamespace(forwards=forwards)
    stage.tokenizer = SimpleNamespace(model_max_length=10**30)
    return stage


def found(engine=None, program=None, options=None, **task):
    played, _ = examine(stage_of(engine or Engine(seeded_letter), program or Searcher(), options, **task), 4)
    return {finding.name: finding for finding in find(played)}


def unparsable(text):
    raise ParseFailure("expected <answer>", present=0, expected=1)


def half_parsable(text):
    if text < "r":
        raise ParseFailure("expected <answer>", present=0, expected=1)
    return text


def by_letter(prediction):
    return ord(prediction[0]) % 3 / 2


def broken(*anything):
    raise ValueError("no field 'label' {in} mine.py")


def failing(error):
    async def generate(request):
        raise error

    engine = Engine(seeded_letter)
    engine.generate = generate
    return engine


def toolless(reward):
    """Score a rollout that used no tool by what it answered."""
    return lambda example, prediction, *_: Score(reward=reward(prediction), metrics={"tool_calls": 0.0})


MMGRPO = composed("train", ["algo=mmgrpo"])["algo"]
REFUSED = {"engine.endpoints": {"a": {"url": "http://127.0.0.1:9/v1", "model": "m"}}}
CASES: dict[str, Any] = {
    "never_parses": ({"program": Searcher(words=unparsable)}, True, "task.prompts"),
    "seldom_parses": ({"program": Searcher(words=half_parsable), "reward": by_letter}, False, "task.prompts"),
    "cut": ({"engine": Engine(seeded_letter, finish="length")}, False, "task.max_tokens"),
    "zero_variance": ({"reward": lambda prediction: 0.25}, True, "algo.group_size"),
    "logprob_gap": ({"engine": Engine(seeded_letter, logprob=-2.5)}, True, "model.dtype"),
    "prompt_too_long": ({"engine": failing(LengthFailure("a prompt of 99 tokens"))}, True, "task.max_context"),
    "prompt_near_limit": ({"options": {"task.max_context": 105, "task.max_tokens": 100}}, False, "task.max_tokens"),
    "user_code": ({"reward": broken}, True, "task.metric"),
    "tool_faults": ({"tools": {"search": broken}}, True, "task.retriever.url"),
    "engine_faults": ({"engine": failing(EngineFailure("out of memory"))}, True, "engine.urls"),
    "endpoint_faults": (
        {"engine": failing(EngineFailure("no answer: connection refused")), "options": REFUSED},
        True,
        "engine.endpoints",
    ),
    "copies_prompt": (
        {"program": Shown(), "engine": Engine(lambda request: "no, one"), "score": lambda *_: Score(reward=next(TURN))},
        False,
        "task.prompts",
    ),
    "no_tool_calls": ({"score": toolless(by_letter)}, False, "algo=sft"),
    "no_gold": ({"gold_shares": {"train": 0.0}}, True, "task.corpus"),
    "empty_searches": ({"tools": {"search": lambda query: []}}, False, "task.corpus"),
}


def test_a_healthy_run_has_no_findings():
    assert found() == {}


@pytest.mark.parametrize(
    "reply",
    [
        lambda request: "one",  # a label alone
        lambda request: "of, one",  # not in the prompt
        lambda request: "no, one" if rng.digest(request.sampling.seed) % 2 else seeded_letter(request),
    ],
)
def test_a_label_an_own_reply_and_a_frequent_one_are_not_copied(reply):
    assert "copies_prompt" not in found(Engine(reply), Shown(), reward=lambda prediction: next(TURN))


@pytest.mark.parametrize("name", CASES)
def test_each_trouble_is_found_in_exactly_its_case(name):
    case, useless, setting = CASES[name]
    findings = found(**case)
    assert list(findings) == [name]
    assert findings[name].useless == useless
    assert setting in findings[name].message
    assert (": a: " in findings[name].text()) == findings[name].key.startswith("module/a/")


def test_a_trouble_has_the_sentence_of_its_alarm():
    """Before training and in it."""
    for name in ("zero_variance", "logprob_gap", "prompt_too_long"):
        played, _ = examine(stage_of(**{"engine": Engine(seeded_letter), "program": Searcher(), **CASES[name][0]}), 4)
        (finding,) = find(played)
        history = [{"step": step, **played.metrics} for step in range(1, 6)]
        assert finding.message in {alarm.message for alarm in alarms(history) if alarm.name == name}


def test_a_few_groups_of_equal_rewards_may_be_chance():
    played, _ = examine(stage_of(Engine(seeded_letter), Searcher()), 4)
    equal = {**played.metrics, "credit/zero_variance_share": 1.0}
    few, many = (replace(played, metrics={**equal, "credit/groups": groups}) for groups in (4, 8))
    assert [finding.useless for one in (few, many) for finding in find(one)] == [False, True]


def test_messages_of_user_code_and_unread_replies_are_quoted():
    assert "no field 'label' {in} mine.py" in found(reward=broken)["user_code"].message
    never = found(program=Searcher(words=unparsable))["never_parses"].message
    assert never.startswith("none of the replies can be parsed") and "for example" in never


def test_equal_rewards_of_a_policy_without_tools_are_no_fault_of_the_data():
    findings = found(score=toolless(lambda prediction: 0.0))
    assert list(findings) == ["no_tool_calls"] and findings["no_tool_calls"].useless
    played, _ = examine(stage_of(Engine(seeded_letter), Searcher(), score=toolless(by_letter)), 4)
    (finding,) = find(replace(played, first_reply='{"name": "search"}'))
    assert finding.message.startswith("""no rollout uses a tool; a reply: '{"name": "search"}'""")


def test_a_model_that_cannot_be_packed_is_found(monkeypatch):
    def differs(forwards, calls):
        assert len(calls) > 4
        raise MmrlError("train.packing: on the first batch, they differ by 3; use train.packing=padded")

    monkeypatch.setattr("mmrl.stages.checkup.check_tries", differs)
    stage = stage_of(Engine(seeded_letter), Searcher())
    stage.trainer.forwards.tries = True
    (finding,) = find(examine(stage, 4)[0])
    assert (finding.name, finding.useless) == ("packing", True)
    assert finding.text().count("train.packing=padded") == 1


def test_format_rewards_can_teach_what_never_parses():
    """Replies that never parse are no reason to give up where some of them come nearer than others."""

    def graded(text):
        raise ParseFailure("expected two fields", present=int(text < "m"), expected=2)

    findings = found(program=Searcher(words=graded), options={"algo": MMGRPO})
    assert list(findings) == ["never_parses"] and not findings["never_parses"].useless


def test_the_command_says_what_is_wrong_and_writes_nothing(random_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["doctor", *command(random_model, "run", "examples=2")[1:], "--json"]
    assert main([word for word in words if not word.startswith("run.dir")]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["can_train"] and "never_parses" in [one["name"] for one in printed["findings"]]
    assert printed["metrics"]["module/rewriter/logprob_gap"] < 1e-4, (
        "the engine samples from the weights that the trainer forwards"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_run_is_healthy(output_of):
    text = output_of("doctor", "examples=2", "hardware=cpu")
    assert text.endswith("it can be trained\n") and "rewriter" in text


def test_runs_on_gpus_are_looked_at_and_others_where_it_is_asked_for(tmp_path):
    made = tmp_path / "doctor.json"

    def needed(device, doctor):
        config = config_of({"hardware.device": device})
        return doctor_runs(config.model_copy(update={"run": config.run.model_copy(update={"doctor": doctor})}), made)

    wanted = [needed(device, doctor) for device in ("cpu", "cuda") for doctor in ("auto", True, False)]
    assert wanted == [False, True, False, True, True, False]
    made.write_text("{}")
    assert not needed("cuda", True), "a start that was killed has looked already"
