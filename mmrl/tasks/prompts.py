"""Prompt templates of a program: defaults, replacement from a YAML file, rendering. Used by programs in `tasks`.

A template is a Python format string whose only fields are its own named placeholders. What is filled in is never
formatted again, so braces in questions and documents are safe.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

from mmrl.errors import ConfigError, DataError, unknown
from mmrl.system.files import read_yaml, user_path


@dataclass(frozen=True, slots=True)
class Template:
    """One default text and its placeholders."""

    text: str
    required: frozenset[str] = frozenset()
    """Placeholders that the text must have."""
    optional: frozenset[str] = frozenset()
    """Placeholders that it may have."""


Templates = Mapping[str, Mapping[str, Template]]
"""Module -> role -> template."""
Texts = Mapping[str, Mapping[str, str]]
"""Module -> role -> text."""


def load_prompts(templates: Templates, path: str | None) -> Texts:
    """The default texts, with those of the YAML file at `path` in their place.

    The file holds `module: {role: text}`; whatever it does not name keeps its default.

    Raises:
        ConfigError: no such file, not YAML, an unknown module or role, or wrong placeholders; all problems at once.
    """
    # A copy: several tasks of one process may replace different prompts.
    texts = {module: {role: t.text for role, t in roles.items()} for module, roles in templates.items()}
    if path is None:
        return texts
    problems: list[str] = []
    for module, roles in _read(path).items():
        if module not in templates:
            problems.append(unknown(f"task.prompts: {path}", module, templates))
            continue
        if not isinstance(roles, Mapping):
            problems.append(f"task.prompts: {path}: {module}: got {type(roles).__name__}, expected role: text")
            continue
        for role, text in roles.items():
            where = f"task.prompts: {path}: {module}.{role}"
            if role not in templates[module]:
                problems.append(unknown(f"task.prompts: {path}: {module}", role, templates[module]))
            elif not isinstance(text, str):
                problems.append(f"{where}: got {type(text).__name__}, expected text")
            else:
                problems += _check(where, text, templates[module][role])
                texts[module][role] = text
    if problems:
        raise ConfigError(problems)
    return texts


def messages(system: str, user: str) -> list[dict[str, str]]:
    """A system and a user message; an empty system text is left out."""
    spoken = [{"role": "system", "content": system}] if system else []
    return [*spoken, {"role": "user", "content": user}]


def snippet(text: str, words: int) -> str:
    """The first `words` whitespace words of a text; an already short one as it is."""
    # A short text keeps its own white space; a cut one has single spaces.
    parts = text.split()
    return text if len(parts) <= words else " ".join(parts[:words])


def _read(path: str) -> Mapping[str, object]:
    try:
        content = read_yaml(user_path(path))
    except DataError as error:
        raise ConfigError(f"task.prompts: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"task.prompts: {path}: got {type(content).__name__}, expected module: {{role: text}}")
    return content


def _check(where: str, text: str, template: Template) -> list[str]:
    """Problems of a replaced text."""
    allowed = template.required | template.optional
    used = set()
    problems = []
    try:
        # Conversions and format specifications are refused: a template only fills in.
        for _, name, form, conversion in string.Formatter().parse(text):
            if name is None:
                continue
            if name not in allowed or form or conversion:
                got = "{" + name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "") + "}"
                valid = ", ".join("{" + other + "}" for other in sorted(allowed)) or "no placeholder"
                problems.append(f"{where}: got {got}, expected {valid} (write {{{{ and }}}} for plain braces)")
            used.add(name)
    except ValueError as error:
        problems.append(f"{where}: {error} (write {{{{ and }}}} for plain braces)")
    missing = sorted(template.required - used)
    if missing and not problems:
        problems.append(f"{where}: misses {', '.join('{' + name + '}' for name in missing)}")
    return problems
