"""The file of a comparison, `conf/compare/<name>.yaml`: algorithms, tasks, seeds and the settings of their runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from mmrl.config.base import Section
from mmrl.config.validate import explain
from mmrl.errors import ConfigError


class ComparePart(Section):
    """Algorithms that are compared with each other on each of some tasks."""

    task: tuple[str, ...] = Field(min_length=1)
    algo: tuple[str, ...] = Field(min_length=1)
    settings: tuple[str, ...] = Field((), description="overrides of every run of the part")


class ComparePlan(Section):
    """What `mmrl compare plan=NAME` runs; settings are overrides as on the command line, later ones win."""

    seed: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    settings: tuple[str, ...] = Field((), description="overrides of every run")
    parts: tuple[ComparePart, ...] = Field(min_length=1)
    algo: Mapping[str, tuple[str, ...]] = Field({}, description="overrides of every run of an algorithm")


def read_plan(path: Path) -> ComparePlan:
    """Read and validate a comparison file.

    Raises:
        ConfigError: every problem in it, with the file's name.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"plan: {path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"plan: {path}: got {type(raw).__name__}, expected a mapping with parts, seed and settings")
    try:
        plan = ComparePlan.model_validate(_tuples(raw))
    except ValidationError as error:
        raise ConfigError(f"plan: {path}: {problem}" for problem in explain(ComparePlan, error)) from None
    known = {algo for part in plan.parts for algo in part.algo}
    stray = [f"plan: {path}: algo.{name}: no part runs this algorithm" for name in plan.algo if name not in known]
    if stray:
        raise ConfigError(stray)
    return plan


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
