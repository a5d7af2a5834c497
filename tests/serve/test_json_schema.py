"""JSON schemas of requests: what they find, and patterns that would never end."""

import time
from typing import Any

import jsonschema
import pytest

from mmrl.serve import json_schema
from mmrl.serve.json_schema import check_schema, violations

ENDLESS, TEXT = "^(a|aa)+$", "a" * 60 + "!"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
PLACES: dict[str, tuple[Any, Any]] = {
    "a text": ({"pattern": ENDLESS}, TEXT),
    "a name": ({"patternProperties": {ENDLESS: {}}}, {TEXT: 1}),
    "an additional name": ({"patternProperties": {ENDLESS: {}}, "additionalProperties": False}, {TEXT: 1}),
    "propertyNames": ({"propertyNames": {"pattern": ENDLESS}}, {TEXT: 1}),
    "in another dialect": (
        {"$schema": DRAFT_7, "properties": {"in": {"$ref": "#"}, "text": {"pattern": ENDLESS}}},
        {"in": {"text": TEXT}},
    ),
    "below a dialect": (
        {"$defs": {"a": {"$schema": DRAFT_7, "pattern": ENDLESS}}, "items": {"$ref": "#/$defs/a"}},
        [TEXT],
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_pattern_that_would_never_end_is_given_up(place, monkeypatch):
    monkeypatch.setattr(json_schema, "MATCH_S", 0.1)
    schema, value = PLACES[place]
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"^the pattern '\^\(a\|aa\)\+\$' needs more than"):
        violations(schema, value)
    assert time.monotonic() - started < 10


SCHEMAS = (
    {"pattern": "^[a-c]+$"},
    {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},  # pydantic's of decimals
    {"patternProperties": {"^x": {"type": "integer"}, "z$": False}},
    {"properties": {"b": True}, "patternProperties": {"^x": True}, "additionalProperties": False},
    {"patternProperties": {"^x": True}, "additionalProperties": {"pattern": "^q"}},
    {"$schema": DRAFT_7, "propertyNames": {"pattern": "^[xy]"}},
    {"properties": {"$schema": {"const": "a"}}, "unevaluatedProperties": False},
)
VALUES = (
    "abc",
    "abd",
    "-12.5",
    "",
    3,
    {},
    {"x1": 2},
    {"x1": "q", "b": "r"},
    {"xz": 1},
    {"y": "q"},
    {"$schema": "a"},
    [1],
)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_values_are_judged_as_by_jsonschema(schema):
    reference = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    told = [bool(violations(schema, value)) for value in VALUES]
    assert told == [not reference.is_valid(value) for value in VALUES] and {*told} == {True, False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": {"pattern": "("}}}, r"\$\.properties\.a\.pattern: '\(' is not a 'regex'"),
        ({"patternProperties": {"(": {}}}, "'\\(' is not a 'regex'"),
        ({"patternProperties": {"a": {}}, "unevaluatedProperties": False}, "without unevaluatedProperties beside"),
        ({"type": 3}, r"\$\.type: 3 is not valid"),
    ],
)
def test_what_cannot_be_checked_is_refused(schema, expected):
    with pytest.raises(ValueError, match=f"^expected a JSON schema.*{expected}"):
        check_schema(schema)
