"""What every option does: for each leaf of each config section an observation that its value changes, or a refusal.

    acts("algo.*", "clip", gradients, 0.2, 0.01, also…)     two values, one observation, which must differ
    refused("eval command", "eval.every", 3, "it is an option of mmrl train")

An observation builds the piece of mmrl that consumes the value and says what came out of it: it may not look at the
config itself. `test_no_silent_option.py` runs all of them, and fails for a leaf that has no entry.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import get_annotations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from pydantic import BaseModel

from mmrl.config import (
    ALGO_SCHEMAS,
    ENGINE_SCHEMAS,
    RETRIEVER_SCHEMAS,
    TASK_SCHEMAS,
    EvalCommandConfig,
    TrainCommandConfig,
    TrainConfig,
)
from mmrl.config.other_stages import PROMPT_SCHEMAS, SftConfig
from mmrl.config.tasks import BUILT_IN
from mmrl.config.validate import sections_of
from mmrl.tasks import TASKS
from tests.fuzz.data import RECORDS
from tests.helpers.programs import saved

Options = dict[str, Any]
Observe = Callable[[str, Options, Path], object]
"""(name of the choice, its options with dots for sections below, an empty folder) -> anything that can be compared."""
CHOSEN = ("task", "algo", "engine", "retriever")
"""Sections with a schema for each name, which are listed under that name."""
SECTIONS: Mapping[str, type[BaseModel]] = {
    **{f"algo.{name}": schema for name, schema in ALGO_SCHEMAS.items()},
    **{f"task.{name}": TASK_SCHEMAS[name] for name in BUILT_IN},
    **{f"engine.{name}": schema for name, schema in ENGINE_SCHEMAS.items()},
    **{f"retriever.{name}": schema for name, schema in RETRIEVER_SCHEMAS.items()},
    **{f"prompts.{name}": schema for name, schema in PROMPT_SCHEMAS.items()},
    "supervised.algo": SftConfig,
    "supervised.train": TrainConfig,
    "train command": TrainCommandConfig,
    "eval command": EvalCommandConfig,
}
SHARED = ("top_k", "dedup", "snippet_words")
"""Keys of every retriever that tasks read themselves, so each task that searches has them among its own leaves."""


@dataclass(frozen=True, kw_only=True)
class Acts:
    """A leaf whose value changes something."""

    observe: Observe
    values: tuple[Any, Any]
    also: Options
    shared: bool
    """Whether what is observed knows the class that declares the key and no more: once for all its sections."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A leaf that has no effect in this section and is refused when it is typed."""

    typed: str
    """As on the command line."""
    starts: str
    """How the sentence begins."""
    says: str


Effect = Acts | Refused
EFFECTS: dict[tuple[str, str], Effect] = {}


def leaves_of(schema: type[BaseModel]) -> Iterator[str]:
    """Paths of everything that can be set in a section; sections below are walked through."""
    for key, field in schema.model_fields.items():
        below = next(sections_of(field.annotation), None)
        if key == "retriever":
            yield from (f"retriever.{shared}" for shared in SHARED)
        elif key in CHOSEN and below is not None:
            continue
        elif below is None:
            yield key
        else:
            yield from (f"{key}.{leaf}" for leaf in leaves_of(below))


def all_leaves() -> list[tuple[str, str]]:
    """(section, key) of every option there is."""
    # the name of a chosen section is what picks its schema, and with it everything that is listed here
    return [
        (section, leaf)
        for section, schema in SECTIONS.items()
        for leaf in leaves_of(schema)
        if not (leaf == "name" and "." in section)
    ]


def acts(
    sections: str, keys: str, observe: Observe, one: Any, other: Any, *, shared: bool = False, **also: Any
) -> None:
    """Register an effect.

    Args:
        shared: see `Acts`.
        sections: patterns, spaces between; those without the key are passed over, and one at least must have it.
        also: other options of the section, under both values; a dot is written as two underscores.
    """
    options = {key.replace("__", "."): value for key, value in also.items()}
    _register(sections, keys, Acts(observe=observe, values=(one, other), also=options, shared=shared))


