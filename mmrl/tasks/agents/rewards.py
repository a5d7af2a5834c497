"""Verifiable rewards of agents, per turn and for the outcome (arXiv 2505.11821, App. C and E). Pure functions.

Read by `search_agent` and `tool_agent`; credit places what they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mmrl.config.tasks import SearchAgentConfig
from mmrl.tasks import metrics
from mmrl.tasks.agents.tags import first_pair, tag_sequence

SEARCH_TAGS = ("think", "search", "information", "answer")
FINAL = ["think", "/think", "answer", "/answer"]
INTERMEDIATE = ["think", "/think", "search", "/search"]
"""Tags that the model writes; the program adds `<information>…</information>`."""
# Values of the paper's table; what an option changes is read from the task's config instead.
RETRIEVED, WELL_FORMED, MALFORMED, RIGHT_FORMAT = 0.3, 0.1, -0.2, 0.2


@dataclass(frozen=True, slots=True)
class SearchTurn:
    """Turn of the search agent."""

    text: str
    """Text that the model generated."""
    information: str | None
    """Retrieved text that the program inserted after it; None where it did not search."""

    @property
    def searches(self) -> bool:
        """True if a search pair was generated, executed or not."""
        pair = first_pair(self.text, ("search", "answer"))
        return pair is not None and pair[0] == "search"


@dataclass(frozen=True, slots=True)
class SearchReward:
    """Rewards of one rollout of the search agent."""

    final: float
    """Last turn."""
    intermediate: tuple[float, ...]
    """The turns before it."""
    format: bool
    """True if all turns are well formed."""
    retrieval: bool
    """Some inserted information holds an accepted answer."""


def search_reward(
    turns: Sequence[SearchTurn], em: bool, answers: Sequence[str], rules: SearchAgentConfig
) -> SearchReward:
    """Compute the rewards of MT-PPO's search agent, turn by turn (arXiv 2505.11821, Sec. 4 to 6 and App. C).

    Last turn: 1 for an exact match (of the right format, unless `em_needs_format` is off); else 0.2 for the right
    format alone, and `final_penalty` for a wrong one. An earlier turn: 0.3 if its search brought an accepted answer,
    plus 0.1 or -0.2 for right or wrong format, less `search_penalty` for each search so far, its own included.

    Args:
        turns: all of them, the last generated one last (it may lack an answer: a limit was reached).
        em: True if the answer of the last turn is an exact match.
        answers: accepted ones.
    """
    final_format = final_well_formed(turns[-1].text, rules.format_check)
    # `em_needs_format=false` is the released code: an exact match earns 1 whatever its format.
    if em and (final_format or not rules.em_needs_format):
        final = 1.0
    else:
        final = RIGHT_FORMAT if final_format else rules.final_penalty
    intermediate, searches, well_formed, hits = [], 0, final_format, False
    for turn in turns[:-1]:
        # Counted before the penalty: the first search already costs `search_penalty` once, the second twice.
        searches += turn.searches
        formed = intermediate_well_formed(turn, rules.format_check)
        hit = turn.information is not None and holds_answer(turn.information, answers, rules)
        intermediate.append(
            (RETRIEVED if hit else 0.0) + (WELL_FORMED if formed else MALFORMED) - rules.search_penalty * searches
        )
        well_formed, hits = well_formed and formed, hits or hit
    return SearchReward(final, tuple(intermediate), well_formed, hits)


def merged_reward(em: bool, answered: bool, reward: SearchReward) -> float:
    """Compute PPO-MR's one number for the whole rollout."""
    if em:
        return 1.0 if reward.format else 0.8
    if reward.format:
        return 0.3 if reward.retrieval else 0.2
    return 0.1 if answered else 0.0


def final_well_formed(text: str, check: Literal["strict", "loose"]) -> bool:
    """Check that the last turn thinks once, then answers once, and has no other known tag."""
    tags = tag_sequence(text, SEARCH_TAGS)
    if check == "strict":
        return tags == FINAL
    return _opening(tags) == ["think", "answer"] and "/answer" in tags[tags.index("answer") :]


def intermediate_well_formed(turn: SearchTurn, check: Literal["strict", "loose"]) -> bool:
    """Check that an earlier turn thinks once, then searches once, and the program inserted the results.

    `loose` looks at opening tags only and does not mind an answer tag.
    """
    tags = tag_sequence(turn.text, SEARCH_TAGS)
    if turn.information is None:
        return False
    # `information` is None where the program inserted nothing, so a model that writes the tag itself never passes.
    return tags == INTERMEDIATE if check == "strict" else _opening(tags, ignored="answer") == ["think", "search"]


def _opening(tags: Sequence[str], ignored: str = "") -> list[str]:
    return [tag for tag in tags if not tag.startswith("/") and tag != ignored]


def holds_answer(text: str, answers: Sequence[str], rules: SearchAgentConfig) -> bool:
    """Check if `text` contains an accepted answer; an answer that is empty after normalisation is in no text."""
    if rules.retrieval_match == "case_insensitive":
        return contains(text, answers)
    normalized = metrics.normalize(text, rules.punctuation)
    # An answer such as "The" normalises to nothing, which would be in every text.
    golds = (metrics.normalize(answer, rules.punctuation) for answer in answers)
    return any(gold and gold in normalized for gold in golds)


def contains(text: str, answers: Sequence[str]) -> bool:
    """Check if some answer is in `text`, without regard to case and outer spaces."""
    lowered = text.lower()
    return any(answer.strip() and answer.strip().lower() in lowered for answer in answers)


def tag_usage(messages: Sequence[str], names: Sequence[str], *, released: bool = False) -> float:
    """Return 0.2 x the mean over messages of how nearly each used tag opens and closes once, from 0 to 0.2.

    A message scores the mean of 1 - |count - 1| over opening and closing tags of the names that it uses at all; 0 when
    it uses none, and never less.

    Args:
        released: as the authors' code: a message may score below 0, their mean may not.
    """
    scores = [_tag_usage(message, names) for message in messages]
    return 0.2 * (max(0.0, _mean(scores)) if released else _mean([max(0.0, score) for score in scores]))


def _tag_usage(message: str, names: Sequence[str]) -> float:
    tags = tag_sequence(message, names)
    # Tags that a message does not use count neither for nor against it.
    present = [name for name in names if name in tags or f"/{name}" in tags]
    return _mean([1 - abs(tags.count(tag) - 1) for name in present for tag in (name, f"/{name}")])


def xml_format(messages: Sequence[str], *, released: bool = False) -> float:
    """Return 0.2 x the mean form score of the messages: `<reasoning>…</reasoning>` with a tool call or an answer.

    A message scores 0.4 x the share of the field sets {reasoning}, {tool, answer} of which it has a tag (0 unless some
    pair is whole), 0.2 if some pair is whole, 0.2 if it starts with `<reasoning>`, 0.2 if it ends with `</tool>` or
    `</answer>`.

    Args:
        released: as the authors' code, whose check of a whole pair looks for blanks around its content and passes
            every message: each without a whole pair scores 0.2 more.
    """
    return 0.2 * _mean([_xml_format(message.strip(), released) for message in messages])


def _xml_format(message: str, released: bool) -> float:
    has_pair = first_pair(message, ("reasoning", "tool", "answer")) is not None
    present = sum(bool(tag_sequence(message, names)) for names in (("reasoning",), ("tool", "answer")))
    score = 0.4 * present / 2 if has_pair else 0.0
    score += 0.2 * (has_pair or released)
    score += 0.2 * message.startswith("<reasoning>")
    return score + 0.2 * message.endswith(("</tool>", "</answer>"))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
