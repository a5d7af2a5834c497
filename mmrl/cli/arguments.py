"""The words after a command, read in one way by all commands: `key=value`, at most one name, and flags.

Typer hands on every word that it does not know (`mmrl.cli`). Commands that Hydra does not compose read theirs here into
a pydantic section; the others give them to `mmrl.cli.configs`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from mmrl.config.base import Idle, Section
from mmrl.config.schema import LARGEST_SEED
from mmrl.config.validate import explain
from mmrl.errors import ConfigError, gathered, refuse

if TYPE_CHECKING:
    # commands that Hydra does not compose start without it
    from hydra.core.override_parser.types import Override

SectionT = TypeVar("SectionT", bound=Section)


def sort_words(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort words into names, settings (`key=value` and `~key`) and flags, which begin with `-`.

    The path of something that exists is a name, also with a `=` behind its folder.
    """
    names: list[str] = []
    settings: list[str] = []
    flags: list[str] = []
    for word in words:
        # Folders of sweeps have names such as `x/seed=0`.
        path = "/" in word.partition("=")[0] and os.path.exists(word)
        setting = word.startswith("~") or ("=" in word and not word.startswith("=") and not path)
        (flags if word.startswith("-") else settings if setting else names).append(word)
    return names, settings, flags


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The words after a command."""

    overrides: tuple[Override, ...] = ()
    """Overrides parsed by Hydra, nowhere else."""
    command_keys: Mapping[str, str] = field(default_factory=dict)
    """The command's own keys (`resume=`), which no config has: key -> value as typed."""
    names: tuple[str, ...] = ()
    """Words without a `=`, where the command takes them."""
    multirun: bool = False
    config_dir: str | None = None
    args: tuple[str, ...] = ()
    """All words as typed."""
    prints: str = ""
    """`job` or `full` (`--cfg`): which config is printed while nothing runs; empty: none."""

    @property
    def switches(self) -> list[str]:
        """Everything that begins with `-`, for commands that take none of it."""
        return [*(["-m"] if self.multirun else []), *(["--cfg"] if self.prints else [])]

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides as they were typed."""
        return tuple(str(override.input_line) for override in self.overrides)

    @property
    def keys(self) -> tuple[str, ...]:
        """The config keys and groups that the user set, in order."""
        return tuple(override.key_or_group for override in self.overrides)

    def section(self, schema: type[SectionT], problems: list[str]) -> SectionT:
        """Return the command's own keys (`from` is the config's), those that are wrong left out.

        Args:
            problems: what is wrong is added, to be refused together with what is wrong in the config.

        Raises:
            ConfigError: every problem, where there is no section without the wrong keys.
        """
        texts = {key: value for key, value in self.command_keys.items() if key != "from"}
        wrong: list[str] = []
        with gathered(wrong):
            return section_of(schema, texts)
        problems += wrong
        named = {problem.partition(":")[0] for problem in wrong}
        try:
            return section_of(schema, {key: text for key, text in texts.items() if key not in named})
        except ConfigError as error:
            others = [problem for problem in error.problems if problem.partition(":")[0] not in named]
            raise ConfigError([*problems, *others]) from None

    def without(self, keys: Collection[str]) -> CommandLine:
        """Return a copy without the overrides of `keys`."""
        return replace(self, overrides=tuple(o for o in self.overrides if o.key_or_group not in keys))


class ShowArguments(Section):
    """`mmrl show`."""

    run_dir: str
    example: str | None = None
    step: int | None = Field(None, ge=0)


class DoctorArguments(Section):
    """`mmrl doctor`, beside a config."""

    examples: int = Field(8, ge=1, description="training examples that are played")


class CreditArguments(Section):
    """`mmrl credit`, beside settings of its algorithms."""

    rollouts: str | None = Field(None, min_length=1, description="a forest file, or one step of a run's journal")
    run: str | None = Field(None, min_length=1, description="a training run, in place of a file")
    step: int | None = Field(None, ge=0, description="of the run")
    # The names become overrides, where a quote or a bracket would be Hydra's grammar.
    algo: tuple[Annotated[str, Field(pattern=r"^[\w./-]+$")], ...] = Field((), description="null: the run's own")
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED, description="of the algorithm's own choices; null: the run's")
    page: str | None = Field(None, description="a file for a page (.html), or its picture alone (.svg)")

    idle: ClassVar = [
        Idle("step", lambda given: given.run is None, "without run=RUN_DIR; a file has one step"),
    ]

    @model_validator(mode="after")
    def _source(self) -> Self:
        if (self.rollouts is None) == (self.run is None):
            raise ValueError("rollouts: expected a file (rollouts=FILE) or a run (run=RUN_DIR), and not both")
        if self.run is not None and self.step is None:
            raise ValueError("step: missing, expected a step of the run (step=N)")
        if self.run is None and not self.algo:
            raise ValueError("algo: missing, expected one or more algorithms (algo=A or algo=A,B)")
        if self.page is not None and not self.page.endswith((".html", ".svg")):
            raise ValueError(f"page: got '{self.page}', expected a file ending in .html, or in .svg for the picture")
        if self.page is not None and os.path.lexists(self.page):
            raise ValueError(f"page: {self.page} exists; name another file, or remove it")
        if self.page is not None and not Path(self.page).parent.is_dir():
            raise ValueError(f"page: no folder '{Path(self.page).parent}'")
        return self


def section_of(schema: type[SectionT], texts: Mapping[str, str]) -> SectionT:
    """Validate the typed keys of a command as its section.

    Raises:
        ConfigError: every problem at once.
    """
    try:
        # Not strictly: what was typed is text, which pydantic turns into the field's type.
        return schema.model_validate({key: _value(schema, key, text) for key, text in texts.items()}, strict=False)
    except ValidationError as error:
        # Of a list a value is named by its text: its number is no key that was typed.
        raise ConfigError(re.sub(r"^(\w+)\.\d+:", r"\1:", problem) for problem in explain(schema, error)) from None


def find_repeated(keys: Sequence[str]) -> list[str]:
    """Return one sentence for each key that was typed more than once."""
    return [f"{key}: given more than once" for key in dict.fromkeys(keys) if keys.count(key) > 1]


def read_arguments(command: str, schema: type[SectionT], words: Sequence[str], *, name: str | None = None) -> SectionT:
    """Parse words and validate them as a section.

    Args:
        command: `mmrl index build`, for messages.
        schema: its fields are the keys; a tuple field takes values joined by commas.
        words: `key=value` each, and the name.
        name: the field that the one word without a `=` sets; None: there is no such word.

    Raises:
        ConfigError: every problem at once.
    """
    names, settings, flags = sort_words(words)
    problems = [f"{flag}: unknown flag of {command}" for flag in flags]
    pairs = [text.partition("=")[::2] for text in settings]
    wrong = find_repeated([key for key, _ in pairs])
    if name is None:
        wrong += [f"{word}: expected key=value" for word in names]
    else:
        if len(names) != 1:
            problems.append(f"{command}: got {len(names)} names, expected one: {command} {name.upper()}")
        # also where it is missing, so that the other keys are validated in the same call
        pairs.append((name, names[0] if names else ""))
    with gathered(wrong):
        section = section_of(schema, dict(pairs))
    problems += [f"{command}: {problem}" for problem in wrong]
    refuse(problems)
    return section


def _value(schema: type[Section], key: str, text: str) -> object:
    declared = schema.model_fields.get(key)
    kind = str(declared.annotation) if declared else ""
    if "tuple" in kind:
        # `a,b` or `[a,b]`
        return tuple(part.strip() for part in text.strip("[]").split(",") if part.strip())
    return None if text == "null" and "None" in kind else text
