"""DSPy modules as programs: prompts byte for byte, one call per request, typed parse failures, forks by replay."""

import asyncio
import enum
import json
import re
import threading
import time
from functools import partial
from typing import Any, Literal

import dspy
import pydantic
import pytest

from mmrl.errors import ConfigError, ProgramFailure
from mmrl.rollout import with_program
from mmrl.rollout.dspy.host import checked_messages
from mmrl.rollout.plans import fork_on_first, independent
from mmrl.tasks.dspy.fields import adapter_in_use
from mmrl.tasks.dspy.tools import use_tool, use_tool_sync
from tests.dspy import Answer
from tests.helpers.programs import (
    FakeEngine,
    FakeTask,
    environment,
    filled,
    forest_of,
    run_program,
    seeded_letter,
    spelled,
)


class Steps(dspy.Module):
    """A chain of thought, a tool, a plain predictor."""

    def __init__(self):
        super().__init__()
        self.draft = dspy.ChainOfThought("text -> idea")
        self.final = dspy.Predict("text, idea -> answer")


class TwoSteps(Steps):
    """Async."""

    async def aforward(self, text):
        idea = (await self.draft.acall(text=text)).idea
        idea += await use_tool("echo", text="+")
        return await self.final.acall(text=text, idea=idea)


class Blocking(Steps):
    """With `forward` alone, as most DSPy programs are written."""

    def forward(self, text):
        idea = self.draft(text=text).idea
        idea += use_tool_sync("echo", text="+")
        return self.final(text=text, idea=idea)


def obliging(request):
    """Fills whichever fields the request's module has with a seeded letter."""
    letter = seeded_letter(request)
    return filled(reasoning="so", idea=letter) if request.module == "draft.predict" else filled(answer=letter)


def only(forest):
    (rollout,) = forest.rollouts
    return rollout


run = partial(run_program, answer=obliging)


@pytest.mark.parametrize("module", [TwoSteps, Blocking])
def test_each_predictor_is_a_module_and_prompts_are_byte_for_byte_what_dspy_renders(module):
    made = module()
    made.final.signature = made.final.signature.with_instructions("Be brief.")
    made.final.demos = [dspy.Example(text="t", idea="i", answer="a"), {"text": "half", "answer": "b"}]
    forest, engine = run(made, independent(1))
    assert forest.modules == tuple(call.module for call in forest.path(only(forest))) == ("draft.predict", "final")
    assert only(forest).error is None and set(only(forest).prediction) == {"answer"}
    first = engine.requests[0]
    expected = dspy.ChatAdapter().format(made.draft.predict.signature, [], {"text": "train0"})
    assert spelled(first.prompt_ids) == "|".join(m["content"] for m in expected)
    idea = seeded_letter(first) + "+"
    expected = dspy.ChatAdapter().format(made.final.signature, made.final.demos, {"text": "train0", "idea": idea})
    assert len(expected) == 6, "instructions, two demonstrations of two messages each, the request"
    assert spelled(engine.requests[1].prompt_ids) == "|".join(m["content"] for m in expected)
    assert "Be brief." in forest.path(only(forest))[1].prompt_text


@pytest.mark.parametrize("module", [TwoSteps, Blocking])
def test_many_rollouts_at_once_do_not_mix(module):
    # more than DSPy's own pool of 8 threads, which would deadlock a deterministic engine
    echoes = lambda r: (  # noqa: E731
        filled(reasoning="so", idea=spelled(r.prompt_ids).split("[[ ## text ## ]]\n")[-1].split("\n")[0])
        if r.module == "draft.predict"
        else filled(answer=spelled(r.prompt_ids).split("[[ ## idea ## ]]\n")[-1].split("\n")[0])
    )
    forest, _ = run(module(), fork_on_first(("draft.predict", "final"), 5), answer=echoes, examples=8)
    assert len(forest.rollouts) == 40
    for rollout in forest.rollouts:
        assert rollout.prediction == {"answer": f"train{rollout.example[1:]}+"}


