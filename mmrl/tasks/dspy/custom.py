"""A program of one's own on data of one's own: the task `dspy`, named by import paths in the config.

`task.program` is a `dspy.Module`, or plain async code under the contract of `mmrl.tasks.base.Program`; `task.metric`
scores a prediction; the data are records in any of the file formats. Nothing of this package is edited.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.config.task import TaskConfig
from mmrl.errors import ConfigError, RewardFailure
from mmrl.records import Call, Example
from mmrl.tasks.base import Context, Score
from mmrl.tasks.dspy.base import SPLITS, DspyTask, unique


@dataclass(frozen=True, slots=True)
class FunctionProgram:
    """An async function `(example, ctx)` as a program."""

    function: Callable[[Example, Context], Awaitable[Any]]
    modules: tuple[str, ...]

    async def run(self, example: Example, ctx: Context) -> Any:
        """See `mmrl.tasks.base.Program.run`."""
        return await self.function(example, ctx)


class CustomTask(DspyTask):
    """Implements `mmrl.tasks.base.Task`; see `DspyTask` for arguments and errors."""

    main_metric = "score"
    absent_features = frozenset({"penalties"})

    def __init__(self, config: TaskConfig, seed: int):
        problems = [
            f"task.{name}: missing; {what}"
            for name, what in (
                ("program", "expected package.module:name of a dspy.Module or of a function that makes one"),
                ("metric", "expected package.module:name of a function (record, prediction) -> number"),
                ("inputs", "expected the fields of a record that the program gets, such as [question]"),
            )
            if not getattr(config, name)
        ]
        if problems:
            raise ConfigError(problems)
        self.metric = _import("task.metric", str(config.metric))
        if not callable(self.metric):
            raise ConfigError(f"task.metric: {config.metric} is a {type(self.metric).__name__}, expected a function")
        super().__init__(config, seed)

    def load(self) -> Mapping[str, Sequence[Example]]:
        """The records of the files; a split left at `mini` is empty."""
        if not self.sources:
            raise ConfigError(
                "task.data: task dspy has no mini world; expected files, such as task.data.train=train.jsonl"
            )
        return {split: self._read(split) if split in self.sources else [] for split in SPLITS}

    def _read(self, split: str) -> list[Example]:
        key, wanted = f"task.data.{split}", self.config.inputs
        found = []
        for number, row in enumerate(self.rows(split, wanted)):
            missing = [field for field in wanted if field not in row.values]
            if missing:
                fields = ", ".join(map(str, row.values))
                raise ConfigError(f"{key}: {row.where}: {', '.join(missing)} is missing (fields: {fields})")
            example = Example(
                id=str(row.values.get("id") or f"{split}-{number}"),
                inputs={field: row.values[field] for field in wanted},
                metadata=dict(row.values),
            )
            found.append((row, example))
        return unique(key, found)

    def make_program(self) -> Any:
        """The object behind `task.program`: as it is, called once, or wrapped."""
        path = str(self.config.program)
        found = _import("task.program", path)
        if inspect.iscoroutinefunction(found):
            if not self.config.modules:
                raise ConfigError("task.modules: missing; expected the names that the function passes to ctx.call")
            return FunctionProgram(found, self.config.modules)
        if self.config.modules:
            raise ConfigError("task.modules: has no effect with this program, which names its own; leave it out")
        if _is_program(found):
            return found
        try:
            made = found()
        except Exception as error:
            raise ConfigError(f"task.program: {path}() raised {type(error).__name__}: {error}") from None
        if not _is_program(made):
            raise ConfigError(
                f"task.program: {path} gave a {type(made).__name__}; expected a dspy.Module, an async function, or an "
                "object with `modules` and `run`"
            )
        return made

    async def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        """The metric's number, or its `score` beside other numbers, which are reported.

        Raises:
            RewardFailure: the metric gave something else.
        """
        self.check_reward_set(reward_set)
        given = self.metric(*self._arguments(example, prediction))
        if inspect.isawaitable(given):
            given = await given
        numbers = _numbers(given)
        if "score" not in numbers or not math.isfinite(numbers["score"]):
            raise RewardFailure(
                f"task.metric gave {given!r}; expected a finite number, or a mapping of numbers with 'score'"
            )
        return Score(reward=numbers["score"], metrics=numbers)

    def _arguments(self, example: Example, prediction: Any) -> tuple[Any, Any]:
        """Record and prediction: with a DSPy program as DSPy's own objects, so that its metrics fit."""
        record = dict(example.metadata)
        if not hasattr(getattr(self.program, "module", None), "named_predictors"):
            return record, prediction
        import dspy

        given = dspy.Prediction(**prediction) if isinstance(prediction, dict) else prediction
        return dspy.Example(**record).with_inputs(*self.config.inputs), given

    def describe(self) -> Mapping[str, Any]:
        """See `mmrl.tasks.base.Task.describe`."""
        return {**super().describe(), "program": self.config.program, "metric": self.config.metric}


def _import(key: str, path: str) -> Any:
    """The object at `package.module:name`.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{key}: got '{path}', expected package.module:name")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the user's own module raises
        raise ConfigError(f"{key}: cannot import '{module}' ({type(error).__name__}: {error})") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}: '{module}' has no '{name}'")
        found = getattr(found, part)
    return found


def _is_program(value: Any) -> bool:
    if inspect.isclass(value):
        return False
    return hasattr(value, "named_predictors") or (hasattr(value, "modules") and hasattr(value, "run"))


def _numbers(given: Any) -> dict[str, float]:
    values = given.toDict() if hasattr(given, "toDict") else given
    values = values if isinstance(values, Mapping) else {"score": values}
    return {str(name): float(value) for name, value in values.items() if isinstance(value, bool | int | float)}
