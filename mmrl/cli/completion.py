"""Typer's classes of the commands: their words are completed in a shell, and Ctrl-C comes through.

Completed are keys, choices of groups, values, names of sets.
A command's own keys are those that its help names; where the help says that it takes those of a run, all of the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from typer.core import CompletionItem, TyperCommand, TyperGroup  # type: ignore[attr-defined]

from mmrl.system.conf import GROUPS, conf_dir, options

Values = list[str] | None
"""Of a key; None: any."""
OF_A_RUN = ("docs/keys-*.md list them all", "as in `mmrl train`")


class Command(TyperCommand):
    """A command whose words are settings."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """Complete keys and values; where there are none, the shell offers files."""
        words = words_for(str(self.help), ctx.args, incomplete)
        return [CompletionItem(word) for word in words] or super().shell_complete(ctx, incomplete)


class Commands(TyperGroup):
    """The commands of `mmrl`."""

    def invoke(self, ctx: Any) -> object:
        """Run a command; Ctrl-C passes Typer, which would drop the exception with the command that continues a run."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise SystemExit(130) from interrupt


# Typer would report an unknown option at once and alone; passed on, it is named together with all other mistakes.
SETTINGS: dict[str, Any] = {
    "cls": Command,
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["-h", "--help"],
    },
}


def words_for(help_text: str, before: Sequence[str], begun: str) -> list[str]:
    """Return what the word that has begun may become.

    Args:
        help_text: its help.
        before: the words after the command, up to this one.
        begun: what is typed of it.
    """
    # bash takes a word apart at its `=`, other shells do not, and it is the last part that is completed.
    typed, head = [*before], ""
    if "=" in begun:
        key, _, begun = begun.partition("=")
        head = f"{key}="
    elif typed[-1:] == ["="]:
        key = typed[-2] if len(typed) > 1 else ""
    elif typed and not begun and typed[-1] in keys(help_text, typed[:-1]):
        key = typed[-1]
    else:
        found = [f"{name}=" for name in keys(help_text, typed)]
        return [word for word in found if word.startswith(begun)]
    # Of a list, the last part.
    first, comma, last = begun.rpartition(",")
    values = keys(help_text, typed).get(key.lstrip("+~")) or ()
    return [f"{head}{first}{comma}{value}" for value in values if value.startswith(last)]


def keys(help_text: str, typed: Sequence[str]) -> dict[str, Values]:
    """Return the keys of a command and their values."""
    block = help_text.partition("Keys")[2].partition("Examples:")[0]
    # In the left half of a line stand keys, in the right one words on them.
    own = [
        name for line in block.splitlines() for name in re.findall(r"([a-z_.]+)=", re.split(r"\S   +", line.strip())[0])
    ]
    found: dict[str, Values] = dict.fromkeys(own)
    if any(words in help_text for words in OF_A_RUN):
        found |= config_keys(typed)
    return found | {group: options(group) for group in (*GROUPS, "set") if group in found}


def config_keys(typed: Sequence[str]) -> dict[str, Values]:
    """Return every key of a run's config, of the sections that the typed choices have, or else the default ones."""
    import yaml

    from mmrl.config.schema import RlRunConfig

    defaults = yaml.safe_load((conf_dir() / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {group: name for item in defaults if isinstance(item, dict) for group, name in item.items()}
    # bash: `algo`, `=`, `grpo`
    pairs = " ".join(typed).replace(" = ", "=").split()
    chosen |= {"task.retriever": "bm25", "engine": "transformers"}
    chosen |= {key.removesuffix(".name"): value for key, sign, value in (word.partition("=") for word in pairs) if sign}
    return dict(_walk(RlRunConfig, "", chosen))


def _walk(schema: type[Any], path: str, chosen: dict[str, str]) -> Iterator[tuple[str, Values]]:
    from mmrl.config.tasks import task_schema
    from mmrl.config.validate import CHOICES, sections_of

    for name, field in schema.model_fields.items():
        key = f"{path}{field.alias or name}"
        section = next(sections_of(field.annotation), None)
        if key in CHOICES:
            choice = chosen.get(key, "")
            section = (task_schema(choice) if key == "task" else CHOICES[key].get(choice)) or section
        if key in GROUPS:
            yield key, options(key)
        if section is None or not isinstance(field.annotation, type):
            yield key, _values(field.annotation)  # a mapping, a list, or a section that may be null
        if section is not None:
            yield from _walk(section, f"{key}.", chosen)


def _values(annotation: object) -> Values:
    """Return the values of a type that lists them."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    parts = [_values(part) for part in get_args(annotation) if part is not type(None)]
    return [value for part in parts for value in part or ()] if parts and all(parts) else None
