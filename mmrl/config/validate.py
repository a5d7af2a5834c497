"""The one door to a validated config: mapping in, frozen models out, all problems at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mmrl.config.algo import ALGO_SCHEMAS, MmgrpoConfig
from mmrl.config.root import EvalCommandConfig, RootConfig, TrainCommandConfig
from mmrl.config.shipped import shipped_for
from mmrl.errors import ConfigError, nearest, unknown

ConfigT = TypeVar("ConfigT", bound=RootConfig)
RENAMED = {"algo.failure_score": "algo.format_failure_best"}
"""Keys of former versions, and what they are called now (task.failure_score is another thing: a rollout's reward)."""


def validate(schema: type[ConfigT], raw: Mapping[str, Any]) -> ConfigT:
    """Validate a composed mapping against `schema` (`TrainCommandConfig` or `EvalCommandConfig`).

    Raises:
        ConfigError: every problem in one go, each starting with the path that the user would type.
    """
    problems: list[str] = []
    values = dict(raw)
    if "algo" in schema.model_fields:
        values["algo"] = algo_section(values.get("algo"), problems)
    try:
        config = schema.model_validate(values)
    except ValidationError as error:
        problems += explain(schema, error, already=("algo",) if problems else ())
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return _with_shipped(config)


def _with_shipped(config: ConfigT) -> ConfigT:
    """`tiny` replaced by the shipped model that plays the task, wherever weights are named."""
    shipped = shipped_for(config.task.name)
    changed: dict[str, Any] = {}
    if config.model.path == "tiny":
        changed["model"] = config.model.model_copy(update={"path": shipped})
    if isinstance(config, EvalCommandConfig) and config.policy == "tiny":
        changed["policy"] = shipped
    algo = config.algo if isinstance(config, TrainCommandConfig) else None
    if isinstance(algo, MmgrpoConfig) and algo.teachers:
        teachers = [t.model_copy(update={"policy": shipped}) if t.policy == "tiny" else t for t in algo.teachers]
        changed["algo"] = algo.model_copy(update={"teachers": tuple(teachers)})
    return config.model_copy(update=changed) if changed else config


def algo_section(raw: Any, problems: list[str]) -> Any:
    """Validate `algo` with its own schema; appends to `problems`."""
    name = raw.get("name") if isinstance(raw, Mapping) else None
    if name not in ALGO_SCHEMAS:
        problems.append(unknown("algo", name, ALGO_SCHEMAS))
        return raw
    algo_schema = ALGO_SCHEMAS[str(name)]
    try:
        return algo_schema.model_validate(dict(raw))
    except ValidationError as error:
        problems += explain(algo_schema, error, prefix=("algo",))
        return raw


def explain(
    schema: type[BaseModel], error: ValidationError, prefix: tuple[str, ...] = (), already: Collection[str] = ()
) -> list[str]:
    """One sentence per pydantic error, in the words of the command line."""
    sentences = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        if location and location[0] in already:
            continue
        path = ".".join([*prefix, *location])
        kind = item["type"]
        if kind == "extra_forbidden":
            sentences.append(_unknown_key(schema, prefix, location, path))
        elif kind == "missing":
            sentences.append(f"{path}: missing, a value is required")
        elif kind == "value_error":
            # A section's own check names the key itself, a field's own check starts with what it got.
            before = f"{'.'.join(prefix)}." if prefix else ""
            for message in item["ctx"]["error"].args:
                sentences.append(f"{path}: {message}" if message.startswith("got ") else f"{before}{message}")
        else:
            sentences.append(f"{path}: got {item['input']!r}, expected {_expected(kind, item['msg'], path)}")
    return sentences


def _expected(kind: str, message: str, path: str) -> str:
    """What pydantic expected, in the words of the command line instead of Python's."""
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return f"a section: {path}.KEY=VALUE"
    if kind == "tuple_type":
        return f"a list: {path}=[a,b]"
    if kind == "bool_type":
        return "true or false"
    return message.removeprefix("Input should be ").removeprefix("a valid ")


def _unknown_key(schema: type[BaseModel], prefix: tuple[str, ...], location: list[str], path: str) -> str:
    if path in RENAMED:
        return f"{path}: is called {RENAMED[path]} now; use that name"
    fields = _fields_at(schema, location[:-1])
    if prefix == ("algo",):
        users = [
            name
            for name, other in sorted(ALGO_SCHEMAS.items())
            if location[-1] in other.model_fields and len(location) == 1
        ]
        if users:
            chosen = next((name for name, other in ALGO_SCHEMAS.items() if other is schema), "this algorithm")
            return f"{path}: has no effect with {chosen}; it is an option of {', '.join(users)}"
    return f"{path}: unknown key{nearest(location[-1], fields)} (valid here: {', '.join(sorted(fields))})"


def _fields_at(schema: type[BaseModel], location: list[str]) -> list[str]:
    """Field names of the section at `location` below `schema`; a mapping of sections takes one part for its key."""
    parts = list(location)
    while parts:
        field = schema.model_fields.get(parts.pop(0))
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        mapped = [get_args(c)[1] for c in candidates if get_origin(c) is dict]
        if mapped and parts:
            parts.pop(0)
        models = [c for c in [*mapped, *candidates] if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return []
        schema = models[0]
    return list(schema.model_fields)
