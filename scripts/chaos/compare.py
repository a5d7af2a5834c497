"""Compares a continued run with the undisturbed one, bit for bit: every file, and nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mmrl.config import schema_of, validate_stored

PER_START = ("environment.json", "run.lock", "set.html", "set.md", "set.json", "set.tex", "figure.svg")
"""Files that say who ran where and when, as logs do; a set's pages have the time at which they were written."""
NOT_COMPARED = ("time/", "rate/", "memory/", "endpoint/")
"""Metric families that a clock or the machine decides; all others are bit-equal on the same inputs."""
WANDB = re.compile(r"tmp/[^/]*wandb-(media|artifacts)(/|$)")


def comparable(metrics: Mapping[str, object]) -> dict[str, object]:
    """`metrics` without times, rates and memory: what an interrupted and an uninterrupted run share bit for bit.

    NaN becomes the string "nan", so that two records compare with `==`.
    """
    return {
        key: "nan" if isinstance(value, float) and math.isnan(value) else value
        for key, value in metrics.items()
        if not key.startswith(NOT_COMPARED)
    }


def differences(expected: Path, actual: Path) -> list[str]:
    """One sentence for each file that differs; empty when the two folders hold the same."""
    names = [_names(expected), _names(actual)]
    found = [f"{name}: is missing" for name in sorted(names[0] - names[1])]
    found += [f"{name}: should not be there" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        one, two = expected / name, actual / name
        if (
            one.is_dir()
            or two.is_dir()
            or one.name in PER_START
            or one.suffix == ".log"
            or one.read_bytes() == two.read_bytes()
        ):
            continue
        if problem := _problem(one, two):
            found.append(f"{name}: {problem}")
    return found


def _names(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_socket()}
    # In TMPDIR a process that was killed while it imported wandb leaves that library's folders.
    return {name for name in names if not WANDB.match(name)}


def _problem(one: Path, two: Path) -> str:
    """Compare two files of different bytes by their contents; empty for equal ones."""
    if one.name == "report.html":
        return "" if two.read_text().rstrip().endswith("</html>") else "is not a whole page"
    if one.name == "examples.jsonl":
        # By split and id, as mmrl reads it: what was lost is appended again, under an id that changed it stays unused.
        return "" if _examples(one).items() <= _examples(two).items() else "has not the same examples"
    read = _tensors if one.suffix in (".pt", ".pth", ".bin") else CONTENTS.get(one.name)
    if read is None:
        return f"{one.stat().st_size} and {two.stat().st_size} bytes differ"
    return "" if _equal(read(one), read(two)) else "its contents differ"


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _examples(path: Path) -> dict[tuple[str, str], Any]:
    return {(line["split"], line["id"]): line for line in _lines(path)}


def _config(path: Path) -> Any:
    """As mmrl reads it: a key whose line was lost has its default."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    read = validate_stored(schema_of(config), config).model_dump()
    # Without the digest of what it started from: checkpoints of equal tensors have files of other bytes.
    return {**read, "start": {**(read.get("start") or {}), "weights": None}}


def _tensors(path: Path) -> Any:
    import torch  # not above: tests without torch use `comparable`

    # Written by this harness's runs a moment ago: whole pickles are no danger here.
    return torch.load(path, weights_only=False)


def _json_without(*keys: str) -> Callable[[Path], Any]:
    """Reads a JSON file without keys that a clock, a digest of such a file or the number of starts decides."""
    return lambda path: _without(json.loads(path.read_text()), keys)


CONTENTS: dict[str, Callable[[Path], Any]] = {
    "metrics.jsonl": lambda path: [comparable(line) for line in _lines(path)],
    "summary.json": _json_without("seconds", "finished"),
    "index.json": _json_without("build_seconds"),
    "complete.json": _json_without("files", "sha256"),
    # transformers' account of progress, counted from where it was started
    "trainer_state.json": _json_without("epoch"),
    "memo.jsonl": lambda path: sorted(path.read_text(encoding="utf-8").splitlines()),
    "config.yaml": _config,
}
"""Files of which some keys, the order or the spelling may differ -> reads what must be equal."""


def _without(value: Any, keys: tuple[str, ...]) -> Any:
    """A JSON object without some keys, in lists of objects too: what each stage of a run took."""
    if isinstance(value, list):
        return [_without(item, keys) for item in value]
    if isinstance(value, dict):
        return {k: _without(v, keys) if isinstance(v, list) else v for k, v in value.items() if k not in keys}
    return value


def _equal(one: Any, two: Any) -> bool:
    import numpy as np
    import torch

    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and np.array_equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(_equal(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(_equal, one, two))
    if hasattr(one, "to_dict"):
        return bool(one.to_dict() == two.to_dict())
    return bool(one == two)
