"""Poor habits of the tiny model: each module has one, it is recognisably worse, and it still parses."""

import random
from dataclasses import replace

import pytest

from mmrl.tasks.agents.r1_searcher import Form
from mmrl.tasks.agents.search_o1 import extract_boxed
from mmrl.tasks.mini.teach import demonstrations
from mmrl.tasks.search_program import parse_answer
from scripts.tiny_model import build
from scripts.tiny_model.habits import poor


@pytest.fixture(scope="module", params=["qa_direct", "search_o1", "r1_searcher"])
def pairs(request):
    """Demonstrations of some examples with a poor version of each that has one."""
    (task,) = build.build_tasks((request.param,), 1)
    found = []
    for number, example in enumerate(task.examples("dev")[:25]):
        for demonstration in demonstrations(task, example):
            worse = poor(demonstration, example, random.Random(number))
            if worse.completion != demonstration.completion:
                found.append((example, demonstration, worse))
    return found


def test_every_module_of_a_baseline_has_a_habit_that_keeps_its_prompt(pairs):
    assert {good.module for _, good, _ in pairs} in ({"solver"}, {"reasoner", "condenser"}, {"searcher"})
    for _, good, worse in pairs:
        assert replace(worse, completion=good.completion) == good


def test_a_habit_is_worse_and_still_in_format(pairs):
    for example, _, worse in pairs:
        answer = example.metadata["answers"][0]
        if worse.module == "solver":
            assert parse_answer(worse.completion) != answer
        elif worse.module == "reasoner":
            assert extract_boxed(worse.completion) is not None
        elif worse.module == "condenser":
            assert worse.completion == "Nothing helpful was found."
        else:
            form = Form.parse(worse.completion)
            assert form.framed
            assert form.balanced
