"""Values that somebody may have written: nearly right ones, spoilt in a few places."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "0", "1e3", "null", "nan", "a" * 300, "x/y", "../..", "mini"),
    *("\x00", "\ud800", "\U0001f600", "é", "\u200b", "\u202e", "<answer>", "${oc.env:HOME}", "{", "[", "%s", "\n"),
    *([], {}, [None], [[]], {"": None}, {"name": 1}, [1, "a"], {"a": {"b": []}}),
)
"""Of every type that JSON has, and texts that mean something to somebody."""
PIECES = (
    *("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"),
    *("<reasoning>", "</reasoning>", "<tool>", "</tool>", "<result>", "</result>", "<score>", "</score>", "< answer >"),
    *("<|begin_of_query|>", "<|end_of_query|>", "<|begin_search_query|>", "<|end_search_query|>", "<|", "|>", "<", ">"),
    *("<|begin_of_documents|>", "<|end_of_documents|>", "<|begin_search_result|>", "<|end_search_result|>"),
    *("Turn1: 0.5", "Turn2: -1", "\n", " ", "Tagus", "the", "Lisbon", "0.7", "1e999", "-", "###", "[[ ## answer ## ]]"),
    *('{"name": "wiki_search", "args": {"query": "x"}}', '{"name": 1}', "{", "}", "\\boxed{", "}", "(1) Tagus", ", "),
    *("\u200b", "é", "\U0001f600", "\ud800", "\x00", "&lt;", "\u2028", "İ", "ß", "١", "yes", "no"),
)
"""What prompts, programs and models put into texts."""


def text(random: Random, pieces: Sequence[str] = PIECES, long: bool = True) -> str:
    """Pieces in any order; one in a few hundred is very long, and made of few different pieces."""
    if long and random.random() < 0.002:
        few = random.choices(pieces, k=random.randint(1, 3))
        return "".join(few) * (200_000 // (sum(map(len, few)) or 1))
    return "".join(random.choices(pieces, k=random.choice((0, 1, 2, 3, 5, 8, 13, 30))))


def value(random: Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = random.random()
    if depth > 3 or kind < 0.6:
        return copy.deepcopy(random.choice(JUNK))  # what is made may be spoilt further
    if kind < 0.7:
        return text(random, long=False)
    if kind < 0.85:
        return [value(random, depth + 1) for _ in range(random.randint(0, 4))]
    return {random.choice(("id", "text", "title", "score", "x", "")): value(random, depth + 1) for _ in range(3)}


def spoilt(original: Any, random: Random) -> Any:
    """A copy of a JSON value, spoilt in one to three places."""
    root = json.loads(json.dumps(original))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        root = _spoil(root, random)
    return root


def _spoil(root: Any, random: Random) -> Any:
    place = root
    # Down to any depth, so that the outer keys are not the only ones that are ever spoilt.
    while isinstance(place, dict | list) and place:
        key = random.choice(list(place)) if isinstance(place, dict) else random.randrange(len(place))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and random.random() < 0.8:
            place = inner
            continue
        _change(place, key, random)
        return root
    return value(random)


def _change(place: Any, key: Any, random: Random) -> None:
    kind = random.randrange(8)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[random.choice(("x", "", "name", "id", str(key) + "s"))] = value(random)
    elif kind == 1:
        place.insert(key, place[key])
    elif kind == 2:
        other = random.choice(list(place)) if isinstance(place, dict) else random.randrange(len(place))
        place[key] = json.loads(json.dumps(place[other]))
    elif kind == 3 and isinstance(place[key], str):
        place[key] = text(random, long=False)
    elif kind == 4 and isinstance(place[key], int | float):
        place[key] = random.choice((place[key] + 1, -place[key], place[key] * 1000, str(place[key])))
    else:
        place[key] = value(random)


def spoilt_bytes(data: bytes, random: Random) -> bytes:
    """A copy of a file's bytes with a few of them changed, cut, doubled or put in."""
    spoiled = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at, length = random.randrange(len(spoiled) + 1), random.choice((1, 1, 2, 8, 100))
        kind = random.randrange(5)
        if kind == 0:
            del spoiled[at : at + length]
        elif kind == 1:
            spoiled[at:at] = spoiled[at : at + length]
        elif kind == 2:
            spoiled[at:at] = random.choice(
                (b"\x00", b"\xff\xfe", b'"', b"\n", b",", b"{", b"]", b"\t", b"\\u", b"1e999")
            )
        elif at < len(spoiled):
            spoiled[at] ^= 1 << random.randrange(8)
        if kind == 4 and random.random() < 0.2:
            del spoiled[at:]
    return bytes(spoiled)
