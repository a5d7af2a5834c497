"""Hydra's compositions: the words of one job in, one composed plain mapping out; what `mmrl credit` composes of them.

Hydra composes, pydantic judges: value overrides are forced in (`++key=value`), so all mistakes are reported together.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, Node, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import MarkedYAMLError

from mmrl.cli.arguments import CommandLine, CreditArguments
from mmrl.cli.overrides import expand, force_override, parse, policy_words, read_line, value_text
from mmrl.commands.credit import CreditRequest
from mmrl.config import AlgoConfig, RlRunConfig
from mmrl.config.validate import algo_section, as_tuples, has_free_keys
from mmrl.errors import ConfigError, gathered, refuse
from mmrl.secrets import environment_value, is_secret
from mmrl.system.conf import conf_dir, user_dirs
from mmrl.system.files import read_yaml

Job = Callable[[Sequence[str]], float | None]
"""Runs one job of Hydra's, given its words."""


def _env(*names: str, _node_: Node) -> object:
    """Resolve `${oc.env:NAME}` as OmegaConf does; a secret is hidden wherever mmrl prints or writes it."""
    value: object = oc.env(*names)
    if names and isinstance(names[0], str) and names[0] in os.environ:
        parent, position = _node_._get_parent(), _node_._key()
        before = parent._get_node(position - 1) if isinstance(parent, ListConfig) and position else None
        words = [str(node._value()) for node in (before, _node_) if isinstance(node, Node)]
        if is_secret(names[0], _node_._get_full_key(None), words):
            environment_value(names[0])
    return value


OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def composed(
    config_name: str, overrides: Sequence[str], config_dir: str | None = None, *, trained_once: bool = False
) -> dict[str, object]:
    """Compose one job into a plain mapping, interpolations resolved, without Hydra's own section.

    The packages that it names as `plugins` are imported: a task's own file may name its package.

    Args:
        trained_once: a run is trained by it, so a file that says what a sweep sweeps (`hydra:`) is refused; a command
            that trains none passes over that.

    Raises:
        ConfigError: Hydra or OmegaConf could not compose it; their message, first line.
    """
    try:
        config = _composition(config_name, overrides, config_dir)
        sets = {"mode": config.hydra.mode is RunMode.MULTIRUN, "sweeper.params": _swept_params(config)}
        says = "a file sets it, and it holds in a sweep of one experiment alone: mmrl train -m"
        refuse(f"hydra.{key}: {says}" for key, value in sets.items() if value and trained_once)
        sections = _sections(config_name, config)
        # Only now: the schema may be that of a plugin. Hydra alone would merge what is typed with what a file has.
        mappings = [override.key_or_group for override in parse(overrides, []) if isinstance(override.value(), dict)]
        if emptied := [f"++{key}=null" for key in mappings if has_free_keys(key)]:
            overrides = [*emptied, *overrides]
            sections = _sections(config_name, _composition(config_name, overrides, config_dir))
        if config_name == "eval" and (policy_overrides := policy_words(sections, overrides, config_dir)):
            sections = _sections(config_name, _composition(config_name, [*overrides, *policy_overrides], config_dir))
        return sections
    except (HydraException, OmegaConfBaseException) as error:
        raise _refusal(error) from None


def _composition(config_name: str, overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """Compose the config with Hydra, its own section too, interpolations unresolved.

    Raises:
        ConfigError: Hydra could not compose it.
    """
    _put_user_folders_first(config_dir)
    # Otherwise Hydra refuses a second composition in one process; the state of a running sweep is restored.
    driving = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=config_name):
            return compose(config_name, overrides=list(overrides), return_hydra_config=True)
    # Hydra has errors of its own for some words alone; others are what its parsers happen to run into.
    except Exception as error:
        raise _refusal(error) from None
    finally:
        GlobalHydra.instance().hydra = driving


def _refusal(error: Exception) -> ConfigError:
    cause = error.__context__
    while cause is not None:
        # Ctrl-C within OmegaConf, whose own clean-up then failed
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        cause = cause.__context__
    # which file it is, the first of its problems says alone
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        with gathered(problems := list[str]()):
            read_yaml(Path(error.problem_mark.name))
        return ConfigError(problems)
    # OmegaConf's errors alone have one: where an interpolation stands
    key = getattr(error, "full_key", None)
    text = " ".join((str(error).splitlines() or [""])[0].split())
    if not isinstance(error, HydraException | OmegaConfBaseException):
        text = f"these words cannot be composed ({type(error).__name__}{': ' if text else ''}{text})"
    return ConfigError(f"{f'{key}: ' if key else ''}{text or type(error).__name__}")


def _sections(config_name: str, config: DictConfig) -> dict[str, object]:
    """Return the command's own sections. A `model=` sets `train.*` too, which is no mistake in an evaluation."""
    with open_dict(config):
        hydra = config.pop("hydra")
    raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(raw, dict)
    if misplaced := raw.pop("experiment", None):
        choice, keys = hydra.runtime.choices.experiment, ", ".join(map(str, misplaced))
        if choice is None:
            raise ConfigError(f"experiment.{keys}: unknown key; experiment=NAME takes conf/experiment/NAME.yaml")
        # Hydra looks for the package in the comment lines above everything else, up to the first that has none.
        raise ConfigError(
            f"experiment: {choice}.yaml sets {keys} without effect; its first line must be # @package _global_"
        )
    left_out = ("train", "algo") if config_name == "eval" else ()
    sections = {str(key): as_tuples(value) for key, value in raw.items() if key not in left_out and value != "???"}
    plugins = sections.get("plugins")
    # anything but a list is for validation to refuse
    if isinstance(plugins, tuple) and plugins:
        # only with plugins: it loads every task and engine
        from mmrl.run.settle import import_plugins

        import_plugins([package for package in plugins if isinstance(package, str)])
    return sections


