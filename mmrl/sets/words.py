"""Overrides of each run of a set, from the set's file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from mmrl.config.schema import stage_schema
from mmrl.config.validate import as_tuples, explain
from mmrl.errors import ConfigError, refuse, unknown
from mmrl.sets.spec import SCALES, Command, Layer, SetSpec
from mmrl.system.conf import conf_dir, later_wins, options, user_dirs
from mmrl.system.files import read_yaml

FOLDER = "set"
TRAINING_ALONE = (
    *("train", "algo", "from", "eval.every", "model.lora", "model.gradient_checkpointing"),
    *("hardware.sharding", "hardware.cpu_offload", "hardware.rollout_devices"),
    *("run.doctor", "run.progress", "run.name", "run.report_to", "run.report_calls"),
    *("run.wandb_project", "run.group", "run.tags"),
)
"""Sections and keys that an evaluation does not take."""
SHARED = ("task.name", "eval", "seed", "run.dir", "plugins")
"""Sections and keys that are the same for all steps of `algo=A+B`, whose scores are compared; but `eval.every`."""


def read_set(name: str, config_dir: str | None = None) -> SetSpec:
    """Read a set, with the content of its base.

    Raises:
        ConfigError: there is none of this name, or every problem of the two files.
    """
    path = _file_of(name, FOLDER, config_dir)
    content = read_yaml(path)
    if isinstance(content, dict) and isinstance(base := content.get("base"), str):
        content["base"] = read_yaml(_file_of(base, f"{FOLDER}/base", config_dir))
    spec, declared = _validated(content, path), options("algo", config_dir)
    layers = (("algos", spec.algos), ("base.algos", spec.base.algos))
    if problems := [unknown(key, algo, declared) for key, algos in layers for algo in algos if algo not in declared]:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    return spec


def set_names(config_dir: str | None = None, group: str = FOLDER) -> list[str]:
    """Return the names of all sets, figure 10 after figure 9."""
    names = [name for name in options(group, config_dir) if "/" not in name]
    return sorted(
        names, key=lambda name: [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )


def scales_of(spec: SetSpec) -> list[str]:
    """Return the scales that a set has words for; [""] for one that has no scales."""
    layers: list[Layer] = [spec.base]
    if "base" not in spec.model_fields_set:
        layers = [spec, *spec.rows.values(), *spec.columns.values()]
    scaled = {scale: [getattr(layer, scale) for layer in layers] for scale in SCALES}
    return [scale for scale in SCALES if any(words.set or words.train for words in scaled[scale])] or [""]


def words_of(
    spec: SetSpec, row: str, column: str, scale: str, command: Command, overrides: Sequence[str] = ()
) -> list[str]:
    """Return the overrides of one run of a cell, each key once; later ones win.

    In turn: of base, set, algorithm, column, its cell, row, and `overrides`; an evaluation has those that it can
    take.
    """
    method, task = spec.rows[row], spec.columns[column]
    shared = [*spec.base.words_at(scale, command), *spec.words_at(scale, command)]
    column_words = [*task.words_at(scale, command), *task.cells.get(row, Layer()).words_at(scale, command)]
    row_words = method.words_at(scale, command)
    # An evaluation has no algorithm.
    words_read = [*shared, *column_words, *row_words]
    algo = next((word.partition("=")[2] for word in reversed(words_read) if word.startswith("algo=")), "")
    algo_words = [word for base in (spec.base, spec) for word in base.algos.get(algo, Layer()).words_at(scale, command)]
    # The row's words come last, so that they override those of its algorithm.
    words = [word for word in [*shared, *algo_words, *column_words] if not is_below(word, method.without)] + row_words
    if command == "eval" and method.policy:
        words.append(f"policy={method.policy}")
    words += overrides
    return later_wins(word for word in words if command == "train" or not is_below(word, TRAINING_ALONE))


def words_of_steps(words: Sequence[str], steps: Sequence[str], config_dir: str | None = None) -> dict[str, list[str]]:
    """Return the overrides of each step of `algo=A+B`: those of all steps, and its own (`A.KEY=VALUE`), which win.

    Keys of `train` that are typed for all hold for the steps that train weights, where there are any.

    Raises:
        ConfigError: a name that is no algorithm; every key of no step, or that all share.
    """
    choices = options("algo", config_dir)
    refuse(unknown("algo", step, choices) for step in steps if step not in choices)
    shared: list[str] = []
    own: dict[str, list[str]] = {step: [] for step in steps}
    problems: list[str] = []
    for word in words:
        typed = word.lstrip("+~").partition("=")[0]
        step, _, key = typed.partition(".")
        if step not in own:
            shared.append(word)
            problems += [unknown(typed, step, own)] if step in choices else []
            continue
        if key in ("algo", "algo.name"):
            problems.append(f"{typed}: a step is its algorithm, which algo= names")
        elif key == "task" or (is_below(key, SHARED) and key != "eval.every"):
            problems.append(f"{typed}: is the same for all; type {key}= or leave it out")
        own[step].append(word.replace(f"{step}.", "", 1))
    refuse(problems)
    training = {step: "train" in stage_schema(step).model_fields for step in steps}
    return {
        step: later_wins(
            [f"algo={step}", *(w for w in shared if trains or not (any(training.values()) and is_below(w, ("train",))))]
            + own[step]
        )
        for step, trains in training.items()
    }


def is_below(word: str, keys: Sequence[str]) -> bool:
    """True for an override that sets one of some keys or sections, or something in one."""
    return any(f"{word.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.") for key in keys)


def _file_of(name: str, group: str, config_dir: str | None) -> Path:
    if name not in (names := set_names(config_dir, group)):
        raise ConfigError(unknown(group, name, names))
    files = [folder / group / f"{name}.yaml" for folder in (*user_dirs(config_dir), conf_dir())]
    path = next(path for path in files if os.path.lexists(path))
    if not path.is_file():
        raise ConfigError(f"{path}: is not a file")
    return path


def _validated(content: object, path: Path) -> SetSpec:
    try:
        return SetSpec.model_validate(as_tuples(content))
    except ValidationError as error:
        raise ConfigError(f"{path}: {problem}" for problem in explain(SetSpec, error)) from None
