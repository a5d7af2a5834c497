"""Exceptions in DSPy programs that are the model's doing: a prompt too long, no answer, a call that fits no tool."""

import json
from functools import partial
from typing import Any

import dspy
import pytest
from dspy.primitives.code_interpreter import CodeExecutionError
from dspy.utils.exceptions import ContextWindowExceededError

from mmrl.records import Example
from mmrl.rollout import with_program
from mmrl.rollout.plans import fork_on
from tests.dspy import Answer
from tests.dspy.agents import ByHand, InProcess, calls, get_weather, step
from tests.helpers.programs import FakeEngine, FakeTask, environment, filled, forest_of, letters, run_program

run = partial(run_program, failure_score=-0.25)


class Shortens(dspy.Module):
    """Halves its text until it fits, and ends as it is told where the shortest does not."""

    def __init__(self, how="", way="sync"):
        super().__init__()
        self.first, self.answer = dspy.Predict("text -> idea"), dspy.Predict("text -> answer")
        self.how, self.caught = how, []
        if way == "async":
            self.aforward = self._aforward

    def forward(self, text):
        self.first(text=text)
        text = text * 64
        while True:
            try:
                return self.answer(text=text)
            except ContextWindowExceededError as error:
                text = self.halved(text, error)
                if not isinstance(text, str):
                    return text[0]

    async def _aforward(self, text):
        await self.first.acall(text=text)
        text = text * 64
        while True:
            try:
                return await self.answer.acall(text=text)
            except ContextWindowExceededError as error:
                text = self.halved(text, error)
                if not isinstance(text, str):
                    return text[0]

    def halved(self, text, error):
        self.caught.append(error)
        if len(text) > 6:
            return text[: len(text) // 2]
        if self.how == "reraises":
            raise error
        if self.how == "raises":
            raise KeyError("no answer")
        return {"none": (None,), "value": ({"answer": "x"},), "odd": ({"answer": "odd"},)}[self.how]


def answer(request):
    return filled(idea="i") if request.module == "first" else filled(answer="x")


def size_of(text):
    """Characters, which are the fakes' tokens, of the prompt that asks for an answer to `text`."""
    program: Any = with_program(FakeTask(Shortens())).program
    shown = program.demonstration("answer", {"text": text}, {"answer": "x"})
    return len(letters("|".join(m["content"] for m in shown.messages)))


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_program_may_shorten_a_prompt_that_is_too_long_and_so_does_each_fork(way):
    module = Shortens(way=way)
    # "train0" 64 times is 384 letters, then 192, 96: room for less than 192 of them
    limit = size_of("") + 192
    forest, engine = run(module, fork_on("answer", 3), answer, settings={"max_context": limit}, reward=lambda p: 1.0)
    assert [(r.error, r.reward) for r in forest.rollouts] == [(None, 1.0)] * 3
    assert [call.module for call in forest.calls.values()] == ["first", "answer", "answer", "answer"]
    assert {call.invocation for call in forest.calls.values()} == {0}, "what was too long became no call"
    assert all(len(request.prompt_ids) < limit for request in engine.requests) and len(engine.requests) == 4
    assert len(module.caught) == 6 and len({id(error) for error in module.caught}) == 6
    sizes = [size_of("") + 384, size_of("") + 192]
    expected = [f"a prompt of {size} tokens leaves no room in a context of {limit}" for size in sizes]
    assert sorted(map(str, module.caught)) == sorted(expected * 3)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("value", None, ""),
        ("reraises", "length", "a prompt of "),
        ("none", "length", "the program returned None after a prompt that is too long"),
        ("raises", "length", "after a prompt that is too long: KeyError: 'no answer'"),
        ("odd", "reward", "ValueError: an odd answer (tests/dspy/test_models_doing.py, line "),
    ],
)
def test_how_a_rollout_ends_after_a_prompt_that_is_too_long(how, error, message):
    def reward(prediction):
        if prediction["answer"] == "odd":
            raise ValueError("an odd answer")
        return 1.0

    settings = {"max_context": size_of("")}
    forest, _ = run(Shortens(how), answer=answer, settings=settings, reward=reward)
    (rollout,) = forest.rollouts
    assert (rollout.error, rollout.reward) == (error, {None: 1.0, "reward": None, "length": -0.25}[error])
    assert rollout.error_message.startswith(message)
    assert [call.module for call in forest.path(rollout)] == ["first"], "it is trained on what it wrote before"


@pytest.mark.parametrize("kept", [1, 0])
def test_react_that_outgrows_the_context_ends_as_in_plain_dspy(kept):
    def lookup(topic: str) -> str:
        """Read an article."""
        return topic + "." * (400 if kept else 4000)

    def reply(request):
        if request.module != "react":
            return filled(reasoning="so", answer="x")
        text = "".join(map(chr, request.prompt_ids))
        seen = [n for n in range(9) if f"t{n}..." in text]
        made = step("lookup", topic=f"t{len(seen) and seen[-1] + 1}") if not seen or seen[-1] < 4 else step("finish")
        return filled(**{**made, "next_tool_args": json.dumps(made["next_tool_args"])})

    def played(limit):
        react = dspy.ReAct("text -> answer", tools=[lookup], max_iters=6)
        return run(react, answer=reply, settings={"max_context": limit}, reward=lambda prediction: 1.0)

    free, engine = played(None)
    assert [call.module for call in free.calls.values()] == ["react"] * 6 + ["extract.predict"]
    sizes = [len(request.prompt_ids) for request in engine.requests]
    # so many articles fit, but not one more; a single one cannot be left out
    forest, _ = played(sizes[kept] + 200)
    (rollout,) = forest.rollouts
    if kept:
        assert (rollout.error, rollout.reward, rollout.prediction["answer"]) == (None, 1.0, "x")
        assert [call.module for call in forest.path(rollout)] == ["react"] * 6 + ["extract.predict"]
    else:
        assert (rollout.error, rollout.reward) == ("length", -0.25)
        assert "cannot be truncated because it only has one tool call" in rollout.error_message


