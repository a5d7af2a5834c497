"""From the words of a command to its validated configs, one per job; of `mmrl train` also of runs in turn.

A stage `A` of `stages=[A,B]` is what the same words with `algo=A` would be, and with what `stage.A.KEY=` (or
`stage.1.KEY=`) says. In a sweep over algorithms that is for the jobs with such a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mmrl.cli.arguments import CommandLine
from mmrl.cli.hydra import composed, import_plugins_of, print_job, through_hydra
from mmrl.cli.overrides import expand, hydra_value, parse, read_line, searched, values_of
from mmrl.config import (
    EvalCommandConfig,
    RootConfig,
    StageConfig,
    StagedCommandConfig,
    StartConfig,
    TrainCommandConfig,
    validate,
)
from mmrl.config.base import value_at
from mmrl.config.other_stages import PROMPT_SCHEMAS, SftConfig
from mmrl.config.schema import stage_schema
from mmrl.errors import ConfigError, unknown
from mmrl.system.conf import GROUPS, options
from mmrl.system.files import plain

if TYPE_CHECKING:
    from mmrl.sets.sweep import Job

ConfigT = TypeVar("ConfigT", bound=RootConfig)
OF_A_STAGE = ("algo", "train", "model", "hardware", "engine", "eval.every", "run.doctor")
"""What may differ between the stages of a run. They evaluate the same items, so that they can be compared."""


def configs(command: str, schema: type[ConfigT], line: CommandLine) -> list[ConfigT]:
    """Every job's config, validated; the problems of all jobs together, each once."""

    def build(raw: Mapping[str, object], job: Sequence[str]) -> ConfigT:
        if command == "eval" and isinstance(raw.get("policy"), str):
            from mmrl.run.start import of_its_run

            raw = of_its_run(raw, [_key(word) for word in job])
        return validate(schema, raw)

    return _configs(command, line, build)


def train_configs(line: CommandLine) -> list[StageConfig | StagedCommandConfig]:
    """Those of `mmrl train`, whose jobs may be of several stages in turn, or of one that trains no weights."""

    in_sweep: set[str] | None = set() if line.multirun else None
    typed, line = line, _after(line)

    def build(raw: Mapping[str, object], job: Sequence[str]) -> StageConfig | StagedCommandConfig:
        return _from(typed, lambda sections: _train_config(sections, job, line.config_dir, in_sweep), raw)

    made = _configs("train", line, build)
    if searched(line) and any(key.startswith("stage.") for key in line.keys):
        # Of what is searched, only the ends are composed.
        for job in ([f"algo={name}"] for name in values_of(line, "algo")):
            build(composed("train", job, line.config_dir), job)
    if in_sweep is not None and (problems := _sweep_problems(line, in_sweep, made)):
        raise ConfigError(problems)
    return made


def _sweep_problems(line: CommandLine, names: Collection[str], made: Sequence[RootConfig]) -> list[str]:
    """What is wrong with the `stage.*` words of a sweep as a whole.

    Args:
        names: the stages of its jobs, and their numbers.
        made: the configs of its jobs.
    """
    own = [override for override in line.overrides if override.key_or_group.partition(".")[0] == "stage"]
    keys = dict.fromkeys(override.key_or_group.partition(".")[2].partition(".")[0] for override in own)
    stages = sorted(name for name in names if not name.isdigit())
    numbers = sorted((name for name in names if name.isdigit()), key=int)
    problems = [_no_such_stage(key, stages, numbers) for key in keys if key not in names]
    several = [override.key_or_group for override in own if override.is_sweep_override()]
    if several and not searched(line) and any(config in made[:place] for place, config in enumerate(made)):
        problems.append(
            f"{', '.join(several)}: several values, and runs without such a stage would be the same run several times; "
            "sweep the algorithms that have it by themselves"
        )
    return problems


