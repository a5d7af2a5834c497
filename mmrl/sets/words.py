"""From the file of a set to the words of each of its runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from mmrl.config.base import Section
from mmrl.config.validate import as_tuples, explain
from mmrl.errors import ConfigError, DataError, unknown
from mmrl.sets.spec import SCALES, Base, Command, Layer, SetSpec
from mmrl.system.conf import later_wins, options
from mmrl.system.files import read_yaml

FOLDER = "set"
"""Of conf/."""
TRAINING_ALONE = (
    *("train", "algo", "stages", "stage", "from", "eval.every", "model.lora", "model.gradient_checkpointing"),
    *("hardware.sharding", "hardware.cpu_offload", "hardware.rollout_devices"),
    *("run.doctor", "run.progress", "run.name", "run.report_to", "run.report_calls"),
    *("run.wandb_project", "run.group", "run.tags"),
)
"""Sections and keys that an evaluation does not take."""
SectionT = TypeVar("SectionT", bound=Section)


def read_set(name: str, folders: Sequence[Path], config_dir: str | None = None) -> tuple[SetSpec, Base]:
    """A set and its base.

    Args:
        folders: of configs, first wins.

    Raises:
        ConfigError: there is none of this name, or every problem of the two files.
    """
    spec = _read(name, FOLDER, folders, SetSpec)
    base = _read(spec.base, f"{FOLDER}/base", folders, Base) if spec.base else Base()
    known = options("algo", config_dir)
    problems = [
        unknown(f"{where}: algos", algo, known)
        for where, algos in ((f"set {name}", spec.algos), (f"base {spec.base}", base.algos))
        for algo in algos
        if algo not in known
    ]
    if problems:
        raise ConfigError(problems)
    return spec, base


def set_names(folders: Sequence[Path]) -> list[str]:
    """All sets, figure 10 after figure 9."""
    names = {path.stem for folder in folders for path in (folder / FOLDER).glob("*.yaml")}
    return sorted(
        names, key=lambda name: [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )


def scales_of(spec: SetSpec, base: Base) -> list[str]:
    """Those that a set has words for; [""] for one that has no scales."""
    layers: list[Layer] = [base, spec, *spec.rows.values(), *spec.columns.values()]
    return [
        scale
        for scale in SCALES
        if any(
            getattr(layer, scale).set or getattr(layer, scale).train for layer in (layers if not spec.base else [base])
        )
    ] or [""]


def words_of(spec: SetSpec, base: Base, row: str, column: str, scale: str, command: Command) -> list[str]:
    """The overrides of one run of a cell, each key once; later layers win: base, set, algorithm, column, cell, row."""
    method, place = spec.rows[row], spec.columns[column]
    shared = [*base.at(scale, command), *spec.at(scale, command)]
    placed = place.at(scale, command)
    if row in place.cells:
        placed += place.cells[row].at(scale, command)
    own = method.at(scale, command)
    # An evaluation has no algorithm.
    algos = [word.partition("=")[2] for word in [*shared, *placed, *own] if word.startswith("algo=")]
    of_algo = [
        word
        for layer in (base, spec)
        if algos and algos[-1] in layer.algos
        for word in layer.algos[algos[-1]].at(scale, command)
    ]
    # Before the row: what a row says for itself holds, whatever its algorithm.
    words = [word for word in [*shared, *of_algo, *placed] if not is_below(word, method.without)]
    words += own
    if command == "eval":
        words = [word for word in words if not is_below(word, TRAINING_ALONE)]
        words += [f"policy={method.policy}"] if method.policy else []
    return later_wins(words)


def is_below(word: str, keys: Sequence[str]) -> bool:
    """Whether an override sets one of some keys or sections, or something in one."""
    return any(f"{word.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.") for key in keys)


def _read(name: str, group: str, folders: Sequence[Path], schema: type[SectionT]) -> SectionT:
    """The file of `name` in a folder of `conf/`.

    Raises:
        ConfigError: there is none, or every problem of it.
    """
    names = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
    if name not in names:
        raise ConfigError(unknown(group, name, names))
    return read_file(next(path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), schema)


def read_file(path: Path, schema: type[SectionT]) -> SectionT:
    """A file of a set.

    Raises:
        ConfigError: it cannot be read, or every problem of it.
    """
    try:
        return schema.model_validate(as_tuples(read_yaml(path)))
    except DataError as error:
        raise ConfigError(f"{FOLDER}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {problem}" for problem in explain(schema, error)) from None
