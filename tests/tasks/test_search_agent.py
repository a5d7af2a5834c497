"""The search agent: which text acts, what every turn earns, limits, injected tags, demonstrations."""

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmrl.config import DataConfig
from mmrl.config.tasks import SearchAgentConfig
from mmrl.errors import ConfigError
from mmrl.tasks import TASKS
from mmrl.tasks.agents.rewards import (
    SearchTurn,
    final_well_formed,
    intermediate_well_formed,
    merged_reward,
    search_reward,
)
from mmrl.tasks.agents.tags import first_pair
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers.programs import EXAMPLE, default_config, make, play, saved

ASK = "<think>a</think><search>river Lisbon</search>"
MISS = "<think>a</think><search>city Douro</search>"
RIGHT = "<think>b</think><answer>the Tagus</answer>"
WRONG = "<think>b</think><answer>Douro</answer>"
ROOMY: dict[str, Any] = {
    "max_observation": 4000,
    "max_context": 40000,
    "max_tokens": 400,
}  # a token is a character here


@pytest.fixture
def task(tmp_path):
    return make("search_agent", tmp_path, **ROOMY)


def turn_rewards(calls):
    return [call.turn_reward for call in calls]


def test_a_search_is_answered_inside_the_same_turn(task):
    rollout, calls, engine = play(task, [ASK, RIGHT])
    assert rollout.error is None
    assert rollout.prediction == {
        "answer": "the Tagus",
        "actions": ["search", "answer"],
        "queries": ["river Lisbon"],
        "ended": "answer",
    }
    first, second = calls
    observation = (
        "\n\n<information>Doc 1(Title: Lisbon) Lisbon is the capital of Portugal, on the river Tagus.\n"
        "Doc 2(Title: Tagus) The Tagus is a river of Iberia.\n"
        "Doc 3(Title: Porto) Porto is a city on the river Douro.\n</information>\n\n"
    )
    assert second.prompt_text == observation
    assert second.prompt_ids == first.prompt_ids + first.completion_ids + tuple(map(ord, observation))
    assert first.observation_tokens == len(observation)
    assert (first.turn, second.turn) == (0, 1)
    assert (first.invocation, second.invocation) == (0, 1)
    assert engine.requests[0].sampling.stop == ("</search>", "</answer>")
    assert rollout.reward == 1.0
    assert turn_rewards(calls) == pytest.approx([0.3 + 0.1 - 0.1, None])
    assert rollout.metrics == {
        "em": 1.0,
        "f1": 1.0,
        "format": 1.0,
        "retrieval": 1.0,
        "searches": 1.0,
        "turns": 2.0,
        "answered": 1.0,
        "answer_words": 2.0,
        "answer_candidates": 1.0,
    }


def test_worked_numbers(task):
    rollout, calls, _ = play(task, [ASK, "<think>a</think><search>zzz</search>", "<think>a</think>", WRONG])
    assert turn_rewards(calls) == pytest.approx([0.3, -0.1, -0.4, None])
    assert rollout.reward == pytest.approx(0.2)
    assert rollout.parts == {"final": pytest.approx(0.2), "intermediate": pytest.approx(-0.2)}
    assert (rollout.metrics["format"], rollout.metrics["retrieval"]) == (0.0, 1.0)
    assert [call.facts["action_none"] for call in calls] == [0, 0, 1, 0]
    assert calls[3].prompt_text == task.program.prompts.text("agent", "correction")


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        (RIGHT, True, True),
        ("say <think>b</think> so <answer>x</answer> end", True, True),  # text outside of tags is allowed
        ("<answer>x</answer>", False, False),
        ("<answer>x</answer><think>b</think>", False, False),
        ("<think>b</think><think>c</think><answer>x</answer>", False, False),
        ("<think>b</think><answer>x</answer><answer>y</answer>", False, False),
        ("<think>b<answer>x</answer>", False, True),
        ("<think>b</think></think><answer>x</answer>", False, True),
        ("<think>b</think><answer>x", False, False),  # no answer at all
        ("</answer><think>b</think><answer>x", False, False),
        ("<think>b</think><search>q</search><answer>x</answer>", False, False),
        ("<think>b</think><information>i</information><answer>x</answer>", False, False),
        ("<think>b</think></information><answer>x</answer>", False, True),
        ("<THINK>b</THINK><answer>x</answer>", False, False),
        ("<think >b</think><answer>x</answer>", False, False),
        ("", False, False),
    ],
)
def test_format_of_a_last_turn(text, strict, loose):
    assert final_well_formed(text, "strict") is strict
    assert final_well_formed(text, "loose") is loose


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        (ASK, True, True),
        ("<think>a</think>\n\nnow <search>q</search>\n", True, True),
        ("<search>q</search>", False, False),
        ("<search>q</search><think>a</think>", False, False),
        ("<think>a<search>q</search>", False, True),
        ("<think>a</think><answer>x<search>q</search>", False, True),
        ("<think>a</think><search>q</search></search>", False, True),
        ("<think>a</think><search>p<search>q</search>", False, False),
        ("<think>a</think><think>b</think><search>q</search>", False, False),
        ("<think>a</think><information>Tagus</information><search>q</search>", False, False),
        ("<think>a</think><search>q</search><information>", False, False),
        ("<think>a</think></information><search>q</search>", False, True),
    ],
)
def test_format_of_an_earlier_turn(text, strict, loose):
    turn = SearchTurn(text, "anything <search> <answer>")
    assert turn.searches
    assert intermediate_well_formed(turn, "strict") is strict
    assert intermediate_well_formed(turn, "loose") is loose
    assert not intermediate_well_formed(SearchTurn(text, None), "loose")


