"""Ends of completions: stop strings however they are cut into tokens, end-of-turn ids, limits, refused requests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from mmrl.engines.base import Request, Sampling
from mmrl.engines.embedded.batch_rows import Rules
from mmrl.errors import EngineFailure, LengthFailure
from mmrl.models.chat import eos_ids
from tests.helpers import Fake
from tests.helpers.engines import EOS, tokenizer


class Bytes(Fake):
    """A byte-level tokenizer: ids 0-255 are bytes, 300 is a special token, 301+ are given multi-byte pieces."""

    eos_token_id = 256
    all_special_ids = (256, 300)

    def __init__(self, *pieces: str):
        self.pieces = {301 + index: piece.encode() for index, piece in enumerate(pieces)} | {300: b"<|x|>", 256: b""}

    def decode(self, ids: list[int], **kwargs: object) -> str:
        if kwargs.get("skip_special_tokens"):
            ids = [token for token in ids if token not in self.all_special_ids]
        data = b"".join(bytes([token]) if token < 256 else self.pieces[token] for token in ids)
        return data.decode(errors="replace")


def run(tokenizer: Bytes, ids: list[int], stop: tuple[str, ...], max_tokens: int = 1000) -> tuple[str | None, int]:
    """Feed ids one by one; returns the finish reason and how many were taken."""
    rules = Rules(tokenizer, {256}, 400, None)
    row = rules.row(Request(prompt_ids=tuple(b"</stop>"), sampling=Sampling(max_tokens=max_tokens, stop=stop)))
    for count, token in enumerate(ids, start=1):
        finish = rules.append(row, token, -1.0)
        if finish is not None:
            return finish, count
    return None, len(ids)


def test_only_generated_text_counts() -> None:
    assert run(Bytes(), list(b"stop>"), ("</stop>",)) == (None, 5)


def test_a_special_token_can_be_a_stop_string_and_does_not_hide_one() -> None:
    assert run(Bytes(), [*b"ab", 300, *b"cd"], ("<|x|>",)) == ("stop", 3)
    assert run(Bytes(), [*b"ab", 300, *b"cd"], ("bc",)) == ("stop", 4)


def test_end_of_turn_before_stop_before_length() -> None:
    assert run(Bytes(), [*b"ab", 256], ("zz",), max_tokens=3) == ("eos", 3)
    assert run(Bytes(), list(b"abc"), ("c",), max_tokens=3) == ("stop", 3)
    assert run(Bytes(), list(b"abc"), ("zz", ""), max_tokens=3) == ("length", 3)


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab<é ", max_size=30),
    st.lists(st.text(alphabet="ab<é ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="ab<é ", min_size=1, max_size=3), max_size=4),
)
def test_stops_where_the_whole_text_first_holds_a_stop_string(text: str, stops: list[str], pieces: list[str]) -> None:
    tokenizer = Bytes(*pieces)
    ids: list[int] = []
    rest = text
    while rest:  # longest piece first, bytes otherwise
        fitting = [i for i, piece in enumerate(pieces) if rest.startswith(piece)]
        if fitting:
            best = max(fitting, key=lambda i: len(pieces[i]))
            ids.append(301 + best)
            rest = rest[len(pieces[best]) :]
        else:
            ids.extend(rest[0].encode())
            rest = rest[1:]
    expected: tuple[str | None, int] = (None, len(ids))
    for count in range(1, len(ids) + 1):
        if any(stop in tokenizer.decode(ids[:count]) for stop in stops):
            expected = ("stop", count)
            break
    assert run(tokenizer, ids, tuple(stops)) == expected


def test_context_limits_the_completion_and_refuses_a_prompt_that_fills_it() -> None:
    rules = Rules(Bytes(), {256}, 400, 10)
    ask = Request(prompt_ids=tuple(range(1, 8)), sampling=Sampling(max_tokens=100))
    rules.check(ask)
    row = rules.row(ask)
    assert [rules.append(row, 5, -1.0) for _ in range(3)] == [None, None, "length"]
    with pytest.raises(LengthFailure, match="10 tokens leaves no room in a context of 10"):
        rules.check(Request(prompt_ids=tuple(range(1, 11)), sampling=Sampling(max_tokens=1)))


@pytest.mark.parametrize(
    ("prompt", "settings_", "message"),
    [
        ((), {}, "no tokens"),
        ((400,), {}, "vocabulary of 400"),
        ((-1,), {}, "vocabulary"),
        ((1,), {"max_tokens": 0}, "max_tokens: got 0"),
        ((1,), {"temperature": -1.0}, "temperature -1.0"),
        ((1,), {"temperature": math.nan}, "temperature nan"),
        ((1,), {"top_p": 0.0}, "top_p 0.0"),
        ((1,), {"top_k": -1}, "top_k -1"),
    ],
)
def test_impossible_requests_are_refused(prompt: tuple[int, ...], settings_: dict, message: str) -> None:
    with pytest.raises(EngineFailure, match=message):
        Rules(Bytes(), {256}, 400, None).check(
            Request(prompt_ids=prompt, sampling=Sampling(**{"max_tokens": 4, **settings_}))
        )


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_log_probability_that_is_not_finite_fails(logprob: float) -> None:
    rules = Rules(Bytes(), {256}, 400, None)
    with pytest.raises(EngineFailure, match="diverged"):
        rules.append(rules.row(Request(prompt_ids=(1,), sampling=Sampling(max_tokens=4))), 3, logprob)


def test_eos_ids_of_tokenizer_and_generation_config() -> None:
    named = tokenizer()
    assert eos_ids(named, GenerationConfig(eos_token_id=[4, 5])) == {EOS, 4, 5}
    named.eos_token = None
    assert eos_ids(named, None) == frozenset()
