"""Hydra, and only here: overrides in, one composed plain mapping per job out.

Hydra composes; pydantic (`mmrl.config`) judges. So value overrides are forced in (`++key=value`) and every unknown
key, wrong type and impossible value is reported together, instead of one at a time by Hydra.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mmrl.config.groups import GROUPS, conf_dir, options, user_dirs
from mmrl.errors import ConfigError, unknown

PASSED_ON = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--resolve", "--package", "-p")
"""Hydra's own flags that print something and run nothing."""
NO_ROW = ("experiment=null", "experiment=")
"""The default, which Hydra cannot be told: it takes null for no choice at all."""


@dataclass(slots=True)
class CommandLine:
    """A command's arguments, sorted."""

    overrides: list[str] = field(default_factory=list)
    multirun: bool = False
    config_dir: str | None = None
    flags: list[str] = field(default_factory=list)
    """Hydra's printing flags with their values."""

    @property
    def prints_only(self) -> bool:
        """True if Hydra should print something and nothing is to run."""
        return bool(self.flags)


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Split a command's arguments into overrides and flags.

    Raises:
        ConfigError: an unknown flag, or an argument that is not `key=value`.
    """
    line, problems, rest = CommandLine(), [], list(arguments)
    while rest:
        argument = rest.pop(0)
        name, _, value = argument.partition("=")
        if argument in ("-m", "--multirun"):
            line.multirun = True
        elif name in ("--config-dir", "-cd"):
            line.config_dir = value or (rest.pop(0) if rest else "")
            if not Path(line.config_dir).is_dir():
                problems.append(f"--config-dir: no folder '{line.config_dir}'")
        elif name in PASSED_ON:
            line.flags.append(argument)
            if name in ("--cfg", "-c", "--info", "-i", "--package", "-p") and not value and rest and "=" not in rest[0]:
                line.flags.append(rest.pop(0))
        elif argument.startswith("-"):
            problems.append(f"{argument}: unknown flag (known: -m, --config-dir, {', '.join(PASSED_ON[::2])})")
        elif "=" not in argument and not argument.startswith("~"):
            problems.append(f"{argument}: expected key=value")
        elif argument not in NO_ROW:
            line.overrides.append(argument)
    if problems:
        raise ConfigError(problems)
    return line


def take(overrides: list[str], key: str) -> str | None:
    """Remove `key=value` from `overrides` and return its value; None if it is not there."""
    for override in [o for o in overrides if o.startswith(f"{key}=")]:
        overrides.remove(override)
        return override.partition("=")[2]
    return None


def expand(line: CommandLine, problems: list[str]) -> list[list[str]]:
    """The overrides of each job: one without `-m`, else the cross product as Hydra's basic sweeper makes it.

    A group that is given a choice it does not have is added to `problems` and left at its default, so that the rest
    of the command line can still be judged.

    Raises:
        ConfigError: overrides that Hydra cannot parse, or a sweep without `-m`.
    """
    parsed = _parse(line.overrides)
    if not line.multirun:
        swept = [override.get_key_element() for override in parsed if override.is_sweep_override()]
        if swept:
            raise ConfigError(
                f'{key}: got several values; run a sweep with -m, or quote a list: "{key}=[a,b]"' for key in swept
            )
    try:
        jobs = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    except HydraException as error:
        raise ConfigError(str(error)) from None
    return [[forced(o) for o in job if not _left_out(o, line.config_dir, problems)] for job in jobs]


def _parse(overrides: Sequence[str]) -> list[Override]:
    problems, parsed = [], []
    for override in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([override])
        except HydraException as error:
            problems.append(f"{override}: not an override that can be read ({str(error).splitlines()[0]})")
    if problems:
        raise ConfigError(problems)
    return parsed


def _left_out(override: str, config_dir: str | None, problems: list[str]) -> bool:
    """Whether Hydra must not see an override: no choice, or one that is not there (which is added to `problems`)."""
    key, _, value = override.lstrip("+~").partition("=")
    value = value.strip("'\"")
    if key == "hydra/launcher" and value.startswith("submitit") and importlib.util.find_spec("submitit") is None:
        problems.append(
            f"hydra/launcher: got {value}, which needs hydra-submitit-launcher, and {sys.executable} does not have it; "
            "install it (pip install 'mmrl[slurm]'), or leave hydra/launcher out"
        )
        return True
    if key not in GROUPS or override.startswith("~"):
        return False
    if f"{key}={value}" in NO_ROW:
        return True
    choices = options(key, config_dir)
    if value in choices:
        return False
    problems.append(unknown(key, value, choices))
    return True


def forced(override: str) -> str:
    """`key=value` as an override that Hydra never refuses; pydantic names unknown keys afterwards."""
    key = override.partition("=")[0]
    if override.startswith(("+", "~")) or key in GROUPS or key.startswith("hydra") or "/" in key or "@" in key:
        return override
    return f"++{override}"


def composed(config_name: str, overrides: Sequence[str], config_dir: str | None = None) -> dict[str, Any]:
    """Compose one job into a plain mapping, interpolations resolved, without Hydra's own section.

    Raises:
        ConfigError: Hydra or OmegaConf could not compose it; their message, first line.
    """
    _overlay(config_dir)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=config_name):
            config = compose(config_name, overrides=list(overrides))
            raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException) as error:
        key = getattr(error, "full_key", None)  # OmegaConf's: where an interpolation stands
        raise ConfigError(f"{f'{key}: ' if key else ''}{' '.join(str(error).splitlines()[0].split())}") from None
    assert isinstance(raw, dict)
    return _sections(config_name, raw, overrides)


def _sections(config_name: str, raw: Mapping[Any, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The sections that the command knows. A `model=` sets `train.*` too, which is no mistake in an evaluation."""
    left_out = {"experiment", "hydra"}
    if config_name == "eval":
        typed = {override.lstrip("+~").partition("=")[0].partition(".")[0] for override in overrides}
        left_out |= {"train", "algo"} - typed
    sections: dict[str, Any] = _plain({key: value for key, value in raw.items() if key not in left_out})
    return sections


