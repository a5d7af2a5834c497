"""The words after `mmrl credit`: algorithms from `conf/algo`, or that of a run with its settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mmrl.cli.arguments import CommandLine, typed_text
from mmrl.cli.hydra import composed, import_plugins_of
from mmrl.cli.overrides import expand, parse, read_line
from mmrl.config import AlgoConfig, TrainCommandConfig
from mmrl.config.validate import algo_section, as_tuples
from mmrl.errors import ConfigError
from mmrl.run.credit import CreditRequest, run_config

OWN = ("rollouts", "run", "step", "algo")


def credit_request(words: Sequence[str]) -> CreditRequest:
    """What is credited, each algorithm composed by itself.

    Raises:
        ConfigError: every problem.
        CheckpointError: `run=` is no training run.
    """
    line = read_line(words, own=OWN, once=True)
    problems = _problems_of_source(line)
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
    )


def _problems_of_source(line: CommandLine) -> list[str]:
    """What is wrong with `rollouts=`, or with `run=` and `step=`."""
    problems = []
    given = [key for key in ("rollouts", "run") if line.own.get(key)]
    if not given:
        problems.append(
            "rollouts: missing, expected a forest file or a journal step (rollouts=FILE), or a step of a run "
            "(run=RUN_DIR step=N)"
        )
    elif len(given) == 2:
        problems.append("rollouts, run: got both, expected one of them: a file, or a step of a run")
    if "step" in line.own and "run" not in line.own:
        problems.append("step: has no effect without run=RUN_DIR; a file has one step")
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
    typed = [override for override in line.overrides if override.key_or_group.startswith("algo.")]
    if run is not None and name == run.algo.name:
        return algo_section(_changed(run, typed, problems), problems) if typed else run.algo
    before = len(problems)
    choice = parse([f"algo={name}"], problems)
    (job,) = expand(replace(line, multirun=False, overrides=(*choice, *line.overrides)), problems)
    if len(problems) > before:
        return None
    return algo_section(composed("credit", job, line.config_dir).get("algo"), problems)


def _changed(run: TrainCommandConfig, typed: Sequence[Override], problems: list[str]) -> object:
    """The `algo` section of a run with the settings that were typed."""
    # For its errors: a sweep, or what cannot be listed.
    expand(CommandLine(overrides=tuple(typed)), problems)
    config = OmegaConf.create({"seed": run.seed, "algo": run.algo.model_dump()})
    for override in typed:
        if override.is_delete():
            problems.append(f"{typed_text(override)}: a setting of a run can be changed, not removed")
            continue
        try:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=False, force_add=True)
        except OmegaConfBaseException as error:
            problems.append(f"{override.key_or_group}: {' '.join(str(error).splitlines()[0].split())}")
    try:
        raw = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {' '.join(str(error).splitlines()[0].split())}") from None
    assert isinstance(raw, dict)
    return as_tuples(raw["algo"])


def _seed(line: CommandLine, run: TrainCommandConfig | None, problems: list[str]) -> int:
    """The seed that was typed, else the run's, else 0."""
    if "seed" not in line.keys:
        return 0 if run is None else run.seed
    (override,) = [override for override in line.overrides if override.key_or_group == "seed"]
    seed = override.value()
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        problems.append(f"seed: got {seed!r}, expected a whole number, 0 or more")
        return 0
    return seed
