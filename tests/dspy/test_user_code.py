"""Tools and metrics of users: in threads, on the tape, with DSPy's objects; exceptions told with file and line."""

import json
import threading

import dspy
import pytest

from mmrl.config import DataConfig
from mmrl.config.tasks import PluginTaskConfig
from mmrl.errors import OWN_CODE, ProgramFailure, failure_summary
from mmrl.rollout import with_program
from mmrl.rollout.dspy.policy_lm import Answer as Answered
from mmrl.rollout.dspy.policy_lm import TextEngine
from mmrl.rollout.plans import fork_on
from mmrl.system import user_code
from mmrl.system.user_code import as_async
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.own import OwnTask
from mmrl.tasks.dspy.tools import use_tool_sync
from tests.dspy import Answer, agents
from tests.dspy.agents import step
from tests.helpers.programs import filled, make_dspy, play_dspy, run_program, saved

ROWS = [{"question": "When?", "gold": "2026-01-02"}, {"question": "Then?", "gold": "2026-01-03"}]
OWN = """
import datetime

import dspy


class Dated(dspy.Signature):
    question: str = dspy.InputField()
    day: datetime.date = dspy.OutputField()
    words: set[str] = dspy.OutputField()


class When(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict(Dated)

    def forward(self, question):
        return self.answer(question=question)


def same_day(example, pred, trace=None):
    return pred.day.isoformat() == example.gold and pred.words == {"a", "b"}


def with_feedback(gold, pred, trace, pred_name, pred_trace):
    assert trace is None and pred_name is None and pred_trace is None
    return dspy.Prediction(score=float(pred.day.day), feedback="well")


judge = dspy.ChainOfThought("question, day -> fine: bool")


def judged(example, pred, trace=None):
    with dspy.context(lm=dspy.utils.DummyLM([{"reasoning": "so", "fine": "True"}] * 9), adapter=dspy.ChatAdapter()):
        return judge(question=example.question, day=str(pred.day)).fine


def wrong(example, pred, trace=None):
    def inner():
        return pred.nothing_like_it

    return inner()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "dated_program.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "dated_program", raising=False)
    path = saved(tmp_path / "data.jsonl", ROWS)

    def played(metric):
        text = filled(day="2026-01-02", words='["a", "b"]')
        task = make_dspy(
            "dspy",
            data={"train": path},
            program="dated_program:When",
            metric=f"dated_program:{metric}",
            inputs=("question",),
        )
        return play_dspy(task, lambda request: text, task.examples("train")).rollouts

    return played


def test_a_metric_gets_dspys_own_objects_and_the_journal_their_json(own):
    first, second = own("same_day")
    assert (first.reward, second.reward, first.error) == (1.0, 0.0, None)
    assert first.prediction["day"] == "2026-01-02" and sorted(first.prediction["words"]) == ["a", "b"]


def test_metrics_of_gepas_form_and_judges_that_are_dspy_programs(own):
    assert [(r.reward, dict(r.feedback)) for r in own("with_feedback")] == [(2.0, {"": "well"})] * 2
    assert [(r.reward, r.error_message) for r in own("judged")] == [(1.0, "")] * 2


def test_an_exception_of_a_metric_says_where_and_is_not_called_a_failure_from_outside(own):
    (rollout, other) = own("wrong")
    line = OWN.splitlines().index("        return pred.nothing_like_it") + 1
    assert rollout.reward is None and rollout.error in OWN_CODE
    assert "nothing_like_it" in rollout.error_message
    assert f"(dated_program.py, line {line}, in inner)" in rollout.error_message
    shown = rollout.error_traceback
    assert "in wrong" in shown and "return pred.nothing_like_it" in shown and "AttributeError" in shown
    assert "user_code.py" not in shown and len(shown) <= user_code.MOST_CHARACTERS + 4
    assert failure_summary([rollout.error, other.error]) == "in the code of the program or its reward"
    assert failure_summary(["tool", "judge"]) == "from outside causes"
    assert failure_summary(["tool", "reward"]) == "from outside causes and in the code of the program or its reward"


def test_a_traceback_is_bounded():
    def deep(n):
        raise ValueError("x" * 9000) if n == 0 else deep(n - 1)

    with pytest.raises(ValueError, match="x") as caught:
        deep(60)
    failure = user_code.user_failure(ProgramFailure, caught.value)
    assert len(failure.traceback) <= user_code.MOST_CHARACTERS + 4


def answered(request):
    return filled(answer="x")


class Other(dspy.LM):
    """A model that is frozen: says one word, and counts."""

    def __init__(self, word):
        super().__init__("other", cache=False, num_retries=0, engine=TextEngine(self.said), async_engine=None)
        self.word, self.sent = word, 0

    def said(self, messages, config):
        self.sent += 1
        return Answered(filled(summary=self.word), 1, 1)


def short(text: str) -> str:
    """A summary by the model that is configured."""
    return dspy.Predict("text -> summary")(text=text).summary


def shorter(text: str) -> str:
    """A summary by a model of its own."""
    with dspy.context(lm=OWN_MODEL):
        return dspy.Predict("text -> summary")(text=text).summary


def shortest(text: str) -> str:
    """A summary without a predictor."""
    return dspy.settings.lm(text)[0]


OWN_MODEL = Other("own")


class Summed(Answer):
    """Its tool is one of the task's."""

    def forward(self, text):
        return self.answer(text=use_tool_sync("short", text=text))


