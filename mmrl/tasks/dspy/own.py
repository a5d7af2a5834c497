"""Tasks of one's own: a program, a reward, tools, and records from data files; nothing of this package is edited.

Two ways to name the parts. `OwnTask` takes Python objects, for packages named in `plugins=` that put one into
`mmrl.tasks.TASKS` (`mmrl new-task NAME` writes such a package). The task `dspy` takes import paths from the config.
What needs more (turn rewards, penalties, several reward sets) implements `mmrl.tasks.base.Task` itself.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from mmrl.config.tasks import UNSCORED, DspyProgramConfig, MetricsConfig, TaskConfig
from mmrl.errors import ConfigError, DataError, ProgramFailure, RewardFailure, gathered, nearest, refuse
from mmrl.records import EMPTY, LARGEST, Call, Example
from mmrl.system.objects import display_name, imported
from mmrl.system.user_code import as_async, as_number, call_scorer, user_failure
from mmrl.tasks.base import RESERVED, Context, Score, Task, Tool
from mmrl.tasks.data.rows import Row, record_id
from mmrl.tasks.dspy.base import DspyTask, awaits, is_dspy_module

READ = frozenset(
    {"name", "data", "reward", "failure_score", "caught_parse_penalty", "max_tokens", "max_context", "timeout_s"}
)
"""Options of `task` that every `OwnTask` reads; DSPy programs read `prompts` and `prompt_layout` too."""

FINISHED = "finished"
"""Metric of a task without rewards: the share of rollouts that did not fail."""

Function = Callable[[Example, Context], Awaitable[object]]
Reward = Callable[[Example, Any], "float | Score | Awaitable[float | Score]"]


@dataclass(frozen=True)
class OwnTask:
    """Factory of a task; calling it with a config and a seed builds one, as entries of `TASKS` do.

        TASKS["routing"] = OwnTask(program, reward, inputs=["message"], modules=["router"])

    Args:
        program: an async function `(example, ctx)` that returns the prediction; or a `dspy.Module` (class or instance),
            called with the inputs as keywords; or an object with `modules` and `run`, as in `mmrl.tasks.base.Program`.
        reward: `(example, prediction)` -> a number, or a `Score` with further metrics; may be async, else it runs in
            threads. It sees `example.metadata`, the program does not. The prediction of a DSPy program is DSPy's own
            object.
        inputs: fields of a record that the program sees; all others are metadata.
        modules: for a function, the names that it passes to `ctx.call`.
        tools: name -> function, for `ctx.tool` and `mmrl.tasks.dspy.tools.use_tool`.
        main_metric: metric that progress and tables show first: `reward`, or a metric of the `Score`.
    """

    program: Any
    reward: Reward
    inputs: Sequence[str]
    modules: Sequence[str] = ()
    tools: Mapping[str, Tool] = EMPTY
    main_metric: str = "reward"

    def __call__(self, config: TaskConfig, seed: int) -> Task:
        """Build the task of a config.

        Raises:
            ConfigError: options without effect, a program that cannot be one, no data, bad data; all at once.
        """
        return _PluginTask(self, config, seed)


@dataclass(frozen=True, slots=True)
class FunctionProgram:
    """Implements `mmrl.tasks.base.Program` by an async function."""

    function: Function
    modules: tuple[str, ...]

    async def run(self, example: Example, ctx: Context) -> object:
        """See `mmrl.tasks.base.Program.run`."""
        return await self.function(example, ctx)


class RecordTask(DspyTask):
    """A program and a reward of one's own, and examples from records, some of whose fields the program sees.

    See `DspyTask` for errors.

    Args:
        key: `program`, `modules` or `inputs` -> what the user has set.
        name: name of the program, for messages.
        rewards: name, likewise, of each function that scores -> the function.
        extra_arguments: True if the reward of a DSPy program gets None for further arguments, as DSPy's metrics do.
    """

    def __init__(
        self,
        parts: OwnTask,
        config: TaskConfig,
        seed: int,
        *,
        key: Callable[[str], str],
        name: str,
        rewards: Mapping[str, Callable[..., Any]],
        extra_arguments: bool,
    ):
        self.parts_given, self.main_metric, self.key = parts, parts.main_metric, key
        problems: list[str] = []
        self._program: object = None
        with gathered(problems):
            self._program = _program(parts.program, parts.modules, name, key)
        # Before the program is wrapped, when a raw module can still be recognised.
        self.of_dspy = is_dspy_module(self._program)
        # A plain function may call tools and so have observations; what a DSPy module gets back goes into prompts.
        self.absent_features = frozenset({"penalties", "observations"} if self.of_dspy else {"penalties"})
        with gathered(problems):
            super().__init__(config, seed)
        for reward, function in rewards.items():
            extra = further_arguments(function) if extra_arguments and self.of_dspy else ()
            if (takes := refusing_signature(function, None, None, *extra)) is not None:
                problems.append(f"{reward} takes {takes}, expected a function (record, prediction) -> number")
        if self.of_dspy and (problem := inputs_problem(self._program, parts.inputs)) is not None:
            problems.append(f"{key('inputs')}: got {', '.join(parts.inputs)}, {problem}")
        refuse(problems)

    def mini(self, split: str) -> Sequence[Example]:
        """Refuse a config without any data."""
        raise ConfigError(
            f"task.data: task {self.name} has no mini world; expected files or hub ids, such as "
            "task.data.train=train.jsonl"
        )

    def metadata(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata of a record, for the reward: the whole record."""
        return dict(record)

    @override
    def make_program(self) -> object:
        # With prompts of its own a copy: another task of the object, as a teacher's, has others. Else the object as
        # it is, with what the user's code keeps in it (sessions, connections).
        program: Any = self._program
        return program.deepcopy() if self.of_dspy and self.config.prompts is not None else program

    @override
    def read(self, split: str) -> Sequence[Example]:
        return self.read_all(split, self._example)

    def _example(self, key: str, row: Row, number: str) -> Example:
        inputs, fields = self.parts_given.inputs, row.values
        if not isinstance(fields, Mapping):
            raise DataError(f"{key}: {row.where}: got {type(fields).__name__}, expected a record with fields")
        if missing := [field for field in inputs if field not in fields]:
            raise DataError(
                f"{key}: {row.where}: {', '.join(missing)} is missing, which {self.key('inputs')} names (fields: "
                f"{', '.join(map(str, fields))}){nearest(missing[0], [*map(str, fields)])}"
            )
        name = record_id(fields, "id", otherwise=number)
        return Example(id=name, inputs={field: fields[field] for field in inputs}, metadata=self.metadata(fields))