def same_code(leaf: tuple[str, str]) -> object:
    """Equal for leaves whose effect is the same code on the same schema, so that one of them is observed for all."""
    (section, key), effect = leaf, EFFECTS[leaf]
    schema, (group, _, name) = SECTIONS[section], section.partition(".")
    if isinstance(effect, Acts) and effect.shared:
        first = key.partition(".")[0]
        schema = next(kind for kind in reversed(schema.__mro__) if first in get_annotations(kind))
        return id(effect), key, schema
    return id(effect), key, schema, TASKS[name] if group == "task" else section


def refused(sections: str, keys: str, value: str, says: str, typed: str = "", starts: str = "") -> None:
    """Register that keys are refused.

    Args:
        value: as typed.
        says: a part of the sentence.
        typed: the key as typed, where it has a name of the user's in it.
        starts: how the sentence begins, where that is not the key.
    """
    for key in keys.split():
        for section in sections.split(";"):
            path = f"{section.partition('.')[0]}.{key}" if "." in section else key
            effect = Refused(typed=f"{typed or path}={value}", starts=starts or path, says=says)
            _register(section, key, effect)


def _register(sections: str, keys: str, effect: Effect) -> None:
    for key in keys.split():
        matching = [
            (name, key)
            for name, schema in SECTIONS.items()
            if any(fnmatchcase(name, pattern) for pattern in sections.split(";")) and key in set(leaves_of(schema))
        ]
        assert matching, f"no section of '{sections}' has the key '{key}'"
        for leaf in matching:
            assert leaf not in EFFECTS, f"{leaf} has an effect already"
            EFFECTS[leaf] = effect


def nested(options: Mapping[str, Any]) -> Options:
    """`{"data.train": x}` as `{"data": {"train": x}}`."""
    made: Options = {}
    for path, value in options.items():
        *above, key = path.split(".")
        at = made
        for part in above:
            at = at.setdefault(part, {})
        at[key] = value
    return made


class Body(httpx.AsyncByteStream):
    """Not read yet, as a reply comes from a network."""

    def __init__(self, content: object):
        self.content = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.content


@dataclass
class Busy(ABC):
    """A server that stands where httpx sends; how many requests are under way at it, and whether each takes its time,
    is what shows what `key` does."""

    key: str
    in_flight: int = 0
    most: int = 0

    @abstractmethod
    async def send(self, request: httpx.Request) -> httpx.Response: ...

    def in_place(self) -> Any:
        return patch.object(httpx.AsyncClient, "send", lambda client, request, **more: self.send(request))

    async def wait(self) -> None:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.2 if self.key == "timeout_s" else 0)
        for _ in range(30 if self.key == "concurrency" else 0):  # until another one is under way too
            if self.most > 1:
                break
            await asyncio.sleep(0.01)
        self.in_flight -= 1


def records_of(name: str, start: int, count: int) -> list[dict[str, Any]]:
    """Records as official files have them, each with a question of its own."""
    question: Callable[[int], dict[str, Any]] = {
        "banking77": lambda n: {"text": f"text {n}", "category": f"label {n % 2}"},
        "papillon": lambda n: {"user_query": f"query {n}", "target_response": f"target {n}"},
        "hover": lambda n: {"uid": f"u{n}", "claim": f"claim {n}", "num_hops": 2 + n % 2, "hpqa_id": f"q{n // 2}"},
    }.get(name, lambda n: {"id": f"r{n}", "question": f"Who made thing {n}?", "gold": f"a{n}"})
    base = RECORDS.get(name, RECORDS["hotpotqa"])[0]
    return [base | question(n) for n in range(start, start + count)]


def file_of(name: str, folder: Path, start: int, count: int = 8) -> str:
    suffix = {"banking77": "csv", "papillon": "csv", "dspy": "jsonl", "agent": "jsonl"}.get(name, "json")
    return saved(folder / f"{start}.{suffix}", records_of(name, start, count))
