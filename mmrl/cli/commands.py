"""One function per command: compose, validate, check, then hand over to `run` (which may import torch)."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from mmrl.cli import print_error
from mmrl.cli.compose import CommandLine, composed, expand, parse_arguments, take, through_hydra
from mmrl.config import EvalCommandConfig, TrainCommandConfig, validate
from mmrl.config.validate import algo_section
from mmrl.errors import ConfigError, MmrlError, unknown


def train_command(arguments: Sequence[str]) -> int:
    """`mmrl train`."""
    line = parse_arguments(arguments)
    resume = take(line.overrides, "resume")
    if resume is not None:
        return _resume(resume, line)
    if line.prints_only:
        _refuse_unknown_choices(line)
        through_hydra("train", line, lambda raw: None)
        return 0
    configs = validated("train", TrainCommandConfig, line)
    from mmrl.run import check as prepare
    from mmrl.run import train as run

    prepare.check_all(configs, typed_keys(line))
    if not line.multirun:
        return run.train(configs[0], command=["mmrl", "train", *arguments])
    return _sweep(line, arguments, len(configs))


def eval_command(arguments: Sequence[str]) -> int:
    """`mmrl eval`."""
    line = parse_arguments(arguments)
    resume = take(line.overrides, "resume")
    if resume is not None:
        _nothing_else(line)
        from mmrl.run import eval as evaluation

        return evaluation.resume_evaluation(Path(resume))
    if line.prints_only:
        _refuse_unknown_choices(line)
        through_hydra("eval", line, lambda raw: None)
        return 0
    configs = validated("eval", EvalCommandConfig, line)
    from mmrl.run import check as prepare
    from mmrl.run import eval as evaluation

    prepare.check_all(configs, typed_keys(line))
    command = ["mmrl", "eval", *arguments]
    if not line.multirun:
        return evaluation.evaluate_policy(configs[0], command=command)
    from mmrl.report.columns import column_names

    columns = dict(zip(column_names(expand(line, [])), configs, strict=True))
    return evaluation.evaluate_columns(columns, command=command)


def show_command(arguments: Sequence[str]) -> int:
    """`mmrl show RUN_DIR [example=ID] [step=N [--json]]`."""
    as_json = "--json" in arguments
    flags = [a for a in arguments if a.startswith("-")]
    positional = [a for a in arguments if "=" not in a and a not in flags]
    values = dict(a.split("=", 1) for a in arguments if "=" in a and a not in flags)
    problems = [f"{flag}: unknown flag, mmrl show has --json alone" for flag in flags if flag != "--json"]
    if as_json and ("step" not in values or "example" in values):
        problems.append("--json: writes the rollouts of one step; give step=N, and no example")
    problems += [unknown("mmrl show", key, ("example", "step")) for key in values if key not in ("example", "step")]
    if len(positional) != 1:
        problems.append(f"mmrl show: got {len(positional)} run directories, expected one: mmrl show RUN_DIR")
    if not values.get("step", "0").isdigit():
        problems.append(f"step: got '{values['step']}', expected a step number")
    if problems:
        raise ConfigError(problems)
    from mmrl.report.show import show

    step = int(values["step"]) if "step" in values else None
    if as_json and step is not None:
        from mmrl.report.forest import dump_forest
        from mmrl.report.journal import read_step
        from mmrl.report.rundir import RunDir
        from mmrl.system.files import dumps

        forest, _ = read_step(RunDir.read(Path(positional[0])), step)
        print(dumps(dump_forest(forest)))
        return 0
    print(show(Path(positional[0]), example=values.get("example"), step=step))
    return 0


def report_command(arguments: Sequence[str]) -> int:
    """`mmrl report RUN_DIR`."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError(f"mmrl report: got {' '.join(arguments) or 'nothing'}, expected one run directory")
    from mmrl.report.html import report

    print(report(Path(arguments[0])))
    return 0


def credit_command(arguments: Sequence[str]) -> int:
    """`mmrl credit algo=A[,B] [algo.key=value] rollouts=FILE [seed=N] [--json]`: no task, no model, no torch."""
    as_json = "--json" in arguments
    line = parse_arguments([a for a in arguments if a != "--json"])
    typed = [override.lstrip("+~").partition("=")[0] for override in line.overrides]
    path = take(line.overrides, "rollouts")
    names = take(line.overrides, "algo")
    problems = [] if path else ["rollouts: missing, expected a forest file or a journal step (rollouts=FILE)"]
    problems += [] if names else ["algo: missing, expected one or more algorithms (algo=A or algo=A,B)"]
    chosen = [name.strip() for name in (names or "").split(",")]
    problems += [f"algo: got '{name}' more than once" for name in dict.fromkeys(chosen) if chosen.count(name) > 1]
    if any(not re.fullmatch(r"[\w./-]*", name) for name in chosen):
        problems.append(f"algo: got '{names}', expected names joined by commas: algo=A,B")
        names = None
    repeated = [key for key in dict.fromkeys(typed) if typed.count(key) > 1]
    problems += [f"{key}: given more than once" for key in repeated]
    flags = [*(["-m"] if line.multirun else []), *line.flags]
    problems += [f"{' '.join(flags)}: has no effect on mmrl credit; several algorithms are algo=A,B"] if flags else []
    stray = {key for key in typed_keys(line) if key.partition(".")[0] not in ("algo", "seed", "plugins")}
    problems += [
        f"{key}: has no effect on mmrl credit, which composes algo= alone" for key in sorted(stray.difference(repeated))
    ]
    line = _without(line, stray)
    if not (path and names) or repeated:
        raise ConfigError(problems)
    with redirect_stdout(sys.stderr):  # what a package prints when it is imported is no part of the result
        _plugins(line)
    algos, seed = [], 0
    for name in dict.fromkeys(chosen):
        job = CommandLine(overrides=[f"algo={name}", *line.overrides], config_dir=line.config_dir)
        before = len(problems)
        (overrides,) = expand(job, problems)
        if len(problems) > before:
            continue
        raw = composed("credit", overrides, line.config_dir)
        algos.append(algo_section(raw.get("algo"), problems))
        seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        problems.append(f"seed: got {seed!r}, expected a whole number, 0 or more")
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    from mmrl.run.credit import credit_report, load_rollouts

    print(credit_report(algos, load_rollouts(Path(path)), seed=seed, as_json=as_json))
    return 0


