"""The tool agent's rewards: both sets, the two format rewards in the strict form and in that of the authors' code."""

import dataclasses

import pytest

from mmrl.tasks.agents.rewards import tag_usage, xml_format
from mmrl.tasks.agents.tool_agent import OWN_TAGS
from tests.helpers.programs import EXAMPLE, make, play
from tests.tasks.test_tool_agent import ASK, MISS, RIGHT, ROOMY, WRONG, call, command

FORMATTED = 0.2 + 0.2


@pytest.fixture
def task(tmp_path):
    return make("tool_agent", tmp_path, **ROOMY)


@pytest.mark.parametrize(
    ("texts", "outcome", "turn"),
    [
        ([ASK, RIGHT], 1.5 + FORMATTED, 0.7),
        ([MISS, RIGHT], 1.5 + FORMATTED, 0.2),
        ([ASK, WRONG], FORMATTED, 0.7),
        ([RIGHT], 1.5 + FORMATTED, None),  # no tool: no turn reward
        (["hm", RIGHT], 1.5 + FORMATTED / 2, None),
        (["hm", ASK, RIGHT], 1.5 + FORMATTED * 2 / 3, 0.7),
        ([call("{oops"), RIGHT], 1.5 + FORMATTED, 0.0),
        ([call(command(name="other")), RIGHT], 1.5 + FORMATTED, 0.0),
        ([call(command("zzz")), RIGHT], 1.5 + FORMATTED, 0.2),  # executed, and nothing found
        ([ASK, "<reasoning>b</reasoning><answer>It is the TEJO.</answer>"], 0.5 + FORMATTED, 0.7),
        ([ASK, "<reasoning>b</reasoning><answer> tejo\n</answer>"], 1.5 + FORMATTED, 0.7),
        ([ASK, ASK], FORMATTED, 0.7),  # a second call ends it, unanswered
        ([ASK, "<reasoning>b</reasoning><answer></answer>"], FORMATTED, 0.7),
    ],
)
def test_reward_sets(task, texts, outcome, turn):
    for name in ("outcome", "turn"):
        rollout, calls, _ = play(task, texts, name)
        assert rollout.error is None
        assert rollout.reward == pytest.approx(outcome)
        given = [one.turn_reward for one in calls if one.turn_reward is not None]
        assert given == ([pytest.approx(turn)] if name == "turn" and turn is not None else [])
        assert calls[-1].turn_reward is None


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("{oops", "JSON"),
        (command(name="other"), "tool"),
        (command(""), "query"),
        (command("zzz"), "article"),  # "No article was found."
        (command("zzz"), "no"),
    ],
)
def test_what_is_no_article_earns_no_retrieval_reward_though_it_holds_the_answer(task, content, answer):
    example = dataclasses.replace(EXAMPLE, metadata={**EXAMPLE.metadata, "answers": [answer]})
    rollout, calls, _ = play(task, [call(content), RIGHT], "turn", example)
    assert answer in calls[1].prompt_text.lower() or answer in calls[1].prompt_text
    assert rollout.metrics["result_answer"] == 0.0
    assert calls[0].turn_reward == pytest.approx(rollout.metrics["tool_execution"])


def test_only_triviaqas_normalised_aliases_are_accepted_where_there_are_some(task):
    """The case study's rule: `lower` and `strip` and nothing more, against `normalized_aliases`."""
    known = {"answers": ["The Tagus", "tagus"], "normalized": ["tagus"]}
    example = dataclasses.replace(EXAMPLE, metadata={**EXAMPLE.metadata, **known})
    said = {"Tagus": (0.5, 1.0), "The Tagus": (0.5, 0.0)}
    for answer, expected in said.items():
        rollout, _, _ = play(task, [RIGHT.replace("Tagus", answer)], "outcome", example)
        assert (rollout.parts["answer_presence"], rollout.parts["exact_match"]) == expected


def test_listing_every_candidate_is_seen(task):
    """The paper's reward asks for the answer anywhere in the given one: a list earns 0.5; its length and parts show."""
    listed = "<reasoning>b</reasoning><answer>the Douro, the Tagus, the Minho or the Sado</answer>"
    rollout, _, _ = play(task, [listed])
    assert rollout.parts["answer_presence"] == 0.5 and rollout.parts["exact_match"] == 0.0
    assert (rollout.metrics["answer_candidates"], rollout.metrics["answer_words"]) == (4, 9)
    assert play(task, [RIGHT])[0].metrics["answer_candidates"] == 1