@pytest.mark.parametrize("module", [TwoSteps, Blocking])
def test_a_parse_failure_is_one_call_with_its_raw_text_and_its_own_prompt(module):
    def answer(request):
        return obliging(request) if request.module == "draft.predict" else "nothing of the kind"

    forest, engine = run(module(), independent(1), answer=answer)
    assert only(forest).error == "parse" and only(forest).reward == 0.0
    assert len(engine.requests) == 2, "no hidden second request in JSON"
    first, failing = forest.path(only(forest))
    assert first.ok and not failing.ok
    assert failing.module == "final" and failing.text == "nothing of the kind"
    assert (failing.present_fields, failing.expected_fields) == (0, 1)
    assert "[[ ## idea ## ]]" in failing.prompt_text


@pytest.mark.parametrize(
    ("text", "present"), [("", 0), (filled(reasoning="so"), 1), (filled(idea="x"), 1), ("[[ ## completed ## ]]", 0)]
)
def test_present_and_expected_fields(text, present):
    forest, _ = run(TwoSteps(), independent(1), answer=lambda request: text)
    (call,) = forest.path(only(forest))
    assert (call.present_fields, call.expected_fields) == (present, 2)
    assert only(forest).error == "parse"


WRITTEN = {
    "chat": (dspy.ChatAdapter(), lambda label: filled(reasoning="so", label=label)),
    "json": (dspy.JSONAdapter(), lambda label: f'{{"reasoning": "so", "label": "{label}"}}'),
    "xml": (dspy.XMLAdapter(), lambda label: f"<reasoning>so</reasoning><label>{label}</label>"),
}


@pytest.mark.parametrize("form", list(WRITTEN))
def test_a_value_of_the_wrong_type_counts_as_nothing_read(form):
    adapter, written = WRITTEN[form]
    module = dspy.ChainOfThought(dspy.Signature("text -> label").with_updated_fields("label", type_=Literal["a", "b"]))
    with dspy.context(adapter=adapter):
        wrong, engine = run(module, independent(1), answer=lambda request: written("c"))
        right, _ = run(module, independent(1), answer=lambda request: written("b"))
    (call,) = wrong.path(only(wrong))
    assert (call.present_fields, call.expected_fields, call.ok) == (0, 2, False)
    assert only(wrong).error == "parse" and len(engine.requests) == 1
    assert only(right).prediction == {"reasoning": "so", "label": "b"}


class Colour(enum.Enum):
    RED = "red"


class Named(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name", mode="before")
    @classmethod
    def stripped(cls, value):
        return value.strip()


@pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter()])
@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (Colour, ["red"], "unhashable|not a valid name or value"),
        (Named, {"name": None}, "AttributeError: 'NoneType' object has no attribute"),
    ],
)
def test_a_value_at_which_the_parser_stumbles_is_a_parse_failure(adapter, kind, value, error):
    module = dspy.Predict(dspy.Signature("text -> label").with_updated_fields("label", type_=kind))
    text = json.dumps(value)
    with dspy.context(adapter=adapter):
        forest, _ = run(
            module,
            independent(1),
            answer=lambda request: filled(label=text) if type(adapter) is dspy.ChatAdapter else f'{{"label": {text}}}',
        )
    (call,) = forest.path(only(forest))
    assert (only(forest).error, call.ok, call.present_fields, call.expected_fields) == ("parse", False, 0, 1)
    assert re.search(error, only(forest).error_message)


