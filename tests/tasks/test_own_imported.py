"""`task=dspy`: a user's own module or function, metric and data, named by import paths."""

import math
import sys
from decimal import Decimal
from fractions import Fraction

import dspy
import numpy as np
import pytest
import torch

from mmrl.errors import ConfigError
from mmrl.rollout.scripted import play as play_function
from tests.helpers.programs import filled, problems, saved
from tests.helpers.programs import make_dspy as make
from tests.helpers.programs import play_dspy as play

OWN = """
import functools

import dspy

class Answerer(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)

made = Answerer()

async def plain(example, ctx):
    reply = await ctx.call("speaker", [{"role": "user", "content": example.inputs["question"]}])
    return reply.text

def attributes(example, pred, trace=None):
    return example.gold == pred.answer

class Based(Answerer):
    def forward(self, question, base):
        return {"base": f"{base} {self.answer(question=question).answer}"}

def of_base(example, pred, trace=None):
    assert example.inputs().toDict() == {"question": example.question, "base": example.base}
    return example.gold == pred.base

def mapping(record, prediction):
    return {"score": 0.25, "words": len(prediction.split()), "note": "text"}

returned = None

def returns(record, prediction):
    return returned

class Retrieves(Answerer):
    def __init__(self):
        super().__init__()
        self.retrieve = dspy.Retrieve(k=1)

class Wants(Answerer):
    def forward(self, query, k=3):
        return self.answer(question=query)

class WantsAsync(Answerer):
    async def aforward(self, *, query):
        return await self.answer.acall(question=query)

class Takes(Answerer):
    def forward(self, **fields):
        return self.answer(**fields)

def makes(question):
    return Answerer()

async def asks(question):
    return question

def sync(example, ctx):
    return "no call is awaited"

def logged(function):
    @functools.wraps(function)
    def wrapper(*given):
        return function(*given)
    return wrapper

decorated = logged(plain)

class Called:
    async def __call__(self, example, ctx):
        return await plain(example, ctx)

called = Called()

async def copies(example, ctx):
    return (await plain(example, ctx)) and example.metadata.get("gold", "nothing")

def gold(record, prediction):
    return float(record["gold"] == prediction)

def one(example):
    return 1.0

def keyword(example, prediction, *, strict):
    return 1.0

def every(*given):
    return float(len(given))

def three(record, prediction, third):
    return 1.0

class Judge(dspy.Module):
    def __init__(self, given=1.0):
        super().__init__()
        self.given = given

class JudgeOfThree(Judge):
    def forward(self, example, pred, trace):
        return self.given if trace is None else 0.0

class JudgeOfOne(Judge):
    def forward(self, example):
        return self.given

judge_of_three, judge_of_one = JudgeOfThree(), JudgeOfOne()

def broken():
    raise ValueError("no")

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_program.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_program", None)
    return saved(tmp_path / "data.jsonl", [{"question": f"q{n}", "gold": f"a{n}"} for n in range(4)])


def task(path, **options):
    defaults = {"program": "own_program:Answerer", "metric": "own_program:attributes", "inputs": ("question",)}
    return make("dspy", data={"train": path}, **{**defaults, **options})


@pytest.mark.parametrize("program", ["own_program:Answerer", "own_program:made"])
def test_a_dspy_module_with_a_dspy_metric(own, program):
    made = task(own, program=program)
    assert made.program.modules == ("answer",)
    assert made.describe()["program"] == program
    forest = play(made, lambda request: filled(answer="a1"), made.examples("train"))
    assert [rollout.reward for rollout in forest.rollouts] == [0.0, 1.0, 0.0, 0.0]


def test_a_field_called_base_is_a_field_like_any_other(own, tmp_path):
    """DSPy's objects take `base` as a keyword for something else."""
    path = saved(tmp_path / "based.jsonl", [{"question": "q", "base": "ten", "gold": "ten one"}])
    made = task(path, program="own_program:Based", metric="own_program:of_base", inputs=("question", "base"))
    (rollout,) = play(made, lambda request: filled(answer="one"), made.examples("train")).rollouts
    assert (rollout.reward, rollout.error) == (1.0, None)


