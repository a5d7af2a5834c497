"""Tags and markers in the texts of agents: the action that a text asks for, the order of tags, disarmed retrieved text.

`search_agent` and `tool_agent` write tags (`<search>`); `search_o1` and `r1_searcher` write markers
(`<|begin_of_query|>`) that look like special tokens but are plain text.

Only text that the model generated is ever read for actions. Retrieved text is disarmed before it is shown and is known
by its place (the program put it there), so nothing in it can end a block, act, or count as format.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from mmrl.records import Reply
from mmrl.tasks.base import Context, Message

CHARS_PER_TOKEN = 64
"""More than the tokens of any readable text have."""
ObservationT = TypeVar("ObservationT", str, Sequence[Message])


def first_pair(text: str, names: Iterable[str]) -> tuple[str, str] | None:
    """Return name and stripped content of the pair `<name>…</name>` that opens first, among closed tags."""
    # Not one expression `<name>(.*?)</name>`: each opening that is never closed would read the text to its end.
    last = {name: text.rfind(f"</{name}>") for name in names}
    for opening in re.finditer(rf"<({'|'.join(last)})>", text):
        name, start = opening[1], opening.end()
        if last[name] >= start:
            return name, text[start : text.index(f"</{name}>", start)].strip()
    return None


def tag_sequence(text: str, names: Iterable[str]) -> list[str]:
    """Return the known tags in order, closing ones with a slash: `["think", "/think", ...]`."""
    # Exact tags only: `<think >` is none.
    return re.findall(rf"<(/?(?:{'|'.join(names)}))>", text)


def disarm(text: str, names: Iterable[str]) -> str:
    """Turn `<` and `>` of anything like a known tag in `text` into parentheses."""
    # one way only to read a run of spaces, or a long one would take the square of its length
    return re.sub(rf"<(\s*(?:/\s*)?(?:{'|'.join(names)})\b[^<>]*)>", r"(\1)", text, flags=re.IGNORECASE)


def fit_observation(
    ctx: Context, reply: Reply, text: str, frame: Callable[[str], ObservationT], limit: int
) -> tuple[ObservationT, bool]:
    """Fit an observation into `limit` tokens: `frame(text)`, the text cut after a word if necessary.

    Returns:
        The observation, and whether it fits; it does not when the frame alone is longer.
    """
    # A long document is cut first, far beyond the limit: tokenizing megabytes again and again takes minutes.
    text = text[: CHARS_PER_TOKEN * max(limit, 1)]
    # Tokens are measured in the reply's context, frame and new-turn markers included: the sum of the parts' lengths
    # can differ.
    observation = frame(text)
    if ctx.measure(observation, after=reply) <= limit:
        return observation, True
    # Inside of what is longer than a word: JSON without spaces, Chinese.
    ends = [0, *(word.end() for word in re.finditer(r"\S{1,64}", text))]
    # Wherever bisection ends, the cut before that place has been measured and fits (or there is none).
    fitting = bisect_right(ends, limit, key=lambda end: ctx.measure(frame(text[:end]), after=reply))
    cut = frame(text[: ends[max(0, fitting - 1)]])
    return cut, ctx.measure(cut, after=reply) <= limit


def last_block(text: str, opening: str, closing: str) -> str | None:
    """Return the stripped text between the last `closing` and the nearest `opening` before it; None without them."""
    # From the end: of several blocks the last one counts, and an opening inside a block belongs to it.
    before, closed, _ = text.rpartition(closing)
    _, opened, content = before.rpartition(opening)
    return content.strip() if closed and opened else None


def has_word(query: str) -> bool:
    """Check if a query has a letter or digit: without one there is nothing to search for, and nothing to reward."""
    return any(character.isalnum() for character in query)


def final_query(text: str, markers: tuple[str, str]) -> str | None:
    """Return the query at the end of a turn, or None: its end marker is a stop string, so nothing follows a query."""
    return last_block(text, *markers) if text.rstrip().endswith(markers[1]) else None


def disarm_markers(text: str) -> str:
    """Disarm `<|…|>` in `text`, also markers that could form later: the brackets of both halves become parentheses."""
    # Each half alone, too: `<|x` in one document and `y|>` in the next would make one marker.
    return text.replace("<|", "(|").replace("|>", "|)")
