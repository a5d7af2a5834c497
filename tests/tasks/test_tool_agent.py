"""The tool agent: commands and their errors, turns, limits, injected tags, demonstrations."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mmrl.algorithms import ALGORITHMS
from mmrl.config.algo import ALGO_SCHEMAS
from mmrl.records import Forest
from mmrl.tasks.agents.tool_agent import read_command
from tests.helpers.programs import EXAMPLE, make, play
from tests.tasks.test_search_agent import turn_rewards

ROOMY: dict[str, Any] = {"max_observation": 4000, "max_completion": 9000, "max_tokens": 6000, "max_context": None}


def command(query="river Lisbon", **changes):
    return json.dumps({"name": "wiki_search", "args": {"query": query}} | changes)


def call(content):
    return f"<reasoning>a</reasoning><tool>{content}</tool>"


ASK, MISS = call(command()), call(command("Douro"))
RIGHT = "<reasoning>b</reasoning><answer>Tagus</answer>"
WRONG = "<reasoning>b</reasoning><answer>Douro</answer>"


@pytest.fixture
def task(tmp_path):
    return make("tool_agent", tmp_path, **ROOMY)


def test_the_result_opens_a_new_turn(task):
    rollout, calls, engine = play(task, [ASK, RIGHT])
    assert rollout.error is None
    assert rollout.prediction == {
        "answer": "Tagus",
        "actions": ["tool", "answer"],
        "succeeded": True,
        "articles": 1,
        "ended": "answer",
    }
    first, second = calls
    observation = "<user><result>Lisbon. Lisbon is the capital of Portugal, on the river Tagus.</result>"
    assert second.prompt_ids == first.prompt_ids + first.completion_ids + tuple(map(ord, observation))
    assert first.observation_tokens == len(observation)
    assert (first.turn, second.turn) == (0, 1)
    assert engine.requests[0].sampling.stop == ("</tool>", "</answer>")
    assert rollout.reward == pytest.approx(1.9)
    assert turn_rewards(calls) == pytest.approx([0.7, None])
    parts = {"answer_presence": 0.5, "exact_match": 1.0, "tag_usage": 0.2, "xml_format": 0.2}
    assert rollout.parts == pytest.approx(parts)
    assert rollout.metrics["tool_execution"] == pytest.approx(0.2)
    assert rollout.metrics["result_answer"] == pytest.approx(0.5)
    assert sum(rollout.parts.values()) == pytest.approx(rollout.reward)


def test_the_turn_reward_stands_where_the_first_turn_ends(task):
    """Everything sampled before the first result is turn 1, so mt_grpo finds the cut there."""
    rollout, calls, _ = play(task, ["hm", "hm", ASK, "hm", RIGHT])
    assert turn_rewards(calls) == pytest.approx([None, None, 0.7, None, None])
    assert [one.prompt_text.startswith("[user] <result>") for one in calls] == [False, False, False, True, False]
    assert rollout.prediction["actions"] == ["none", "none", "tool", "none", "answer"]
    other, more, _ = play(task, [RIGHT])
    forest = Forest(
        calls={one.id: one for one in (*calls, *(copied(one) for one in more))},
        rollouts=(rollout, copied(other)),
        modules=("agent",),
    )
    schema: Any = ALGO_SCHEMAS["mt_grpo"]
    algo = schema(name="mt_grpo", group_size=2, beta=0.0)
    advantage = {e.call: e.advantages[0] for e in ALGORITHMS["mt_grpo"].credit(forest, algo, 0).entries}
    first, second = advantage["e/0#0"], advantage["e/0#4"]
    assert [advantage[f"e/0#{turn}"] for turn in range(5)] == pytest.approx([first, first, first, second, second])
    assert first > second  # the tool turn is better than average on its own


def copied(record):
    """A rollout or call of a second branch."""
    names = {name: getattr(record, name) for name in ("id", "leaf") if hasattr(record, name)}
    return replace(record, **{name: value.replace("e/0", "e/1") for name, value in names.items()})


@pytest.mark.parametrize(
    ("text", "query", "error"),
    [
        (command("x"), "x", ""),
        (command(""), None, "the query is empty"),
        (command(" \u200b?! "), None, "the query is empty"),
        ('{"args": {"query": "x"}, "name": "wiki_search"}', "x", ""),
        ("", None, "not JSON"),
        ("{'name': 'wiki_search'}", None, "not JSON"),
        ("[" * 5000, None, "not JSON"),
        ("9" * 5000, None, "not JSON"),
        ("[1]", None, "not a JSON object"),
        ("null", None, "not a JSON object"),
        ("{}", None, "has no name"),
        ('{"name": "", "args": {"query": "x"}}', None, "has no name"),
        ('{"name": "google", "args": {"query": "x"}}', None, "no such tool"),
        ('{"name": ["wiki_search"], "args": {"query": "x"}}', None, "no such tool"),
        ('{"name": "wiki_search"}', None, "one argument"),
        ('{"name": "wiki_search", "args": "x"}', None, "one argument"),
        ('{"name": "wiki_search", "args": {"q": "x"}}', None, "one argument"),
        ('{"name": "wiki_search", "args": {"query": "x", "k": 2}}', None, "one argument"),
        ('{"name": "wiki_search", "args": {"query": 3}}', None, "one argument"),
        ('{"name": "wiki_search", "args": null}', None, "one argument"),
    ],
)
def test_tool_commands(task, text, query, error):
    found, message = read_command(text)
    assert found == query
    assert error in message
    assert message.startswith("Error:") == (query is None)
    rollout, calls, _ = play(task, [call(text), RIGHT])
    assert rollout.prediction["succeeded"] is (query is not None)
    assert ("<result>Error:" in calls[1].prompt_text) == (query is None)
    assert rollout.metrics["tool_execution"] == pytest.approx(0.2 * (query is not None))


def test_the_second_tool_call_ends_it_and_is_not_executed(task):
    for texts in ([ASK, MISS, RIGHT], [call("{oops"), ASK, RIGHT], ["hm", ASK, "hm", ASK, RIGHT]):
        rollout, calls, _ = play(task, texts)
        assert rollout.prediction["ended"] == "calls"
        assert rollout.prediction["answer"] is None
        assert len(calls) == len(texts) - 1
        assert calls[-1].observation_tokens == 0


def test_an_article_that_looks_like_an_error_is_none(task):
    task.tools = {"search": lambda queries, corpus: [{"title": "Error:", "text": "a film"}]}
    rollout, _, _ = play(task, [ASK, RIGHT])
    assert rollout.metrics["tool_execution"] == pytest.approx(0.2)


def test_the_token_limit_counts_observations_and_ends_without_an_exception(task):
    prompt = sum(len(m["content"]) for m in task.program.question(EXAMPLE.inputs["question"])) + 1
    frame = len("<user><result></result>")
    for room in range(200):
        task.program.config = task.config.model_copy(update={"max_completion": len(ASK) + room})
        rollout, calls, _ = play(task, [ASK, RIGHT])
        assert rollout.error is None
        last = calls[-1]
        assert len(last.prompt_ids) + last.completion_tokens <= prompt + len(ASK) + room
        assert len(calls) == (1 if room <= frame else 2)
        if len(calls) == 1:
            assert rollout.prediction["ended"] == "tokens"
            assert rollout.prediction["succeeded"] is None
            assert turn_rewards(calls) == [None]
        else:
            assert last.prompt_text.endswith("</result>")
            assert turn_rewards(calls) == pytest.approx([0.2 + 0.5 * ("Tagus" in last.prompt_text), None])
    task.program.config = task.config.model_copy(update={"max_completion": 300})
    rollout, calls, _ = play(task, ["hm"])
    assert rollout.prediction["ended"] == "tokens"
    assert len(calls) > 3
    assert rollout.reward == 0.0
    task.program.config = task.config.model_copy(update={"max_completion": 3})
    rollout, calls, _ = play(task, [ASK])
    assert [one.completion_tokens for one in calls] == [3]


def test_the_context_limit_is_kept_too(task):
    prompt = sum(len(m["content"]) for m in task.program.question(EXAMPLE.inputs["question"])) + 1
    task.program.config = task.config.model_copy(update={"max_context": prompt + len(ASK) + 60})
    rollout, calls, _ = play(task, [ASK, RIGHT])
    assert rollout.error is None
    assert len(calls[-1].prompt_ids) + calls[-1].completion_tokens <= prompt + len(ASK) + 60