def test_an_async_function_with_named_modules(own):
    made = task(own, program="own_program:plain", metric="own_program:mapping", modules=("speaker",))
    forest = play(made, lambda request: "two words", made.examples("train")[:1])
    (rollout,) = forest.rollouts
    assert forest.modules == ("speaker",) and rollout.reward == 0.25
    assert rollout.metrics == {"score": 0.25, "words": 2.0}


def scored(made, value):
    """The rollout whose metric returns `value`."""
    vars(sys.modules["own_program"])["returned"] = value
    (rollout,) = play(made, lambda request: filled(answer="x"), made.examples("train")[:1]).rollouts
    return rollout


NUMBERS = [
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.int64(1), 1.0),
    (np.bool_(True), 1.0),
    (np.array(0.25), 0.25),
    (np.array([[0.25]]), 0.25),
    (torch.tensor(0.5), 0.5),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor([True]), 1.0),
    (torch.tensor(3), 3.0),
    (Fraction(1, 2), 0.5),
    (Decimal("0.5"), 0.5),
]


def test_numbers_of_numpy_and_torch_are_numbers(own):
    made = task(own, metric="own_program:returns")
    for value, expected in NUMBERS:
        rollout = scored(made, value)
        assert (rollout.reward, rollout.error) == (expected, None), repr(value)
        both = {"score": value, "beside": value}
        for given in (both, dspy.Prediction(**both, feedback="text")):
            rollout = scored(made, given)
            assert (rollout.reward, rollout.metrics) == (expected, {"score": expected, "beside": expected}), repr(value)


@pytest.mark.parametrize(
    "value", [[1.0], np.array([0.5, 0.5]), "good", np.str_("1"), np.complex64(1), torch.zeros(2), None]
)
def test_what_is_no_number_is_refused(own, value):
    made = task(own, metric="own_program:returns")
    rollout = scored(made, value)
    assert rollout.error == "reward" and f"task.metric gave {value!r};" in rollout.error_message
    assert dict(scored(made, {"score": 1.0, "beside": value}).metrics) == {"score": 1.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e200, np.float32("nan"), 10**400])
def test_a_number_that_is_not_finite_fails_the_rollout_beside_the_score_too(own, value):
    made = task(own, metric="own_program:returns")
    for given in (value, {"score": value}, {"score": 1.0, "beside": value}):
        rollout = scored(made, given)
        assert (rollout.error, rollout.reward, dict(rollout.metrics)) == ("reward", None, {})
        assert rollout.error_message.startswith("task.metric gave ")


def test_what_is_missing_is_told_at_once(own):
    told = problems("dspy")
    assert all(f"task.{name}: missing" in told for name in ("program", "inputs"))
    told = problems("dspy", program="json:dumps", metric="json:dumps", inputs=("a",))
    assert "task dspy has no mini world; expected files" in told


