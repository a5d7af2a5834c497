"""`key=value` arguments of commands that Hydra does not compose: read, typed and judged all at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from mmrl.config.base import Section
from mmrl.config.validate import explain
from mmrl.errors import ConfigError

SectionT = TypeVar("SectionT", bound=Section)


def read_arguments(command: str, schema: type[SectionT], arguments: Sequence[str]) -> SectionT:
    """Arguments as a section.

    Args:
        command: `mmrl index build`, for messages.
        schema: its fields are the keys; a tuple field takes values joined by commas.
        arguments: `key=value` each.

    Raises:
        ConfigError: every problem at once.
    """
    problems = [f"{a}: expected key=value" for a in arguments if "=" not in a or a.startswith("-")]
    given = [a.split("=", 1) for a in arguments if "=" in a and not a.startswith("-")]
    keys = [key for key, _ in given]
    problems += [f"{key}: given more than once" for key in dict.fromkeys(keys) if keys.count(key) > 1]
    values = {key: _value(schema, key, text) for key, text in given}
    try:
        section = schema.model_validate(values)
    except ValidationError as error:
        problems += explain(schema, error)
    if problems:
        raise ConfigError([f"{command}: {problem}" for problem in problems])
    return section


def _value(schema: type[Section], key: str, text: str) -> Any:
    field = schema.model_fields.get(key)
    kind = str(field.annotation) if field else ""
    if "tuple" in kind:
        return tuple(part.strip() for part in text.strip("[]").split(",") if part.strip())
    if "str" in kind and "Literal" not in kind:
        return None if text == "null" and "None" in kind else text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false", "null") else text)
    except ValueError:
        return text
