"""One schema per task, engine and retriever: a key of another one is refused by name, with the names that have it."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from mmrl.cli.configs import train_configs
from mmrl.cli.hydra import composed
from mmrl.cli.overrides import read_line
from mmrl.config import (
    ALGO_SCHEMAS,
    ENGINE_SCHEMAS,
    RETRIEVER_SCHEMAS,
    TASK_SCHEMAS,
    EvalCommandConfig,
    TrainCommandConfig,
    validate,
)
from mmrl.config.tasks import BUILT_IN, PluginTaskConfig, TaskConfig
from mmrl.engines import ENGINES
from mmrl.errors import ConfigError
from mmrl.system.conf import options
from mmrl.tasks import TASKS


@cache
def composed_once(command: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    return composed(command, list(arguments))


def raw_of(*arguments: str, command: str = "train") -> dict[str, Any]:
    return deepcopy(composed_once(command, arguments))


def problems_of(raw: dict[str, Any]) -> list[str]:
    try:
        validate(TrainCommandConfig, raw)
    except ConfigError as error:
        return error.problems
    return []


def foreign(schemas: Any) -> list[tuple[str, str]]:
    keys = {key for schema in schemas.values() for key in schema.model_fields}
    return sorted((name, key) for name, schema in schemas.items() for key in keys - set(schema.model_fields))


@pytest.mark.parametrize(("name", "key"), foreign({name: TASK_SCHEMAS[name] for name in BUILT_IN}))
def test_a_key_of_another_task_is_refused_by_name(name: str, key: str) -> None:
    raw = raw_of()
    raw["task"] = {"name": name, key: 1}
    (problem,) = problems_of(raw)
    users = ", ".join(other for other, schema in TASK_SCHEMAS.items() if key in schema.model_fields)
    assert problem == f"task.{key}: got 1, which has no effect with task {name}; it is an option of {users}"


@pytest.mark.parametrize(("name", "key"), foreign(ENGINE_SCHEMAS))
@pytest.mark.parametrize("through", ["engine", "hardware"])
def test_a_key_of_another_engine_is_refused_by_name(name: str, key: str, through: str) -> None:
    raw = raw_of()
    raw["engine"] = {"name": name if through == "engine" else "auto", key: 1}
    raw["hardware"]["engine"] = name
    (problem,) = problems_of(raw)
    assert problem.startswith(f"engine.{key}: got 1, which has no effect with engine={name}; it is an option of ")


@pytest.mark.parametrize(("name", "key"), foreign(RETRIEVER_SCHEMAS))
def test_a_key_of_another_retriever_is_refused_by_name(name: str, key: str) -> None:
    raw = raw_of()
    raw["task"]["retriever"] = {"name": name, key: 1} | ({"url": "http://h"} if name == "remote" else {})
    (problem,) = problems_of(raw)
    users = ", ".join(other for other, schema in RETRIEVER_SCHEMAS.items() if key in schema.model_fields)
    said = f"got 1, which has no effect with task.retriever.name={name}; it is an option of {users}"
    assert problem == f"task.retriever.{key}: {said}"


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["task.max_tokns=3"], "task.max_tokns: unknown key; did you mean 'max_tokens'? (valid here: corpus, "),
        (["task.data.trian=x"], "task.data.trian: unknown key; did you mean 'train'? (valid here: dev, "),
        (["task.retriever.top=3"], "task.retriever.top: unknown key; did you mean 'top_k'? (valid here: b, "),
        (["engine.lop=hf"], "engine.lop: unknown key; did you mean 'loop'? (valid here: batch_tokens, "),
        (["task=papillon", "task.judge.modl=x"], "task.judge.modl: unknown key; did you mean 'model'? (valid here: "),
        (["engine.endpoint.url=http://x"], "engine.endpoint.url: got http://x, which has no effect with engine="),
        (["task.retriever.name=bm26", "task.retriever.k1=2.0"], "task.retriever.name: got 'bm26', expected 'bm25', "),
        (["task.retriever.name=remote"], "task.retriever.url: missing, a value is required"),
        (["task.retriever={name: remote, url: x}"], "task.retriever.url: got 'x', expected http://HOST"),
        (
            ["task.retriever.retries=9"],
            "task.retriever.retries: got 9, which has no effect with task.retriever.name=bm25",
        ),
        (["engine.name=vlm"], "engine.name: got 'vlm', expected 'auto', "),
        (["engine=vllm_server", "hardware.processes=x"], "hardware.processes: got 'x', expected"),
    ],
)
def test_a_mistake_below_a_chosen_schema_has_one_sentence(arguments: list[str], starts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_configs(read_line(arguments))
    (problem,) = caught.value.problems
    assert problem.startswith(starts)


@pytest.mark.parametrize(
    ("task", "algo"), [(task, "grpo") for task in options("task")] + [("hotpotqa", algo) for algo in ALGO_SCHEMAS]
)
def test_every_task_and_every_algorithm_composes(task: str, algo: str) -> None:
    config = validate(TrainCommandConfig, raw_of(f"task={task}", f"algo={algo}"))
    assert type(config.task) is TASK_SCHEMAS[config.task.name]
    assert type(config.algo) is ALGO_SCHEMAS[config.algo.name]


@pytest.mark.parametrize("group", ["model", "hardware", "engine"])
def test_every_choice_of_a_group_composes(group: str) -> None:
    for choice in options(group):
        path = ("++model.path=a/b",) if choice == "hf" else ()  # the one that leaves it to the user
        validate(TrainCommandConfig, raw_of(f"{group}={choice}", *path))
        validate(EvalCommandConfig, raw_of(f"{group}={choice}", "policy=tiny", command="eval"))


def test_schemas_have_the_names_of_what_they_configure() -> None:
    assert set(BUILT_IN) <= set(TASKS) and set(ENGINE_SCHEMAS) == set(ENGINES)


def test_a_plugin_without_a_schema_may_read_any_key_and_one_with_a_schema_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = raw_of()
    raw["task"] = {"name": "routing", "max_turns": 2, "labels": "x.json"}
    assert type(validate(TrainCommandConfig, raw).task) is PluginTaskConfig

    class RoutingConfig(TaskConfig):
        depth: int = 3

    monkeypatch.setitem(TASK_SCHEMAS, "routing", RoutingConfig)
    raw["task"] = {"name": "routing", "depth": 5}
    assert validate(TrainCommandConfig, raw).task.model_dump()["depth"] == 5
    raw["task"] = {"name": "routing", "max_turns": 2}
    (problem,) = problems_of(raw)
    assert problem.startswith("task.max_turns: got 2, which has no effect with task routing; it is an option of ")
    raw["task"] = {"name": "hotpotqa", "depth": 2}
    assert problems_of(raw) == ["task.depth: got 2, which has no effect with task hotpotqa; it is an option of routing"]
