"""Hydra's compositions: the words of one job in, one composed plain mapping out; what `mmrl credit` composes of them.

Hydra composes, pydantic judges: value overrides are forced in (`++key=value`), so all mistakes are reported together.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout, suppress
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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from mmrl.cli.arguments import CommandLine, comma_separated, typed_text
from mmrl.cli.overrides import expand, forced, of_policy, parse, read_line, typed_value
from mmrl.config import AlgoConfig, TrainCommandConfig
from mmrl.config.schema import LARGEST_SEED
from mmrl.config.validate import algo_section, as_tuples
from mmrl.errors import ConfigError
from mmrl.run.credit import CreditRequest, run_config
from mmrl.secrets import environment_value
from mmrl.system.conf import conf_dir, user_dirs

Job = Callable[[Callable[[], dict[str, object]], Sequence[str]], float | None]
"""Runs one job of Hydra's: given what composes its sections, and its words."""


def _env(*names: str) -> object:
    """`${oc.env:NAME}`: as OmegaConf has it, and hidden wherever mmrl prints or writes it."""
    value: object = oc.env(*names)
    if names and isinstance(names[0], str):
        environment_value(names[0])
    return value


OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def import_plugins_of(line: CommandLine) -> None:
    """Import `plugins=[pkg]` before validation, so that their names are known to it."""
    for override in line.overrides:
        if override.key_or_group == "plugins" and not override.is_delete():
            _import_plugins(comma_separated(typed_value(override) or ""))


def _import_plugins(packages: Collection[str]) -> None:
    # only with plugins: it loads every task and engine
    from mmrl.run.settle import import_plugins

    import_plugins(packages)


def composed(config_name: str, overrides: Sequence[str], config_dir: str | None = None) -> dict[str, object]:
    """Compose one job into a plain mapping, interpolations resolved, without Hydra's own section.

    The packages that it names as `plugins` are imported: a task's own file may name its package.

    Raises:
        ConfigError: Hydra or OmegaConf could not compose it; their message, first line.
    """
    try:
        sections = _sections(config_name, _composition(config_name, overrides, config_dir))
        if config_name == "eval" and (more := of_policy(sections, overrides, config_dir)):
            sections = _sections(config_name, _composition(config_name, [*overrides, *more], config_dir))
        return sections
    except (HydraException, OmegaConfBaseException) as error:
        raise _refusal(error) from None


def _composition(config_name: str, overrides: Sequence[str], config_dir: str | None) -> DictConfig:
    """As Hydra composes it, interpolations as they are.

    Raises:
        ConfigError: Hydra could not compose it.
    """
    _put_user_folders_first(config_dir)
    # Hydra refuses a second composition in one process otherwise; a sweep is put back for whoever drives it.
    driving = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3", job_name=config_name):
            return compose(config_name, overrides=list(overrides))
    # Hydra has errors of its own for some words alone; others are what its parsers happen to run into.
    except Exception as error:
        raise _refusal(error) from None
    finally:
        GlobalHydra.instance().hydra = driving


def _refusal(error: Exception) -> ConfigError:
    before = error.__context__
    while before is not None:
        # Ctrl-C within OmegaConf, whose own clean-up then failed
        if isinstance(before, KeyboardInterrupt):
            raise before
        before = before.__context__
    # OmegaConf's errors alone have one: where an interpolation stands
    key = getattr(error, "full_key", None)
    text = " ".join((str(error).splitlines() or [""])[0].split())
    if not isinstance(error, HydraException | OmegaConfBaseException):
        text = f"these words cannot be composed ({type(error).__name__}{': ' if text else ''}{text})"
    return ConfigError(f"{f'{key}: ' if key else ''}{text or type(error).__name__}")


def _sections(config_name: str, config: DictConfig) -> dict[str, object]:
    """The sections that the command knows. A `model=` sets `train.*` too, which is no mistake in an evaluation."""
    raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(raw, dict)
    left_out = {"experiment", "hydra", *(("train", "algo") if config_name == "eval" else ())}
    left_out |= {key for key in ("stages", "stage") if raw.get(key) in (None, {})}
    sections = {str(key): as_tuples(value) for key, value in raw.items() if key not in left_out and value != "???"}
    plugins = sections.get("plugins")
    # anything but a list is for validation to refuse
    if isinstance(plugins, tuple) and plugins:
        _import_plugins([package for package in plugins if isinstance(package, str)])
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


def print_job(config_name: str, line: CommandLine) -> None:
    """`--cfg job`: print the composed sections, interpolations as they are; nothing runs.

    Raises:
        ConfigError: a sweep, or a choice that a group does not have.
    """
    problems = ["--cfg: prints one job, without -m and with one value for each key"] if line.multirun else []
    words = expand(line, problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    config = _composition(config_name, words[0], line.config_dir)
    if config_name == "eval":
        with suppress(OmegaConfBaseException):  # what cannot be resolved is printed as it stands
            more = of_policy(_sections(config_name, config), words[0], line.config_dir)
            config = _composition(config_name, [*words[0], *more], line.config_dir)
    print(OmegaConf.to_yaml(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])), end="")


def through_hydra(config_name: str, line: CommandLine, job: Job, program: str = "mmrl") -> None:
    """Let Hydra's own main drive: multirun with any sweeper and launcher."""
    _put_user_folders_first(line.config_dir)
    GlobalHydra.instance().clear()

    def call(config: DictConfig) -> float | None:
        return job(lambda: _sections(config_name, config), list(HydraConfig.get().overrides.task))

    # A sweep goes to Hydra unexpanded: which sweeper takes it apart may be an override too.
    words = [forced(override, typed_value(override)) for override in line.overrides]
    # `hydra.main` reads the process's own arguments and has no other way in.
    saved, sys.argv = sys.argv, [program, "-m", *words]
    # Hydra would print what a sweeper raises, with a traceback, and end the process.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        hydra_main(config_path=str(conf_dir()), config_name=config_name, version_base="1.3")(call)()
    except (HydraException, OmegaConfBaseException) as error:
        raise _refusal(error) from None
    finally:
        sys.argv = saved


