"""Every causal language model of transformers, tiny: right in each way that it takes, or refused in known words."""

from typing import Any

import pytest

from scripts.models.architectures import BEYOND, architectures, model_types
from scripts.models.known import NO_CACHE, PARTLY, REFUSED
from scripts.models.measure import GRADIENT_TOLERANCE, TOLERANCE, measure

ALL = architectures()
SOME = {*ALL[::3]}
"""Every third is quick to test; all of them are slow together."""
WAYS = {"engine", "engine again", "padded", "training", "gradient", "adapter"}


def cases():
    """An architecture each, with its marks."""
    for name in ALL:
        yield pytest.param(name, marks=[] if name in SOME else [pytest.mark.slow])


@pytest.mark.parametrize("name", [*cases()])
def test_every_way_agrees_with_the_plain_forward_or_is_refused(name):
    found: dict[str, Any] = measure(name)
    plain, loop = found.pop("plain"), found.pop("loop", "")
    if name in REFUSED:
        # What a run meets first: before it starts, else at its engine.
        assert REFUSED[name] in found.get("load", found.get("engine"))
        return
    assert plain <= TOLERANCE, "the model is not causal"
    if name in PARTLY:
        way, words = PARTLY[name]
        assert found[way].startswith("refused: ") and words in found[way]
        found = {way: value for way, value in found.items() if not isinstance(value, str)}
        assert all(value <= allowed(way) for way, value in found.items())
        return
    assert not (said := {way: value for way, value in found.items() if isinstance(value, str)}), said
    assert found.keys() >= WAYS
    wrong = {way: value for way, value in found.items() if not value <= allowed(way)}
    assert not wrong
    assert (loop == "generation without a cache") == (name in NO_CACHE)


def allowed(way):
    """The largest difference that rounding explains."""
    return GRADIENT_TOLERANCE if way == "gradient" else TOLERANCE


def test_what_is_known_is_known_of_something():
    assert {*REFUSED, *NO_CACHE, *PARTLY} <= {*ALL}
    assert {*BEYOND} <= {*model_types()}