def _put_user_folders_first(config_dir: str | None) -> None:
    """Put the user's config folders in front of the shipped ones for every following composition."""
    folders = user_dirs(config_dir)

    class UserConfigs(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in reversed(folders):
                search_path.prepend(provider="user", path=f"file://{folder}")

    # Hydra has no call that takes a plugin back; without this the folders of an earlier composition would stay.
    plugins = Plugins.instance()
    registered = plugins.plugin_type_to_subclass_list[SearchPathPlugin]
    registered[:] = [plugin for plugin in registered if plugin.__name__ != UserConfigs.__name__]
    plugins.register(UserConfigs)


def with_swept_params(line: CommandLine) -> CommandLine:
    """Return the words of a sweep with those that files say for it (`hydra: {sweeper: {params: …}}`), typed ones last.

    So its jobs are listed and checked, whoever names them.
    """
    typed = [force_override(o, value_text(o)) for o in line.overrides if not o.is_sweep_override()]
    try:
        config = _composition("train", typed, line.config_dir)
        params = _swept_params(config)
    except (ConfigError, OmegaConfBaseException):
        return line  # which the jobs' own compositions refuse
    words = [f"{key}={value}" for key, value in params.items() if key.lstrip("+") not in line.keys]
    if "hydra/sweeper" not in line.keys and (sweeper := config.hydra.runtime.choices["hydra/sweeper"]) != "basic":
        words.append(f"hydra/sweeper={sweeper}")
    problems: list[str] = []
    added = parse(words, problems)
    refuse(problems)
    # Or the sweeper would take them twice.
    emptied = parse(["hydra.sweeper.params=null"] if params else [], [])
    return replace(line, overrides=(*added, *line.overrides, *emptied))


def _swept_params(config: DictConfig) -> dict[str, object]:
    """Return what the sweeper of a composition sweeps by itself, key -> values in Hydra's grammar."""
    params = OmegaConf.select(config, "hydra.sweeper.params")
    raw = OmegaConf.to_container(params, resolve=True) if isinstance(params, DictConfig) else {}
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def through_hydra(line: CommandLine, job: Job) -> None:
    """Let Hydra's own main drive `mmrl train -m`, with any sweeper and launcher."""
    _put_user_folders_first(line.config_dir)
    GlobalHydra.instance().clear()

    def call(config: DictConfig) -> float | None:
        return job(list(HydraConfig.get().overrides.task))

    # A sweep goes to Hydra unexpanded: which sweeper takes it apart may be an override too.
    words = [force_override(override, value_text(override)) for override in line.overrides]
    # `hydra.main` reads the process's own arguments and has no other way in.
    saved, sys.argv = sys.argv, ["mmrl", "-m", *words]
    # Hydra would print what a sweeper raises, with a traceback, and end the process.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        hydra_main(config_path=str(conf_dir()), config_name="train", version_base="1.3")(call)()
    except (HydraException, OmegaConfBaseException) as error:
        raise _refusal(error) from None
    finally:
        sys.argv = saved


def credit_request(words: Sequence[str]) -> CreditRequest:
    """Read what `mmrl credit` is to credit, each algorithm composed by itself.

    Raises:
        ConfigError: every problem.
        CheckpointError: `run=` is no training run.
    """
    line = read_line(words, command_keys=tuple(CreditArguments.model_fields))
    stray = {key for key in line.keys if key.partition(".")[0] not in ("algo", "plugins")}
    problems = [f"{key}: has no effect on mmrl credit" for key in [*line.switches, *sorted(stray)]]
    source = line.section(CreditArguments, problems)
    line = line.without(stray)
    # Output of packages at import is no part of the result, which may be JSON.
    with redirect_stdout(sys.stderr):
        run = None
        if source.run is not None:
            # It loads every task, which the credit of a file need not wait for.
            from mmrl.run.settle import stored_config

            run = stored_config(Path(source.run), RlRunConfig, reading=True)
        names = dict.fromkeys(source.algo or ([run.algo.name] if run else []))
        # Each algorithm is a section of its own: an option of one may be unknown to another, which is then named.
        sections = [_section(name, line, run, problems) for name in names]
    refuse(dict.fromkeys(problems))
    return CreditRequest(
        algos=[section for section in sections if section is not None],
        seed=source.seed if source.seed is not None else run.seed if run else 0,
        rollouts=None if source.rollouts is None else Path(source.rollouts),
        run=run,
        step=source.step,
        user_keys=[*line.keys, *(["seed"] if "seed" in line.command_keys else [])],
        page=None if source.page is None else Path(source.page),
    )


def _section(name: str, line: CommandLine, run: RlRunConfig | None, problems: list[str]) -> AlgoConfig | None:
    """Return an algorithm's settings, the run's or else those of `conf/algo`, with the typed overrides."""
    trained = run.algo if run is not None and name == run.algo.name else None
    if trained is not None and not any(key.startswith("algo.") for key in line.keys):
        return trained
    count = len(problems)
    choice = parse([f"algo={name}"], problems)
    (job,) = expand(replace(line, multirun=False, overrides=(*choice, *line.overrides)), problems)
    if len(problems) > count:
        return None
    sections = composed("credit", job, line.config_dir)
    raw = sections.get("algo")
    if trained is not None:
        from mmrl.run.start import with_overrides  # numpy and tasks, which credit of a file need not wait for

        raw = with_overrides(trained.model_dump(), sections, line.keys, "algo")
    with gathered(problems):
        return algo_section(raw)
    return None
