"""The one door to a validated config: mapping in, frozen models out, all problems at once."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mmrl.config.algo import ALGO_SCHEMAS, AlgoConfig
from mmrl.config.base import Section, flattened, literal, quote_value, shipped_for, under_tiny, value_at
from mmrl.config.engines import ENGINE_SCHEMAS
from mmrl.config.prompts import PROMPT_SCHEMAS
from mmrl.config.retriever import RETRIEVER_SCHEMAS
from mmrl.config.schema import Algo, HardwareConfig, RlRunConfig, RootConfig
from mmrl.config.sft import SFT, SftConfig
from mmrl.config.tasks import TASK_SCHEMAS, task_schema
from mmrl.errors import ConfigError, nearest, refuse
from mmrl.secrets import holder, reveal, secret_name, user_in_address

ConfigT = TypeVar("ConfigT", bound=RootConfig)
CHOICES: Mapping[str, Mapping[str, type[BaseModel]]] = {
    "algo": ChainMap[str, type[Any]](ALGO_SCHEMAS, PROMPT_SCHEMAS, {SFT: SftConfig}),  # live: plugins add to it
    "task": TASK_SCHEMAS,
    "task.retriever": RETRIEVER_SCHEMAS,
    "engine": ENGINE_SCHEMAS,
}
"""Sections whose `name` picks their schema."""
_UNFIT = re.compile(r"(?<!\\)(\\\\)*\\(ud[89a-f]|x00)")
"""A lone surrogate or a NUL, as `repr` writes it."""
IN_A_NAME = re.compile(r"\s*\w+: ")
"""What Hydra reads as a value of the name before the first colon."""
COLON = r"; a colon in a name is typed \:"


def validate(schema: type[ConfigT], raw: Mapping[str, object], *, stored: bool = False) -> ConfigT:
    """Validate a composed mapping, or the `stored` one of a run, against `RlRunConfig` or `EvalRunConfig`.

    Raises:
        ConfigError: every problem in one go, each starting with the path that the user would type.
    """
    problems = _secrets_in(raw)
    if unfit := [path for path, value in flattened(raw).items() if _UNFIT.search(repr((path, value)))]:
        # pydantic could not even name such a key
        raise ConfigError(
            problems + [f"{path}: got a text with half a character or a NUL, which no file can hold" for path in unfit]
        )
    problems += [] if stored else under_tiny(value_at(raw, "model.name"), value_at(raw, "model.path"))
    try:
        config = schema.model_validate(dict(raw))
    except ValidationError as error:
        # A secret is reported already, and pydantic's sentence might repeat its value.
        named = tuple(f"{problem.partition(': ')[0]}: " for problem in problems)
        problems += [sentence for sentence in explain(schema, error, raw=raw) if not sentence.startswith(named)]
    refuse(problems)
    return _with_shipped(config)


def _secrets_in(raw: Mapping[str, object]) -> list[str]:
    """Report secrets among the values, which every run directory would keep, and where they belong."""
    problems = []
    for path, value in flattened(raw).items():
        key, text = path.rpartition(".")[2], literal(value)
        why = f"which every run directory would keep; put it into an environment variable: {path}=${{oc.env:NAME}}"
        if text in ("", "null") or holder(text) is not None:
            continue
        if secret_name(key):
            problems.append(f"{path}: got a text that {key} says is a secret, {why}, or of an endpoint key_env=NAME")
        elif user_in_address(text):
            problems.append(f"{path}: got an address with a user or password, {why}")
    return problems


def validate_stored(schema: type[ConfigT], stored: Mapping[str, object]) -> ConfigT:
    """Validate the `config.yaml` of a run directory.

    Raises:
        ConfigError: as `validate`; an environment variable that is not set.
    """
    raw = {key: as_tuples(value) for key, value in revealed(stored).items()}
    if isinstance(engine := raw.get("engine"), dict) and engine.get("push") == "disk":
        del engine["push"]  # the only way now, which earlier versions wrote down; deleted with `mmrl.cli.gone`
    return validate(schema, raw, stored=True)


def revealed(stored: Mapping[str, object]) -> dict[str, object]:
    """Return a stored config with the values of the environment variables that it names.

    Raises:
        ConfigError: one is not set.
    """
    result, problems = {}, []
    for key, value in stored.items():
        try:
            result[key] = reveal(value)
        except KeyError as error:
            problems.append(f"{key}: the environment variable {error.args[0]} is not set, which this run was given")
    refuse(problems)
    return result


def as_tuples(value: object) -> object:
    """Convert lists to tuples and drop missing values (`???`), as strict models require."""
    if isinstance(value, dict):
        return {str(key): as_tuples(item) for key, item in value.items() if item != "???"}
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value


def _with_shipped(config: ConfigT) -> ConfigT:
    """Replace `tiny` by the shipped model that plays the task, wherever weights are named."""
    # Here and not where weights load, so that config.yaml and report name the model that was really used.
    shipped = shipped_for(config.task.name)
    changed: dict[str, object] = {}
    if config.model.path == "tiny":
        changed["model"] = config.model.model_copy(update={"path": shipped})
    if value_at(config, "policy") == "tiny":
        changed["policy"] = shipped
    algo: Any = getattr(config, "algo", None)
    if teachers := getattr(algo, "teachers", None):
        replaced = tuple(t.model_copy(update={"policy": shipped}) if t.policy == "tiny" else t for t in teachers)
        changed["algo"] = algo.model_copy(update={"teachers": replaced})
    elif distill := getattr(algo, "distill", None):
        named = {module: shipped if teacher == "tiny" else teacher for module, teacher in distill.items()}
        changed["algo"] = algo.model_copy(update={"distill": named})
    return config.model_copy(update=changed) if changed else config


class _AlgoAlone(Section):
    """The section of a config that `mmrl credit` has."""

    algo: Algo


def algo_section(raw: object) -> AlgoConfig:
    """Validate `algo` alone, by its own schema.

    Raises:
        ConfigError: every problem.
    """
    try:
        return _AlgoAlone.model_validate({"algo": raw}).algo
    except ValidationError as error:
        raise ConfigError(explain(_AlgoAlone, error, raw={"algo": raw})) from None


def explain(schema: type[BaseModel], error: ValidationError, raw: Mapping[str, object] | None = None) -> list[str]:
    """Return a sentence for each pydantic error, in the words of the command line.

    Args:
        raw: the config that was validated, for the names that choose schemas.
    """
    sentences: list[str] = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        path, kind = ".".join(parts), item["type"]
        if kind == "too_short" and sentences and sentences[-1].startswith(f"{path}."):
            continue  # its members did not pass, which is said
        if kind == "extra_forbidden":
            sentences += _unknown_key(schema, parts, item["input"], raw or {})
        elif kind == "missing":
            expected = "expected model.path=FOLDER_OR_HUB_ID" if path == "model.path" else "a value is required"
            sentences.append(f"{path}: missing, {expected}")
        elif kind == "value_error":
            # The check of a section names the key itself; the check of a field starts with "got".
            for message in item["ctx"]["error"].args:
                sentences.append(
                    f"{path}: {message}" if message.startswith("got ") else f"{path}.{message}".lstrip(".")
                )
        else:
            section = f"a section: {path}.KEY=VALUE"
            words = {"model_type": section, "dict_type": section, "tuple_type": f"a list: {path}=[a,b]"}
            words["too_short"] = f"at least {item.get('ctx', {}).get('min_length')}"
            wanted = (
                item["msg"].removeprefix("Input should be ").removeprefix("a valid ").replace("String should ", "to ")
            )
            colon = COLON if IN_A_NAME.match(str(item["input"])) else ""
            sentences.append(f"{path}: got {quote_value(item['input'])}, expected {words.get(kind, wanted)}{colon}")
    return sentences


LABELS = {"task": "task ", "engine": "engine=", "task.retriever": "task.retriever.name="}


def _unknown_key(schema: type[BaseModel], parts: list[str], value: object, raw: Mapping[str, object]) -> Iterator[str]:
    """Yield sentences for a key that is not in its section's schema."""
    path, section, key = ".".join(parts), ".".join(parts[:-1]), parts[-1]
    fields = _fields_at(schema, parts[:-1], raw)
    if fields is None:
        return  # the name that chooses the schema is wrong itself, and is reported
    owners = [name for name, other in CHOICES.get(section, {}).items() if key in other.model_fields]
    if owners:
        name, users = _chosen_name(raw, section), ", ".join(owners)
        # A sentence for each key that was typed: `task.judge.url`, not the section around it.
        for leaf, leaf_value in flattened({path: value}).items():
            got = "" if section == "algo" else f"got {literal(leaf_value)}, which "
            yield f"{leaf}: {got}has no effect with {LABELS.get(section, '')}{name}; it is an option of {users}"
    else:
        hint = nearest(key, fields) if section else meant_keys(key) or nearest(key, fields)
        yield f"{path}: unknown key{hint} (valid here: {', '.join(sorted(fields))})"


