"""`task.metric=[…]`: several metrics whose weighted sum is the reward, of a DSPy program, a function and an agent."""

import sys

import pytest

from mmrl.config import DataConfig
from mmrl.config.tasks import AnyAgentConfig
from mmrl.errors import ConfigError
from mmrl.report.trees import rollout_line
from mmrl.tasks import TASKS
from tests.helpers.gateway import Scripted, named, post, rolled_out
from tests.helpers.lines import refused
from tests.helpers.programs import filled, saved
from tests.helpers.programs import make_dspy as make
from tests.helpers.programs import play_dspy as play

OWN = """
import dspy

def answerer():
    return dspy.Predict("question -> answer")

async def plain(example, ctx):
    return (await ctx.call("speaker", [{"role": "user", "content": example.inputs["question"]}])).text

def text_of(prediction):
    return prediction if isinstance(prediction, str) else prediction.answer

def exact(record, prediction):
    return {"score": text_of(prediction) == "a1", "letters": len(text_of(prediction)), "feedback": "Say a1."}

async def brief(record, prediction):
    return 0.5

def traced(record, prediction, trace):
    assert trace is None
    return 3

def reward(record, prediction):
    return 1.0

def n_high(record, prediction):
    return 1.0

def score(record, prediction):
    return 1.0

def one(record):
    return 1.0

def words(record, prediction):
    return "good"

class Judge:
    @staticmethod
    def exact(record, prediction):
        return 1.0

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "listed.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("listed", None)
    return saved(tmp_path / "data.jsonl", [{"question": "q"}])


PLAIN = {"program": "listed:plain", "modules": ("speaker",)}


def task(path, *metrics, **options):
    named = tuple(f"listed:{name}" for name in metrics)
    defaults = {"program": "listed:answerer", "metric": named, "inputs": ("question",)}
    return make("dspy", data={"train": path}, **{**defaults, **options})


def refusal(path, *metrics, **options):
    with pytest.raises(ConfigError) as error:
        task(path, *metrics, **options)
    return error.value.problems


def played(made, answer="a1"):
    reply = (
        (lambda request: answer) if made.program.modules == ("speaker",) else (lambda request: filled(answer=answer))
    )
    (rollout,) = play(made, reply, made.examples("train")).rollouts
    return rollout


@pytest.mark.parametrize("program", [{}, PLAIN], ids=["dspy", "function"])
@pytest.mark.parametrize(
    ("weights", "right", "wrong"),
    [((), 1 + 0.5, 0 + 0.5), ((2.0, -0.5), 2 - 0.25, 0 - 0.25), ((1.0, 0.0), 1.0, 0.0)],
)
def test_the_reward_is_the_weighted_sum_and_each_metric_is_reported(own, program, weights, right, wrong):
    made = task(own, "exact", "brief", metric_weights=weights, **program)
    rollout = played(made)
    assert rollout.reward == right
    assert rollout.metrics == {"score": right, "exact": 1.0, "exact.letters": 2.0, "brief": 0.5}
    first, second = weights or (1.0, 1.0)
    assert rollout.parts == {"exact": first, "brief": 0.5 * second}
    assert rollout.feedback == {"": "Say a1."}
    assert played(made, "other").reward == wrong
    assert made.describe()["metric"] == "listed:exact, listed:brief"


def test_a_page_shows_the_sum(own):
    assert "reward 2.500 = exact 2 + brief 0.500" in rollout_line(
        played(task(own, "exact", "brief", metric_weights=(2.0, 1.0)))
    )


def test_metrics_of_dspys_form_get_none_for_further_arguments(own):
    assert played(task(own, "traced", "brief")).reward == 3.5
    (said,) = refusal(own, "traced", "brief", **PLAIN)
    assert said.startswith("task.metric: listed:traced takes (record, prediction, trace), expected a function")


def test_one_metric_that_gives_no_number_fails_the_rollout_and_is_named(own):
    rollout = played(task(own, "exact", "words"))
    assert rollout.error == "reward" and "task.metric: listed:words gave 'good'" in rollout.error_message


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (["exact", "nothing"], ["task.metric: 'listed' has no 'nothing'"]),
        (["exact", "number"], ["task.metric: listed:number is a int, expected a function"]),
        (["exact", "one"], ["task.metric: listed:one takes (record), expected"]),
        (["exact", "exact"], ["task.metric: got 2 of the name exact; expected a name for each"]),
        (["exact", "reward", "score"], ["got the name reward, which is mmrl's own", "got the name score, which is"]),
        (["n_high"], ["task.metric: got the name n_high, which is mmrl's own"]),
    ],
)
def test_lists_that_cannot_be_scored_are_refused(own, metrics, said):
    found = refusal(own, *metrics)
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True)), found


def test_a_name_in_a_class_tells_two_apart(own):
    assert played(task(own, "exact", "Judge.exact")).parts == {"exact": 1.0, "Judge.exact": 1.0}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            "task.metric=a:b task.metric_weights=[1,2]",
            "metric_weights: got [1.0,2.0], which has no effect without a list",
        ),
        (
            "task.metric=[a:b,a:c] task.metric_weights=[1]",
            "metric_weights: got 1, expected one for each of the 2 metrics",
        ),
        ("task.metric=[a:b] task.metric_weights=[1e31]", "metric_weights: got 1e+31, expected at most 1e+30 in size"),
        ("task.metric=[]", "metric: got [], expected at least one package.module:name"),
        ("task.metric=[a:b] task.metric_weights=[nan]", "metric_weights.0: got nan, expected a finite number"),
    ],
)
@pytest.mark.parametrize("task_name", ["dspy", "agent"])
def test_weights_without_effect_are_refused(keys, said, task_name):
    assert any(said in problem for problem in refused(f"task={task_name}", *keys.split()))


async def agent(example, base_url, api_key):
    return (await post(base_url, api_key)).json()["choices"][0]["message"]["content"]


def test_an_agent_is_scored_by_a_list_too_and_has_no_rewards_of_single_calls(own):
    config = AnyAgentConfig(
        name="agent",
        agent=named(agent),
        inputs=("question",),
        metric=("listed:exact", "listed:brief"),
        metric_weights=(2.0, 1.0),
        data=DataConfig(train=own),
    )
    made = TASKS["agent"](config, 0)
    (rollout,) = rolled_out(made, Scripted(lambda prompt: "a1")).rollouts
    assert (rollout.reward, rollout.parts) == (2.5, {"exact": 2.0, "brief": 0.5})
    assert made.reward_sets == ("outcome",)
    with pytest.raises(ConfigError, match="listed:one takes"):
        TASKS["agent"](config.model_copy(update={"metric": ("listed:exact", "listed:one")}), 0)
