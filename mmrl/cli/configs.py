"""From the words of a command to its validated configs, one per job; of `mmrl train` also of several stages.

A stage `A` of `stages=[A,B]` is what the same words with `algo=A` would be, and with what `stage.A.KEY=` (or
`stage.1.KEY=`) says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mmrl.cli.arguments import CommandLine
from mmrl.cli.hydra import composed, import_plugins_of, through_hydra
from mmrl.cli.overrides import expand, hydra_value, read_line
from mmrl.config import RootConfig, StageConfig, StagedCommandConfig, TrainCommandConfig, stage_schema, validate
from mmrl.config.other_stages import PROMPT_SCHEMAS, SFT, SftConfig
from mmrl.errors import ConfigError, unknown
from mmrl.system.conf import GROUPS, options

if TYPE_CHECKING:
    from mmrl.run.sweep import Job

ConfigT = TypeVar("ConfigT", bound=RootConfig)
OF_A_STAGE = ("algo", "train", "model", "hardware", "engine", "eval.every", "run.doctor")
"""What may differ between the stages of a run. They evaluate the same items, so that they can be compared."""


def configs(command: str, schema: type[ConfigT], line: CommandLine) -> list[ConfigT]:
    """Every job's config, validated; the problems of all jobs together, each once."""
    return _configs(command, line, lambda raw, job: validate(schema, raw))


def train_configs(line: CommandLine) -> list[StageConfig | StagedCommandConfig]:
    """Those of `mmrl train`, whose jobs may be of several stages, or of one that trains no weights."""

    def build(raw: Mapping[str, object], job: Sequence[str]) -> StageConfig | StagedCommandConfig:
        return _train_config(raw, job, line.config_dir)

    return _configs("train", line, build)


def weight_config(command: str, line: CommandLine) -> TrainCommandConfig:
    """The one config of a command that looks at the training of weights by reinforcement learning.

    Raises:
        ConfigError: it is of several stages, or trains none; or every problem of it.
    """
    (config,) = train_configs(line)
    if not isinstance(config, TrainCommandConfig):
        raise ConfigError(f"algo: got {config.algo.name}, and {command} looks at one stage of reinforcement learning")
    return config


def _configs(
    command: str, line: CommandLine, build: Callable[[Mapping[str, object], Sequence[str]], ConfigT]
) -> list[ConfigT]:
    problems: list[str] = []
    if command == "eval":
        # The composed config cannot tell: a `model=` brings `train.*` into an evaluation too (see `hydra._sections`).
        stray = sorted({key for key in line.keys if key.partition(".")[0] in ("train", "algo")})
        problems += [f"{key}: has no effect on mmrl eval; it is an option of mmrl train" for key in stray]
        line = line.without(stray)
    jobs = expand(line, problems)
    # Keys of a group whose choice is unknown cannot be judged: they belong to another schema.
    unjudged = tuple(f"{problem.partition(':')[0]}." for problem in problems)
    import_plugins_of(line)
    # A row of the other command fails in ways that do not mention the row; the hint names the command to use instead.
    row = next((override.value() for override in line.overrides if override.key_or_group == "experiment"), None)
    valid: list[ConfigT] = []
    for job in jobs:
        try:
            valid.append(build(composed(command, job, line.config_dir), job))
        except ConfigError as error:
            for problem in error.problems:
                hint = _row_of_other_command(command, row, "policy" in line.keys, problem)
                problems += [] if problem.startswith(unjudged) and hint is None else [hint or problem]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return valid


def configured(words: Sequence[str], config_dir: str | None = None) -> StageConfig | StagedCommandConfig:
    """The config that `mmrl train WORDS` would run with, before its cross-section checks.

    Raises:
        ConfigError: every problem.
    """
    (config,) = train_configs(replace(read_line(words, once=False), config_dir=config_dir))
    return config


def swept(line: CommandLine, job: Job) -> None:
    """Let Hydra go through the jobs of a sweep of `mmrl train`, by any sweeper and launcher."""
    through_hydra("train", line, lambda sections, words: job(lambda: _train_config(sections(), words, line.config_dir)))


def _row_of_other_command(command: str, row: object, policy_typed: bool, problem: str) -> str | None:
    """What to say instead of `problem` where it comes from a row (`experiment=`) of the other command."""
    if row and command == "train" and problem.startswith("policy: unknown key") and not policy_typed:
        return f"experiment: got '{row}', which evaluates and does not train: mmrl eval experiment={row}"
    if row and command == "eval" and "Could not override 'algo'" in problem:
        return f"experiment: got '{row}', which trains: mmrl train experiment={row}"
    return None