def meant_keys(key: str) -> str:
    """Return `"; did you mean train.steps?"` for a key that was typed without its section, or an empty string."""
    keys = []
    for section, field in RlRunConfig.model_fields.items():
        kinds = CHOICES.get(section, {}).values() or sections_of(field.annotation)
        if any(key in kind.model_fields for kind in kinds):
            keys.append(f"{section}.{key}")
    return f"; did you mean {' or '.join(keys)}?" if keys else ""


def _chosen_name(raw: Mapping[str, object], path: str) -> str:
    """Return the name that picks the schema at `path`, as far as the mapping gives one."""
    section = value_at(raw, path)
    # the defaults of the two sections whose name may be left out
    wanted = {"engine": "auto", "task.retriever": "bm25"}.get(path)
    name = section.get("name", wanted) if isinstance(section, Mapping) else wanted
    if path == "engine" and name == "auto":
        hardware = value_at(raw, "hardware")
        fallback = HardwareConfig.model_fields["engine"].default
        name = hardware.get("engine", fallback) if isinstance(hardware, Mapping) else fallback
    return str(name)


def _fields_at(schema: type[BaseModel], location: Iterable[str], raw: Mapping[str, object]) -> list[str] | None:
    """Return the field names of the section at `location` below `schema`; None if its schema is not known."""
    path = ""
    for part in location:
        path = f"{path}.{part}".lstrip(".")
        if path in CHOICES:
            # the annotation names the base class; the config's name says which subclass validated
            name = _chosen_name(raw, path)
            choice = task_schema(name) if path == "task" else CHOICES[path].get(name)
            if choice is None:
                return None
            schema = choice
        elif part in schema.model_fields:  # else a key of a mapping of sections, or a number in a list of them
            schema = next(sections_of(schema.model_fields[part].annotation), schema)
    return [field.alias or name for name, field in schema.model_fields.items()]


def has_free_keys(path: str) -> bool:
    """True for a key whose value is a mapping with names of the user's own: `algo.distill`, `task.environment`."""
    kinds: list[Any] = [RlRunConfig]
    parts = path.split(".")
    for depth, part in enumerate(parts, start=1):
        kinds = [*CHOICES.get(".".join(parts[: depth - 1]), {}).values()] or kinds
        kinds = [below for kind in kinds for below in _annotations_below(kind, part)]
    return any(_mappings_in(kind) for kind in kinds)


def _annotations_below(annotation: Any, key: str) -> Iterator[Any]:
    """Yield what a key may hold in a value of some type: a field of a section, or the values of a mapping."""
    for kind in sections_of(annotation):
        if key in kind.model_fields:
            yield kind.model_fields[key].annotation
    yield from (get_args(mapping)[1] for mapping in _mappings_in(annotation))


def _mappings_in(annotation: Any) -> list[Any]:
    own = [annotation] if get_origin(annotation) is dict else []
    return own or [mapping for argument in get_args(annotation) for mapping in _mappings_in(argument)]


def sections_of(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the schemas in a type: those of optional sections, mappings and lists are among its arguments."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_of(argument)
