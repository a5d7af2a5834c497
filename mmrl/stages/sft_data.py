"""What a supervised stage trains on: demonstrations of a task, a user's file, or the best of some rollouts.

Used by `stages.sft` and by the checks of a run: imports no torch, so that a wrong file is refused before a model loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmrl import rng
from mmrl.config import SftCommandConfig
from mmrl.config.other_stages import SftConfig
from mmrl.errors import ConfigError, DataError, unknown
from mmrl.records import Forest, Rollout
from mmrl.tasks.base import Demonstrating, Demonstration, FieldProgram, Message, Task
from mmrl.tasks.data.rows import Row, Source
from mmrl.trainer.settings import Settings

ROLES = ("system", "user", "assistant")
SHOWN = 5
"""Problems of a file that are listed; the others are counted."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """A demonstration and where it comes from."""

    where: str
    demonstration: Demonstration


def sft_problems(config: SftCommandConfig, task: Task, frozen: Sequence[str] = ()) -> list[str]:
    """What stands against a supervised run, one sentence each, before any model loads.

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


def read_examples(config: SftCommandConfig, task: Task, frozen: Sequence[str] = ()) -> list[Supervised]:
    """The demonstrations of `algo.source` task or file, of the modules that are trained.

    Raises:
        ConfigError: there are none.
        DataError: records of the file that are none, up to `SHOWN` of them named.
    """
    algo = config.algo
    given = demonstrated(task, algo, frozen) if algo.source == "task" else read_file(config, task)
    examples = [item for item in given if item.demonstration.module not in frozen]
    if not examples:
        raise ConfigError(_nothing(algo, task))
    return examples


def _nothing(algo: SftConfig, task: Task) -> str:
    of = f" of {', '.join(algo.modules)}" if algo.modules else ""
    if algo.source == "file":
        return f"algo.file: {algo.file} holds no examples{of}"
    return (
        f"algo.source: task={task.name} makes no demonstrations{of} of its train examples; use algo.source=file "
        "algo.file=FILE, or algo.source=rollouts"
    )


def demonstrated(task: Task, algo: SftConfig, frozen: Sequence[str] = ()) -> Iterator[Supervised]:
    """The demonstrations that a task makes of its train examples, one example after the other."""
    # It imports every task of the package, which a file or rollouts do not need.
    from mmrl.tasks.mini.teach import demonstrations

    for example in task.examples("train"):
        made = task.demonstrations(example) if isinstance(task, Demonstrating) else demonstrations(task, example)
        for shown in made:
            if shown.module not in frozen and (algo.modules is None or shown.module in algo.modules):
                yield Supervised(f"example {example.id}", shown)


def read_file(config: SftCommandConfig, task: Task) -> list[Supervised]:
    """The records of `algo.file`, each checked, of the modules in `algo.modules`.

    Raises:
        DataError: records that are no examples, up to `SHOWN` of them named.
    """
    algo = config.algo
    # A chat of no module teaches the weights that all modules share, where they do and where none is chosen.
    shared = config.model.modules is None and algo.modules is None
    examples, problems = [], []
    for row in Source("algo.file", algo.file or "").rows("train"):
        try:
            shown = _example(row, task, shared)
        except ConfigError as error:
            problems += [f"algo.file: {row.where}: {problem}" for problem in error.problems]
            continue
        if algo.modules is None or shown.module in algo.modules:
            examples.append(Supervised(row.where, shown))
    if problems:
        more = len(problems) - SHOWN
        raise DataError(problems[:SHOWN] + ([f"algo.file: {more} more problems like these"] if more > 0 else []))
    return examples


def _example(row: Row, task: Task, shared: bool) -> Demonstration:
    """One record as a demonstration; `shared`: whether a chat may be of no module.

    Raises:
        ConfigError: what is wrong with it, without its place.
    """
    record = row.values
    if not isinstance(record, Mapping):
        raise ConfigError(f"got {type(record).__name__}, expected an object")
    # A file of several kinds of records, as tables have them, holds null for the fields that a record lacks.
    keys = {key for key, value in record.items() if value is not None}
    kinds = [kind for kind in (frozenset({"messages"}), frozenset({"inputs", "outputs"})) if kind & keys]
    if len(kinds) != 1 or (missing := kinds[0] - keys):
        lacking = f" without {', '.join(sorted(missing))}" if len(kinds) == 1 else ""
        got = ", ".join(sorted(map(str, keys))) or "nothing"
        raise ConfigError(f"got an object with {got}{lacking}, expected messages, or inputs and outputs")
    if strange := sorted(map(str, keys - kinds[0] - {"module"})):
        raise ConfigError(f"unknown field {', '.join(strange)} (valid here: {', '.join(sorted(kinds[0]))}, module)")
    module = _module(record.get("module"), task, shared and "messages" in keys)
    if "messages" in keys:
        messages = _messages(record["messages"])
        return Demonstration(module=module, messages=messages[:-1], completion=messages[-1]["content"])
    inputs, outputs = record["inputs"], record["outputs"]
    if not isinstance(inputs, Mapping) or not isinstance(outputs, Mapping):
        raise ConfigError("inputs, outputs: expected an object with the fields of the module")
    program = task.program
    if not isinstance(program, FieldProgram):
        raise ConfigError(f"inputs, outputs: task={task.name} is no DSPy program, so fields say nothing; use messages")
    return program.demonstration(module, inputs, outputs)


def _module(name: object, task: Task, optional: bool) -> str:
    """The module that a record is of; empty for none."""
    modules = task.program.modules
    if name is None and len(modules) == 1:
        return modules[0]
    if name is None and optional:
        return ""
    if name is None:
        raise ConfigError(f"module: missing, expected one of {', '.join(modules)}")
    if name not in modules:
        raise ConfigError(unknown("module", name, modules))
    return str(name)


def _messages(value: object) -> list[Message]:
    """The messages of a chat, the last one the assistant's."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) < 2:
        raise ConfigError("messages: expected a list of at least two, the last one the assistant's")
    messages: list[Message] = []
    for number, message in enumerate(value):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise ConfigError(
                f"messages[{number}]: expected an object with role ({', '.join(ROLES)}) and content, a text"
            )
        messages.append({"role": str(role), "content": content})
    if messages[-1]["role"] != "assistant":
        raise ConfigError(f"messages: the last one is the {messages[-1]['role']}'s, expected the assistant's")
    return messages


def best_rollouts(forest: Forest, algo: SftConfig, seed: int) -> list[Rollout]:
    """The rollouts that are trained on, in the order of their examples.

    Of each example the `algo.per_example` best of those with at least `algo.min_reward`; among equal ones it is drawn.

    Raises:
        ConfigError: there are none.
    """
    chosen: list[Rollout] = []
    scored = [r for r in forest.rollouts if r.reward is not None and r.error is None and r.leaf is not None]
    for example in forest.examples:
        good = [r for r in scored if r.example == example and (r.reward or 0.0) >= algo.min_reward]
        # Not the first ones: which rollouts are first may say something of how they were sampled.
        rng.stream(seed, "sft", example).shuffle(good)
        good.sort(key=lambda rollout: -(rollout.reward or 0.0))
        chosen += good[: algo.per_example]
    if not chosen:
        best = max((r.reward for r in scored if r.reward is not None), default=None)
        reached = "all of them failed" if best is None else f"the best has {best:g}"
        raise ConfigError(
            f"algo.min_reward: none of the {len(forest.rollouts)} rollouts has {algo.min_reward:g} or more, {reached}; "
            "set a smaller one, or more algo.rollouts"
        )
    return chosen
