"""A task of one's own from its parts: a program, a reward, tools, and rows of data files.

For packages named in `plugins=`, which put one into `mmrl.tasks.TASKS`; `mmrl new-task NAME` writes such a package.
What needs more (turn rewards, penalties, several reward sets) implements `mmrl.tasks.base.Task` itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.config.task import TaskConfig
from mmrl.errors import ConfigError, DataError, RewardFailure, unknown
from mmrl.records import EMPTY, Call, Example
from mmrl.tasks.base import BaseTask, Context, Program, Score, Task, Tool
from mmrl.tasks.data.layouts import subset
from mmrl.tasks.data.rows import FORMATS, Row, Source
from mmrl.tasks.dspy.base import SPLITS, set_prompts, unique

READ = frozenset({"name", "data", "reward", "failure_score", "max_tokens", "max_context", "timeout_s"})
"""Options of `task` that every such task reads; DSPy programs read `prompts` too."""

Function = Callable[[Example, Context], Awaitable[Any]]
Reward = Callable[[Example, Any], "float | Score | Awaitable[float | Score]"]


@dataclass(frozen=True)
class OwnTask:
    """What makes a task; calling it with a config and a seed builds one, as entries of `TASKS` do.

        TASKS["routing"] = OwnTask(program, reward, inputs=["message"], modules=["router"])

    Args:
        program: an async function `(example, ctx)` that returns the prediction; or a `dspy.Module` (class or instance),
            called with the inputs as keywords; or an object with `modules` and `run`, as in `mmrl.tasks.base.Program`.
        reward: `(example, prediction)` -> a number, or a `Score` with further metrics; may be async. It sees
            `example.metadata`, the program does not.
        inputs: fields of a record that the program sees; all others are metadata.
        modules: for a function, the names that it passes to `ctx.call`.
        tools: name -> function, for `ctx.tool` and `mmrl.tasks.dspy.tools.use_tool`.
        main_metric: what progress and tables show first: `reward`, or a metric of the `Score`.
    """

    program: Any
    reward: Reward
    inputs: Sequence[str]
    modules: Sequence[str] = ()
    tools: Mapping[str, Tool] = EMPTY
    main_metric: str = "reward"

    def __call__(self, config: TaskConfig, seed: int) -> Task:
        """The task of a config.

        Raises:
            ConfigError: options without effect, a program that cannot be one, no data, bad data; all at once.
        """
        return _Built(self, config, seed)


@dataclass(frozen=True, slots=True)
class FunctionProgram:
    """Implements `mmrl.tasks.base.Program` by a plain function."""

    function: Function
    modules: tuple[str, ...]

    async def run(self, example: Example, ctx: Context) -> Any:
        """Call the function."""
        return await self.function(example, ctx)


class _Built(BaseTask):
    """Implements `mmrl.tasks.base.Task`; see `OwnTask`."""

    reward_sets: tuple[str, ...] = ("outcome",)

    def __init__(self, parts: OwnTask, config: TaskConfig, seed: int):
        self.name, self.config, self._parts = config.name, config, parts
        self.failure_score, self.main_metric, self.tools = config.failure_score, parts.main_metric, parts.tools
        problems: list[str] = []
        self.program: Any = None
        try:
            self.program = _program(parts, config.name)
        except ConfigError as error:
            problems += error.problems
        dspy = _is_dspy(self.program)
        self.absent_features = frozenset({"penalties", "observations"} if dspy else {"penalties"})
        problems += _without_effect(config, READ | {"prompts"} if dspy else READ)
        self._examples: dict[str, list[Example]] = {}
        try:
            self._examples = self._load(seed)
            if dspy:
                set_prompts(self.program, config.prompts)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    def _load(self, seed: int) -> dict[str, list[Example]]:
        data = self.config.data
        self._sources = {split: spec for split in SPLITS if (spec := getattr(data, split)) != "mini"}
        if not self._sources:
            raise DataError(
                f"task.data: no data for task {self.name}, expected task.data.train and task.data.dev, each a "
                f"{', '.join(FORMATS)} file or a hub id"
            )
        files: dict[str, str] = {}
        for split, spec in self._sources.items():
            rows = Source(f"task.data.{split}", spec).identity(split)
            if rows in files:
                raise DataError(f"task.data: {files[rows]} and {split} are both {spec}; expected a file each")
            files[rows] = split
        found = {split: self._read(split) if split in self._sources else [] for split in SPLITS}
        # dev and test subsets are the same for every seed, so that runs can be compared item by item
        return {
            split: subset(examples, getattr(data, f"{split}_items"), split, *([seed] if split == "train" else []))
            for split, examples in found.items()
        }

    def _read(self, split: str) -> list[Example]:
        key = f"task.data.{split}"
        rows = Source(key, self._sources[split]).rows(split, tuple(self._parts.inputs))
        return unique(key, [(row, self._example(key, row, f"{split}-{n}")) for n, row in enumerate(rows)])

    def _example(self, key: str, row: Row, name: str) -> Example:
        if not isinstance(row.values, Mapping):
            raise DataError(f"{key}: {row.where}: got {type(row.values).__name__}, expected an object")
        missing = [field for field in self._parts.inputs if field not in row.values]
        if missing:
            fields = ", ".join(map(str, row.values))
            raise DataError(f"{key}: {row.where}: {', '.join(missing)} is missing (fields: {fields})")
        rest = {field: value for field, value in row.values.items() if field not in (*self._parts.inputs, "id")}
        given = row.values.get("id")
        return Example(
            id=name if given is None else str(given),
            inputs={field: row.values[field] for field in self._parts.inputs},
            metadata=rest,
        )

    def examples(self, split: str) -> Sequence[Example]:
        """See `mmrl.tasks.base.Task.examples`."""
        return self._examples[split]

    async def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        """What the reward function says."""
        if reward_set not in self.reward_sets:
            raise ConfigError(unknown("task.reward", reward_set, self.reward_sets))
        said: Any = self._parts.reward(example, prediction)
        if inspect.isawaitable(said):
            said = await said
        if isinstance(said, Score):
            return said
        if not isinstance(said, int | float):
            raise RewardFailure(f"the reward function returned {type(said).__name__}, expected a number or a Score")
        return Score(reward=float(said))

    def describe(self) -> Mapping[str, Any]:
        """See `mmrl.tasks.base.Task.describe`."""
        data = ", ".join(f"{split} {spec}" for split, spec in self._sources.items())
        return {"data": data, **{f"{split} items": len(found) for split, found in self._examples.items()}}


def _without_effect(config: TaskConfig, read: frozenset[str]) -> list[str]:
    """Options that were set and that the task does not read."""
    return [
        f"task.{name}: has no effect with task {config.name}; leave it out"
        for name, field in type(config).model_fields.items()
        if name not in read and getattr(config, name) != field.get_default(call_default_factory=True)
    ]


def _is_dspy(program: Any) -> bool:
    dspy = sys.modules.get("dspy")  # a module of DSPy's is there only if the package has imported it
    return dspy is not None and isinstance(program, dspy.Module)


def _program(parts: OwnTask, name: str) -> Program | Any:
    """The program: a raw `dspy.Module` (wrapped by whoever builds the task), or one that runs as it is.

    Raises:
        ConfigError: neither.
    """
    given = parts.program
    if inspect.iscoroutinefunction(given):
        if not parts.modules:
            raise ConfigError(
                f"task {name}: OwnTask(modules=...) is missing: the names that {given.__name__} passes to ctx.call"
            )
        return FunctionProgram(given, tuple(parts.modules))
    if parts.modules:
        raise ConfigError(
            f"task {name}: OwnTask(modules=...) has no effect with {getattr(given, '__name__', type(given).__name__)}, "
            "which is no async function; leave it out, or write `async def`"
        )
    # each task its own instance: `task.prompts` changes the predictors of one
    made = given() if isinstance(given, type) else given.deepcopy() if _is_dspy(given) else given
    if _is_dspy(made) or (isinstance(getattr(made, "modules", None), tuple) and hasattr(made, "run")):
        return made
    raise ConfigError(
        f"task {name}: OwnTask(program=...): got {getattr(given, '__name__', type(given).__name__)}, expected an async "
        "function (example, ctx), a dspy.Module, or an object with `modules` and `run`"
    )
