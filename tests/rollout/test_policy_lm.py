"""The LM of a trained policy: text as its tokens come, from engines that say them and from those that do not."""

import asyncio
import inspect
from contextlib import ExitStack
from functools import partial

import dspy
import pytest
from dspy import lm15
from dspy.utils.exceptions import LMUnsupportedFeatureError
from dspy.utils.saving import cloudpickle

from mmrl.config import ModelConfig
from mmrl.engines.base import Completion, Engine
from mmrl.models.chat import decode_text, encode_text, growing_text
from mmrl.models.load import load_tokenizer
from mmrl.rollout.dspy.policy_lm import PolicyLM, ServedPolicy, as_trained
from mmrl.rollout.dspy.structure import Structure
from mmrl.tasks.dspy.fields import shared_first
from tests.helpers.programs import filled

TOKENIZER = load_tokenizer(ModelConfig(name="tiny", path="tiny"))
TEXT = "naïve, 日本語 and  two blanks\n🙂 end"


class Said(Engine):
    """Says one text; for ever where it is told so."""

    def __init__(self, tells=True, ends=True):
        self.tells, self.ends, self.cancelled, self.asked = tells, ends, asyncio.Event(), []

    async def generate(self, request):
        self.asked.append(request.messages)
        ids = (*encode_text(TOKENIZER, TEXT), TOKENIZER.eos_token_id)
        try:
            while True:
                for token in ids if self.tells and request.on_token else ():
                    request.on_token(token)
                await asyncio.sleep(0.001)
                if self.ends:
                    return Completion(ids=ids, logprobs=None, finish="eos")
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
def lm():
    made = []

    def make(**options):
        served = ServedPolicy("policy", Said(**options), TOKENIZER, ExitStack(), 64, reopen=partial(pytest.fail, "no"))
        made.append(served)
        return PolicyLM(served, Structure(dspy.Predict("question -> answer")))

    yield make
    for served in made:
        served.close()


REQUEST = lm15.Request(model="policy", messages=(lm15.Message.user("question"),))


def events(lm, way):
    if way == "sync":
        return list(lm.engine.stream(REQUEST))

    async def gathered():
        return [event async for event in lm._async_engine_spec.stream(REQUEST)]

    return asyncio.run(gathered())


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("tells", [True, False])
def test_the_parts_add_up_to_the_text(lm, way, tells):
    start, *deltas, end = events(lm(tells=tells), way)
    assert (start.type, end.type, end.finish_reason) == ("start", "end", "stop")
    assert "".join(event.delta.text for event in deltas) == TEXT
    assert (len(deltas) > 5) is tells and end.usage.output_tokens == len(encode_text(TOKENIZER, TEXT)) + 1


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_listener_that_leaves_ends_the_request(lm, way):
    policy = lm(ends=False)
    engine = policy.served.engine
    if way == "sync":
        stream = policy.engine.stream(REQUEST)
        assert [next(stream).type for _ in range(2)] == ["start", "delta"]
        stream.close()
    else:

        async def left():
            stream = policy._async_engine_spec.stream(REQUEST)
            assert [(await anext(stream)).type for _ in range(2)] == ["start", "delta"]
            await stream.aclose()

        asyncio.run(left())
    waiting = asyncio.run_coroutine_threadsafe(engine.cancelled.wait(), policy.served._loop)
    assert waiting.result(10) is True


def test_growing_text_holds_halves_of_characters_back():
    growing, ids = growing_text(TOKENIZER), encode_text(TOKENIZER, TEXT)
    parts = [growing.add(token) for token in ids]
    assert "".join(parts) == growing.text == decode_text(TOKENIZER, ids) == TEXT
    assert not any("\ufffd" in part for part in parts)