# -- an agent without an answer, a call that fits no tool --------------------------------------------------------------


class Careful(InProcess):
    """An interpreter that says when code has failed."""

    def execute(self, code, variables=None):
        try:
            return super().execute(code, variables)
        except Exception as error:
            raise CodeExecutionError(str(error)) from error


class Broken(InProcess):
    def execute(self, code, variables=None):
        raise RuntimeError("no interpreter here")


class Loop(dspy.Module):
    """Calls a tool as its model says."""

    def __init__(self, tool, way="sync", wrapped=False):
        super().__init__()
        self.tool, self.choose, self.wrapped = dspy.Tool(tool), dspy.Predict("question -> arguments: dict"), wrapped
        if way == "async":
            self.aforward = self._aforward

    def forward(self, question):
        arguments = self.choose(question=question).arguments
        try:
            return {"answer": self.tool(**arguments)}
        except Exception as error:
            if self.wrapped:
                raise RuntimeError("the tool failed") from error
            raise

    async def _aforward(self, question):
        return {"answer": await self.tool.acall(**(await self.choose.acall(question=question)).arguments)}


def rude(city: str) -> str:
    """Raises what DSPy raises itself."""
    raise ValueError("Arg city is invalid")


class Own(Answer):
    """Raises an error of its own."""

    signature = "question -> answer"

    def forward(self, question):
        self.answer(question=question)
        raise ValueError("ReActV2 failed to produce final outputs")


V2 = partial(dspy.ReActV2, "question -> answer", tools=[get_weather], max_iters=1)
LOOK = calls(("get_weather", {"city": "Rome"}))
POT = partial(dspy.ProgramOfThought, "question -> answer", max_iters=2)
CODE = {"reasoning": "so", "generated_code": "```python\n1 / 0\n```"}


def chosen(**arguments):
    return [{"arguments": arguments}]


def by_hand(name, **arguments):
    return [{"outputs": {"tool_calls": [{"name": name, "args": arguments}]}}]


ENDS: dict[str, tuple[Any, Any, str, str]] = {
    "ReActV2 without a submit": (V2, [LOOK, LOOK], "limit", "no submit call"),
    "ReActV2 with a submit that lacks a field": (V2, [LOOK, calls(("submit", {}))], "limit", "submit failed"),
    "ReActV2 that calls nothing": (V2, [calls(), calls()], "limit", "no submit call"),
    "ProgramOfThought whose code fails": (partial(POT, interpreter_factory=Careful), [CODE, CODE], "limit", "Max hops"),
    "ProgramOfThought without an interpreter": (
        partial(POT, interpreter_factory=Broken),
        [CODE],
        "program",
        "no interp",
    ),
    "a tool without its argument": (partial(Loop, get_weather), chosen(), "parse", "missing 1 required"),
    "an argument that a tool does not have": (partial(Loop, get_weather), chosen(town="x"), "parse", "Arg town is not"),
    "an argument of another type": (partial(Loop, get_weather), chosen(city=[1]), "parse", "Arg city is invalid"),
    "the same, awaited": (partial(Loop, get_weather, "async"), chosen(city=[1]), "parse", "Arg city is invalid"),
    "missing, awaited": (partial(Loop, get_weather, "async"), chosen(), "parse", "missing 1 required"),
    "raised anew": (partial(Loop, get_weather, wrapped=True), chosen(city=[1]), "parse", "the tool failed"),
    "a tool that is not there": (ByHand, by_hand("nothing"), "parse", "'nothing' not found"),
    "a call that lacks an argument": (ByHand, by_hand("get_weather"), "parse", "missing 1 required"),
    "a tool that fails": (ByHand, by_hand("divide", a=1.0, b=0.0), "program", "division by zero"),
    "a tool that raises the same": (partial(Loop, rude), chosen(city="x"), "program", "Arg city is invalid"),
    "the same, raised anew": (partial(Loop, rude, wrapped=True), chosen(city="x"), "program", "the tool failed"),
    "a program that raises the same": (Own, [{"answer": "x"}], "program", "failed to produce"),
}
"""Program, the model's replies, the kind of failure, and a part of its message."""


@pytest.mark.parametrize("case", ENDS)
def test_what_the_model_did_has_the_failure_score_and_what_others_did_has_none(case):
    make, replies, error, message = ENDS[case]
    task = with_program(FakeTask(make(), failure_score=-0.25))
    texts = iter(replies)
    program: Any = task.program
    engine = FakeEngine(lambda request: program.written(request.module, next(texts)))
    (rollout,) = forest_of(environment(task, engine), [Example(id="q", inputs={"question": "?"})]).rollouts
    assert (rollout.error, rollout.reward) == (error, None if error == "program" else -0.25)
    assert message in rollout.error_message and next(texts, None) is None