@pytest.mark.parametrize("form", list(WRITTEN))
def test_the_reminder_of_the_fields_stands_after_the_item_or_is_shared(form):
    adapter, written = WRITTEN[form]
    module = dspy.ChainOfThought(dspy.Signature("text -> label").with_updated_fields("label", type_=Literal["a", "b"]))
    module.predict.demos = [dspy.Example(text="one", reasoning="so", label="a")]
    with dspy.context(adapter=adapter):
        prompts = {}
        for layout in ("dspy", "shared_first"):
            forest, engine = run(module, independent(1), answer=lambda request: written("b"), prompt_layout=layout)
            assert only(forest).prediction == {"reasoning": "so", "label": "b"}
            prompts[layout] = spelled(engine.requests[0].prompt_ids)
    reminder = adapter.user_message_output_requirements(module.predict.signature)
    assert prompts["dspy"].count(reminder) == prompts["shared_first"].count(reminder) == 1
    # nothing is lost, and only the item and what ends its message stand after the reminder and the demonstrations
    assert sorted(prompts["dspy"].replace("\n", "")) == sorted(prompts["shared_first"].replace("\n", ""))
    system, item = prompts["shared_first"].partition(reminder)[::2]
    assert "train0" not in system and item.rindex("train0") > item.index("one")
    assert prompts["dspy"].index("train0") < prompts["dspy"].index(reminder)


def test_an_adapter_without_a_reminder_has_no_other_layout():
    class Bare(dspy.Adapter):
        pass

    with dspy.context(adapter=Bare()), pytest.raises(ConfigError, match=r"task\.prompt_layout: .*no effect with Bare"):
        adapter_in_use("shared_first")


@pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter(), dspy.XMLAdapter()])
def test_tool_calls_of_a_history_are_shown_as_text(adapter):
    """Also under an adapter that would send them to a provider apart from the text."""

    def look_up(query: str) -> str:
        """Look it up."""
        return f"found {query}"

    steps = iter([("look_up", {"query": "needle"}), ("submit", {"answer": "x"})])

    def answer(request):
        name, arguments = next(steps)
        calls = {"tool_calls": [{"name": name, "args": arguments}]}
        return program.written("react", {"next_thought": "so", "tool_calls": calls})

    with dspy.context(adapter=adapter):
        task = with_program(FakeTask(dspy.ReActV2("text -> answer", tools=[look_up])))
        program: Any = task.program
        engine = FakeEngine(answer)
        forest = forest_of(environment(task, engine))
    assert only(forest).error is None
    _, _, called, seen, *_ = (message["content"] for message in engine.requests[1].messages)
    assert "look_up" in called and "needle" in called and "found needle" in seen
    assert {message["role"] for message in engine.requests[1].messages} == {"system", "user", "assistant"}
    with pytest.raises(ProgramFailure, match="something other than text"):
        checked_messages("react", [{"role": "assistant", "content": "so", "tool_calls": [{"id": "1"}]}])


class Odd(Answer):
    """Does what the source does not show."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    async def aforward(self, text):
        if self.how == "bare":
            return dspy.settings.lm("hello")
        if self.how == "blocking":
            return self.answer(text=text)
        result = await self.answer.acall(text=text)
        return {"answer": object()} if self.how == "json" else result


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("bare", "without await"),
        ("blocking", "without await"),
        ("json", "cannot be written as JSON"),
    ],
)
def test_what_cannot_be_recorded_is_a_program_failure_that_says_why(how, message):
    forest, _ = run(Odd(how), independent(1), answer=lambda request: filled(answer="x"))
    assert only(forest).error == "program" and only(forest).reward is None
    assert message in only(forest).error_message


def test_a_timeout_ends_the_thread_of_a_blocking_module():
    async def never(request):
        await asyncio.sleep(60)

    engine = FakeEngine(obliging)
    engine.generate = never
    task = with_program(FakeTask(Answer()))
    env = environment(task, engine, timeout_s=0.1)
    forest = forest_of(env, plans=independent(3))
    assert [rollout.error for rollout in forest.rollouts] == ["timeout"] * 3
    for _ in range(100):
        if not any(thread.name == "mmrl-user-code" for thread in threading.enumerate()):
            break
        time.sleep(0.02)
    assert not any(thread.name == "mmrl-user-code" for thread in threading.enumerate())