def validated(name: str, schema: Any, line: CommandLine) -> list[Any]:
    """Every job's config, validated; the problems of all jobs together, each once."""
    problems: list[str] = []
    if name == "eval":
        line = _without_training(line, problems)
    jobs = expand(line, problems)
    # Keys of a group whose choice is unknown cannot be judged: they belong to another schema.
    unjudged = tuple(f"{problem.partition(':')[0]}." for problem in problems)
    _plugins(line)
    configs = []
    for overrides in jobs:
        try:
            raw = composed(name, overrides, line.config_dir)
            import_config_plugins(raw)
            configs.append(validate(schema, raw))
        except ConfigError as error:
            found = [_row_elsewhere(name, overrides, problem) or problem for problem in error.problems]
            problems += [problem for problem in found if not problem.startswith(unjudged)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return configs


def _row_elsewhere(name: str, overrides: Sequence[str], problem: str) -> str | None:
    """What to say instead of `problem` where it comes from a row (`experiment=`) of the other command."""
    typed = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    row = typed.get("experiment")
    if row and name == "train" and problem.startswith("policy: unknown key") and "policy" not in typed:
        return f"experiment: got '{row}', which evaluates and does not train: mmrl eval experiment={row}"
    if row and name == "eval" and "Could not override 'algo'" in problem:
        return f"experiment: got '{row}', which trains: mmrl train experiment={row}"
    return None


def _without_training(line: CommandLine, problems: list[str]) -> CommandLine:
    """The line without keys that only `mmrl train` has; these are added to `problems`."""
    stray = {key for key in typed_keys(line) if key.partition(".")[0] in ("train", "algo")}
    problems += [f"{key}: has no effect on mmrl eval; it is an option of mmrl train" for key in sorted(stray)]
    return _without(line, stray)


def _without(line: CommandLine, keys: Collection[str]) -> CommandLine:
    """The line without the overrides of these keys."""
    kept = [override for override in line.overrides if override.lstrip("+~").partition("=")[0] not in keys]
    return replace(line, overrides=kept)


def _refuse_unknown_choices(line: CommandLine) -> None:
    problems: list[str] = []
    if line.multirun:
        problems.append(f"{line.flags[0]}: prints one job, without -m and with one value for each key")
    expand(line, problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def typed_keys(line: CommandLine) -> set[str]:
    """The keys that the user set."""
    return {override.lstrip("+~").partition("=")[0] for override in line.overrides}


def _plugins(line: CommandLine) -> None:
    """Import `plugins=[pkg]` before validation, so that their names are known to it."""
    for override in line.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "plugins":
            from mmrl.run.check import import_plugins

            import_plugins(name.strip() for name in value.strip("[]").split(",") if name.strip())


def import_config_plugins(raw: Mapping[str, Any]) -> None:
    """Import what a composed config names as `plugins`: a task's own file may name its package."""
    given = raw.get("plugins")
    if given and isinstance(given, tuple):  # anything else is for validation to refuse
        from mmrl.run.check import import_plugins

        import_plugins(package for package in given if isinstance(package, str))


def _resume(folder: str, line: CommandLine) -> int:
    _nothing_else(line)
    from mmrl.run import train as run

    return run.resume(Path(folder))


def _nothing_else(line: CommandLine) -> None:
    """Refuse anything beside `resume=`."""
    if line.overrides or line.multirun or line.flags:
        given = ", ".join([*line.overrides, *line.flags, *(["-m"] if line.multirun else [])])
        raise ConfigError(f"resume: a run continues with the config it was started with; remove {given}")


def _sweep(line: CommandLine, arguments: Sequence[str], jobs: int) -> int:
    """Run the jobs through Hydra's sweeper and launcher; a job that stops does not stop the others.

    A launcher may run them elsewhere (submitit: on a cluster), so exit codes come back as files.
    """
    Path("outputs").mkdir(exist_ok=True)
    with TemporaryDirectory(dir="outputs", prefix=".sweep-") as folder:
        codes = Path(folder).absolute()
        through_hydra("train", line, partial(_swept, codes, tuple(arguments), jobs))
        found = [int(path.read_text()) for path in codes.iterdir()]
    failed = jobs - sum(code == 0 for code in found)
    print(f"sweep: {jobs - failed} of {jobs} runs finished", file=sys.stderr if failed else sys.stdout)
    return max(found, default=1) or int(failed > 0)


def _swept(codes: Path, arguments: tuple[str, ...], jobs: int, raw: Mapping[str, Any]) -> None:
    """One job of a sweep, in this process or in one that a launcher has started."""
    from mmrl.run import train as run

    name = f"algo={raw['algo']['name']} task={raw['task']['name']} seed={raw['seed']}"
    print(f"-- job {len(list(codes.iterdir())) + 1} of {jobs}: {name}")
    import_config_plugins(raw)
    try:
        code = run.train(validate(TrainCommandConfig, raw), command=["mmrl", "train", *arguments])
    except MmrlError as error:
        print_error(error)
        code = error.exit_code
    (codes / uuid4().hex).write_text(str(code))
