"""Data of a supervised stage: demonstrations of a task, a user's file, or the best of some rollouts.

Used by `stages.sft` and by the checks of a run: imports no torch, so that a wrong file is refused before a model loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    Json,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mmrl import rng
from mmrl.config import SftRunConfig
from mmrl.config.base import reasons
from mmrl.config.sft import SftConfig
from mmrl.errors import ConfigError, DataError, unknown
from mmrl.models.template import THOUGHTS
from mmrl.records import Forest, Rollout
from mmrl.tasks.base import Conversation, Demonstrating, Demonstration, FieldProgram, Message, Task
from mmrl.tasks.data.rows import Row, Source, without_nulls
from mmrl.trainer.settings import Settings

Supervised = tuple[str, Demonstration | Conversation]
"""Origin of an example, and the example."""


class _Part(BaseModel, extra="forbid"):
    """A part of a message; what it has beside the fields is not left out of training without a word."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: object) -> object:
        # Tables and OpenAI's replies have null, or an empty list, for what is not there.
        if not isinstance(fields, Mapping):
            return fields
        return {k: v for k, v in fields.items() if k in ("content", "arguments") or (v is not None and v != [])}


class _Function(_Part):
    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]]
    """As an object, or as its text, in OpenAI's way."""


class _Called(BaseModel, extra="allow"):
    """A call of a tool in a reply."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


def _of_reply(weight: int | None, info: ValidationInfo) -> int | None:
    if weight is not None and info.data.get("role") != "assistant":
        raise ValueError("only a reply, the assistant's message, has a weight")
    return weight


Weight = Annotated[Literal[0, 1] | None, AfterValidator(_of_reply)]
"""OpenAI's: a reply with 0 is not trained."""


class _ChatMessage(_Part):
    role: Literal["system", "user", "assistant"]
    content: str
    weight: Weight = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, fields: object) -> object:
        if isinstance(fields, Mapping) and (own := [key for key in THOUGHTS if fields.get(key)]):
            raise ValueError(f"{own[0]}: of a chat without tools; put the thoughts into the content")
        return fields