FUNCTION = "expected a function (record, prediction) -> number"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"program": "own_program"}, "task.program: got 'own_program', expected package.module:name"),
        ({"program": "no_such_module:x"}, "task.program: cannot import 'no_such_module'"),
        ({"program": "own_program:absent"}, "task.program: 'own_program' has no 'absent'"),
        ({"program": "own_program:broken"}, "task.program: own_program:broken() raised ValueError: no"),
        ({"program": "own_program:number"}, "task.program"),
        ({"program": "own_program:plain"}, "task.modules: missing"),
        ({"modules": ("x",)}, "task.modules: has no effect"),
        (
            {"program": "own_program:sync", "modules": ("speaker",)},
            "task.program: own_program:sync is not async, and awaits no reply so; write async def",
        ),
        ({"metric": "own_program:number"}, "task.metric: own_program:number is a int"),
        ({"program": "own_program:Wants"}, "task.inputs: got question, but Wants.forward takes (query, k=3)"),
        ({"program": "own_program:WantsAsync"}, "task.inputs: got question, but WantsAsync.aforward takes (*, query)"),
        ({"inputs": ("question", "gold")}, "task.inputs: got question, gold, but Answerer.forward takes (question)"),
        ({"program": "own_program:makes"}, "task.program: own_program:makes takes ("),
        (
            {"program": "own_program:asks", "modules": ("a",)},
            "task.program: own_program:asks takes (question), expected an async function (example, ctx)",
        ),
        ({"metric": "own_program:judge_of_one"}, f"task.metric: own_program:judge_of_one takes (example), {FUNCTION}"),
        ({"metric": "own_program:one"}, f"task.metric: own_program:one takes (example), {FUNCTION}"),
        (
            {"metric": "own_program:keyword"},
            f"task.metric: own_program:keyword takes (example, prediction, *, strict), {FUNCTION}",
        ),
        (
            {"program": "own_program:plain", "modules": ("speaker",), "metric": "own_program:three"},
            f"task.metric: own_program:three takes (record, prediction, third), {FUNCTION}",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence_before_anything_runs(own, options, says):
    with pytest.raises(ConfigError) as caught:
        task(own, **options)
    (problem,) = caught.value.problems
    assert problem.startswith(says)


def test_metrics_and_programs_of_any_fitting_form_are_taken(own):
    for options in ({"metric": "own_program:every"}, {"metric": "own_program:three"}, {"program": "own_program:Takes"}):
        assert task(own, **options).program.modules == ("answer",)
    both = {"program": "own_program:Wants", "metric": "own_program:one"}
    with pytest.raises(ConfigError) as caught:
        task(own, **both)
    assert len(caught.value.problems) == 2
    faults = {"program": "own_program:absent", "metric": "own_program:absent"}
    with pytest.raises(ConfigError) as caught:
        task(own, **faults)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["task.program", "task.metric"]


def test_a_metric_that_is_a_module_gets_what_its_forward_asks_for(own):
    made = task(own, metric="own_program:judge_of_three")
    forest = play(made, lambda request: filled(answer="x"), made.examples("train")[:1])
    assert [(rollout.reward, rollout.error_message) for rollout in forest.rollouts] == [(1.0, "")]


@pytest.mark.parametrize("name", ["plain", "decorated", "called"])
def test_an_async_program_may_be_decorated_or_an_object(own, name):
    built = task(own, program=f"own_program:{name}", modules=("speaker",), metric="own_program:gold")
    (example, *_) = built.examples("train")
    assert [play_function(built, example, [text]).reward for text in ("a0", "a1")] == [1.0, 0.0]


def test_a_program_cannot_copy_what_it_is_scored_by(own):
    built = task(own, program="own_program:copies", modules=("speaker",), metric="own_program:gold")
    (example, *_) = built.examples("train")
    rollout = play_function(built, example, ["wrong"])
    assert (rollout.prediction, rollout.reward) == ("nothing", 0.0)


def test_prompts_of_one_task_leave_the_program_of_another_as_it_is(own, tmp_path):
    """Where `task.program` is an object that stands in the user's module, as for a teacher with prompts of its own."""
    file = tmp_path / "prompts.yaml"
    file.write_text("answer:\n  instructions: TEACHER\n")
    first = task(own, program="own_program:made")
    other = task(own, program="own_program:made", prompts=str(file))
    assert other.predictors["answer"].signature.instructions == "TEACHER"
    assert first.predictors["answer"].signature.instructions != "TEACHER"


def test_the_state_of_a_program_that_retrieves_is_that_of_all_its_parts(own, tmp_path):
    file, lacking = tmp_path / "program.json", tmp_path / "lacking.json"
    program = task(own, program="own_program:Retrieves").program
    program.module.retrieve.k = 7
    program.module.answer.signature = program.module.answer.signature.with_instructions("Be brief, née.")
    program.save(file)
    assert "née" in file.read_text(encoding="utf-8")
    plain = sys.modules["own_program"].Retrieves()
    plain.load(str(file))  # DSPy's own
    loaded = task(own, program="own_program:Retrieves", prompts=str(file)).program.module
    for made in (plain, loaded):
        assert (made.retrieve.k, made.answer.signature.instructions) == (7, "Be brief, née.")
    task(own).program.save(lacking)
    with pytest.raises(ConfigError, match="holds answer, expected the state of answer, retrieve"):
        task(own, program="own_program:Retrieves", prompts=str(lacking))