@pytest.mark.parametrize(("tool", "says"), [(short, "configured"), (shorter, "own"), (shortest, "configured")])
def test_models_in_tools_are_frozen_and_asked_once_for_all_forks(tool, says):
    """The configured one, or another; of the program's own tools and of the task's."""
    configured, before = Other("configured"), OWN_MODEL.sent

    def answer(request):
        if request.module == "extract.predict":
            return filled(reasoning="so", answer="x")
        done = "observation_0" in request.messages[-1]["content"]
        chosen = step("finish") if done else step(tool.__name__, text="abc")
        return filled(**{**chosen, "next_tool_args": json.dumps(chosen["next_tool_args"])})

    with dspy.context(lm=configured):
        agent = dspy.ReAct("text -> answer", tools=[tool])
        forest, _ = run_program(agent, fork_on("extract.predict", 3), answer)
        asked = (configured.sent, OWN_MODEL.sent - before)
        summed, _ = run_program(Summed(), answer=answered, tools={"short": as_async(tool)})
    assert [(r.error, r.error_message) for r in (*forest.rollouts, *summed.rollouts)] == [(None, "")] * 4
    assert all(says in r.prediction["trajectory"]["observation_0"] for r in forest.rollouts)
    assert says in next(iter(summed.calls.values())).prompt_text
    assert asked == ((0, 1) if says == "own" else (1, 0))
    assert {call.module for call in forest.calls.values()} == {"react", "extract.predict"}


class Exhausted(Answer):
    def forward(self, text):
        return next(iter([self.answer(text=text)][3:]))  # for StopIteration nothing may wait for ever


class Broken(Answer):
    def forward(self, text):
        return [self.answer(text=text)][3]


@pytest.mark.parametrize(("kind", "error"), [(Exhausted, "StopIteration"), (Broken, "IndexError")])
def test_an_exception_of_a_program_says_where(kind, error):
    (rollout,) = run_program(kind(), answer=answered, settings={"timeout_s": 20.0})[0].rollouts
    assert rollout.error == "program" and error in rollout.error_message
    assert "tests/dspy/test_user_code.py, line " in rollout.error_message
    assert "[self.answer(text=text)][3" in rollout.error_traceback


def test_slow_metrics_run_beside_each_other(tmp_path):
    pairs = threading.Barrier(2, timeout=60)

    def slow(example, prediction):
        pairs.wait()  # until another metric runs
        return Score(reward=1.0)

    rows = saved(tmp_path / "rows.jsonl", [{"text": str(n)} for n in range(12)])
    config = PluginTaskConfig(name="slow", data=DataConfig(train=rows))
    task = with_program(OwnTask(Answer, slow, inputs=["text"])(config, 0))
    forest = play_dspy(task, answered, task.examples("train"))
    assert [rollout.reward for rollout in forest.rollouts] == [1.0] * 12


def test_the_tools_of_an_agent_run_once_for_all_forks():
    case = next(case for case in agents.AGENTS if "never the same" in case.name)
    before = next(agents.used)
    forest, _ = case.play(fork_on("extract.predict", 3))
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3
    assert next(agents.used) == before + 2, "one use for three rollouts"
    assert len({rollout.prediction["trajectory"]["observation_0"]["number"] for rollout in forest.rollouts}) == 1
