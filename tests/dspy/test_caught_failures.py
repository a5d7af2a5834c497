"""Programs that catch a reply which does not parse: scored as `dspy.Evaluate` scores them, the same when replayed."""

import json
import sys
from collections import Counter
from functools import partial

import dspy
import pytest
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import AdapterParseError

from mmrl.cli import main
from mmrl.rollout.plans import fork_on
from mmrl.store.rundir import RunDir
from tests.dspy import Answer
from tests.helpers.programs import filled, run_program, saved
from tests.helpers.servers import Scripted, chat_reply, serving

PROGRAMS = '''
import dspy
from dspy.utils.exceptions import AdapterParseError


def short(inputs, prediction):
    return float(len(prediction.answer) == 1)


class Fallback(dspy.Module):
    """Asks again in other words where a reply does not parse, and says so where that does not either."""

    def __init__(self):
        super().__init__()
        self.first = dspy.Predict("question -> answer")
        self.second = dspy.ChainOfThought("question -> answer")

    def forward(self, question):
        try:
            return self.first(question=question)
        except AdapterParseError:
            pass
        try:
            return self.second(question=question)
        except AdapterParseError as error:
            return dspy.Prediction(answer=str((error.parsed_result or {}).get("reasoning", error.lm_response)))


class Twice(dspy.Module):
    """Two questions for the same attempts, whose failures are counted together."""

    kind, count = dspy.BestOfN, None

    def __init__(self):
        super().__init__()
        self.tried = self.kind(dspy.Predict("question -> answer"), 3, short, 1.0, fail_count=self.count)

    def forward(self, question):
        first = self.tried(question=question)
        return first if first.answer == "a" else self.tried(question=question)


class Refined(Twice):
    kind = dspy.Refine


class Strict(Twice):
    count = 1


def exact(example, prediction, trace=None):
    return float(prediction.answer == example.gold)


def broken(example, prediction, trace=None):
    raise KeyError("a name of mine")
'''
GOOD, LONG, PLAIN = filled(answer="a"), filled(answer="too long"), "nothing of the kind"
WRONG = filled(answer="b")
ADVICE = filled(discussion="d", advice='{"self": "be short"}')
REASONED = filled(reasoning="a", answer="a")
SCRIPTS = {
    "Fallback": [
        [GOOD],
        [WRONG],
        [PLAIN, REASONED],
        [PLAIN, filled(reasoning="a")],
        [PLAIN, PLAIN],
        ["", filled(reasoning="b")],
    ],
    "Twice": [
        [GOOD],
        [PLAIN, GOOD],
        [LONG, PLAIN, GOOD],
        [PLAIN, PLAIN, GOOD],
        [PLAIN, PLAIN, PLAIN],
        [WRONG, GOOD],
        [WRONG, PLAIN, PLAIN, PLAIN],
        [LONG, PLAIN, PLAIN, GOOD],
        [PLAIN, WRONG, PLAIN, PLAIN, GOOD],
    ],
    "Refined": [
        [GOOD],
        [PLAIN, GOOD],
        [PLAIN, PLAIN, PLAIN],
        [LONG, ADVICE, PLAIN, GOOD],
        [LONG, PLAIN, LONG, ADVICE, GOOD],
        [LONG, PLAIN, PLAIN, GOOD],
        [PLAIN, WRONG, PLAIN, PLAIN, GOOD],
    ],
    "Strict": [[GOOD], [PLAIN, GOOD], [PLAIN, PLAIN, GOOD], [WRONG, PLAIN, GOOD], [PLAIN, WRONG, PLAIN, GOOD]],
}
"""Program -> for each question the replies in order; what it does not ask for stays unused."""


class Replies:
    """The replies to each question, in order, whoever asks; records what was asked for."""

    def __init__(self, scripts):
        self.scripts, self.asked = scripts, Counter()

    def __call__(self, messages):
        # A question is a word that no other has in it; advice is asked for with the whole of what the program did.
        (number,) = {n for n in range(len(self.scripts)) if f"question{n}." in messages[-1]["content"]}
        self.asked[number] += 1
        return self.scripts[number][self.asked[number] - 1]


class ScriptedLM(dspy.BaseLM):
    def __init__(self, reply):
        super().__init__(model="scripted", cache=False)
        self.reply = reply

    def __call__(self, prompt=None, *, messages=None, **options):
        return [self.reply(messages)]

    def copy(self, **options):
        return self


