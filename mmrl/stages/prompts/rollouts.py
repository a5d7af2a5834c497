"""The rollouts of a search: the `forward` of a student is one, asked for from DSPy's threads, run on the run's loop.

Each is stored before DSPy sees it, by candidate, example and draw, and paid for once: an optimiser that is run again
from its seed needs the same ones, so a run that was killed goes on where its store ends.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import dspy
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.callback import BaseCallback

from mmrl import rng
from mmrl.config import PromptCommandConfig
from mmrl.config.other_stages import BootstrapConfig
from mmrl.records import Example, Rollout
from mmrl.rollout.environment import Stopwatch, make_environment, sampling_settings
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import sample
from mmrl.stages import Stage
from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.students import State, Student, as_json, state_of, student_of
from mmrl.stages.step_metrics import refuse_failures
from mmrl.system.files import JsonObject, plain
from mmrl.system.json_lines import Store
from mmrl.system.portal import LOOK_S, STOP_S, Job, rollout_loop
from mmrl.tasks.base import Program

T = TypeVar("T")
THREADS = 64
"""Threads of DSPy's: so many rollouts are in flight at once in an evaluation."""
JUDGED = 8
"""Rollouts of bootstrapping, which come one by one, after which their failures are judged."""
MOST_CANDIDATES = 32
"""Candidates that stay built."""
COSTS = ("calls", "prompt_tokens", "completion_tokens")
"""Costs in a rollout's result."""
ID = "mmrl_id"
"""Input of a student's `forward`: the example's id."""


class TrainExample(dspy.Example):
    """An example as DSPy takes it: metadata are labels, which demonstrations may show."""

    _id: str

    @classmethod
    def from_example(cls, example: Example) -> TrainExample:
        """Make one from the inputs and metadata of an example of the task."""
        inputs = as_json(example.inputs)
        labels = {key: value for key, value in as_json(example.metadata).items() if key not in inputs}
        converted: TrainExample = cls(**inputs, **labels).with_inputs(*inputs)
        converted._id = example.id
        return converted

    def inputs(self) -> dspy.Example:
        """Return the arguments of a program; the id tells two examples with the same inputs apart."""
        return dspy.Example(base=super().inputs().toDict(), **{ID: self._id}).with_inputs(*self._input_keys, ID)


@dataclass(frozen=True, slots=True)
class Need:
    """Rollout that an optimiser needs; without a temperature, as an evaluation would sample it."""

    candidate: str
    """Digest of its state."""
    example: str
    temperature: float | None = None
    number: int | None = None
    """DSPy's number of the sample."""

    @property
    def draw(self) -> tuple[str | None, int | None]:
        """The part of its key that differs between samples of the same candidate on the same example."""
        return None if self.temperature is None else repr(self.temperature), self.number

    @property
    def key(self) -> str:
        """Name of its result in the store."""
        return f"{rng.digest(self.candidate, self.example, *self.draw):032x}"


class Played(dspy.Prediction):
    """The prediction of a rollout, with all that is known of the rollout."""

    rollout_need: Need
    rollout_result: JsonObject

    @classmethod
    def from_result(cls, need: Need, result: JsonObject) -> Played:
        """Return the prediction of a stored rollout."""
        fields = result["prediction"]
        played = cls(**(fields if isinstance(fields, dict) else {"prediction": fields}))
        # Not as fields: the prompt model of some optimisers reads all fields.
        object.__setattr__(played, "rollout_need", need)
        object.__setattr__(played, "rollout_result", result)
        return played


