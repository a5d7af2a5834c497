"""Tools of a server as a model is told of them: its JSON schemas in the form of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.tasks.base import Message

_VALUES = ("default", "const", "enum", "examples")
"""Keys of a schema under which there are values, not schemas."""


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Message:
    """Return a tool with a description and the JSON schema of its arguments.

    Definitions are put where they are used, since chat templates read `properties` alone; titles, which pydantic makes
    of the names, are left out.
    """
    plain = _plain(parameters, parameters.get("$defs", {}), ())
    return {"type": "function", "function": {"name": name, "description": description, "parameters": plain}}


def _plain(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_plain(part, definitions, inside) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    rest = {
        key: value if key in _VALUES else _plain(value, definitions, inside)
        for key, value in schema.items()
        # A property of this name has a schema, no text.
        if key not in ("$defs", "$ref", "$schema") and not (key == "title" and isinstance(value, str))
    }
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name not in definitions or name in inside:  # a tree's branches are trees
        return rest
    return {**_plain(definitions[name], definitions, (*inside, name)), **rest}