def print_train(line: CommandLine) -> None:
    """`mmrl train --cfg job`; nothing runs.

    The sections that Hydra has composed are printed. Of several stages no section is what any of them runs with, so
    what each runs with is printed under the name of its folder.

    Raises:
        ConfigError: as `hydra.print_job`, and of stages every problem.
    """
    if not line.multirun:
        (job,) = expand(line, [])
        raw: Mapping[str, object] = {}
        with suppress(ConfigError):  # what is wrong with it is said below
            raw = composed("train", job, line.config_dir)
        if raw.get("stages") or raw.get("stage"):
            import yaml  # no other command of this module writes any

            config = _train_config(raw, job, line.config_dir, None)
            mappings = [plain(stage.model_dump(mode="json")) for stage in config.in_turn]
            named = {f"{number}_{value_at(stage, 'algo.name')}": stage for number, stage in enumerate(mappings, 1)}
            print(yaml.safe_dump(named, sort_keys=False, allow_unicode=True), end="")
            return
    print_job("train", line)


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
    of_jobs: list[Collection[str]] = []
    for job in jobs:
        try:
            valid.append(build(composed(command, job, line.config_dir), job))
        except ConfigError as error:
            of_jobs.append(dict.fromkeys(error.problems))
    for problem in chain.from_iterable(of_jobs):
        hint = _row_of_other_command(command, row, "policy" in line.keys, problem)
        hint = hint or _of_some_jobs(problem, len(jobs) - sum(problem in some for some in of_jobs), line)
        problems += [] if problem.startswith(unjudged) and hint is None else [hint or problem]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return valid


def _of_some_jobs(problem: str, others: int, line: CommandLine) -> str | None:
    """What to say of a key that some of the algorithms of a sweep do not have, where `others` take it."""
    key = problem.partition(":")[0]
    if not others or key not in line.keys or not key.startswith(("algo.", "train.")) or "algo" not in line.keys:
        return None
    return f"{problem}; for one algorithm of the sweep: stage.NAME.{key}="


def configured(words: Sequence[str], config_dir: str | None = None) -> StageConfig | StagedCommandConfig:
    """The config that `mmrl train WORDS` would run with, before its cross-section checks.

    Raises:
        ConfigError: every problem.
    """
    (config,) = train_configs(replace(read_line(words, once=False), config_dir=config_dir))
    return config


def set_config(command: str, words: Sequence[str], config_dir: str | None) -> StageConfig | EvalCommandConfig:
    """That of `mmrl train WORDS` or `mmrl eval WORDS`, a run of a set; raises as `configured`."""
    if command == "eval":
        line = replace(read_line(words, once=False), config_dir=config_dir)
        return configs("eval", EvalCommandConfig, line)[0]
    config = configured(words, config_dir)
    if config.kind.name == "stages":
        raise ConfigError(f"algo: got {config.algo.name}, and a row of a set is one stage; make it rows with from:")
    return config


def swept(line: CommandLine, job: Job) -> None:
    """Let Hydra go through the jobs of a sweep of `mmrl train`, by any sweeper and launcher."""

    def build(sections: Callable[[], dict[str, object]], words: Sequence[str]) -> StageConfig | StagedCommandConfig:
        # What `stage.*` says of stages of other jobs was judged before the sweep began.
        return _from(line, lambda raw: _train_config(raw, words, line.config_dir, set()), sections())

    through_hydra("train", _after(line), lambda sections, words: job(lambda: build(sections, words)))


def _after(line: CommandLine) -> CommandLine:
    """The words of a run that starts from another (`from=RUN`), with that one's model and task where none is typed."""
    if "from" not in line.own:
        return line
    from mmrl.run.start import run_of, sections_of

    stored = sections_of(run_of(Path(line.own["from"])))
    names = {group: stored[group].get("name") for group in stored if group not in line.keys}
    words = [f"{group}={name}" for group, name in names.items() if name in options(group, line.config_dir)]
    return replace(line, overrides=(*parse(words, []), *line.overrides))


def _from(line: CommandLine, build: Callable[[Mapping[str, object]], ConfigT], raw: Mapping[str, object]) -> ConfigT:
    """The config of a job; where it starts from another run, with the sections of that one which were not typed."""
    if "from" not in line.own:
        return build(raw)
    from mmrl.run.start import made_policy, run_of, sections_of, with_typed

    run = run_of(Path(line.own["from"]))
    stored = sections_of(run)
    sections = {name: with_typed(stored[name], raw, line.keys, name) for name in stored if name not in line.keys}
    if "model" in sections and value_at(raw, "model.path") is not None:
        # The path of a run that has itself started from another is no setting; the policy's weights take its place.
        sections["model"]["path"] = value_at(raw, "model.path")
    config = build({**raw, **sections})
    if config.kind.name == "stages":
        raise ConfigError(f"from: {value_at(config, 'algo.name')} is several runs, each from the one before")
    made_policy(run)
    return config.model_copy(update={"start": StartConfig(run=str(run))})