@given(st.lists(st.sampled_from(("<search>", "</search>", "<answer>", "</answer>", " a\n")), max_size=9).map("".join))
@example("<search>a <answer>b</answer>")
@example("<search>a<search>b</search>")
@example("<search>a</search><search>b</search>")
@example("<Search>a</Search>")
def test_the_first_pair_acts_and_is_that_of_the_plain_expression(text):
    match = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    assert first_pair(text, ("search", "answer")) == (match and (match[1], match[2].strip()))


def test_limits(task, tmp_path):
    rollout, calls, _ = play(task, [MISS])
    assert rollout.error is None
    assert rollout.prediction["ended"] == "turns"
    assert (len(calls), len(rollout.prediction["queries"])) == (5, 4)  # four that search, a last that may not
    assert calls[-1].observation_tokens == 0
    assert (rollout.reward, rollout.prediction["answer"]) == (-1.0, None)
    assert turn_rewards(calls) == pytest.approx([0.0, -0.1, -0.2, -0.3, None])
    assert rollout.metrics["searches"] == 5
    for count, expected in ((False, 3), (True, 2)):
        own = make("search_agent", tmp_path, max_turns=2, count_final_call=count, **ROOMY)
        assert len(play(own, [MISS])[1]) == expected
    own = make("search_agent", tmp_path, max_turns=1, count_final_call=True, **ROOMY)
    rollout, calls, _ = play(own, [ASK, RIGHT])
    assert (len(calls), rollout.reward, turn_rewards(calls)) == (1, -1.0, [None])


def test_a_full_context_ends_the_rollout_without_an_exception(task):
    question = len(task.program.question(EXAMPLE.inputs["question"])[0]["content"])
    frame = len("\n\n<information></information>\n\n")
    for room in range(3 * frame):
        task.program.max_context = question + len(ASK) + room
        rollout, calls, _ = play(task, [ASK, RIGHT])
        assert rollout.error is None
        if room <= frame:
            assert (len(calls), rollout.prediction["ended"], rollout.reward) == (1, "context", -1.0)
        else:
            assert len(calls) == 2
            assert len(calls[1].prompt_ids) < question + len(ASK) + room
            assert calls[1].prompt_text.endswith("</information>\n\n")


def test_observations_are_cut_inside_the_block_and_hits_are_looked_for_in_what_was_shown(tmp_path):
    whole = len("\n\n<information></information>\n\nDoc 1(Title: Lisbon) Lisbon is the capital of Portugal, on")
    for limit, hit in ((whole + 8, 0.0), (whole + 20, 0.3)):
        task = make("search_agent", tmp_path, **{**ROOMY, "max_observation": limit})
        _, calls, _ = play(task, [ASK, RIGHT])
        assert calls[0].observation_tokens <= limit
        assert calls[1].prompt_text.startswith("\n\n<information>Doc 1(Title: Lisbon)")
        assert calls[1].prompt_text.endswith("</information>\n\n")
        assert turn_rewards(calls) == pytest.approx([hit + 0.1 - 0.1, None])


