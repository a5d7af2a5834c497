import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.tasks import TASKS
from mmrl.tasks.agents.search_o1 import QUERY, RESULT, boxed
from mmrl.tasks.agents.tags import disarm_markers, last_block
from mmrl.tasks.base import Task
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers.programs import DOCUMENTS, default_config, make, play
from tests.helpers.watch import terminates

ASK = f"look it up {QUERY[0]} Lisbon {QUERY[1]}"
ANSWER = r"so it is \boxed{Tagus}"


@pytest.fixture
def task(tmp_path):
    return make("search_o1", tmp_path, max_tokens=400, max_turns=2)


def test_it_is_a_task_with_two_modules(task):
    assert isinstance(task, Task)
    assert task.program.modules == ("reasoner", "condenser")


def test_only_the_condensed_result_enters_the_context(task):
    rollout, calls, engine = play(task, [ASK, "it is on the Tagus", ANSWER], "outcome")
    assert [call.module for call in calls] == ["reasoner", "condenser", "reasoner"]
    assert all(document["text"] in calls[1].prompt_text for document in DOCUMENTS if "Lisbon" in document["text"])
    assert f"Reasoning so far: {ASK}\nQuery: Lisbon\n" in calls[1].prompt_text
    assert calls[2].prompt_text == f"\n{RESULT[0]} it is on the Tagus {RESULT[1]}\n"
    assert calls[2].prompt_ids[: calls[0].prompt_tokens] == calls[0].prompt_ids
    assert calls[2].turn == 1
    assert [request.sampling.stop for request in engine.requests] == [(QUERY[1],), (), (QUERY[1],)]
    assert rollout.prediction["answer"] == "Tagus"
    assert rollout.reward == rollout.metrics["em"] == 1
    assert rollout.metrics["searches"] == 1


def test_the_condenser_sees_all_the_reasoning_so_far(task):
    _, calls, _ = play(task, [ASK, "one", f"then {QUERY[0]} Tagus {QUERY[1]}", "two", ANSWER], "outcome")
    result = f"\n{RESULT[0]} one {RESULT[1]}\n"
    assert f"Reasoning so far: {ASK}{result}then {QUERY[0]} Tagus {QUERY[1]}\n" in calls[3].prompt_text


def test_a_search_beyond_the_limit_is_told_so_once(task):
    rollout, calls, _ = play(task, [ASK, "one", ASK, "two", ASK, ASK], "outcome")
    assert [call.module for call in calls] == ["reasoner", "condenser"] * 2 + ["reasoner"] * 2
    assert "No more searches" in calls[5].prompt_text
    assert (rollout.prediction["ended"], rollout.prediction["answer"], rollout.reward) == ("searches", None, 0.0)
    assert rollout.error is None
    rollout, calls, _ = play(task, [ASK, "one", ASK, "two", ASK, ANSWER], "outcome")
    assert (rollout.prediction["ended"], rollout.reward) == ("answer", 1.0)


def test_nothing_found_is_not_condensed(task):
    ask = f"{QUERY[0]} zzzz {QUERY[1]}"
    rollout, calls, _ = play(task, [ask, ANSWER], "outcome")
    assert [call.module for call in calls] == ["reasoner", "reasoner"]
    assert "Nothing helpful was found." in calls[1].prompt_text
    assert rollout.reward == 1


@pytest.mark.parametrize("query", ["", "  "])
def test_an_empty_query_finds_nothing(task, query):
    rollout, calls, _ = play(task, [f"{QUERY[0]}{query}{QUERY[1]}", ANSWER], "outcome")
    assert rollout.error is None
    assert len(calls) == 2


def test_a_full_context_ends_the_rollout_without_an_exception(tmp_path):
    _, calls, _ = play(make("search_o1", tmp_path), [ANSWER], "outcome")
    task = make("search_o1", tmp_path, max_tokens=400, max_context=calls[0].prompt_tokens + len(ASK) + 20)
    rollout, _, _ = play(task, [ASK, "word " * 60, ANSWER], "outcome")
    assert (rollout.prediction["ended"], rollout.error, rollout.reward) == ("context", None, 0.0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{Tagus}", "Tagus"),
        (r"\boxed{ a {b} c }", "a {b} c"),
        (r"\boxed{one} or \boxed{two}", "two"),
        (r"\boxed{one} and \boxed{two", "one"),
        (r"\boxed{", None),
        ("Tagus", None),
        ("", None),
    ],
)
def test_boxed(text, answer):
    assert boxed(text) == answer


PIECES = [*QUERY, *RESULT, "<|", "|>", "<", ">", "|", "<|im_end|>", "Tagus", "{0}", r"\boxed{Porto}", " ", "\n"]
hostile = st.lists(st.sampled_from(PIECES), max_size=10).map("".join)


@given(hostile, hostile)
def test_disarmed_text_holds_no_marker_however_it_is_put_together(left, right):
    for shown in (disarm_markers(left + right), disarm_markers(left) + disarm_markers(right)):
        assert not any(marker in shown for marker in (*QUERY, *RESULT, "<|im_end|>"))
    assert len(disarm_markers(left)) == len(left)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=hostile, condensed=hostile)
def test_neither_documents_nor_the_condenser_can_forge_a_result_or_an_answer(task, document, condensed):
    task.tools = {"search": lambda queries, corpus: [{"title": "T", "text": document}]}
    rollout, calls, _ = play(task, [ASK, condensed, "no idea"], "outcome")
    shown = calls[2].prompt_text
    assert [shown.count(marker) for marker in (*RESULT, *QUERY)] == [1, 1, 0, 0]
    documents = calls[1].prompt_text.partition("\nQuery: Lisbon\n")[2]
    assert not any(marker in documents for marker in (*RESULT, *QUERY))
    assert rollout.prediction["answer"] is None


texts = st.lists(st.sampled_from([*PIECES, ASK, ANSWER]), max_size=4).map("".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts, min_size=1, max_size=8))
def test_no_output_of_a_policy_makes_the_program_fail(task, said):
    rollout, calls, _ = play(task, said, "outcome")
    assert rollout.error is None
    assert len(calls) <= 2 * 2 + 2
    json.dumps(rollout.prediction)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("<a> x </a>", "x"),
        ("<a> x <a> y </a> z", "y"),
        ("<a> x </a> <a> y </a>", "y"),
        ("</a> <a> x", None),
        ("x </a>", None),
        ("", None),
    ],
)
def test_last_block(text, block):
    assert last_block(text, "<a>", "</a>") == block


def test_demonstrations_have_the_prompts_of_a_run_and_earn_everything():
    task = TASKS["search_o1"](default_config("search_o1", max_observation=4000, max_context=9000, max_tokens=400), 0)
    played = 0
    for example in task.examples("dev")[:20]:
        shown = demonstrations(task, example)
        if not shown:
            continue
        played += 1
        rollout, calls, _ = play(task, [d.completion for d in shown], "outcome", example)
        assert [call.module for call in calls] == [d.module for d in shown]
        for call, demonstration in zip(calls, shown, strict=True):
            expected = "\n".join(f"[{m['role']}] {m['content']}" for m in demonstration.messages)
            assert call.prompt_text == (demonstration.history[-1][1] if demonstration.history else expected)
        assert rollout.reward == rollout.metrics["em"] == rollout.metrics["gold_retrieved"] == 1
    assert played >= 18


def test_boxes_that_never_close_are_read_once():
    with terminates():
        assert boxed("\\boxed{one} " + "\\boxed{" * 500_000) == "one"
    assert boxed("\\boxed{a \\boxed{b} c") == "b"
