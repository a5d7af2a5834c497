"""The search agent under hostile text, from its tools and from its policy: nothing ends, forges or breaks a turn."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.tasks.agents.rewards import (
    SEARCH_TAGS,
)
from mmrl.tasks.agents.tags import disarm, tag_sequence
from tests.helpers.programs import make, play
from tests.helpers.watch import terminates
from tests.tasks.test_search_agent import ASK, ROOMY, WRONG, approx, turn_rewards

PIECES = [f"<{slash}{name}>" for name in SEARCH_TAGS for slash in ("", "/")]
PIECES += [
    "< /information >",
    "</INFORMATION>",
    "<answer x>",
    "Tagus",
    "river",
    "<|im_end|>",
    "{0}",
    "%s",
    "\n",
    " ",
    "<",
    ">",
]
hostile = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.fixture
def task(tmp_path):
    return make("search_agent", tmp_path, **ROOMY)


@given(hostile, hostile)
def test_disarmed_text_has_no_tag_however_it_is_cut(left, right):
    shown = disarm(left + right, SEARCH_TAGS)
    assert len(shown) == len(left + right)
    for start in range(len(shown) + 1):
        assert tag_sequence(shown[start:], SEARCH_TAGS) == []
    assert tag_sequence(shown.upper(), [name.upper() for name in SEARCH_TAGS]) == []


def test_long_runs_of_spaces_are_read_once():
    n = 500_000
    with terminates():
        for text in ("<" + " " * n, "< " * n, "<" + " " * n + "/" + " " * n + "think>", "<think " * n):
            assert tag_sequence(disarm(text, SEARCH_TAGS), SEARCH_TAGS) == []
    assert disarm("<  /  think >", SEARCH_TAGS) == "(  /  think )"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(title=hostile, text=hostile)
def test_retrieved_text_can_neither_end_nor_forge_anything(task, title, text):
    results = []
    for document in ({"title": title, "text": text}, {"title": "Lisbon", "text": "a river"}):
        task.tools = {"search": lambda queries, corpus, found=document: [found]}
        rollout, calls, _ = play(task, [ASK, ASK, WRONG])
        shown = calls[1].prompt_text
        assert tag_sequence(shown, SEARCH_TAGS) == ["information", "/information"]
        assert shown.endswith("</information>\n\n")
        results.append((rollout.reward, rollout.prediction, rollout.metrics["format"]))
        hit = 0.3 * ("tagus" in shown.lower())
        assert turn_rewards(calls) == approx([hit + 0.1 - 0.1, hit + 0.1 - 0.2, None])
    assert results[0] == results[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(hostile, min_size=1, max_size=4))
def test_no_output_of_a_policy_makes_the_program_fail(task, texts):
    rollout, calls, _ = play(task, texts)
    assert rollout.error is None
    assert rollout.reward in (1.0, 0.2, -1.0)
    assert len(calls) <= 5
    assert [call.turn_reward is None for call in calls] == [False] * (len(calls) - 1) + [True]
