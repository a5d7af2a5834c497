"""What the words of a command become: a valid config for each job.

words --read_line--> overrides --expand--> jobs --composed--> sections --inherit--> sections --validate--> config
      (overrides)              (overrides)      (hydra)                (run.start)           (config.validate)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from omegaconf import OmegaConf

from mmrl.cli.arguments import CommandLine, SectionT
from mmrl.cli.hydra import composed, through_hydra
from mmrl.cli.overrides import expand, key_of, read_line
from mmrl.config import EvalRunConfig, RlRunConfig, RootConfig, StageConfig, Typed, stage_schema, validate
from mmrl.config.base import value_at
from mmrl.config.validate import CHOICES
from mmrl.errors import gathered, refuse
from mmrl.sets.words import words_of_steps
from mmrl.system.conf import options, row_keys
from mmrl.system.files import plain, user_path

if TYPE_CHECKING:
    from mmrl.sets.sweep import Job

Command = Literal["train", "eval"]
ConfigT = TypeVar("ConfigT", bound=RootConfig)


def train_configs(line: CommandLine, trains: bool = True) -> list[StageConfig]:
    """Return the config of every job of `mmrl train`, validated; the problems of all jobs together, each once.

    Args:
        trains: False for a command that only looks at them, and so need not sweep what a file says is swept.
    """
    return cast("list[StageConfig]", _configs("train", line, trains=trains))


def eval_configs(line: CommandLine) -> list[EvalRunConfig]:
    """Return the config of every job of `mmrl eval`, as `train_configs`."""
    stray = sorted({key for key in line.keys if key.partition(".")[0] in ("train", "algo")})
    # The composed config cannot tell: a `model=` brings `train.*` into an evaluation too (see `hydra._sections`).
    problems = [f"{key}: has no effect on mmrl eval; it is an option of mmrl train" for key in stray]
    return cast("list[EvalRunConfig]", _configs("eval", line.without(stray), problems, trains=False))


def print_config(command: Command, line: CommandLine) -> None:
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
        found = train_configs(line, trains=False) if command == "train" else eval_configs(line)
        config = plain(found[0].model_dump(mode="json"))
    print(OmegaConf.to_yaml(OmegaConf.create(config)), end="")


def _configs(
    command: Command, line: CommandLine, problems: Sequence[str] = (), *, trains: bool
) -> list[StageConfig | EvalRunConfig]:
    problems = [*problems]
    jobs = expand(line, problems)
    # Keys of a group whose choice is unknown cannot be judged: they belong to another schema.
    unjudged = tuple(f"{problem.partition(':')[0]}." for problem in problems)
    valid: list[StageConfig | EvalRunConfig] = []
    for job in jobs:
        wrong: list[str] = []
        with gathered(wrong):
            valid.append(_config(command, line, job, trains))
        problems += [problem for problem in wrong if not problem.startswith(unjudged)]
    refuse(dict.fromkeys(problems))
    return valid


def configured(words: Sequence[str], config_dir: str | None = None, trains: bool = True) -> StageConfig:
    """Return the config that `mmrl train WORDS` would run with, before its cross-section checks.

    Args:
        trains: as in `train_configs`.

    Raises:
        ConfigError: every problem.
    """
    line = replace(read_line(words, command_keys=("from",), once=False), config_dir=config_dir)
    return train_configs(line, trains)[0]


def set_config(command: Command, words: Sequence[str], config_dir: str | None) -> StageConfig | EvalRunConfig:
    """Return the config of `mmrl train WORDS` or `mmrl eval WORDS`, a run of a set; raises as `configured`."""
    if command == "eval":
        return eval_configs(replace(read_line(words, once=False), config_dir=config_dir))[0]
    return configured(words, config_dir)


def with_section(
    line: CommandLine, schema: type[SectionT], configs: Callable[[CommandLine], Sequence[ConfigT]]
) -> tuple[ConfigT, SectionT]:
    """Return the config of a command for one run, and its own keys.

    Raises:
        ConfigError: every problem of both.
    """
    problems: list[str] = []
    wrong: list[str] = []
    with gathered(problems):
        section = line.section(schema, wrong)
        refuse(wrong)
    with gathered(problems):
        (config,) = configs(line)
    refuse(problems)
    return config, section


def audit_configs(
    line: CommandLine, algos: Sequence[str], policy: str | None, problems: list[str]
) -> list[RlRunConfig]:
    """Return the config of each row of `mmrl audit`: that of a training run by the algorithm, from a run's policy.

    Args:
        problems: those of the command's own keys.

    Raises:
        ConfigError: these, and every problem of all rows, each once; an algorithm that gives no credit.
    """
    rows: list[StageConfig] = []
    start = [] if policy is None else [f"from={policy}"]
    for words in words_of_steps(line.words, algos, line.config_dir, problems).values():
        with gathered(problems):
            rows.append(configured([*words, *start], line.config_dir, trains=False))
    problems = [re.sub("^from(?=: )", "policy", problem) for problem in problems]
    problems += [f"algo: {row.algo.name} gives calls no credit" for row in rows if not isinstance(row, RlRunConfig)]
    refuse(dict.fromkeys(problems))
    return cast("list[RlRunConfig]", rows)


def swept(line: CommandLine, job: Job) -> None:
    """Let Hydra go through the jobs of a sweep of `mmrl train`, by any sweeper and launcher."""
    through_hydra(line, lambda words: job(lambda: cast(StageConfig, _config("train", line, words, True))))


def _config(command: Command, line: CommandLine, job: Sequence[str], trains: bool) -> StageConfig | EvalRunConfig:
    """Return the config of a job, the one way from words to a config.

    Args:
        job: its overrides, one value for each key.
        trains: as in `train_configs`.

    Raises:
        ConfigError: every problem.
    """
    # Not what a row (`experiment=`) sets: of `algo` and `train` that belongs to the algorithm that the row is about.
    typed = list(map(key_of, job))
    # Where experiments are swept themselves, the sweeper reads no file of theirs.
    swept = line.multirun and not any(o.key_or_group == "experiment" and o.is_sweep_override() for o in line.overrides)
    once = trains and not swept
    with_rows = [*line.keys, *typed, *row_keys(job, line.config_dir)]
    if "from" in line.command_keys:
        from mmrl.run.start import inherit, sections_of

        run = user_path(line.command_keys["from"])
        sections = sections_of(run, with_rows)
        # What the choice of its model and task sets elsewhere holds here too.
        names = {group: value_at(sections, f"{group}.name") for group in ("model", "task")}
        choices = [f"{group}={name}" for group, name in names.items() if name in options(group, line.config_dir)]
        raw = inherit(composed(command, [*choices, *job], line.config_dir, trained_once=once), run, sections, with_rows)
    else:
        raw = composed(command, job, line.config_dir, trained_once=once)
    if command == "train":
        config: StageConfig | EvalRunConfig = _stage(raw, typed)
    else:
        if isinstance(raw.get("policy"), str):
            from mmrl.run.start import evaluation_sections

            raw = evaluation_sections(raw, with_rows)
        config = validate(EvalRunConfig, raw)
    return config.as_typed(Typed(line.keys, ("mmrl", command, *line.args)))


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