@pytest.mark.parametrize(
    ("texts", "outcome", "turn", "merged"),
    [
        ([ASK, RIGHT], 1.0, 1.0, 1.0),
        ([RIGHT], 1.0, 1.0, 1.0),
        ([ASK, "<answer>Tejo</answer>"], 1.0, -1.0, 0.8),
        (["<search>river Lisbon</search>", RIGHT], 1.0, 1.0, 0.8),
        ([ASK, WRONG], 0.0, 0.2, 0.3),
        ([WRONG], 0.0, 0.2, 0.2),
        ([ASK, "<answer>Douro</answer>"], 0.0, -1.0, 0.1),
        (["hm"], 0.0, -1.0, 0.0),
        (["<think>a</think><answer></answer>"], 0.0, 0.2, 0.2),
    ],
)
def test_reward_sets(task, texts, outcome, turn, merged):
    for name, expected in (("outcome", outcome), ("turn", turn), ("merged", merged)):
        rollout, calls, _ = play(task, texts, name)
        assert rollout.reward == pytest.approx(expected)
        assert rollout.error is None
        assert all((call.turn_reward is None) == (name != "turn" or call is calls[-1]) for call in calls)


def test_reward_options(tmp_path):
    unformed = ["<answer>Tagus</answer>"]
    q = make("search_agent", tmp_path, final_penalty=0.0, em_needs_format=False, **ROOMY)
    assert [play(q, texts)[0].reward for texts in (unformed, [WRONG], ["<answer>x</answer>"])] == [1.0, 0.2, 0.0]
    free = make("search_agent", tmp_path, search_penalty=0.0, **ROOMY)
    assert turn_rewards(play(free, [ASK, ASK, RIGHT])[1]) == pytest.approx([0.4, 0.4, None])
    loose = make("search_agent", tmp_path, format_check="loose", **ROOMY)
    assert play(loose, ["<think>b<answer>Tagus</answer>"])[0].reward == 1.0


@pytest.mark.parametrize(
    ("information", "answer", "normalized", "case_insensitive"),
    [
        ("the U.S.A.", "usa", True, False),
        ("On The Tagus", "the tagus", True, True),
        ("an elk", "a elk", True, False),
        ("x", "", False, False),
        ("x the y", "the", False, True),  # nothing is left of it after normalisation
        ("x", "  ", False, False),
    ],
)
def test_retrieval_match(information, answer, normalized, case_insensitive):
    match: Any
    for match, expected in (("normalized", normalized), ("case_insensitive", case_insensitive)):
        rules = SearchAgentConfig(name="search_agent", retrieval_match=match)
        turns = [SearchTurn(ASK, information), SearchTurn(RIGHT, None)]
        assert search_reward(turns, False, [answer], rules).retrieval is expected


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=5),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1),
)
def test_ranges(earlier, formed, em, penalty):
    rules = SearchAgentConfig(name="search_agent", search_penalty=penalty)
    turns = [
        SearchTurn(
            ASK if asked and good else "<search>q</search>" if asked else "x",
            ("Tagus" if hit else "") if asked else None,
        )
        for asked, good, hit in earlier
    ]
    found = search_reward([*turns, SearchTurn(RIGHT if formed else "<answer>", None)], em, ["Tagus"], rules)
    assert found.final in (1.0, 0.2, -1.0)
    assert (found.final == -1.0) == (not formed)
    for index, value in enumerate(found.intermediate):
        searches = sum(turn.searches for turn in turns[: index + 1])
        assert value + penalty * searches == pytest.approx(
            0.3 * earlier[index][0] * earlier[index][2] + (0.1 if all(earlier[index][:2]) else -0.2)
        )
    assert merged_reward(em, True, found) in (1.0, 0.8, 0.3, 0.2, 0.1)


def test_questions_of_files_end_in_a_question_mark_and_need_a_corpus_without_paragraphs(tmp_path):
    """Search-R1's `nq_search.py` and `qa_search_test_merge.py` add it where a question has none."""
    rows = [{"question": "on which river is lisbon ", "answer": ["Tagus"]}, {"question": "why?", "answer": ["b"]}]
    path = saved(tmp_path / "nq.jsonl", rows)
    data = DataConfig(train=path, dev=path, test=path)
    with pytest.raises(ConfigError, match=r"task\.corpus: got null, and the questions of task\.data\.train"):
        TASKS["search_agent"](default_config("search_agent", dataset="nq", data=data), 0)
    task = make("search_agent", tmp_path, dataset="nq", data=data, **ROOMY)
    first, other = task.examples("dev")
    assert (first.id, first.metadata["answers"]) == ("dev-0", ["Tagus"])
    assert [one.inputs["question"] for one in (first, other)] == ["on which river is lisbon?", "why?"]
    assert demonstrations(task, first) == []
    assert play(task, [ASK, RIGHT], example=first)[0].reward == 1.0
