"""Strategies of hypothesis for values that are nearly right, spoilt in a few places."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "0", "1e3", "null", "nan", "a" * 300, "x/y", "../..", "mini"),
    *("\x00", "\ud800", "\U0001f600", "é", "\u200b", "\u202e", "<answer>", "${oc.env:HOME}", "{", "[", "%s", "\n"),
    *([], {}, [None], [[]], {"": None}, {"name": 1}, [1, "a"], {"a": {"b": []}}),
)
"""Values of every type that JSON has, and texts that mean something to somebody."""
BYTES = (b"\x00", b"\xff\xfe", b'"', b"\n", b",", b"{", b"]", b"\t", b"\\u", b"1e999", b"[" * 20_000)


KEYS = st.sampled_from(("id", "text", "title", "score", "name", "x", ""))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(JUNK).map(copy.deepcopy) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
"""Any JSON value."""


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


@st.composite
def spoilt(draw: st.DrawFn, original: Any) -> Any:
    """A copy of a JSON value, spoilt in one to three places."""
    root = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        if not (places := _places(root)):
            return draw(JSON)
        container, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(("gone", "twice", "another's", "scaled", "other", "other", "other")))
        if how == "gone":
            del container[key]
        elif how == "twice" and isinstance(container, dict):
            container[draw(KEYS | st.just(f"{key}s"))] = copy.deepcopy(container[key])
        elif how == "twice":
            container.insert(key, copy.deepcopy(container[key]))
        elif how == "another's":
            container[key] = copy.deepcopy(container[draw(st.sampled_from([k for c, k in places if c is container]))])
        elif how == "scaled" and isinstance(container[key], int | float):
            number = container[key]
            container[key] = draw(st.sampled_from((number + 1, -number, number * 1000, str(number))))
        else:
            container[key] = draw(JSON)
    return root


@st.composite
def spoilt_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """A copy of a file's bytes, with some of them changed, cut, doubled or put in."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 5))):
        at, length = draw(st.integers(0, len(data))), draw(st.sampled_from((1, 2, 8, 100)))
        how = draw(st.sampled_from(("cut", "doubled", "put in", "flipped", "flipped", "ends")))
        if how == "cut":
            del data[at : at + length]
        elif how == "doubled":
            data[at:at] = data[at : at + length]
        elif how == "put in":
            data[at:at] = draw(st.sampled_from(BYTES))
        elif how == "ends":
            del data[at:]
        elif at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)