def _train_config(
    raw: Mapping[str, object], words: Sequence[str], config_dir: str | None
) -> StageConfig | StagedCommandConfig:
    """The config of a job of `mmrl train`.

    Args:
        raw: the job, composed.
        words: its overrides.

    Raises:
        ConfigError: every problem.
    """
    # Not what a row (`experiment=`) sets: of `algo` and `train` that belongs to the algorithm that the row is about.
    typed = [word.lstrip("+~").partition("=")[0] for word in words]
    sections = dict(raw)
    names, own = sections.pop("stages", None), sections.pop("stage", None) or {}
    if names is None:
        if own:
            raise ConfigError(f"{key}: has no effect without stages=[…]" for key, _ in _flat({"stage": own}))
        return _stage(sections, typed)
    listed = _listed(names, own, config_dir)
    problems = [f"{key}: say of which stage: stage.{listed[0]}.{key}" for key in typed if key.startswith("algo.")]
    if "algo" in typed and "stages" in typed:
        problems.append(f"algo: has no effect beside stages=[{','.join(listed)}]; leave one of them out")
    stages: list[StageConfig] = []
    for number, name in enumerate(listed, start=1):
        of_stage = _words_of(own, name, number)
        problems += _shared_problems([key for key, _ in of_stage], name, number)
        kept = [word for word in words if not _is_of(word, ("algo", "stages", "stage"))]
        mapping = composed("train", [*kept, f"algo={name}", *(word for _, word in of_stage)], config_dir)
        if mapping.pop("stages", None) and name not in (SFT, *PROMPT_SCHEMAS) and "name" not in _section(mapping):
            problems.append(f"stages: got {name}, which stands for several stages itself; list them")
            continue
        mapping.pop("stage", None)
        try:
            stages.append(_stage(mapping, [key for key, _ in of_stage]))
        except ConfigError as error:
            problems += [f"stage {number} ({name}): {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    shared = {name: getattr(stages[0], name) for name in RootConfig.model_fields}
    method = {"name": "+".join(listed)}
    return StagedCommandConfig.model_validate({**shared, "algo": method, "stages": tuple(stages)})


def _stage(sections: Mapping[str, object], typed: Collection[str]) -> StageConfig:
    """One stage, by the schema of its kind."""
    algo = _section(sections)
    schema = stage_schema(algo.get("name"))
    if schema is TrainCommandConfig:
        return validate(TrainCommandConfig, sections)
    # A `model=` sets what suits it in training by algorithms; that is no mistake here. What the user typed is.
    fields = (
        PROMPT_SCHEMAS[str(algo["name"])].model_fields if algo["name"] in PROMPT_SCHEMAS else SftConfig.model_fields
    )
    mapping = dict(sections)
    mapping["algo"] = {key: value for key, value in algo.items() if key in fields or f"algo.{key}" in typed}
    problems = []
    if "train" not in schema.model_fields:
        mapping.pop("train", None)
        problems = [
            f"{key}: has no effect with algo={algo['name']}, which trains no weights"
            for key in typed
            if key.partition(".")[0] == "train"
        ]
    try:
        config: StageConfig = validate(schema, mapping)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return config


def _section(sections: Mapping[str, object]) -> Mapping[str, object]:
    algo = sections.get("algo")
    return algo if isinstance(algo, Mapping) else {}


def _listed(names: object, own: object, config_dir: str | None) -> list[str]:
    """The names of the stages.

    Raises:
        ConfigError: they are none, or `stage.*` names others.
    """
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"stages: got {names!r}, expected names of algo= in a list: stages=[miprov2,mmgrpo]")
    choices = options("algo", config_dir)
    problems = [unknown("stages", name, choices) for name in names if name not in choices]
    if not isinstance(own, Mapping):
        problems.append(f"stage: got {own!r}, expected stage.NAME.KEY=VALUE")
    else:
        numbers = [str(number) for number in range(1, len(names) + 1)]
        problems += [
            f"stage.{key}: no such stage (stages: {', '.join(names)}; also by number: {', '.join(numbers)})"
            for key in map(str, own)
            if key not in (*names, *numbers)
        ]
        problems += [
            f"stage.{key}: expected a key of that stage: stage.{key}.KEY=VALUE"
            for key, value in own.items()
            if not isinstance(value, Mapping)
        ]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return list(names)


def _words_of(own: object, name: str, number: int) -> list[tuple[str, str]]:
    """What `stage.*` says of one stage: keys, and the words that set them; the number's come last, so they win."""
    assert isinstance(own, Mapping)
    said = [*_flat(own.get(name) or {}), *_flat(own.get(str(number)) or own.get(number) or {})]
    return [
        (key, f"{key}={value}" if key in GROUPS and isinstance(value, str) else f"++{key}={hydra_value(key, value)}")
        for key, value in dict(said).items()
    ]


def _shared_problems(keys: Sequence[str], name: str, number: int) -> list[str]:
    """Keys of `stage.*` that all stages share, and weights that a later stage has from the one before."""
    problems = []
    for key in keys:
        if not any(f"{key}.".startswith(f"{part}.") for part in OF_A_STAGE):
            problems.append(f"stage.{name}.{key}: is the same for all stages; set {key} without stage.{name}")
        elif key in ("model", "model.path", "model.name", "model.revision") and number > 1:
            problems.append(f"stage.{name}.{key}: has no effect, the weights are those of the stage before")
    return problems


def _is_of(word: str, sections: Collection[str]) -> bool:
    """Whether an override sets one of the sections, or something in it."""
    key = word.lstrip("+~").partition("=")[0].partition("@")[0]
    return key.partition(".")[0] in sections


def _flat(section: object, above: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys of a mapping of mappings, and their values."""
    if isinstance(section, Mapping):
        for key, value in section.items():
            if isinstance(value, Mapping) and value:
                yield from _flat(value, f"{above}{key}.")
            else:
                yield f"{above}{key}", value