class Loop:
    """Rollouts of a search on the loop of all rollouts, while the optimiser waits for them in threads.

    The first error ends the search: whatever is asked for later raises it too. DSPy takes an exception for a bad
    candidate and goes on, so that whoever runs it looks at `failure`.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._waiting: set[Job[Any]] = set()

    def run(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, which runs in a thread and calls `wait`."""
        # Rollouts have DSPy's settings of now and not the optimiser's: a metric may call the LM that is configured.
        self._context = copy_context()
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(copy_context().run, function)
            try:
                while not done.done():  # with pauses, in which a notebook's stop button is noticed
                    futures.wait([done], LOOK_S)
                return done.result()
            finally:
                with self._lock:
                    self.failure = self.failure or RuntimeError("the search has ended")
                    jobs = list(self._waiting)
                # What was asked for as the search was stopped: nothing else would wake its threads.
                for job in jobs:
                    job.cancel()
                futures.wait([job.ended for job in jobs], STOP_S)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work` on the loop; called from any other thread, which it blocks."""
        with self._lock:
            if self.failure is not None:
                work.close()
                raise self.failure
            job = self._context.copy().run(Job, work, rollout_loop())
            self._waiting.add(job)
        job.ended.add_done_callback(lambda _: self._waiting.discard(job))
        with self.noting():
            try:
                return job.ended.result()
            except asyncio.CancelledError:
                raise RuntimeError("the search has ended") from None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error that leaves the block."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """Sampler and store of the rollouts of one stage; a student's `forward` is answered from them."""

    stage: Stage[PromptCommandConfig]
    """Rollouts are sampled as in its evaluations."""
    store: Store
    loop: Loop
    paid: Counter[str]
    """Costs of all results that this process has used, whether they were sampled now or before a kill."""
    student: Student = field(init=False)
    sampling: Stopwatch = field(default_factory=Stopwatch)
    """Time of rollouts."""
    states: dict[str, State] = field(default_factory=dict)
    """Digest -> state of each candidate so far."""
    _examples: Mapping[str, Example] = field(init=False)
    """The train split, by id."""
    _tasks: dict[str, asyncio.Task[JsonObject]] = field(default_factory=dict)
    """Key -> result of each rollout that this process has needed."""
    _stored: dict[str, JsonObject] = field(init=False)
    _failed: dict[str, tuple[Rollout, JsonObject]] = field(default_factory=dict)
    """Key -> what failed by no doing of the model, until `check` of its batch stores it."""
    _bootstrapped: list[Need] = field(default_factory=list)
    """Rollouts of bootstrapping whose failures were not judged yet."""
    _program: Callable[[str], Program] = field(init=False)
    _places: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, CHUNK))

    def __post_init__(self) -> None:
        self.student = student_of(self.stage.task, self.forward)
        self._examples = {example.id: example for example in self.stage.task.examples("train")}
        self._stored = {result["key"]: result for line in self.store.lines for result in line["rollouts"]}
        # Each is a copy of the program, and whatever it holds: the oldest go.
        self._program = lru_cache(MOST_CANDIDATES)(lambda digest: self.student.program(self.states[digest]))

    def forward(self, module: dspy.Module, inputs: Mapping[str, object]) -> Played:
        """Play a student's `forward`: the prediction of a rollout with its prompts; the trace is DSPy's."""
        with self.loop.noting():
            need = Need(self.digest(module), str(inputs[ID]), *_draw(module))
            (result,), trace = self.obtain([need]), dspy.settings.trace
            # Evaluations have no trace.
            if trace is not None:
                trace.extend(self._trace(dict(module.named_predictors()), result["steps"]))
                # Rollouts of bootstrapping come one by one.
                if isinstance(self.stage.config.algo, BootstrapConfig):
                    self._bootstrapped.append(need)
                if len(self._bootstrapped) == JUDGED:
                    self.check(())
            return Played.from_result(need, result)

    def _trace(self, predictors: Mapping[str, Any], steps: Sequence[JsonObject]) -> Iterator[tuple[Any, ...]]:
        for step in steps:
            outputs: object = None
            if step["outputs"] is not None:
                outputs = dspy.Prediction(**step["outputs"])
            elif self.stage.config.algo.name == "gepa":
                outputs = FailedPrediction(completion_text=step["text"])
            if outputs is not None and step["module"] in predictors:
                yield predictors[step["module"]], dict(step["inputs"]), outputs

    def digest(self, module: dspy.Module) -> str:
        """Return the digest of a program's prompts, whose state is noted under it."""
        state = state_of(module)
        digest = f"{rng.digest(json.dumps(state, sort_keys=True)):032x}"
        self.states.setdefault(digest, state)
        return digest

    def obtain(self, needs: Sequence[Need]) -> list[JsonObject]:
        """Return the results of all of these, from the store or sampled now, all at once; blocks a thread of DSPy's."""
        return self.loop.wait(self._obtained(needs))

    async def _obtained(self, needs: Sequence[Need]) -> list[JsonObject]:
        for need in needs:
            # DSPy asks again where a thread takes long.
            if need.key not in self._tasks:
                self._tasks[need.key] = asyncio.create_task(self._obtain(need))
        return await asyncio.gather(*(self._tasks[need.key] for need in needs))

    def result(self, need: Need) -> JsonObject:
        """Return the result of a rollout that has ended."""
        return self._tasks[need.key].result()

    async def _obtain(self, need: Need) -> JsonObject:
        result = self._stored.get(need.key)
        if result is None:
            async with self._places:
                rollout, result = await self._sampled(need)
            if rollout.reward is None:
                self._failed[need.key] = rollout, result
            else:
                # Before it is used: what an optimiser has seen is never sampled again.
                self.store.append({"rollouts": [result]})
        self.paid.update({"rollouts": 1, **{name: result[name] for name in COSTS}})
        return result

    async def _sampled(self, need: Need) -> tuple[Rollout, JsonObject]:
        # Of its own: two draws of one candidate and example may run at once.
        program, stage = copy.copy(self._program(need.candidate)), self.stage
        # Shallow: data, corpora and tools are large, and no candidate changes them.
        task = copy.copy(stage.task)
        task.program = program
        settings = sampling_settings(stage.config.eval, stage.config.task)
        if need.temperature is not None:
            settings = replace(settings, temperature=need.temperature)
        # Without the candidate: candidates are compared on the same draws.
        key: rng.Key = (stage.config.seed, "prompts", *need.draw)
        env = make_environment(task, stage.engine, stage.tokenizer, settings, key)
        with self.sampling.running():
            forest = await sample(env, [(self._examples[need.example], (Tree(),))], stage.reward_set)
        (rollout,) = forest.rollouts
        calls = forest.path(rollout)
        result = {
            "key": need.key,
            "candidate": need.candidate[:12],
            "temperature": need.temperature,
            "number": need.number,
            "example": rollout.example,
            "score": task.failure_score if rollout.reward is None else rollout.reward,
            "error": rollout.error,
            "message": rollout.error_message,
            "prediction": as_json(rollout.prediction) if rollout.error is None else {},
            "metrics": dict(rollout.metrics),
            "parts": dict(rollout.parts),
            "steps": self.student.steps(program, forest, rollout),
            "calls": sum(call.attempts for call in calls),
            "prompt_tokens": sum(call.prompt_tokens or 0 for call in calls),
            "completion_tokens": sum(call.completion_tokens for call in calls),
        }
        return rollout, plain(result)

    def check(self, needs: Sequence[Need]) -> None:
        """Store what failed by no doing of the model, of a batch and of bootstrapping before it.

        Only now is it known not to be too much.

        Raises:
            TooManyFailures: more than `eval.max_failed_share` of them; a resume samples them again.
        """
        needs, self._bootstrapped = [*self._bootstrapped, *needs], []
        failed = [self._failed.pop(need.key) for need in needs if need.key in self._failed]
        if failed:
            errors = [self.result(need)["error"] for need in needs]
            limit = self.stage.config.eval.max_failed_share
            refuse_failures(errors, [rollout for rollout, _ in failed], limit, "a batch of the search", key="eval")
        for _, result in failed:
            self.store.append({"rollouts": [result]})


def _draw(module: dspy.Module) -> tuple[float | None, int | None]:
    lms = [predictor.lm for predictor in module.predictors() if predictor.lm is not None]
    options = (lms[0] if lms else dspy.settings.lm).kwargs
    temperature = options.get("temperature")
    # A number alone says that DSPy's cache may answer, which is what the store does.
    return (None, None) if temperature is None else (temperature, options.get("rollout_id"))


@dataclass
class Evaluated(BaseCallback):
    """Callback that calls a function with the rollouts of each evaluation of DSPy's."""

    loop: Loop
    on_batch: Callable[[Sequence[Need]], None]

    def on_evaluate_end(self, call_id: str, outputs: Any | None, exception: BaseException | None = None) -> None:
        """See `BaseCallback`."""
        if outputs is None or self.loop.failure is not None:
            return
        # With a trace beside it where GEPA asked for one.
        played = [output[0] if isinstance(output, tuple) else output for _, output, _ in outputs.results]

        async def called() -> None:
            self.on_batch([prediction.rollout_need for prediction in played])

        self.loop.wait(called())