@pytest.fixture
def programs(tmp_path, monkeypatch):
    (tmp_path / "resilient.py").write_text(PROGRAMS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("resilient", None)
    import resilient

    return resilient


def by_dspy(programs, name, records):
    """Scores of `dspy.Evaluate`, and how many replies each record took."""
    reply = Replies(SCRIPTS[name])
    examples = [dspy.Example(**record).with_inputs("question") for record in records]
    adapter = dspy.ChatAdapter(use_json_adapter_fallback=False)
    with dspy.context(lm=ScriptedLM(reply), adapter=adapter):
        evaluate = dspy.Evaluate(devset=examples, metric=programs.exact, num_threads=1, max_errors=1000)
        result = evaluate(lambda **inputs: getattr(programs, name)()(**inputs))
    return [score for *_, score in result.results], reply.asked


def by_mmrl(name, folder, records, metric="exact", code=0):
    """The same of `mmrl eval`."""
    saved(folder / "dev.jsonl", records)
    reply = Replies(SCRIPTS[name])

    def serve(seen):
        # Before it evaluates, mmrl asks which models there are.
        return chat_reply(reply(seen.body["messages"])) if seen.body else Scripted({"data": [{"id": "scripted"}]})

    with serving(serve) as (url, _):
        words = ["eval", "engine=openai", "policy=scripted", "task=dspy", "split=dev"]
        words += [f"engine.endpoint.url={url}", "engine.endpoint.key_env=null"]
        words += [f"task.program=resilient:{name}", f"task.metric=resilient:{metric}", "task.inputs=[question]"]
        words += ["task.data.dev=dev.jsonl", "eval.parse_retries=0", "hardware.threads=1", f"run.dir={name}"]
        assert main(words) == code
    items = RunDir.read(folder / name).eval_path(0, "dev").read_text(encoding="utf-8").splitlines()
    scores = {item["id"]: item["metrics"]["score"] for item in map(json.loads, items)}
    return [scores[record["id"]] for record in records], reply.asked


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_scores_are_those_of_dspys_own_evaluation(name, programs, tmp_path, capsys):
    records = [
        {"id": f"i{number}", "question": f"question{number}.", "gold": "a"} for number in range(len(SCRIPTS[name]))
    ]
    expected, asked = by_dspy(programs, name, records)
    assert 0.0 in expected and 1.0 in expected
    assert by_mmrl(name, tmp_path, records) == (expected, asked)
    assert "replies that do not parse were caught by the program" in capsys.readouterr().out


def test_a_metric_that_raises_is_its_own_failure_whatever_the_replies_were(programs, tmp_path, capsys):
    records = [{"id": f"i{n}", "question": f"question{n}.", "gold": "a"} for n in range(len(SCRIPTS["Fallback"]))]
    by_mmrl("Fallback", tmp_path, records, metric="broken", code=1)
    run = RunDir.read(tmp_path / "Fallback")
    assert run.summary["metrics"]["failed/reward"] == 1.0 and run.summary["metrics"]["model_failed"] == 0
    raised = "KeyError: 'a name of mine' (resilient.py, line "
    assert raised in capsys.readouterr().err
    assert main(["show", str(run.path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"the first failure that is not the model's, i0: {raised}" in said


class Noting(dspy.Module):
    """Keeps every exception that it catches, of two strands where it has those."""

    def __init__(self, way="sync"):
        super().__init__()
        self.one = dspy.Predict("text -> answer, reason")
        self.two = dspy.Predict("text -> answer")
        self.caught = []
        if way == "async":
            self.aforward = self._aforward

    def forward(self, text):
        try:
            self.one(text=text)
        except Exception as error:
            self.note(error)
        return self.two(text=text)

    async def _aforward(self, text):
        try:
            await self.one.acall(text=text)
        except Exception as error:
            self.note(error)
        return await self.two.acall(text=text)

    def note(self, error):
        self.caught.append(error)
        error.parsed_result["answer"] += "!"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_program_gets_dspys_exception_and_so_does_each_fork(way):
    module = Noting(way)
    partly = "[[ ## answer ## ]]\nx"
    forest, engine = run_program(
        module, fork_on("two", 3), lambda request: partly if request.module == "one" else filled(answer="x")
    )
    assert [(r.error, r.error_message) for r in forest.rollouts] == [(None, "")] * 3
    assert len(engine.requests) == 4 and len(forest.calls) == 4, "the forks replay the reply that does not parse"
    assert [type(error) for error in module.caught] == [AdapterParseError] * 3
    assert len({id(error) for error in module.caught}) == 3
    for error in module.caught:
        assert error.lm_response == partly and error.adapter_name == "ChatAdapter"
        assert error.parsed_result == {"answer": "x!"}, "what a program does with one is its own"
        assert error.signature is module.one.signature and str(error) == str(module.caught[0])
    with pytest.raises(AdapterParseError) as plain, dspy.context(lm=ScriptedLM(lambda messages: partly)):
        dspy.ChatAdapter(use_json_adapter_fallback=False)(
            dspy.settings.lm, {}, module.one.signature, [], {"text": "train0"}
        )
    assert str(plain.value) == str(module.caught[0]) and plain.value.message == module.caught[0].message
    failing = next(iter(forest.calls.values()))
    assert not failing.ok and (failing.present_fields, failing.expected_fields) == (1, 2)


@pytest.mark.parametrize("last", [filled(answer="x"), "no"])
def test_a_caught_failure_has_the_tasks_penalty_and_what_ended_a_rollout_has_none(last):
    forest, _ = run_program(
        Noting(),
        fork_on("two", 3),
        lambda request: "[[ ## answer ## ]]\nx" if request.module == "one" else last,
        settings={"caught_parse_penalty": -0.25},
    )
    assert [(call.module, call.penalty) for call in forest.calls.values()] == [("one", -0.25)] + [("two", 0.0)] * 3
    assert {rollout.error for rollout in forest.rollouts} == ({None} if last != "no" else {"parse"})


class Ends(Answer):
    """Catches a failure, then ends as it is told."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, text):
        try:
            return self.answer(text=text)
        except AdapterParseError as error:
            if self.how == "again":
                return self.answer(text=text)
            if self.how == "raises":
                raise KeyError("no answer") from error
            if self.how == "reraises":
                raise
            if self.how == "wraps":
                raise RuntimeError("gave up") from error
            return {"none": None, "value": {"answer": "so"}, "odd": {"answer": "odd"}}[self.how]


def strict_metric(prediction):
    if prediction["answer"] == "odd":
        raise ValueError("an odd answer")
    return 1.0


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("value", None, ""),
        ("odd", "reward", "ValueError: an odd answer (tests/dspy/test_caught_failures.py, line "),
        ("reraises", "parse", "output fields missing: answer"),
        ("again", "parse", "output fields missing: answer"),
        ("none", "parse", "the program returned None after a reply that does not parse"),
        ("raises", "parse", "after a reply that does not parse: KeyError: 'no answer'"),
        ("wraps", "parse", "after a reply that does not parse: RuntimeError: gave up"),
    ],
)
def test_how_a_rollout_ends_after_a_caught_failure(how, error, message):
    forest, _ = run_program(Ends(how), answer=lambda request: "no", reward=strict_metric, failure_score=-0.25)
    (rollout,) = forest.rollouts
    assert (rollout.error, rollout.reward) == (error, {None: 1.0, "reward": None, "parse": -0.25}[error])
    assert rollout.error_message.startswith(message)
    assert not any(call.ok for call in forest.calls.values()) and forest.calls


@pytest.mark.parametrize("how", ["none", "odd"])
def test_without_a_parse_failure_the_same_ends_are_the_programs_own(how):
    class Always(Answer):
        def forward(self, text):
            self.answer(text=text)
            return {"none": None, "odd": {"answer": "odd"}}[how]

    forest, _ = run_program(Always(), answer=lambda request: filled(answer="x"), reward=strict_metric)
    assert (forest.rollouts[0].error, forest.rollouts[0].reward) == ("reward", None)


class Watched(ScriptedLM):
    """With the callbacks of DSPy's own LMs."""

    @with_callbacks
    def __call__(self, prompt=None, *, messages=None, **kwargs):
        return [self.reply(messages)]


class Hidden(Answer):
    """Hides a request that cannot be recorded, as agents and attempts do."""

    def __init__(self, how):
        super().__init__()
        self.how, self.hint = how, dspy.Predict("text -> hint")
        if how == "blocks":
            self.aforward = self._aforward

    def hinted(self, text):
        adapter = {"adapter": dspy.ChatAdapter()} if self.how == "lm and adapter" else {}
        with dspy.context(lm=Watched(lambda messages: filled(hint="h")), **adapter):
            return self.hint(text=text).hint

    def forward(self, text):
        try:
            text += self.hinted(text)
        except Exception:
            text += "none"
        return self.answer(text=text)

    async def _aforward(self, text):
        try:
            text += self.hint(text=text).hint
        except Exception:
            text += "none"
        return await self.answer.acall(text=text)


def judged(inputs, prediction):
    with dspy.context(lm=Watched(lambda messages: filled(score="1"))):
        return float(dspy.Predict("answer -> score")(answer=prediction.answer).score)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Hidden, "lm"), "an LM of its own (Watched), whose replies are not recorded"),
        (partial(Hidden, "lm and adapter"), "an LM of its own (Watched), whose replies are not recorded"),
        (partial(Hidden, "blocks"), "without await"),
        (partial(dspy.BestOfN, dspy.Predict("text -> answer"), 2, judged, 1.0), "an LM of its own (Watched)"),
    ],
)
def test_a_request_that_is_not_recorded_ends_the_rollout_also_where_it_is_caught(make, message):
    forest, _ = run_program(make(), answer=lambda request: filled(answer="x"), reward=lambda prediction: 1.0)
    (rollout,) = forest.rollouts
    assert (rollout.error, rollout.reward) == ("program", None) and message in rollout.error_message


def test_a_reward_of_attempts_may_ask_a_model_without_a_module():
    def judged(inputs, prediction):
        return float(Watched(lambda messages: "1")(prediction.answer)[0])

    refined = dspy.Refine(dspy.Predict("text -> answer"), 2, judged, 1.0)
    forest, _ = run_program(refined, answer=lambda request: filled(answer="x"))
    assert [(r.error, r.prediction) for r in forest.rollouts] == [(None, {"answer": "x"})]


def test_outside_of_rollouts_the_count_is_dspys():
    tried = dspy.BestOfN(dspy.Predict("text -> answer"), 3, lambda inputs, made: 1.0, 1.0)
    with (
        dspy.context(lm=ScriptedLM(lambda messages: "no"), adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)),
        pytest.raises(AdapterParseError),
    ):
        tried(text="x")
    assert tried.fail_count == 1
    assert tried.deepcopy().fail_count == 1
