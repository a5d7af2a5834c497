"""DSPy's LM callbacks in rollouts: what plain DSPy tells them, also of a reply that does not parse."""

import dspy
import pytest
from dspy.utils.callback import BaseCallback

from tests.dspy import Answer
from tests.dspy.test_caught_failures import Watched
from tests.dspy.test_models_doing import Shortens, size_of
from tests.helpers.programs import filled, run_program


class Notes(BaseCallback):
    """What LM callbacks were told: the request's messages, then the outputs or the exception."""

    def __init__(self):
        self.told = []

    def on_lm_start(self, call_id, instance, inputs):
        assert isinstance(instance, dspy.BaseLM) and set(inputs) == {"prompt", "messages", "kwargs"}
        self.told.append(("start", inputs["messages"]))

    def on_lm_end(self, call_id, outputs, exception=None):
        self.told.append(("end", outputs, type(exception).__name__))


class Awaits(Answer):
    async def aforward(self, text):
        return await self.answer.acall(text=text)


@pytest.mark.parametrize("kind", [Answer, Awaits])
@pytest.mark.parametrize("reply", [filled(answer="x"), "nothing of the kind"])
def test_lm_callbacks_are_told_what_plain_dspy_tells_them(kind, reply):
    notes, plain = Notes(), Notes()
    with dspy.context(callbacks=[notes]):
        forest, _ = run_program(kind(), answer=lambda request: reply)
    assert forest.rollouts[0].error == (None if "answer" in reply else "parse")
    adapter = dspy.ChatAdapter(use_json_adapter_fallback=False)
    with dspy.context(callbacks=[plain], lm=Watched(lambda messages: reply), adapter=adapter):
        try:
            Answer()(text="train0")
        except dspy.utils.exceptions.AdapterParseError:
            assert "answer" not in reply
    assert notes.told == plain.told and len(notes.told) == 2


def test_a_prompt_that_is_too_long_is_the_lms_exception():
    notes = Notes()
    with dspy.context(callbacks=[notes]):
        run_program(Shortens("value"), answer=lambda request: filled(idea="i"), settings={"max_context": size_of("")})
    ends = [note[2] for note in notes.told if note[0] == "end"]
    assert ends == ["NoneType", *["ContextWindowExceededError"] * (len(ends) - 1)] and len(ends) > 1