class _ToolMessage(_Part):
    """A message of a conversation with tools."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[_Called] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    weight: Weight = None

    @field_validator("content", mode="before")
    @classmethod
    def _null(cls, content: object, info: ValidationInfo) -> object:
        # As OpenAI writes a reply that only calls tools.
        return "" if content is None and info.data.get("role") == "assistant" else content


class _Chat(BaseModel, extra="forbid"):
    """A record with the messages of a chat."""

    module: str | None = None
    messages: list[_ChatMessage] = Field(min_length=2)

    @field_validator("messages")
    @classmethod
    def _ends(cls, messages: list[_ChatMessage]) -> list[_ChatMessage]:
        if messages[-1].role != "assistant":
            raise ValueError(f"the last one is the {messages[-1].role}'s, expected the assistant's")
        weights = [message.weight for message in messages]
        if weights[-1] == 0 or any(weights[:-1]):
            raise ValueError(f"got the weights {weights}; of a chat without tools the last reply alone is trained")
        return messages


class _Talk(BaseModel, extra="forbid"):
    """A record with a conversation with tools."""

    module: str | None = None
    messages: list[_ToolMessage] = Field(min_length=2)
    tools: list[dict[str, Any]] = Field(min_length=1)
    """Or its JSON text, which TRL takes too: a table would give each schema the keys of all."""

    @field_validator("tools", mode="before")
    @classmethod
    def _text(cls, tools: object, info: ValidationInfo) -> object:
        if not isinstance(tools, str):
            return without_nulls(tools) if (info.context or {}).get("table") else tools
        with suppress(ValueError):
            return json.loads(tools)
        raise ValueError(f"got {tools!r:.60}, expected a list of functions, or its JSON text")

    @field_validator("messages")
    @classmethod
    def _ends(cls, messages: list[_ToolMessage]) -> list[_ToolMessage]:
        if messages[-1].role != "assistant" or messages[0].role == "assistant":
            raise ValueError("expected a prompt first, and the assistant's last")
        if all(message.weight == 0 for message in messages if message.role == "assistant"):
            raise ValueError("every reply has weight 0, expected one to train on")
        return messages


class _Fields(BaseModel, extra="forbid"):
    """A record with the fields of a module of a DSPy program."""

    module: str | None = None
    inputs: dict[str, Any]
    outputs: dict[str, Any]


def sft_problems(config: SftRunConfig, task: Task, frozen: Sequence[str] = ()) -> list[str]:
    """Return problems of a supervised run, one sentence each, before any model loads.

    Args:
        frozen: modules that are out of the loss (`model.modules`, `engine.endpoints`).
    """
    algo, modules = config.algo, task.program.modules
    problems = [unknown("algo.modules", name, modules) for name in algo.modules or () if name not in modules]
    problems += [
        f"algo.modules: names '{name}', which is out of the loss (model.modules or engine.endpoints); leave one out"
        for name in algo.modules or ()
        if name in frozen
    ]
    if config.hardware.processes * config.hardware.nodes != 1:
        problems.append(f"hardware: profile '{config.hardware.name}' has several processes, algo=sft trains in one")
    problems += Settings.supervised(config.train, config.model, config.seed).problems()
    if algo.source != "file" and not task.examples("train"):
        problems.append("task.data.train: there are no train examples; set task.data.train, or algo.source=file")
    elif not problems and algo.source != "rollouts":
        try:
            # The first is enough of a task, whose searches take time; a file is read whole, for all that is wrong in it
            if not (read_file(config, task) if algo.source == "file" else next(demonstrated(task, algo, frozen), None)):
                problems.append(_nothing(algo, task))
        except ConfigError as error:
            problems += error.problems
    return problems


def read_examples(config: SftRunConfig, task: Task, frozen: Sequence[str] = ()) -> list[Supervised]:
    """Return the demonstrations of `algo.source` task or file, of the modules that are trained.

    Raises:
        ConfigError: there are none.
        DataError: records of the file that are none.
    """
    algo = config.algo
    candidates = demonstrated(task, algo, frozen) if algo.source == "task" else read_file(config, task)
    examples = [(where, demonstration) for where, demonstration in candidates if demonstration.module not in frozen]
    if not examples:
        raise ConfigError(_nothing(algo, task))
    return examples


def _nothing(algo: SftConfig, task: Task) -> str:
    modules = f" of {', '.join(algo.modules)}" if algo.modules else ""
    if algo.source == "file":
        return f"algo.file: {algo.file} holds no examples{modules}"
    return (
        f"algo.source: task={task.name} makes no demonstrations{modules} of its train examples; use algo.source=file "
        "algo.file=FILE, or algo.source=rollouts"
    )


def demonstrated(task: Task, algo: SftConfig, frozen: Sequence[str]) -> Iterator[Supervised]:
    """Yield the demonstrations that a task makes of its train examples, one example after the other."""
    # It imports every task of the package, which a file or rollouts do not need.
    from mmrl.tasks.mini.teach import demonstrations

    for example in task.examples("train"):
        taught = task.demonstrations(example) if isinstance(task, Demonstrating) else demonstrations(task, example)
        for demonstration in taught:
            if demonstration.module not in frozen and (algo.modules is None or demonstration.module in algo.modules):
                yield f"example {example.id}", demonstration


def read_file(config: SftRunConfig, task: Task) -> list[Supervised]:
    """Return the records of `algo.file`, each checked, of the modules in `algo.modules`.

    Raises:
        DataError: records that are no examples.
    """
    algo = config.algo
    # A chat of no module teaches the weights that all modules share, where they do and where none is chosen.
    shared = config.model.modules is None and algo.modules is None
    examples, problems = [], []
    for row in Source("algo.file", algo.file or "").rows("train"):
        try:
            demonstration = _example(row, task, shared)
        except ConfigError as error:
            problems += [f"algo.file: {row.where}: {problem}" for problem in error.problems]
            continue
        if algo.modules is None or demonstration.module in algo.modules:
            examples.append((row.where, demonstration))
    if problems:
        raise DataError(problems)
    return examples


def _example(row: Row, task: Task, shared: bool) -> Demonstration | Conversation:
    """Convert a record to an example; `shared`: True if a chat may name no module.

    Raises:
        ConfigError: what is wrong with it, without its place.
    """
    # A file of several kinds of records, as tables have them, holds null for the fields that a record lacks.
    fields = {
        key: value
        for key, value in (row.values if isinstance(row.values, Mapping) else {}).items()
        if value is not None
    }
    kind = _Fields if "messages" not in fields else _Talk if "tools" in fields or _calls(fields["messages"]) else _Chat
    try:
        parsed = kind.model_validate(fields, context={"table": row.table})
    except ValidationError as error:
        raise ConfigError(reasons(error)) from None
    module = _module(parsed.module, task, shared and not isinstance(parsed, _Fields))
    if isinstance(parsed, _Talk):
        return Conversation(module=module, messages=_named(parsed.messages), tools=parsed.tools)
    if isinstance(parsed, _Chat):
        messages: list[Message] = [{"role": m.role, "content": m.content} for m in parsed.messages]
        return Demonstration(module=module, messages=messages[:-1], completion=messages[-1]["content"])
    if not isinstance(task.program, FieldProgram):
        raise ConfigError(f"inputs, outputs: task={task.name} is no DSPy program, so fields say nothing; use messages")
    return task.program.demonstration(module, parsed.inputs, parsed.outputs)


def _calls(messages: object) -> bool:
    """Return True if messages have calls of tools, or results."""
    given = messages if isinstance(messages, list) else []
    return any(isinstance(m, Mapping) and (m.get("tool_calls") or m.get("role") == "tool") for m in given)


def _named(messages: Sequence[_ToolMessage]) -> list[Message]:
    """Return messages, with the name of its function in each tool result, which some templates write."""
    called: list[_Called] = []
    found: list[Message] = []
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        if message.role == "assistant":
            called = list(message.tool_calls or ())
        elif message.role == "tool" and called:
            # By its id; without one, in the order of the calls.
            own = next((call for call in called if call.id is not None and call.id == message.tool_call_id), called[0])
            called.remove(own)
            fields.setdefault("name", own.function.name)
        found.append(fields)
    return found


def _module(name: str | None, task: Task, optional: bool) -> str:
    """Return the module that a record is of; empty for none."""
    modules = task.program.modules
    if name is None and len(modules) == 1:
        return modules[0]
    if name is None and optional:
        return ""
    if name is None:
        raise ConfigError(f"module: missing, expected one of {', '.join(modules)}")
    if name not in modules:
        raise ConfigError(unknown("module", name, modules))
    return name


def best_rollouts(forest: Forest, algo: SftConfig, seed: int) -> list[Rollout]:
    """Return the rollouts that are trained on, in the order of their examples.

    Of each example the `algo.per_example` best of those with at least `algo.min_reward`; among equal ones it is drawn.

    Raises:
        ConfigError: there are none.
    """
    selected: list[Rollout] = []
    scored = [r for r in forest.rollouts if r.reward is not None and r.error is None and r.leaf is not None]
    for example in forest.examples:
        good = [r for r in scored if r.example == example and (r.reward or 0.0) >= algo.min_reward]
        # Not the first ones: which rollouts are first may say something of how they were sampled.
        rng.stream(seed, "sft", example).shuffle(good)
        good.sort(key=lambda rollout: -(rollout.reward or 0.0))
        selected += good[: algo.per_example]
    if not selected:
        best = max((r.reward for r in scored if r.reward is not None), default=None)
        reached = "all of them failed" if best is None else f"the best has {best:g}"
        raise ConfigError(
            f"algo.min_reward: none of the {len(forest.rollouts)} rollouts has {algo.min_reward:g} or more, {reached}; "
            "set a smaller one, or more algo.rollouts"
        )
    return selected
