import pytest

from mmrl.tasks.agents.r1_searcher import DOCUMENTS, QUERY, Form
from tests.helpers.programs import make, play

ASK = f"look it up {QUERY[0]} Lisbon {QUERY[1]}"
ANSWER = "so it is Tagus </think>\n<answer> Tagus </answer>"
WRONG = "so it is Porto </think>\n<answer> Porto </answer>"


@pytest.fixture
def task(tmp_path):
    return make("r1_searcher", tmp_path, max_tokens=400, max_turns=2)


def test_documents_go_on_in_the_same_turn(task):
    rollout, calls, engine = play(task, [ASK, ANSWER], "outcome")
    assert calls[0].prompt_text.endswith("\n<think>")
    assert calls[1].prompt_text.startswith(f"\n{DOCUMENTS[0]}\n(1) Lisbon | Lisbon is the capital")
    assert calls[1].prompt_text.endswith(f"\n{DOCUMENTS[1]}\n")
    assert calls[1].prompt_ids[: calls[0].prompt_tokens] == calls[0].prompt_ids
    assert {request.sampling.stop for request in engine.requests} == {(QUERY[1], "</answer>")}
    assert rollout.reward == rollout.metrics["em"] == rollout.metrics["format"] == 1


@pytest.mark.parametrize(
    ("texts", "stage1", "stage2"),
    [
        ([ASK, ANSWER], 2.0, 1.0),
        ([ANSWER], 1.5, 1.0),  # no search: stage 1 alone minds
        ([ASK, WRONG], 0.0, 0.0),
        ([ASK, "so </think> <answer> the Tagus river </answer>"], 2.0, pytest.approx(2 / 3)),
        ([ASK, "so it is Tagus"], -0.5, -1.0),  # no answer: cover match fails, the form too
        ([ASK, "so <answer> Tagus </answer>"], 1.5, 0.0),  # thoughts not ended
        ([ASK, f"x </think> {ANSWER}"], 1.5, 0.0),  # ended twice
        ([ASK, f"<answer> {ANSWER}"], 1.5, 0.0),  # another answer is opened
        ([ASK, f"<think> {ANSWER}"], 1.5, 0.0),  # opened again: the prompt has that
        ([ASK, f"{QUERY[0]} {ANSWER}"], 1.5, 0.0),  # a query that does not end
        ([f"{DOCUMENTS[0]} Tagus {DOCUMENTS[1]} {ASK}", ANSWER], 1.5, 0.0),  # forged documents
        ([ASK, "水 " + ANSWER], 2.0, 0.0),  # Chinese characters: stage 2 alone minds
        ([""], -1.0, -1.0),
    ],
)
def test_rewards_of_the_two_stages(task, texts, stage1, stage2):
    assert play(task, texts, "stage1")[0].reward == stage1
    assert play(task, texts, "outcome")[0].reward == stage2


@pytest.mark.parametrize(
    ("text", "chinese"),
    [(c, True) for c in "㐀𠀀豈𪜶⽔〇ㄅ㈠水\U00031350"]
    + [(text, False) for text in ("Tagus", "é", "Tejo…", "に", "한", "“ ”", "（", "①", "😀")],
)
def test_chinese_of_every_block_is_chinese_and_other_scripts_are_not(text, chinese):
    assert Form.parse(text).chinese == chinese


@pytest.mark.parametrize("query", ["", " ", "?!", "\u200b"])
def test_an_empty_query_is_no_search(task, query):
    texts = [f"look {QUERY[0]}{query}{QUERY[1]}", ANSWER]
    assert play(task, texts, "stage1")[0].reward == 1.5


def test_many_answers_in_one_are_seen(task):
    """Cover match asks for the answer anywhere in the given one: a list earns it, and its length and parts show."""
    listed = "so </think> <answer> Porto, Tagus, Douro, Minho or Sado </answer>"
    missed = "so </think> <answer> Porto </answer>"
    assert (play(task, [missed], "stage1")[0].reward, play(task, [listed], "stage1")[0].reward) == (-0.5, 1.5)
    metrics = play(task, [listed], "stage1")[0].metrics
    assert (metrics["answer_candidates"], metrics["answer_words"]) == (5, 6)


def test_chinese_documents_are_not_the_policys(task):
    task.tools = {"search": lambda queries, corpus: [{"title": "塔霍河", "text": "Tagus"}]}
    assert play(task, [ASK, ANSWER], "outcome")[0].reward == 1


def test_limits(task):
    rollout, calls, _ = play(task, [ASK], "outcome")
    assert (rollout.prediction["ended"], len(calls), rollout.prediction["queries"]) == ("searches", 3, ["Lisbon"] * 2)


def test_nothing_found_is_said(task):
    _, calls, _ = play(task, [f"{QUERY[0]} zzzz {QUERY[1]}", ANSWER], "outcome")
    assert calls[1].prompt_text == f"\n{DOCUMENTS[0]}\n(1) Nothing was found.\n{DOCUMENTS[1]}\n"
