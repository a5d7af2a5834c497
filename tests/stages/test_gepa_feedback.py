"""GEPA on a metric of its form: what it says of a rollout, or of one module's part of it, is what is reflected on."""

from typing import Any

import dspy
import pytest

from mmrl.config import DataConfig
from mmrl.config.tasks import DspyProgramConfig
from mmrl.rollout import with_program
from mmrl.system.objects import register
from mmrl.tasks.dspy.own import ImportedTask
from tests.helpers.programs import filled
from tests.helpers.stages import optimised, proposal
from tests.stages.test_prompt_problems import Twice

ROWS = [{"text": f"t{number}", "gold": "secret"} for number in range(8)]


def silent(gold, pred, trace=None):
    return 0.0


def of_all(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return {"score": 0.0, "feedback": f"SAID of {gold.text}: it said {pred.label}", "length": 3}


def nothing(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return dspy.Prediction(score=0.0, feedback="")


def of_each(gold, pred, trace=None, pred_name=None, pred_trace=None):
    if pred_name is None:
        return 0.0
    ((predictor, inputs, outputs),) = pred_trace
    assert (predictor, inputs, outputs) in [tuple(step) for step in trace] and len(trace) == 2
    return dspy.Prediction(score=0.0, feedback=f"SAID of {pred_name}: {inputs['text']} is {outputs.label}")


async def awaited(gold, pred, trace=None, pred_name=None, pred_trace=None):
    return of_each(gold, pred, trace, pred_name, pred_trace)


def reflected(folder, metric):
    """What the prompt model was asked for each module's instruction."""
    asked = []

    def answer(messages, temperature, seed):
        made = proposal(messages, seed)
        if made is None:
            return filled(label="of " + messages[-1]["content"].split("[[ ## text ## ]]\n")[1].split("\n")[0])
        asked.append(messages[-1]["content"])
        return made

    names: dict[str, Any] = {
        "program": register("twice", Twice),
        "metric": register(f"metric_{metric.__name__}", metric),
    }
    data = DataConfig(train=register("rows", ROWS))
    config = DspyProgramConfig(name="dspy", inputs=("text",), data=data, **names)
    options = {"auto": None, "max_metric_calls": 24, "component_selector": "all", "use_merge": False}
    optimised(folder / "run", (config, with_program(ImportedTask(config, 0))), "gepa", answer, **options)
    assert len(asked) >= 2
    return asked[:2]


@pytest.mark.parametrize("metric", [of_each, awaited])
def test_each_module_reads_what_is_said_of_its_own_calls(tmp_path, metric):
    first, second = reflected(tmp_path, metric)
    assert "SAID of first: t" in first and "SAID of second" not in first
    assert "SAID of second: of t" in second and "SAID of first" not in second
    assert "secret" not in first + second, "it was for the metric to say"


def of_both(gold, pred, trace=None, pred_name=None, pred_trace=None):
    said = "OF ALL" if pred_name is None else "OF THE FIRST" if pred_name == "first" else ""
    return dspy.Prediction(score=0.0, feedback=said)


def test_what_is_said_of_a_module_goes_before_what_is_said_of_the_rollout(tmp_path):
    first, second = reflected(tmp_path, of_both)
    assert "OF THE FIRST" in first and "OF ALL" not in first
    assert "OF ALL" in second


def test_what_is_said_of_the_rollout_is_read_for_each_module(tmp_path):
    for text in reflected(tmp_path, of_all):
        assert "SAID of t" in text and ": it said of of t" in text
        assert "length 3" not in text and "secret" not in text


class Same(dspy.Module):
    """A metric as `dspy.evaluate.SemanticF1` is one."""

    __name__ = "same"

    def forward(self, example, pred, trace=None):
        return dspy.Prediction(score=float(example.gold == pred.label), feedback="SAID by a module")


def any_number(*given, **named):
    return {"score": silent(*given, **named), "feedback": "SAID by another"}


@pytest.mark.parametrize("metric", [Same(), any_number])
def test_a_metric_that_speaks_of_no_predictor_is_asked_about_the_rollout_alone(tmp_path, metric):
    assert all("SAID by a" in text for text in reflected(tmp_path, metric))


def test_a_metric_may_choose_to_say_nothing(tmp_path):
    assert not any("secret" in text or "score 0" in text for text in reflected(tmp_path, nothing))


def test_of_a_metric_without_feedback_its_numbers_and_the_labels_are_read(tmp_path):
    for text in reflected(tmp_path, silent):
        assert "The reward is 0." in text and "score 0" in text and "gold of this example: secret" in text
