"""Validated configs of the words of a command, one per job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import OmegaConf

from mmrl.cli.arguments import CommandLine
from mmrl.cli.hydra import composed, through_hydra
from mmrl.cli.overrides import expand, key_of, parse, read_line
from mmrl.config import (
    EvalRunConfig,
    RlRunConfig,
    RootConfig,
    StageConfig,
    StartConfig,
    validate,
)
from mmrl.config.base import value_at
from mmrl.config.schema import stage_schema
from mmrl.config.validate import CHOICES
from mmrl.errors import ConfigError, gathered, refuse
from mmrl.system.conf import options, row_keys
from mmrl.system.files import plain

if TYPE_CHECKING:
    from mmrl.sets.sweep import Job

ConfigT = TypeVar("ConfigT", bound=RootConfig)


def train_configs(line: CommandLine) -> list[StageConfig]:
    """Return the config of every job of `mmrl train`, validated; the problems of all jobs together, each once."""
    return _configs("train", _from_run(line), lambda raw, words: _train_config(line, raw, words))


def eval_configs(line: CommandLine) -> list[EvalRunConfig]:
    """Return the config of every job of `mmrl eval`, as `train_configs`."""
    stray = sorted({key for key in line.keys if key.partition(".")[0] in ("train", "algo")})
    # The composed config cannot tell: a `model=` brings `train.*` into an evaluation too (see `hydra._sections`).
    problems = [f"{key}: has no effect on mmrl eval; it is an option of mmrl train" for key in stray]
    return _configs("eval", line.without(stray), partial(_eval_config, line), problems)


def print_config(command: str, line: CommandLine) -> None:
    """Print the composed sections of a job (`--cfg job`), or its validated config with all keys (`--cfg full`).

    Raises:
        ConfigError: a sweep, or a choice that a group does not have; of `full` every problem of a key.
    """
    problems = ["--cfg: prints one job, without -m and with one value for each key"] if line.multirun else []
    jobs = expand(line, problems)
    refuse(dict.fromkeys(problems))
    if line.prints == "job":
        config: dict[str, Any] = composed(command, jobs[0], line.config_dir)
    else:
        config = plain((train_configs if command == "train" else eval_configs)(line)[0].model_dump(mode="json"))
    print(OmegaConf.to_yaml(OmegaConf.create(config)), end="")


def _configs(
    command: str,
    line: CommandLine,
    build: Callable[[Mapping[str, object], Sequence[str]], ConfigT],
    problems: Sequence[str] = (),
) -> list[ConfigT]:
    problems = [*problems]
    jobs = expand(line, problems)
    # Keys of a group whose choice is unknown cannot be judged: they belong to another schema.
    unjudged = tuple(f"{problem.partition(':')[0]}." for problem in problems)
    valid: list[ConfigT] = []
    for job in jobs:
        wrong: list[str] = []
        with gathered(wrong):
            valid.append(build(composed(command, job, line.config_dir), job))
        problems += [problem for problem in wrong if not problem.startswith(unjudged)]
    refuse(dict.fromkeys(problems))
    return valid


def configured(words: Sequence[str], config_dir: str | None = None) -> StageConfig:
    """Return the config that `mmrl train WORDS` would run with, before its cross-section checks.

    Raises:
        ConfigError: every problem.
    """
    (config,) = train_configs(replace(read_line(words, once=False), config_dir=config_dir))
    return config


def set_config(command: str, words: Sequence[str], config_dir: str | None) -> StageConfig | EvalRunConfig:
    """Return the config of `mmrl train WORDS` or `mmrl eval WORDS`, a run of a set; raises as `configured`."""
    if command == "eval":
        return eval_configs(replace(read_line(words, once=False), config_dir=config_dir))[0]
    return configured(words, config_dir)


def swept(line: CommandLine, job: Job) -> None:
    """Let Hydra go through the jobs of a sweep of `mmrl train`, by any sweeper and launcher."""
    through_hydra(_from_run(line), lambda raw, words: job(lambda: _train_config(line, raw(), words)))


def _eval_config(line: CommandLine, raw: Mapping[str, object], words: Sequence[str]) -> EvalRunConfig:
    if isinstance(raw.get("policy"), str):
        from mmrl.run.start import evaluation_sections

        raw = evaluation_sections(raw, [*map(key_of, words), *row_keys(words, line.config_dir)])
    return validate(EvalRunConfig, raw)


def _from_run(line: CommandLine) -> CommandLine:
    """Return the words of a run with `from=RUN`; model, task and plugins are that run's unless typed."""
    if "from" not in line.command_keys:
        return line
    from mmrl.run.settle import announce_code, packages_of
    from mmrl.run.start import sections_of
    from mmrl.store.rundir import RunDir

    run = Path(line.command_keys["from"])
    stored, plugins = sections_of(run), packages_of(RunDir.read(run).config)
    typed = [*line.keys, *row_keys(line.words, line.config_dir)]
    names = {group: stored[group].get("name") for group in stored if group not in typed}
    words = [f"{group}={name}" for group, name in names.items() if name in options(group, line.config_dir)]
    if plugins and "plugins" not in typed:
        announce_code(run, stored, plugins, program=True)
        words.append(f"plugins=[{','.join(plugins)}]")
    return replace(line, overrides=(*parse(words, []), *line.overrides))