def _row_of_other_command(command: str, row: object, policy_typed: bool, problem: str) -> str | None:
    """What to say instead of `problem` where it comes from a row (`experiment=`) of the other command."""
    if row and command == "train" and problem.startswith("policy: unknown key") and not policy_typed:
        return f"experiment: got '{row}', which evaluates and does not train: mmrl eval experiment={row}"
    if row and command == "eval" and "Could not override 'algo'" in problem:
        return f"experiment: got '{row}', which trains: mmrl train experiment={row}"
    return None


def _train_config(
    raw: Mapping[str, object], words: Sequence[str], config_dir: str | None, in_sweep: set[str] | None
) -> StageConfig | StagedCommandConfig:
    """The config of a job of `mmrl train`.

    Args:
        raw: the job, composed.
        words: its overrides.
        in_sweep: the stages of all jobs of a sweep, to which those of this job are added; `stage.*` may name any of
            them then. None for a job alone.

    Raises:
        ConfigError: every problem.
    """
    # Not what a row (`experiment=`) sets: of `algo` and `train` that belongs to the algorithm that the row is about.
    typed = [_key(word) for word in words]
    sections = dict(raw)
    names, own = sections.pop("stages", None), sections.pop("stage", None) or {}
    if names is None and not own and in_sweep is None:
        return _stage(sections, typed)
    listed = [_chosen(words, sections)] if names is None else _listed(names, config_dir)
    own = _owned(own, listed, in_sweep)
    problems: list[str] = []
    if names is not None:
        problems += [f"{key}: say of which stage: stage.{listed[0]}.{key}" for key in typed if key.startswith("algo.")]
        if "algo" in typed and "stages" in typed:
            problems.append(f"algo: has no effect beside stages=[{','.join(listed)}]; leave one of them out")
    stages: list[StageConfig] = []
    rows: list[list[str]] = []
    for number, name in enumerate(listed, start=1):
        of_stage = _words_of(own, name, number)
        problems += _shared_problems(of_stage, name, number)
        elsewhere = {"stage"} if names is None else {"stage", "stages", "algo"}
        if names is not None and "train" not in stage_schema(name).model_fields:
            elsewhere.add("train")  # what was typed for all stages holds for those that have it
        kept = [
            word
            for word in words
            if not _is_of(word, elsewhere) and not (_key(word) in of_stage and _key(word) in GROUPS)
        ]
        row = [*kept, *([f"algo={name}"] if names is not None else []), *of_stage.values()]
        mapping = composed("train", row, config_dir)
        if names is not None and mapping.pop("stages", None) and "name" not in _section(mapping):
            problems.append(f"stages: got {name}, which stands for several stages itself; list them")
            continue
        mapping.pop("stage", None)
        try:
            stages.append(_stage(mapping, [_key(word) for word in row]))
            rows.append(row)
        except ConfigError as error:
            problems += _as_typed(error, of_stage, typed, number, name if names is not None else "")
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return stages[0] if names is None else _staged(stages, rows, config_dir)


def _as_typed(
    error: ConfigError, of_stage: Collection[str], typed: Collection[str], number: int, name: str
) -> list[str]:
    """Problems by the keys that were typed for a stage; others under its number and name, where there are several."""
    problems = []
    for problem in error.problems:
        key = problem.partition(":")[0]
        by_name = next((word for word in typed if word.startswith("stage.") and word.endswith(f".{key}")), "")
        where = f"stage {number} ({name}): " if name else ""
        problems.append(f"{by_name}{problem.removeprefix(key)}" if key in of_stage and by_name else f"{where}{problem}")
    return problems


def _staged(
    stages: Sequence[StageConfig], words: Sequence[Sequence[str]], config_dir: str | None
) -> StagedCommandConfig:
    shared = {name: getattr(stages[0], name) for name in RootConfig.model_fields}
    method = {"name": "+".join(stage.algo.name for stage in stages)}
    of_rows = tuple(map(tuple, words))
    rows = {"stages": tuple(stages), "words": of_rows, "config_dir": config_dir}
    return StagedCommandConfig.model_validate({**shared, "algo": method, **rows})


