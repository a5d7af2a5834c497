"""DSPy's own programs: each runs, is recorded token for token, forks, and gets credit; or is refused by name."""

import re
from collections import Counter
from typing import Any

import dspy
import pytest

from mmrl.algorithms import assign_credit
from mmrl.config.algo import GroupConfig, MmgrpoConfig
from mmrl.errors import ConfigError
from mmrl.records import Example
from mmrl.rollout import with_program
from mmrl.rollout.dspy.dspy_program import DspyProgram
from mmrl.rollout.plans import fork_on, independent
from tests.dspy import sentence, table
from tests.dspy.agents import AGENTS
from tests.dspy.composed import COMPOSED
from tests.dspy.refused import REFUSED
from tests.dspy.simple import ATTEMPTS, SIMPLE
from tests.helpers import TOP
from tests.helpers.programs import FakeEngine, FakeTask, environment, forest_of

WORKS = [*SIMPLE, *COMPOSED, *ATTEMPTS, *AGENTS]


def counted(forest, number):
    return Counter(call.module for call in forest.path(forest.rollouts[number]))


@pytest.mark.parametrize("case", WORKS, ids=lambda case: case.name)
def test_it_runs_is_recorded_and_gets_credit(case):
    forest, engine = case.play(independent(2))
    assert [(r.error, r.error_message, r.error_traceback) for r in forest.rollouts] == [(None, "", "")] * 2
    assert [r.reward for r in forest.rollouts] == [1.0, 0.0]
    assert counted(forest, 0) == case.calls and counted(forest, 1) == (case.bad_calls or case.calls)
    # what is trained is what was sampled, after the prompt that was sent
    asked = {request.order[0]: request for request in engine.requests}
    assert {key: call.completion_ids for key, call in forest.calls.items()} == engine.sampled
    assert all(call.prompt_ids == asked[key].prompt_ids for key, call in forest.calls.items())
    assert engine.live == 0

    better, worse = (forest.path(rollout) for rollout in forest.rollouts)
    credit = assign_credit(forest, GroupConfig(name="grpo"), 0)
    advantages = {entry.call: set(entry.advantages) for entry in credit.entries}
    assert set(advantages) == set(forest.calls)
    assert all(min(advantages[call.id]) > 0 for call in better) and all(max(advantages[call.id]) < 0 for call in worse)
    grouped = assign_credit(forest, MmgrpoConfig(name="mmgrpo"), 0)
    assert {entry.call for entry in grouped.entries} == set(forest.calls)
    of_module = {call.id: call.module for call in forest.calls.values()}
    for group in grouped.groups:
        assert len({of_module[member.call.id] for member in group.members}) == 1


@pytest.mark.parametrize("case", WORKS, ids=lambda case: case.name)
def test_a_fork_at_its_last_call_replays_all_others(case):
    last = list(case.play(independent(1))[0].calls.values())[-1]
    forest, engine = case.play(fork_on(last.module, 2))
    first, second = (forest.path(rollout) for rollout in forest.rollouts)
    assert [(r.error, r.error_message, r.reward) for r in forest.rollouts] == [(None, "", 1.0)] * 2
    shared = [call.id for call in first if call in second]
    place = next(number for number, call in enumerate(first) if call.module == last.module)
    assert [call.module for call in first] == [call.module for call in second]
    assert len(shared) == place and len(engine.requests) == len(forest.calls) == 2 * len(first) - place


@pytest.mark.parametrize("case", [case for case in REFUSED if case.runs], ids=lambda case: case.name)
def test_what_only_a_run_shows_fails_its_rollouts_with_a_sentence(case):
    task = with_program(FakeTask(case.make()))
    program: Any = task.program
    engine = FakeEngine(lambda request: program.written(request.module, {"draft": "x", "answer": "x"}))
    (rollout,) = forest_of(environment(task, engine), [Example(id="q", inputs={"question": "x"})]).rollouts
    assert (rollout.error, rollout.reward) == ("program", None)
    assert case.sentence in rollout.error_message


@pytest.mark.parametrize("case", [case for case in REFUSED if not case.runs], ids=lambda case: case.name)
def test_what_cannot_be_trained_is_refused_by_name(case):
    with dspy.context(adapter=case.adapter), pytest.raises(ConfigError) as caught:
        DspyProgram(case.make())
    (problem,) = (re.sub(r"line \d+", "line N", problem) for problem in caught.value.problems)
    assert problem.startswith(f"task.program: {case.sentence}")


def test_the_documentation_lists_what_the_suite_runs_and_refuses():
    assert len(WORKS) >= 30
    page = (TOP / "docs" / "dspy.md").read_text(encoding="utf-8")
    assert table(WORKS) in page and sentence(REFUSED) in " ".join(page.split())
