"""One schema per task, engine and retriever: a key of another one is refused by name, with the names that have it."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from mmrl.cli.hydra import composed
from mmrl.config import ENGINE_SCHEMAS, RETRIEVER_SCHEMAS, TASK_SCHEMAS, RlRunConfig, validate
from mmrl.config.tasks import BUILT_IN, PluginTaskConfig, TaskConfig
from mmrl.config.validate import CHOICES
from mmrl.engines import ENGINES
from mmrl.errors import ConfigError
from mmrl.tasks import TASKS


@cache
def composed_once() -> dict[str, Any]:
    return composed("train", [])


def raw_of() -> dict[str, Any]:
    return deepcopy(composed_once())


def problems_of(raw: dict[str, Any]) -> list[str]:
    try:
        validate(RlRunConfig, raw)
    except ConfigError as error:
        return error.problems
    return []


def foreign(schemas: Any) -> list[tuple[str, str]]:
    keys = {key for schema in schemas.values() for key in schema.model_fields}
    return sorted((name, key) for name, schema in schemas.items() for key in keys - set(schema.model_fields))


@pytest.mark.parametrize(
    ("section", "name", "key", "chosen"),
    [
        *(("task", *pair, "task ") for pair in foreign({name: TASK_SCHEMAS[name] for name in BUILT_IN})),
        *(("task.retriever", *pair, "task.retriever.name=") for pair in foreign(RETRIEVER_SCHEMAS)),
        *((through, *pair, "engine=") for pair in foreign(ENGINE_SCHEMAS) for through in ("engine", "hardware.engine")),
    ],
)
def test_a_key_of_another_choice_is_refused_by_name(section: str, name: str, key: str, chosen: str) -> None:
    raw, options = raw_of(), {"name": name, key: 1} | ({"url": "http://h"} if name == "remote" else {})
    if section == "hardware.engine":
        section, raw["hardware"]["engine"], options["name"] = "engine", name, "auto"
    (raw["task"] if section == "task.retriever" else raw)[section.rpartition(".")[2]] = options
    (problem,) = problems_of(raw)
    users = ", ".join(other for other, schema in CHOICES[section].items() if key in schema.model_fields)
    assert problem == f"{section}.{key}: got 1, which has no effect with {chosen}{name}; it is an option of {users}"


@pytest.mark.parametrize("name", ["agent", "dspy"])
def test_names_of_modules_fit_into_names_of_files_and_metrics(name: str) -> None:
    raw = raw_of()
    raw["task"] = {"name": name, "modules": ("a b", "planner", "x/y", "..", "step_1.read-only")}
    expected = "expected letters, digits, '_', '.' and '-', a letter, digit or '_' first"
    assert f"task.modules: got 'a b', 'x/y', '..', {expected}" in problems_of(raw)


def test_schemas_have_the_names_of_what_they_configure() -> None:
    assert set(BUILT_IN) <= set(TASKS) and set(ENGINE_SCHEMAS) == set(ENGINES)


def test_a_plugin_without_a_schema_may_read_any_key_and_one_with_a_schema_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = raw_of()
    raw["task"] = {"name": "routing", "max_turns": 2, "labels": "x.json"}
    assert type(validate(RlRunConfig, raw).task) is PluginTaskConfig

    class RoutingConfig(TaskConfig):
        depth: int = 3

    monkeypatch.setitem(TASK_SCHEMAS, "routing", RoutingConfig)
    raw["task"] = {"name": "routing", "depth": 5}
    assert validate(RlRunConfig, raw).task.model_dump()["depth"] == 5
    raw["task"] = {"name": "routing", "max_turns": 2}
    (problem,) = problems_of(raw)
    assert problem.startswith("task.max_turns: got 2, which has no effect with task routing; it is an option of ")
    raw["task"] = {"name": "hotpotqa", "depth": 2}
    assert problems_of(raw) == ["task.depth: got 2, which has no effect with task hotpotqa; it is an option of routing"]