def stored_chain(folder: Path) -> StagedCommandConfig:
    """The runs of `folder/set.yaml`, which `mmrl train stages=[A,B]` has written.

    Raises:
        ConfigError: every problem of the file, or of its words.
    """
    from mmrl.sets.chain import read_rows

    rows, config_dir = read_rows(folder)
    stages = [configured(words, config_dir) for words in rows]
    return _staged(stages, rows, config_dir).in_folder(str(folder))


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


def _chosen(words: Sequence[str], sections: Mapping[str, object]) -> str:
    """The name that a job of one stage has after `algo=`."""
    names = [word.partition("=")[2] for word in words if _key(word) == "algo"]
    return names[-1].strip("'\"") if names else str(_section(sections).get("name"))


def _listed(names: object, config_dir: str | None) -> list[str]:
    """The names of the stages.

    Raises:
        ConfigError: they are none.
    """
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"stages: got {names!r}, expected names of algo= in a list: stages=[miprov2,mmgrpo]")
    choices = options("algo", config_dir)
    if problems := [unknown("stages", name, choices) for name in names if name not in choices]:
        raise ConfigError(dict.fromkeys(problems))
    return list(names)


def _owned(own: object, listed: Sequence[str], in_sweep: set[str] | None) -> Mapping[str, object]:
    """What `stage.*` says of the stages of a job.

    Raises:
        ConfigError: it is none, or names a stage that is not there. In a sweep other jobs may have it.
    """
    if not isinstance(own, Mapping):
        raise ConfigError(f"stage: got {own!r}, expected stage.NAME.KEY=VALUE")
    numbers = [str(number) for number in range(1, len(listed) + 1)]
    if in_sweep is not None:
        in_sweep.update(listed, numbers)
    problems = [
        f"stage.{key}: expected a key of that stage: stage.{key}.KEY=VALUE"
        for key, value in own.items()
        if not isinstance(value, Mapping)
    ]
    stray = [str(key) for key in own if str(key) not in (*listed, *numbers)]
    if in_sweep is None:
        problems += [_no_such_stage(key, listed, numbers) for key in stray]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return {str(key): value for key, value in own.items() if str(key) not in stray}


def _no_such_stage(key: str, names: Sequence[str], numbers: Sequence[str]) -> str:
    """The problem of `stage.KEY`, which is none of the stages."""
    return f"stage.{key}: no such stage (stages: {', '.join(names)}; also by number: {', '.join(numbers)})"


def _words_of(own: Mapping[str, object], name: str, number: int) -> dict[str, str]:
    """What `stage.*` says of one stage: key -> the word that sets it; by number wins over by name."""
    said = dict([*_flat(own.get(name) or {}), *_flat(own.get(str(number)) or {})])
    return {
        key: f"{key}={value}" if key in GROUPS and isinstance(value, str) else f"++{key}={hydra_value(key, value)}"
        for key, value in said.items()
    }


def _shared_problems(keys: Collection[str], name: str, number: int) -> list[str]:
    """Keys of `stage.*` that all stages share, and weights that a later stage has from the one before."""
    problems = []
    for key in keys:
        if not any(f"{key}.".startswith(f"{part}.") for part in OF_A_STAGE):
            problems.append(f"stage.{name}.{key}: is the same for all stages; set {key} without stage.{name}")
        elif key in ("algo", "algo.name"):
            problems.append(f"stage.{name}.{key}: has no effect, the stage is {name}")
        elif key in ("model", "model.path", "model.name", "model.revision") and number > 1:
            problems.append(f"stage.{name}.{key}: has no effect, the weights are those of the stage before")
    return problems


def _key(word: str) -> str:
    """The key that an override sets."""
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def _is_of(word: str, sections: Collection[str]) -> bool:
    """Whether an override sets one of the sections, or something in it."""
    return _key(word).partition(".")[0] in sections


def _flat(section: object, above: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys of a mapping of mappings, and their values."""
    if isinstance(section, Mapping):
        for key, value in section.items():
            if isinstance(value, Mapping) and value:
                yield from _flat(value, f"{above}{key}.")
            else:
                yield f"{above}{key}", value
