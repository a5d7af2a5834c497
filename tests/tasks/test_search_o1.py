import pytest

from mmrl.tasks.agents.search_o1 import QUERY, RESULT, extract_boxed
from mmrl.tasks.agents.tags import last_block
from tests.helpers.programs import DOCUMENTS, make, play

ASK = f"look it up {QUERY[0]} Lisbon {QUERY[1]}"
ANSWER = r"so it is \boxed{Tagus}"


@pytest.fixture
def task(tmp_path):
    return make("search_o1", tmp_path, max_tokens=400, max_turns=2)


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


@pytest.mark.parametrize("query", ["zzzz", "", "  "])
def test_nothing_found_is_not_condensed(task, query):
    rollout, calls, _ = play(task, [f"{QUERY[0]}{query}{QUERY[1]}", ANSWER], "outcome")
    assert [call.module for call in calls] == ["reasoner", "reasoner"]
    assert "Nothing helpful was found." in calls[1].prompt_text
    assert rollout.reward == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{Tagus}", "Tagus"),
        (r"\boxed{ a {b} c }", "a {b} c"),
        (r"\boxed{one} or \boxed{two}", "two"),
        (r"\boxed{one} and \boxed{two", "one"),
        (r"\boxed{a \boxed{b} c", "b"),
        (r"So \boxed{\text{Tagus}}.", "Tagus"),
        (r"\boxed{\textbf{\textit{Barack} Obama}}", "Barack Obama"),
        (r"\boxed{\mathrm{H}_{2} or \mathbf{x}}, \text{say}", "H_{2} or x"),
        (r"\text{ it is \boxed{Tagus} }", "Tagus"),
        (r"\boxed{\text{Tagus}", None),
        (r"\boxed{", None),
        ("Tagus", None),
        ("", None),
    ],
)
def test_boxed(text, answer):
    assert extract_boxed(text) == answer


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
