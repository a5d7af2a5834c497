"""JSON schemas of requests: the form of a reply, the arguments of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable


def check_schema(schema: Mapping[str, Any]) -> None:
    """Check that a value is a JSON schema.

    Raises:
        ValueError: it is none.
    """
    _validator(json.dumps(schema))


def violations(schema: Mapping[str, Any], value: object) -> Sequence[tuple[str, str]]:
    """Return what is wrong with a value: the field of it (empty: the whole) and in words, the first of each field.

    Raises:
        ValueError: the schema is none, or refers to what it has not.
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
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"expected a JSON schema; {error.json_path}: {error.message:.200}") from None
    # Of its own: nothing is fetched.
    made: Validator = kind(schema, registry=Registry())
    return made
