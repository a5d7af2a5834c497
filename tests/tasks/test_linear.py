"""Everything that reads what a policy wrote takes time in proportion to its length, whatever it wrote."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from mmrl.rollout.dspy.dspy_program import DspyProgram
from mmrl.tasks import metrics, search_program
from mmrl.tasks.agents import judge, r1_searcher, rewards, search_o1, tags, tool_agent
from mmrl.tasks.dspy import built_in, hover, papillon
from mmrl.tasks.dspy.fields import within_bounds
from mmrl.tasks.mini.examples import make_external

SHORT, LONG = 50_000, 200_000
MOST = 8.0
"""Times the processor time for four times the text; a quadratic reader takes 16 times as long."""
UNNOTICED_S = 0.5
"""A reader that takes less for the long text is no quadratic one, and too fast to be compared."""
FIRST = 4_000
"""Read before: a quadratic reader would take minutes for the long text."""

LABELS = built_in.Banking77(["a", "b"])


def fields(signature: type[dspy.Signature], text: str) -> None:
    *_, last = signature.output_fields
    reply = f"[[ ## reasoning ## ]]\n{text}\n[[ ## {last} ## ]]\n{text}"
    with contextlib.suppress(AdapterParseError):
        within_bounds(signature, reply, dspy.ChatAdapter().parse)


def canonical(text: str) -> object:
    return DspyProgram(LABELS).written("classify.predict", {"reasoning": text, "label": "a"})


READERS: dict[str, Callable[[str], object]] = {
    "first_pair": lambda text: tags.first_pair(text, ("search", "answer")),
    "tag_sequence": lambda text: tags.tag_sequence(text, rewards.SEARCH_TAGS),
    "disarm": lambda text: tags.disarm(text, rewards.SEARCH_TAGS),
    "last_block": lambda text: tags.last_block(text, "<answer>", "</answer>"),
    "final_query": lambda text: tags.final_query(text, r1_searcher.QUERY),
    "tag_usage": lambda text: rewards.tag_usage([text], tool_agent.OWN_TAGS),
    "xml_format": lambda text: rewards.xml_format([text]),
    "well_formed": lambda text: rewards.final_well_formed(text, "loose"),
    "contains": lambda text: rewards.contains(text, ["aaab" * 9]),
    "read_command": tool_agent.read_command,
    "form": r1_searcher.Form.parse,
    "boxed": search_o1.extract_boxed,
    "boxed_fonts": lambda text: search_o1.extract_boxed(f"\\boxed{{{text}{'}' * text.count('{')}}}"),
    "parse_queries": search_program.parse_queries,
    "parse_selection": lambda text: search_program.parse_selection(text, 10),
    "parse_answer": search_program.parse_answer,
    "f1": lambda text: metrics.f1(text, text[::-1]),
    "accuracy": lambda text: metrics.accuracy(text, "a" * 60 + "b"),
    "answer_shape": metrics.answer_shape,
    "leaked_pieces": lambda text: metrics.leaked_pieces(["Ann Lee", "a a a", "[[ ##", "Margaret Thatcher"], text),
    "names": papillon._names,
    "plain": papillon.disarm,
    "external": make_external(),
    "same_title": hover.same_title,
    "needed": lambda text: built_in.drop_empty_queries([text]),
    "fields": lambda text: fields(LABELS.classify.predict.signature, text),
    "canonical": canonical,
    "escape": judge.escape,
    "read_outcome": lambda text: judge.read_outcome(f"<score>{text}"),
    "read_turns": lambda text: judge.read_turns(f"<score>{text}</score>", 3),
    "salvage_turns": lambda text: judge.salvage_turns(f"<score>{text}</score>", 3),
}
PIECES = (
    "<search>", "<search><answer>", "<reasoning><tool>", "<think ", "</ ", " ", "\n ", "a", "a ", "{",
    "\\boxed{", "\\text{", "[1]",
    "\"", "9", "### ;", "<|begin_of_query|>", "<|end_of_query|>", "Answer:", "Turn1:", "Turn ", "[[ ## label ## ]]\n",
    "[[ ##", "&#9", "\u0301\u0323", "A b ", "-", "水",
)  # fmt: skip


def spent(reader: Callable[[str], object], text: str) -> float:
    """Processor seconds of one reading, without those of threads that other tests left."""
    started = time.thread_time()
    reader(text)
    return time.thread_time() - started


@pytest.mark.parametrize("name", READERS)
def test_four_times_the_text_takes_about_four_times_as_long(name: str) -> None:
    reader = READERS[name]
    reader("warm")
    for piece in PIECES:
        text = (piece * (LONG // len(piece) + 1))[:LONG]
        first = spent(reader, text[:FIRST])
        assert first < 0.5, f"{FIRST} characters of {piece!r} took {first:.1f} s"
        long = spent(reader, text)
        if long <= UNNOTICED_S:
            continue
        ratio = long / max(spent(reader, text[:SHORT]), 1e-4)
        # Once more where it looks slow: a machine may stumble.
        if ratio > MOST:
            ratio = spent(reader, text) / max(spent(reader, text[:SHORT]), 1e-4)
        assert ratio <= MOST, f"{piece!r}: {long:.2f} s for {LONG} characters, {ratio:.1f} times that of {SHORT}"
