"""What `tiny_direct` is told: all single facts of the runs' world, as thoughts, and no question of dev or test."""

import pytest

from mmrl.tasks.search_program import parse_answer
from scripts.tiny_model import build
from scripts.tiny_model.facts import LISTS, STEPS
from scripts.tiny_model.mini.world import WORLD_SEED, make_world


@pytest.fixture(scope="module")
def told():
    return build.knowledge(("qa_direct",))


def test_every_step_of_a_dev_question_is_known_and_the_question_is_not(told):
    known = " ".join(found.completion for found in told if found.module == LISTS)
    asked = {message["content"] for found in told for message in found.messages}
    (task,) = build.build_tasks(("qa_direct",), WORLD_SEED)
    for split in ("dev", "test"):
        for example in task.examples(split):
            assert f"Question: {example.inputs['question']}" not in asked
            for hop in example.metadata["hops"]:
                assert f"{hop['query']}: {hop['answer']}." in known


def test_a_fact_answers_its_question_with_and_without_the_step(told):
    steps = [found for found in told if found.module == STEPS]
    assert len(steps) > 2 * len(make_world(WORLD_SEED).entities)
    for thought, plain in zip(steps[::2], steps[1::2], strict=True):
        assert thought.messages[-1] == plain.messages[-1]
        assert parse_answer(thought.completion) == parse_answer(plain.completion) == plain.completion