@pytest.mark.parametrize(
    ("messages", "strict", "released"),
    [
        ([RIGHT], 1.0, None),
        ([ASK, RIGHT], 1.0, None),
        (["hm"], 0.0, None),
        (["hm", RIGHT], 0.5, 0.5),
        (["<answer>x</answer>"], 1.0, None),
        (["<answer>x"], 0.5, None),  # opens once (1), never closes (1 - |0 - 1| = 0)
        (["<answer>x</answer></answer>"], 0.5, None),
        (["<answer>x</answer></answer></answer>"], 0.0, None),
        (["<answer></answer></answer></answer></answer></answer></answer>"], 0.0, None),  # not below 0
        (["<reasoning>a</reasoning><answer>x"], 0.75, None),
        (["<result>x</result>"], 0.0, None),  # not a tag of the model's
        ([], 0.0, None),
        # Opens once (1), closes five times (1 - 4 = -3): (1 - 3) / 2 = -1, which strict takes for 0.
        (["<answer>" + "</answer>" * 5], 0.0, 0.0),
        # Beside a message of 1: (1 + 0) / 2, and (1 - 1) / 2.
        ([RIGHT, "<answer>" + "</answer>" * 5], 0.5, 0.0),
        # Beside two of them: (1 + 1 + 0) / 3, and (1 + 1 - 1) / 3.
        ([RIGHT, ASK, "<answer>" + "</answer>" * 5], 2 / 3, 1 / 3),
        # Four answers: opens four times (1 - 3 = -2), closes four times: -2; with one that is right (1 - 2) / 2 < 0.
        ([RIGHT, "<answer>x</answer>" * 4], 0.5, 0.0),
    ],
)
def test_tag_usage_in_the_strict_form_and_as_the_authors_code_has_it(messages, strict, released):
    assert tag_usage(messages, OWN_TAGS) == pytest.approx(0.2 * strict)
    if released is not None:
        assert tag_usage(messages, OWN_TAGS, released=True) == pytest.approx(0.2 * released)


@pytest.mark.parametrize(
    ("messages", "strict", "released"),
    [
        # Strict / released, per message. Both whole: 1 / 1.
        ([RIGHT], 1.0, 1.0),
        ([f"\n {ASK}\n"], 1.0, None),
        # No pair at all: 0 / 0.2, which the check that cannot fail gives. 0.2 x 0.2 = 0.04.
        (["hm"], 0.0, 0.2),
        (["<answer>x</answer>"], 0.2 + 0.2 + 0.2, None),
        (["so <reasoning>a</reasoning> then"], 0.2 + 0.2, None),
        (["<reasoning>a</reasoning><answer>x"], 0.4 + 0.2 + 0.2, None),
        # Begins with <reasoning>: 0.2 / 0.4.
        (["<reasoning>a"], 0.2, 0.4),
        (["<reasoning>a</answer>"], 0.4, None),  # no whole pair
        # One of two messages without a whole pair: (1 + 0) / 2 and (1 + 0.2) / 2, which is 0.04 x its share more.
        ([RIGHT, "hm"], 0.5, 0.6),
        # Two of three: (1 + 0 + 0.2) / 3 and (1 + 0.2 + 0.4) / 3.
        ([RIGHT, "hm", "<reasoning>a"], 0.4, 1.6 / 3),
        ([], 0.0, 0.0),
    ],
)
def test_xml_format_in_the_strict_form_and_as_the_authors_code_has_it(messages, strict, released):
    assert xml_format(messages) == pytest.approx(0.2 * strict)
    if released is not None:
        assert xml_format(messages, released=True) == pytest.approx(0.2 * released)


def test_the_authors_format_rewards_are_an_option(tmp_path):
    """A message without any tag, then a right answer: tag usage (0 + 1) / 2; format (0 + 1) / 2, or (0.2 + 1) / 2."""
    for option, expected in (("strict", 0.1), ("released", 0.12)):
        task = make("tool_agent", tmp_path, format_rewards=option, **ROOMY)
        rollout, _, _ = play(task, ["hm", RIGHT])
        assert rollout.parts["xml_format"] == pytest.approx(expected)
        assert rollout.parts["tag_usage"] == pytest.approx(0.1)
        assert rollout.reward == pytest.approx(1.5 + 0.1 + expected)


def test_three_outcome_rewards(tmp_path):
    task = make("tool_agent", tmp_path, outcome_rewards=3, **ROOMY)
    rollout, _, _ = play(task, [ASK, RIGHT])
    assert rollout.reward == pytest.approx(1.7)
    assert "xml_format" not in rollout.parts
    assert rollout.metrics["xml_format"] == pytest.approx(0.2)