CREDIT = ("rollouts", "run", "step", "algo", "page")
"""Keys of `mmrl credit` itself."""


def credit_request(words: Sequence[str]) -> CreditRequest:
    """What `mmrl credit` is to credit, each algorithm composed by itself.

    Raises:
        ConfigError: every problem.
        CheckpointError: `run=` is no training run.
    """
    line = read_line(words, own=CREDIT, once=True)
    problems = _source_problems(line)
    chosen = _chosen(line, problems)
    if line.switches:
        problems.append(f"{' '.join(line.switches)}: has no effect on mmrl credit; several algorithms are algo=A,B")
    stray = {key for key in line.keys if key.partition(".")[0] not in ("algo", "seed", "plugins")}
    problems += [f"{key}: has no effect on mmrl credit, which composes algo= alone" for key in sorted(stray)]
    if not (line.own.get("rollouts") or line.own.get("run")) or chosen is None:
        raise ConfigError(problems)
    line = line.without(stray)
    # What a package prints when it is imported is no part of the result, which may be JSON.
    with redirect_stdout(sys.stderr):
        import_plugins_of(line)
        run = run_config(Path(line.own["run"])) if line.own.get("run") else None
    # Each algorithm is a section of its own: an option of one may be unknown to another, which is then named.
    sections = [_section(name, line, run, problems) for name in chosen or ([run.algo.name] if run else [])]
    seed = _seed(line, run, problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return CreditRequest(
        algos=[section for section in sections if section is not None],
        seed=seed,
        rollouts=Path(line.own["rollouts"]) if run is None else None,
        run=run,
        step=int(line.own["step"]) if "step" in line.own else None,
        typed=line.keys,
        page=Path(line.own["page"]) if "page" in line.own else None,
    )


def _source_problems(line: CommandLine) -> list[str]:
    """What is wrong with `rollouts=`, with `run=` and `step=`, or with `page=`."""
    problems = []
    given = [key for key in ("rollouts", "run") if line.own.get(key)]
    if not given:
        problems.append(
            "rollouts: missing, expected a forest file or a journal step (rollouts=FILE), or a run (run=RUN_DIR)"
        )
    elif len(given) == 2:
        problems.append("rollouts, run: got both, expected one of them: a file, or a run")
    if "step" in line.own and "run" not in line.own:
        problems.append("step: has no effect without run=RUN_DIR; a file has one step")
    if (page := line.own.get("page")) is not None:
        if "run" in line.own and "step" not in line.own:
            problems.append("page: has no effect without step=N; a page has one step of a run")
        if Path(page).suffix not in (".html", ".svg"):
            problems.append(f"page: got '{page}', expected a file ending in .html, or in .svg for the picture alone")
        elif Path(page).exists():
            problems.append(f"page: {page} exists; name another file, or remove it")
    if not re.fullmatch(r"[0-9]{1,9}", line.own.get("step", "0")):
        problems.append(f"step: got '{line.own['step']}', expected the number of a step")
    return problems


def _chosen(line: CommandLine, problems: list[str]) -> tuple[str, ...] | None:
    """The names that `algo=` has; empty where a run has the only one, None where they are none."""
    if "algo" not in line.own and "run" in line.own:
        return ()
    typed = line.own.get("algo", "")
    names = [name.strip() for name in typed.split(",")]
    if not typed:
        problems.append("algo: missing, expected one or more algorithms (algo=A or algo=A,B)")
        return None
    problems += [f"algo: got '{name}' more than once" for name in dict.fromkeys(names) if names.count(name) > 1]
    # The names become overrides below, where a quote or a bracket would be Hydra's grammar.
    if any(not re.fullmatch(r"[\w./-]*", name) for name in names):
        problems.append(f"algo: got '{typed}', expected names joined by commas: algo=A,B")
        return None
    return tuple(dict.fromkeys(names))


def _section(name: str, line: CommandLine, run: TrainCommandConfig | None, problems: list[str]) -> AlgoConfig | None:
    """One algorithm's settings: those of the run, if it is the run's own, else of `conf/algo`; and what was typed."""
    trained = run.algo if run is not None and name == run.algo.name else None
    typed = [override for override in line.overrides if override.key_or_group.startswith("algo.")]
    if trained is not None and not typed:
        return trained
    before = len(problems)
    if trained is not None:
        removed = [typed_text(override) for override in typed if override.is_delete()]
        problems += [f"{text}: a setting of a run can be changed, not removed" for text in removed]
    choice = parse([f"algo={name}"], problems)
    (job,) = expand(replace(line, multirun=False, overrides=(*choice, *line.overrides)), problems)
    if len(problems) > before:
        return None
    sections = composed("credit", job, line.config_dir)
    if trained is None:
        return algo_section(sections.get("algo"), problems)
    from mmrl.run.start import with_typed  # numpy and tasks, which credit of a file need not wait for

    return algo_section(with_typed(trained.model_dump(), sections, line.keys, "algo"), problems)


def _seed(line: CommandLine, run: TrainCommandConfig | None, problems: list[str]) -> int:
    """The seed that was typed, else the run's, else 0."""
    if "seed" not in line.keys:
        return 0 if run is None else run.seed
    (override,) = [override for override in line.overrides if override.key_or_group == "seed"]
    seed = override.value()
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
        problems.append(f"seed: got {seed!r}, expected a whole number from 0 to {LARGEST_SEED}")
        return 0
    return seed
