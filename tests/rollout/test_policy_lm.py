"""The LM of a trained policy: text as its tokens come, from engines that say them and from those that do not."""

import asyncio
from contextlib import ExitStack
from functools import partial

import dspy
import pytest
from dspy import lm15
from dspy.utils.exceptions import LMUnsupportedFeatureError

from mmrl.config import ModelConfig
from mmrl.engines.base import Completion, Engine
from mmrl.models.chat import GrowingText, decode_text, encode_text
from mmrl.models.load import load_tokenizer
from mmrl.rollout.dspy.policy_lm import PolicyLM, ServedPolicy

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
        return PolicyLM(served, "module")

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
    growing, ids = GrowingText(TOKENIZER), encode_text(TOKENIZER, TEXT)
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


def test_a_copy_with_other_options_has_the_same_engine(lm):
    policy = lm()
    warm = policy.copy(temperature=1.0)
    assert warm.served is policy.served and warm.engine is policy.engine and warm("question") == [TEXT]
    assert isinstance(warm, dspy.LM) and policy.kwargs["temperature"] == 0.0