def _from(line: CommandLine, raw: Mapping[str, object], words: Sequence[str]) -> StageConfig:
    """Return the config of a job that starts from another run, whose sections stand for those not typed."""
    from mmrl.run.start import policy_of_run, sections_of, with_overrides

    run = Path(line.command_keys["from"])
    stored = sections_of(run)
    # Not all of the job's words: `_from_run` has added those of the run.
    typed = [*line.keys, *row_keys(words, line.config_dir)]
    sections = {name: with_overrides(stored[name], raw, typed, name) for name in stored if name not in typed}
    if "model" in sections and value_at(raw, "model.path") is not None:
        # The path of a run that has itself started from another is no setting; the policy's weights take its place.
        sections["model"]["path"] = value_at(raw, "model.path")
    config = _stage({**raw, **sections}, list(map(key_of, words)))
    if policy_of_run(run).prompts is not None and "task.prompts" in typed:
        raise ConfigError(
            f"task.prompts: has no effect with from={run}, whose policy has prompts of its own; leave it out, or take "
            f"its weights alone: mmrl export {run} out=FOLDER, then model.path=FOLDER"
        )
    return config.model_copy(update={"start": StartConfig(run=str(run))})


def _train_config(line: CommandLine, raw: Mapping[str, object], words: Sequence[str]) -> StageConfig:
    """Return the config of a job of `mmrl train`.

    Args:
        raw: the job, composed.
        words: its overrides.

    Raises:
        ConfigError: every problem.
    """
    if "from" in line.command_keys:
        return _from(line, raw, words)
    # Not what a row (`experiment=`) sets: of `algo` and `train` that belongs to the algorithm that the row is about.
    return _stage(raw, list(map(key_of, words)))


def _stage(sections: Mapping[str, object], user_keys: Collection[str]) -> StageConfig:
    """Validate one stage by the schema of its kind."""
    algo = sections.get("algo")
    schema = stage_schema(value_at(algo, "name"))
    if schema is RlRunConfig or not isinstance(algo, Mapping):
        return validate(RlRunConfig, sections)
    # A `model=` sets what suits it in training by algorithms; that is no mistake here. What the user typed is.
    fields = CHOICES["algo"][algo["name"]].model_fields
    mapping = {**sections, "algo": {key: algo[key] for key in algo if key in fields or f"algo.{key}" in user_keys}}
    problems: list[str] = []
    if "train" not in schema.model_fields:
        mapping.pop("train", None)
        why = f"has no effect with algo={algo['name']}, which trains no weights"
        problems = [f"{key}: {why}" for key in user_keys if key.partition(".")[0] == "train"]
    with gathered(problems):
        config: StageConfig = validate(schema, mapping)
    refuse(problems)
    return config
