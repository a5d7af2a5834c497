"""Tools of a server, and what they give, as a model is told of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from mmrl.tasks.base import Message

_VALUES = ("default", "const", "enum", "examples")
"""Keys of a schema under which there are values, not schemas."""
_DEFINITIONS = ("$defs", "definitions")


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Message:
    """Return a tool with a description and the JSON schema of its arguments.

    What a schema refers to is put where it is used, since chat templates read `properties` alone; references of a
    schema to itself stay, and the definitions with them. Titles, which pydantic makes of the names, are left out.
    """
    plain = _plain({key: value for key, value in parameters.items() if key not in _DEFINITIONS}, parameters, ())
    if '"$ref"' in json.dumps(plain):
        plain |= {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": plain}}


def part_text(part: Mapping[str, Any]) -> str:
    """Return a part of an MCP result: its or its file's text, a link's name and address, or a mark: `[image]`."""
    if part["type"] == "resource_link":
        return f"{part['name']} {part['uri']}"
    text = part.get("resource", part).get("text")
    return f"[{part['type']}]" if text is None else str(text)


def _plain(schema: Any, root: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_plain(part, root, inside) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    rest = {
        key: value if key in _VALUES else _plain(value, root, inside)
        for key, value in schema.items()
        # A property of this name has a schema, no text.
        if key not in ("$defs", "$schema") and not (key == "title" and isinstance(value, str))
    }
    pointer: Any = rest.get("$ref")
    if pointer in inside or (target := _target(pointer, root)) is None:  # a tree's branches are trees
        return rest
    del rest["$ref"]
    return {**_plain(target, root, (*inside, pointer)), **rest}


def _target(pointer: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema at a JSON pointer such as `#/$defs/Point`; None where there is none."""
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    found: Any = root
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key) if isinstance(found, list) else key]
        except (LookupError, TypeError, ValueError):
            return None
    return found if isinstance(found, Mapping) else None
