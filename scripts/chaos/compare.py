"""Whether a continued run is the undisturbed one, bit for bit: every file, and nothing else."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

PAGES = ("set.html", "set.md", "set.json", "figure.svg")
"""Of a set, with the time at which they were made."""
PER_START = ("environment.json", "run.lock", "optimiser.log", *PAGES)
"""Files that say who ran where and when."""
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
        if one.is_dir() or two.is_dir() or name.rpartition("/")[2] in PER_START:
            continue
        if one.read_bytes() != two.read_bytes() and (problem := _reader(name)(one, two)):
            found.append(f"{name}: {problem}")
    return found


def _names(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_socket()}
    # In TMPDIR a process that was killed while it imported wandb leaves that library's own folders.
    names = {name for name in names if not WANDB.match(name)}
    return names


def _reader(name: str) -> Callable[[Path, Path], str]:
    """What tells two files of different bytes apart; it returns a sentence, empty for equal contents."""
    last = name.rpartition("/")[2]
    if last == "metrics.jsonl":
        return _metrics
    if last == "digests.jsonl":
        return lambda one, two: "" if _ledger(one) == _ledger(two) else "says another digest of some file"
    if last == "examples.jsonl":
        return lambda one, two: "" if _examples(one) == _examples(two) else "holds other examples"
    if name.endswith("prompts/rollouts.jsonl"):
        return lambda one, two: "" if sorted(_lines(one)) == sorted(_lines(two)) else "holds other rollouts"
    if last in WITHOUT:
        return lambda one, two: _objects(one, two, WITHOUT[last])
    if last == "config.yaml":
        return lambda one, two: "" if _config(one) == _config(two) else "other settings"
    if last == "report.html":
        return _page
    if last.endswith((".pt", ".pth", ".bin")):
        return _tensors
    return lambda one, two: f"{one.stat().st_size} and {two.stat().st_size} bytes differ"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _examples(path: Path) -> dict[tuple[str, str], Any]:
    """By split and id, as mmrl reads it: what was lost is appended again, and what is there twice is the same."""
    return {(line["split"], line["id"]): line for line in map(json.loads, _lines(path))}


def _config(path: Path) -> dict[str, Any]:
    """Without the digest of what it started from: checkpoints of equal tensors have files of other bytes."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    return _without_nulls({**config, "start": {**(config.get("start") or {}), "weights": None}})


def _without_nulls(value: Any) -> Any:
    """A null is the default of its key, which stands also where the key is missing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


WITHOUT: dict[str, tuple[str, ...]] = {
    "summary.json": ("seconds", "finished"),
    "index.json": ("build_seconds",),
    "complete.json": ("files", "sha256"),
    "extra.json": ("run",),
    # transformers' own account of progress, counted from where it was started
    "trainer_state.json": ("epoch",),
}
"""JSON files, and their keys that a clock, a digest of such a file or the number of starts decides."""


def _ledger(path: Path) -> dict[str, tuple[int, str]]:
    """The last digest of each file; one that is said twice is the same."""
    lines = [json.loads(line) for line in _lines(path)]
    return {line["file"]: (line["bytes"], line["sha256"]) for line in lines}


def _metrics(one: Path, two: Path) -> str:
    lines = [[comparable(json.loads(line)) for line in _lines(path)] for path in (one, two)]
    for number, (expected, actual) in enumerate(itertools.zip_longest(*lines), start=1):
        if expected is None or actual is None:
            return f"{len(lines[1])} lines, expected {len(lines[0])}"
        if expected != actual:
            keys = [k for k in {*expected, *actual} if expected.get(k, "no") != actual.get(k, "no")]
            return f"line {number} differs in {', '.join(sorted(keys)[:5])}"
    return ""


def _objects(one: Path, two: Path, without: tuple[str, ...]) -> str:
    expected, actual = (_kept(json.loads(path.read_text()), without) for path in (one, two))
    keys = [k for k in {*expected, *actual} - set(without) if expected.get(k) != actual.get(k)]
    return f"differs in {', '.join(sorted(keys))}" if keys else ""


def _kept(value: Any, without: tuple[str, ...]) -> Any:
    """A JSON value without some keys, in lists of objects too: what each stage of a run took."""
    if isinstance(value, list):
        return [_kept(item, without) for item in value]
    return (
        {k: _kept(v, without) if isinstance(v, list) else v for k, v in value.items() if k not in without}
        if isinstance(value, dict)
        else value
    )


def _page(one: Path, two: Path) -> str:
    return "" if two.read_text().rstrip().endswith("</html>") else "is not a whole page"


def _tensors(one: Path, two: Path) -> str:
    import torch

    # Written by this harness's own runs a moment ago: whole pickles are no danger here.
    expected, actual = (torch.load(path, weights_only=False) for path in (one, two))
    return "" if _equal(expected, actual) else "its contents differ"


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
