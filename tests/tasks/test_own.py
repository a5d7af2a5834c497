"""`OwnTask`: what it makes of a program, a reward and files, and refuses. `play`: rollouts from scripted replies."""

from typing import Any

import numpy as np
import pytest
import torch

from mmrl.config import DataConfig
from mmrl.config.tasks import PluginTaskConfig
from mmrl.errors import ConfigError
from mmrl.rollout.scripted import play
from mmrl.tasks.base import Score
from mmrl.tasks.dspy.own import OwnTask
from tests.dspy import Answer
from tests.helpers.programs import saved


async def shout(example, ctx):
    reply = await ctx.call("speaker", [{"role": "user", "content": f"Say {example.inputs['word']} loudly."}])
    return reply.text + await ctx.tool("mark")


def loud(example, prediction):
    return float(prediction == f"{example.inputs['word'].upper()}{example.metadata['end']}")


PARTS = OwnTask(shout, loud, inputs=["word"], modules=["speaker"], tools={"mark": lambda: "!"})


def make(tmp_path, rows=({"word": "hey", "end": "!"},), parts=PARTS, dev=None, **options):
    data = DataConfig(train=saved(tmp_path / "train.jsonl", rows), **({"dev": dev} if dev else {}))
    return parts(PluginTaskConfig(name="shout", data=data, **options), 0)


def problems(tmp_path, **options):
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **options)
    return "\n".join(caught.value.problems)


def test_the_program_sees_the_inputs_and_the_reward_sees_the_rest(tmp_path):
    task = make(tmp_path)
    (example,) = task.examples("train")
    assert (example.inputs, example.metadata, example.id) == ({"word": "hey"}, {"end": "!"}, "train-0")
    assert play(task, example, ["HEY"]).reward == 1.0
    rollout = play(task, example, ["hey"])
    assert (rollout.reward, rollout.prediction, rollout.error) == (0.0, "hey!", None)


async def later(example, prediction):
    return 0.25


NUMBERS: dict[str, Any] = {"reward": np.int64(1), "metrics": {"loud": torch.tensor(True)}}


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda e, p: Score(reward=0.5, metrics={"loud": 1.0}), (0.5, {"loud": 1.0}, None)),
        (lambda e, p: True, (1.0, {}, None)),
        (lambda e, p: Score(**NUMBERS), (1.0, {"loud": 1.0}, None)),
        (later, (0.25, {}, None)),
        (lambda e, p: "good", (None, {}, "reward")),
    ],
)
def test_rewards_are_numbers_or_scores_async_or_not(reward, said, tmp_path):
    task = make(tmp_path, parts=OwnTask(shout, reward, inputs=["word"], modules=["speaker"], tools=PARTS.tools))
    rollout = play(task, task.examples("train")[0], ["x"])
    assert (rollout.reward, dict(rollout.metrics), rollout.error) == said


def test_a_script_that_is_too_short_or_too_long_is_told(tmp_path):
    task = make(tmp_path)
    (example,) = task.examples("train")
    rollout = play(task, example, [])
    assert rollout.error == "engine" and "no more" in rollout.error_message
    with pytest.raises(ValueError, match="1 replies were not requested"):
        play(task, example, ["a", "b"])


def test_bad_records_name_file_and_line(tmp_path):
    missing = "train.jsonl line 3: word is missing, which task shout: OwnTask(inputs=...) names (fields: end)"
    assert missing in problems(tmp_path, rows=[{"word": "a"}, {"end": "!"}])
    assert "did you mean 'words'?" in problems(tmp_path, rows=[{"words": "a"}])
    assert "line 1: got int, expected a record with fields" in problems(tmp_path, rows=[7])
    assert "line 1: got a list, expected a record" in problems(tmp_path, rows=[[1]])
    assert "line 3: duplicate id '7'" in problems(tmp_path, rows=[{"word": "a", "id": 7}, {"word": "b", "id": "7"}])
    assert "no such file" in problems(tmp_path, dev="nowhere.jsonl")
    assert "train and dev are both" in problems(tmp_path, dev=str(tmp_path / "train.jsonl"))


def test_options_that_no_one_reads_are_refused_all_at_once(tmp_path):
    said = problems(tmp_path, max_turns=7, prompts="p.yaml", rows=[{"end": "!"}])
    for part in ("task.max_turns: has no effect", "task.prompts: has no effect", "word is missing"):
        assert part in said


def test_what_does_not_fit_is_refused_by_its_part(tmp_path):
    """What is refused else, and why: test_own_imported."""
    modules = problems(tmp_path, parts=OwnTask(shout, loud, inputs=["word"]))
    assert modules == "task shout: OwnTask(modules=...): missing; expected the names that shout passes to ctx.call"
    too_few: Any = lambda prediction: 1.0  # noqa: E731
    said = problems(tmp_path, parts=OwnTask(Answer, too_few, inputs=["word"])).splitlines()
    assert said == [
        "task shout: OwnTask(reward=...): takes (prediction), expected a function (record, prediction) -> number",
        "task shout: OwnTask(inputs=...): got word, but Answer.forward takes (text)",
    ]