def test_parts_that_are_not_text_are_refused_and_parts_that_are_are_joined(lm):
    policy = lm()
    call = lm15.ToolCallPart(id="1", name="look_up", input={"query": "q"})
    parts = (lm15.Message.user("question"), lm15.Message.assistant((lm15.TextPart("thought"), call)))
    with pytest.raises(
        LMUnsupportedFeatureError, match="messages: got tool_call, tool_result; this LM reads text alone"
    ):
        policy(lm15.Request(model="policy", messages=(*parts, lm15.Message.tool("1", "seen"))))
    with pytest.raises(LMUnsupportedFeatureError, match="messages: got image"):
        policy(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}])
    system = (lm15.TextPart("one"), lm15.TextPart("two"))
    policy(lm15.Request(model="policy", messages=parts[:1], system=system))
    expected = ({"role": "system", "content": "one\ntwo"}, {"role": "user", "content": "question"})
    assert policy.served.engine.asked[-1] == expected


class Answers(Engine):
    """Says a text for each module, and notes who asked for what."""

    def __init__(self):
        self.asked = []

    async def generate(self, request):
        self.asked.append((request.module, request.messages))
        fields = {"discussion": "d", "advice": "{}"} if request.module.endswith("feedback") else {"draft": "x"}
        return Completion(
            ids=tuple(encode_text(TOKENIZER, filled(**fields, answer=request.module))), logprobs=None, finish="eos"
        )


class Two(dspy.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = dspy.Predict("question -> draft"), dspy.Predict("question, draft -> answer")

    def forward(self, question):
        return self.b(question=question, draft=self.a(question=question).draft)


class Awaits(Two):
    async def aforward(self, question):
        draft = (await self.a.acall(question=question)).draft
        return await self.b.acall(question=question, draft=draft)


OPENED = {}


def opened():
    return OPENED["policy"]


@pytest.fixture
def trained():
    def make(program, layout="dspy"):
        engine, structure = Answers(), Structure(program)
        OPENED["policy"] = ServedPolicy("policy", engine, TOKENIZER, ExitStack(), 64, opened)
        as_trained(program, OPENED["policy"], structure, layout)
        return engine.asked

    yield make
    OPENED.pop("policy").close()


def never(inputs, prediction):
    return 0.0


ONCE = ["module.a", "module.b"]


@pytest.mark.parametrize(
    ("kind", "expected"), [(dspy.BestOfN, ONCE * 2), (dspy.Refine, [*ONCE, "offer_feedback", *ONCE])]
)
@pytest.mark.parametrize("form", ["itself", "a part", "a copy", "loaded"])
def test_attempts_speak_with_the_weights_of_their_modules(trained, kind, expected, form):
    program = kind(Two(), 2, never, 1.0)
    called = program
    if form == "a part":
        called = dspy.Module()
        called.inner, called.forward = program, lambda question: called.inner(question=question)
        expected = [f"inner.{name}" for name in expected]
    asked = trained(called)
    if form == "a copy":
        called = called.deepcopy()
    if form == "loaded":
        called = cloudpickle.loads(cloudpickle.dumps(called))
    prediction = called(question="q")
    assert [module for module, _ in asked] == expected and prediction.answer == expected[1]
    assert isinstance(called, kind) or form == "a part"


def test_a_program_has_the_prompt_layout_of_its_training(trained):
    first = dspy.ChatAdapter().user_message_output_requirements(Two().a.signature)
    prompts = {}
    for layout in ("dspy", "shared_first", "set by hand"):
        program = Awaits()
        asked = trained(program, "shared_first" if layout == "set by hand" else layout)
        adapter = shared_first(dspy.ChatAdapter()) if layout == "set by hand" else None
        with dspy.context(adapter=adapter):
            assert program(question="q").answer == "b" and asyncio.run(program.acall(question="q")).answer == "b"
            assert dspy.settings.adapter is adapter
        assert asked[:2] == asked[2:]
        prompts[layout] = [message["content"] for message in asked[0][1]]
    assert [first in content for content in prompts["dspy"]] == [False, True]
    assert [first in content for content in prompts["shared_first"]] == [True, False]
    assert prompts["set by hand"] == prompts["shared_first"]
    assert inspect.getsource(type(program)) == inspect.getsource(Awaits)


def test_a_copy_with_other_options_has_the_same_engine(lm):
    policy = lm()
    warm = policy.copy(temperature=1.0)
    assert warm.served is policy.served and warm.engine is policy.engine and warm("question") == [TEXT]
    assert isinstance(warm, dspy.LM) and policy.kwargs["temperature"] == 0.0
