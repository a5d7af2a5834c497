"""JSON schemas of requests: the form of a reply, the arguments of a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import regex
from jsonschema import Draft202012Validator, FormatChecker, SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

MATCH_S = 1.0
"""Longest search for a pattern, in computing time of the whole process: some need time exponential in the text."""
PATTERNS = FormatChecker(())
PATTERNS.checks("regex", raises=regex.error)(regex.compile)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check that a value is a JSON schema.

    Raises:
        ValueError: it is none.
    """
    _validator(json.dumps(schema))


def violations(schema: Mapping[str, Any], value: object) -> Sequence[tuple[str, str]]:
    """Return what is wrong with a value: the field of it (empty: the whole) and in words, the first of each field.

    Raises:
        ValueError: the schema is none, refers to what it has not, or has a pattern that takes too long here.
    """
    found: dict[str, str] = {}
    try:
        for error in _validator(json.dumps(schema)).iter_errors(value):
            found.setdefault(str(next(iter(error.absolute_path), "")), f"{error.json_path}: {error.message:.200}")
    except (Unresolvable, RecursionError) as error:
        raise ValueError(f"expected a JSON schema that is whole in itself: {error}") from None
    return list(found.items())


@lru_cache(256)
def _validator(text: str) -> Validator:
    schema = json.loads(text)
    if not isinstance(schema.get("$schema", ""), str):
        raise ValueError(f"expected a JSON schema; $.$schema: got {schema['$schema']!r:.60}, expected a text")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=PATTERNS)
    except SchemaError as error:
        raise ValueError(f"expected a JSON schema; {error.json_path}: {error.message:.200}") from None
    if '"patternProperties"' in text and '"unevaluatedProperties"' in text:
        raise ValueError("expected a JSON schema without unevaluatedProperties beside patternProperties")
    # Where a part names a dialect, a reference to it would bring back that dialect's own keywords.
    bare = json.loads(
        text, object_hook=lambda part: {key: part[key] for key in part if (key, type(part[key])) != ("$schema", str)}
    )
    # Of its own: nothing is fetched.
    made: Validator = extend(kind, _bounded(kind))(bare, registry=Registry())
    return made


def _bounded(kind: type[Validator]) -> dict[str, Any]:
    """Return the keywords that search for patterns, each search with a limit, which Python's `re` has not."""

    def pattern(validator: Validator, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, str) and not _found(pattern, value):
            yield ValidationError(f"{value!r} does not match {pattern!r}")

    def pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        for one in patterns if isinstance(value, dict) else ():
            for key in value:
                if _found(one, key):
                    yield from validator.descend(value[key], patterns[one], path=key, schema_path=one)

    def additional_properties(validator: Any, extra: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, dict) and (patterns := schema.get("patternProperties")):
            value = {key: inner for key, inner in value.items() if not any(_found(one, key) for one in patterns)}
            schema = {name: inner for name, inner in schema.items() if name != "patternProperties"}
        yield from kind.VALIDATORS["additionalProperties"](validator, extra, value, schema)

    return {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
    }


def _found(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=MATCH_S) is not None
    except TimeoutError:
        raise ValueError(f"the pattern {pattern!r:.100} needs more than {MATCH_S:g} s for {text!r:.60}") from None