class _PluginTask(RecordTask):
    """Implements `mmrl.tasks.base.Task`; see `OwnTask`."""

    def __init__(self, parts: OwnTask, config: TaskConfig, seed: int):
        key = f"task {config.name}: OwnTask({{}}=...)".format
        name = getattr(parts.program, "__name__", type(parts.program).__name__)
        rewards = {f"{key('reward')}:": parts.reward}
        super().__init__(parts, config, seed, key=key, name=name, rewards=rewards, extra_arguments=False)
        self.tools = {name: as_async(tool) for name, tool in parts.tools.items()}

    def option_problems(self) -> list[str]:
        """Report options that were set and that no such task reads."""
        read = READ | {"prompts", "prompt_layout"} if self.of_dspy else READ
        return [
            f"task.{name}: has no effect with task {self.name}; leave it out"
            for name, field in type(self.config).model_fields.items()
            if name not in read and vars(self.config)[name] != field.get_default(call_default_factory=True)
        ]

    def metadata(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields that the program does not see: one that saw the reference could copy it."""
        return {field: value for field, value in record.items() if field not in (*self.parts_given.inputs, "id")}

    async def score(self, example: Example, prediction: object, path: Sequence[Call], reward_set: str) -> Score:
        """Return the score of the reward function.

        Raises:
            RewardFailure: it is neither a number nor a `Score`.
        """
        score = await call_scorer(self.parts_given.reward, example, prediction)
        if isinstance(score, Score):
            return score
        # `float` would train on a text of digits too.
        number = as_number(score)
        if number is None:
            raise RewardFailure(f"the reward function returned {type(score).__name__}, expected a number or a Score")
        return Score(reward=number)


class ImportedTask(RecordTask):
    """The task `dspy`: program and metric by import paths. Implements `mmrl.tasks.base.Task`."""

    config: DspyProgramConfig
    asked_about: Sequence[str] = ()
    """Modules that a metric of GEPA's form is asked about one by one; set by who optimises their prompts."""
    asked_with_trace: bool = False
    """Whether a metric that takes a trace is asked once more, with the program's; set by who bootstraps."""
    answer_to_trace: float | None = None
    """What it said then of the last rollout; None: it was not asked."""

    def __init__(self, config: DspyProgramConfig, seed: int):
        expected = {
            "program": "expected package.module:name of a dspy.Module or of a function that makes one",
            "inputs": "expected the fields of a record that the program gets, such as [question]",
        }
        problems = [f"task.{name}: missing; {hint}" for name, hint in expected.items() if not getattr(config, name)]
        refuse(problems)
        metrics, path = dict[str, Callable[..., Any]](), str(config.program)
        with gathered(problems):
            program = imported("task.program", path)
        with gathered(problems):
            metrics = imported_metrics(config)
        refuse(problems)
        metric, main = (as_one(metrics, config), "score") if metrics else (unscored, FINISHED)
        if not metrics:
            self.reward_sets = (UNSCORED,)
        parts = OwnTask(program, metric, config.inputs, config.modules, main_metric=main)
        super().__init__(parts, config, seed, key="task.{}".format, name=path, rewards=metrics, extra_arguments=True)

    async def score(self, example: Example, prediction: object, path: Sequence[Call], reward_set: str) -> Score:
        """Return the metric's number, or its `score` beside other numbers, which are reported, and its `feedback`.

        Raises:
            RewardFailure: there is no `score`, or a number is not finite.
        """
        metric, record = self.parts_given.reward, dict(example.metadata)
        if not self.of_dspy or reward_set == UNSCORED:
            return scored(await call_scorer(metric, record, prediction), "task.metric")
        # DSPy's own objects, so that metrics written for it fit; as keywords a field called `base` would be lost.
        import dspy

        known = dspy.Example(base=record).with_inputs(*self.config.inputs)
        predicted = dspy.Prediction(base=prediction) if isinstance(prediction, dict) else prediction
        score = scored(await call_scorer(metric, known, predicted, *further_arguments(metric)), "task.metric")
        if self.asked_with_trace and takes_trace(metric):
            steps = [step for step in self.program.trace if step[2] is not None]
            answer = await call_scorer(metric, known, predicted, *further_arguments(metric, steps))
            self.answer_to_trace = scored(answer, "task.metric").reward
        # Metrics of GEPA's form may say nothing until they are asked about one predictor.
        if not self.asked_about or not speaks_of_predictors(metric):
            return score
        # What it says of the whole stands for predictors of which it says nothing.
        trace, feedback = list(self.program.trace), dict(score.feedback)
        for name in self.asked_about:
            own = [step for step in trace if self.program.structure.name_of([step[0]]) == name and step[2] is not None]
            if own:
                about = scored(await call_scorer(metric, known, predicted, trace, name, own), "task.metric").feedback
                if "" in about:
                    feedback[name] = about[""]
        return replace(score, feedback=feedback)

    @override
    def describe(self) -> Mapping[str, object]:
        paths = {"program": str(self.config.program), "metric": ", ".join(paths_of(self.config)) or UNSCORED}
        return {**super().describe(), **{name: display_name(path) for name, path in paths.items()}}


def _program(source: Any, modules: Sequence[str], name: str, key: Callable[[str], str]) -> object:
    """Return the program: a raw `dspy.Module` (wrapped by the code that builds the task), or one that runs as it is.

    Args:
        source: a program, what makes one without arguments, or an async function.
        modules: modules of an async function.
        name: name of the source, for messages.
        key: `program` or `modules` -> what the user has set.

    Raises:
        ConfigError: neither.
    """
    # A function does not say which modules it calls, and groups, weights and metrics are by module.
    if _is_async(source):
        if not modules:
            raise ConfigError(f"{key('modules')}: missing; expected the names that {name} passes to ctx.call")
        if (takes := refusing_signature(source, None, None)) is not None:
            raise ConfigError(f"{key('program')}: {name} takes {takes}, expected an async function (example, ctx)")
        return FunctionProgram(source, tuple(modules))
    if modules and inspect.isroutine(source) and refusing_signature(source, None, None) is None:
        raise ConfigError(f"{key('program')}: {name} is not async, and awaits no reply so; write async def {name}")
    # An object with `modules` names its own; two lists could disagree.
    if modules:
        raise ConfigError(f"{key('modules')}: has no effect with {name}, which is no async function; leave it out")
    if _is_program(source):
        return source
    # A module's class hides its arguments behind those of DSPy's metaclass.
    call = (source.__init__, None) if inspect.isclass(source) else (source,)
    takes = refusing_signature(*call) if callable(source) else f"no call (a {type(source).__name__})"
    if takes is not None:
        raise ConfigError(
            f"{key('program')}: {name} takes {takes}; expected a dspy.Module, what makes one without arguments, or an "
            "async function (example, ctx)"
        )
    try:
        built = source()
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(str(user_failure(ProgramFailure, error, f"{key('program')}: {name}() raised "))) from None
    if not _is_program(built):
        raise ConfigError(
            f"{key('program')}: {name} gave a {type(built).__name__}; expected a dspy.Module, an async function, or an "
            "object with `modules` and `run`"
        )
    return built


def _is_async(source: object) -> bool:
    """Return True for an async function, also behind a decorator, and for an object that is called as one."""
    if inspect.isclass(source) or _is_program(source):
        return False
    inner = inspect.unwrap(source) if callable(source) else None
    return any(map(inspect.iscoroutinefunction, (source, inner, getattr(source, "__call__", None))))  # noqa: B004


def _is_program(value: object) -> bool:
    # A class has `modules` and `run` too, and is no program before it is called.
    if inspect.isclass(value):
        return False
    return is_dspy_module(value) or (hasattr(value, "modules") and hasattr(value, "run"))


# --- metrics


def paths_of(config: MetricsConfig) -> Sequence[str]:
    """Return the import paths of the metrics."""
    return (config.metric,) if isinstance(config.metric, str) else config.metric or ()


def imported_metrics(config: MetricsConfig) -> dict[str, Callable[..., Any]]:
    """Import the metrics: `task.metric: PATH` -> function.

    Raises:
        ConfigError: one is no function; two of a list have one name, or one has a name that means something else.
    """
    metrics, problems, names = dict[str, Callable[..., Any]](), list[str](), Counter(map(_name, paths_of(config)))
    for path in paths_of(config):
        with gathered(problems):
            metrics[f"task.metric: {path}"] = metric = imported("task.metric", path)
            if not callable(metric):
                problems.append(f"task.metric: {path} is a {type(metric).__name__}, expected a function")
    if not isinstance(config.metric, str):
        problems += [
            f"task.metric: got {count} of the name {name}; expected a name for each, under which it is reported"
            for name, count in names.items()
            if count > 1
        ]
        taken = [name for name in names if name == "score" or RESERVED.fullmatch(name)]
        problems += [f"task.metric: got the name {name}, which is mmrl's own in a list; rename it" for name in taken]
    refuse(problems)
    return metrics


def _name(path: str) -> str:
    return path.rpartition(":")[2]


def unscored(record: object, result: object) -> Score:
    """Return what is said of a rollout that nothing scores: it came to its end."""
    return Score(reward=0.0, metrics={FINISHED: 1.0})


def as_one(metrics: Mapping[str, Callable[..., Any]], config: MetricsConfig) -> Callable[..., Any]:
    """Return the metric, of a list one that weighs all."""
    if isinstance(config.metric, str):
        return metrics[f"task.metric: {config.metric}"]
    return WeightedMetrics(metrics, config.metric_weights or (1.0,) * len(metrics))


@dataclass(frozen=True, slots=True)
class WeightedMetrics:
    """Several metrics as one: their weighted sum, and each under its own name.

    Args:
        metrics: `task.metric: PATH` -> function.
        weights: one for each.
    """

    metrics: Mapping[str, Callable[..., Any]]
    weights: Sequence[float]

    async def __call__(self, record: object, prediction: object, trace: object = None) -> Score:
        """Score by each in turn; what one reports beside its score is `NAME.KEY`.

        Args:
            trace: for those that take one.

        Raises:
            RewardFailure: as of `scored`.
        """
        numbers, parts, feedback = dict[str, float](), dict[str, float](), list[str]()
        for (source, metric), weight in zip(self.metrics.items(), self.weights, strict=True):
            name = _name(source)
            score = scored(await call_scorer(metric, record, prediction, *further_arguments(metric, trace)), source)
            numbers |= {name if key == "score" else f"{name}.{key}": value for key, value in score.metrics.items()}
            parts[name] = weight * score.reward
            feedback += score.feedback.values()
        total = math.fsum(parts.values())
        said = {"": "\n".join(feedback)} if feedback else {}
        return Score(reward=total, metrics={"score": total, **numbers}, parts=parts, feedback=said)


def scored(result: object, source: str) -> Score:
    """Return a metric's result as a score: a number, or a mapping of numbers with `score`, and perhaps a `feedback`.

    Args:
        source: who gave it, for messages.

    Raises:
        RewardFailure: there is no `score`, or a number is not finite.
    """
    if isinstance(result, Score):
        return result
    # Where DSPy was never imported nothing can be an object of it, and importing it takes seconds.
    dspy = sys.modules.get("dspy")
    given = result.toDict() if dspy is not None and isinstance(result, dspy.Example) else result
    values = {str(name): value for name, value in (given if isinstance(given, Mapping) else {"score": given}).items()}
    numbers = {name: number for name, value in values.items() if (number := as_number(value)) is not None}
    if "score" not in numbers or not all(abs(number) <= LARGEST for number in numbers.values()):
        raise RewardFailure(
            f"{source} gave {result!r:.300}; expected a finite number, or a mapping of finite numbers with 'score', "
            f"each of at most {LARGEST:g} in size"
        )
    feedback = values.get("feedback")
    return Score(reward=numbers["score"], metrics=numbers, feedback={"": feedback} if isinstance(feedback, str) else {})


# --- user code by its signature, before it runs


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return a function's signature, of a `dspy.Module` its `forward`'s; None: it does not say, as compiled code."""
    inner = _method(function, "forward") if is_dspy_module(function) else function
    try:
        return inspect.signature(inner or function)
    except (TypeError, ValueError):
        return None


def refusing_signature(function: Callable[..., Any], /, *args: object, **named: object) -> str | None:
    """Return a function's parameter list as text, if it cannot be called with these arguments."""
    signature = signature_of(function)
    if signature is None:
        return None
    try:
        signature.bind(*args, **named)
    except TypeError:
        parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return None


def further_arguments(metric: Callable[..., Any], trace: object = None) -> Sequence[object]:
    """Return what a metric gets beside record and prediction: None for each argument without a default.

    DSPy's optimizers pass `trace` and more, and so metrics written for it may ask for them.

    Args:
        trace: the first of these, where the metric takes one.
    """
    further = (None,) * sum(parameter.default is parameter.empty for parameter in _positional(metric)[2:])
    return further if trace is None or not takes_trace(metric) else (trace, *further[1:])


def takes_trace(metric: Callable[..., Any]) -> bool:
    """Check if a metric takes a trace, which DSPy's optimizers pass third: there may be an option of its own."""
    if isinstance(metric, WeightedMetrics):
        return any(map(takes_trace, metric.metrics.values()))
    return any(p.default is p.empty or "trace" in p.name for p in _positional(metric)[2:3])


def speaks_of_predictors(metric: Callable[..., Any]) -> bool:
    """Check if a metric has GEPA's form: `trace`, `pred_name` and `pred_trace` behind record and prediction.

    One that takes any number of arguments (`*given`) need not: it may hand them to one that has it not.
    """
    return len(_positional(metric)) > 3 and refusing_signature(metric, *(None,) * 5) is None


def _positional(metric: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    signature = signature_of(metric)
    parameters = () if signature is None else signature.parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def inputs_problem(module: Any, fields: Sequence[str]) -> str | None:
    """Explain why a `dspy.Module` cannot be called with these fields as keywords: the words after "got FIELDS"."""
    name = "aforward" if awaits(module) else "forward"
    method = _method(module, name)
    if method is None:
        return None  # its rollouts tell
    takes = refusing_signature(method, **dict.fromkeys(fields))
    return None if takes is None else f"but {type(module).__name__}.{name} takes {takes}"


def _method(module: Any, name: str) -> Callable[..., Any] | None:
    """Return a module's method; not by `module.forward`, which DSPy takes for a call that goes around its own."""
    of_class: Any = getattr(type(module), name, None)
    method: Callable[..., Any] | None = vars(module).get(name) or (of_class and of_class.__get__(module))
    return method