def _plain(value: Any) -> Any:
    """Lists as tuples, missing values (`???`) left out: what strict pydantic models take."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item != "???"}
    return tuple(_plain(item) for item in value) if isinstance(value, list) else value


def _overlay(config_dir: str | None) -> None:
    """Put the user's config folders in front of the shipped ones for every following composition."""
    folders = user_dirs(config_dir)

    class UserConfigs(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in reversed(folders):
                search_path.prepend(provider="user", path=f"file://{folder}")

    plugins = Plugins.instance()
    registered = plugins.plugin_type_to_subclass_list[SearchPathPlugin]
    registered[:] = [plugin for plugin in registered if plugin.__name__ != UserConfigs.__name__]
    plugins.register(UserConfigs)


def through_hydra(
    config_name: str, line: CommandLine, job: Callable[[dict[str, Any]], None], program: str = "mmrl"
) -> None:
    """Let Hydra's own main drive: multirun with any sweeper and launcher, `--cfg`, `--info`."""
    _overlay(line.config_dir)
    GlobalHydra.instance().clear()

    def call(config: Any) -> None:
        raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        assert isinstance(raw, dict)
        job(_sections(config_name, raw, line.overrides))

    arguments = [*line.flags, *(["-m"] if line.multirun else []), *(forced(o) for o in line.overrides)]
    saved, sys.argv = sys.argv, [program, *arguments]
    try:
        hydra_main(config_path=str(conf_dir()), config_name=config_name, version_base="1.3")(call)()
    finally:
        sys.argv = saved


def complete(arguments: Sequence[str]) -> int:
    """Shell completion as Hydra gives it: `eval "$(mmrl -sc install=bash)"`; the command word is hidden from Hydra."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split(" ")
    config_name = words[1] if len(words) > 1 and words[1] in ("train", "eval") else "train"
    if len(words) > 1 and words[1] == config_name:
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
        os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))
    through_hydra(config_name, CommandLine(flags=list(arguments)), lambda config: None)
    return 0
