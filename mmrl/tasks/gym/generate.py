"""Data sets of reasoning-gym: the parameters of one, checked; and its problems, made in a process of their own.

Some generators walk through sets of texts, whose order Python draws anew in each process, and one seeds NumPy's global
generator. In a process with a fixed order the problems are the same on every machine and after every resume.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmrl.errors import ConfigError, gathered, reason_of, refuse, unknown

OURS = ("seed", "size")
"""Parameters of every data set that mmrl sets, by split."""
Entry = dict[str, Any]
"""A problem as the package has it: `question`, `answer`, `metadata`."""


def build(name: str, params: Mapping[str, Any], seed: int, size: int) -> Any:
    """Return the data set `name` of the package.

    Raises:
        ConfigError: no such data set, or parameters that it refuses; all problems at once.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise ConfigError(unknown("task.dataset", name, DATASETS))
    given = _checked(name, params, "task.params")
    try:
        return create_dataset(name, **given, seed=seed, size=size)
    except Exception as error:  # its `validate` asserts; a bad value may raise anything
        raise ConfigError(f"task.params: {name} refuses its parameters: {reason_of(error)}") from None


def _checked(name: str, params: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the parameters of a data set by the types that its config class has."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    schema = DATASETS[name][1]
    kinds, problems, values = typing.get_type_hints(schema), list[str](), dict[str, Any]()
    names = [field.name for field in dataclasses.fields(schema) if field.name not in OURS]
    for param, value in params.items():
        if param in OURS:
            problems.append(f"{key}.{param}: is set by mmrl, for each split; use task.data.train_items and the like")
            continue
        if param not in names:
            problems.append(unknown(f"{key}.{param}", param, names))
            continue
        kind = kinds[param]
        if typing.get_origin(kind) is tuple and len(typing.get_args(kind)) == 1:
            # the package writes tuple[str] and means any number of them
            kind = types.GenericAlias(tuple, (*typing.get_args(kind), ...))
        try:
            values[param] = TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join([f"{key}.{param}", *map(str, first["loc"])])
            problems.append(
                f"{where}: got {first['input']!r:.80}, expected {first['msg'].removeprefix('Input should be ')}"
            )
    for number, spec in enumerate(values.get("datasets") or () if name == "composite" else ()):
        assert isinstance(spec, DatasetSpec)
        if spec.name not in DATASETS:
            problems.append(unknown(f"{key}.datasets.{number}.name", spec.name, DATASETS))
            continue
        with gathered(problems):
            spec.config = _checked(spec.name, spec.config, f"{key}.datasets.{number}.config")
    refuse(problems)
    return values


def entries(
    module: str, name: str, params: Mapping[str, Any], splits: Mapping[str, tuple[int, int]]
) -> dict[str, list[Entry]]:
    """Return the problems of each split.

    Args:
        module: where the data set's class is from: importing it registers those of other packages.
        splits: split -> its seed and number of problems.

    Raises:
        ConfigError: the generator fails.
    """
    asked = json.dumps([module, name, params, splits])
    # -P: this file's folder is no place to import from
    command = [sys.executable, "-P", __file__]
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths}
    done = subprocess.run(command, input=asked, capture_output=True, text=True, encoding="utf-8", env=env)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"])[-1]
        raise ConfigError(f"task.dataset: {name} cannot make its problems: {why}")
    made: dict[str, list[Entry]] = ast.literal_eval(done.stdout.splitlines()[-1])
    return made


def _literal(value: Any) -> Any:
    """Return a value of Python's literals alone, which need no pickle; JSON would make lists of tuples."""
    if isinstance(value, dict):
        return {_literal(key): _literal(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_literal, value))
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    return _literal(value.item()) if hasattr(value, "item") else str(value)


def _main() -> None:
    module, name, params, splits = json.load(sys.stdin)
    # a generator may print
    output, sys.stdout = sys.stdout, sys.stderr
    importlib.import_module(module)
    made = {}
    for split, (seed, size) in splits.items():
        data = build(name, params, seed, size)
        made[split] = [_literal(data[number]) for number in range(size)]
    print(repr(made), file=output)


if __name__ == "__main__":
    _main()
