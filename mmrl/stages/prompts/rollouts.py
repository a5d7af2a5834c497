"""DSPy's optimisers, which run a program example by example, on rollouts, which are sampled in whole batches.

A first pass over a batch of DSPy's only notes which rollouts it needs; they are sampled together and stored; then
DSPy's own code runs, answered from the store. An optimiser that is run again from its seed needs the same rollouts in
the same batches, so a run that was killed goes on where its store ends. What DSPy does one after the other, or in
threads, is replaced while an optimiser runs (`on_rollouts`), and put back after it.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import dspy
from dspy.teleprompt import BootstrapFewShot
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.parallelizer import ParallelExecutor

from mmrl.records import Example
from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.stored_rollouts import AS_EVALUATED, Need, Sampler
from mmrl.stages.prompts.students import as_json
from mmrl.system.files import JsonObject

NO_LIMIT = 10**9
"""Of errors: a failed rollout is no error here, so that DSPy's limits have nothing to count."""
AHEAD = "mmrl_ahead"
"""Attribute of one bootstrapping: how many examples it rolls out at once next."""


class Abort(BaseException):
    """What ends the stage from within DSPy's code, which takes any `Exception` for a bad candidate."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class _Noted(BaseException):
    """A rollout was only noted, in the pass over a batch that finds out what it needs."""


class Played(dspy.Prediction):
    """The prediction of a rollout, with all that is known of the rollout."""

    rollout_result: JsonObject

    @classmethod
    def of(cls, result: JsonObject) -> Played:
        """The prediction of a stored rollout."""
        fields = result["prediction"]
        made = cls(**(fields if isinstance(fields, dict) else {"prediction": fields}))
        # Not as a field: the prompt model of some optimisers reads all fields.
        object.__setattr__(made, "rollout_result", result)
        return made


@dataclass(slots=True)
class Rollouts:
    """What a student's `forward` and DSPy's batches are answered from."""

    sampler: Sampler
    on_batch: Callable[[Sequence[Need]], None]
    """Called when DSPy has seen all results of a batch."""
    shows_failures: bool = False
    """Whether traces have the replies that could not be parsed, as GEPA takes them."""
    _by_inputs: dict[str, list[Example]] = field(init=False)
    _item: dspy.Example | None = None
    _noted: list[Need] | None = None

    def __post_init__(self) -> None:
        self._by_inputs = {}
        # DSPy hands a program inputs alone, from which the example has to be known again.
        for example in self.sampler.examples:
            self._by_inputs.setdefault(_text(example.inputs), []).append(example)

    def given(self, examples: Iterable[Example]) -> list[dspy.Example]:
        """Examples as DSPy takes them: metadata are labels, which demonstrations may show."""
        return [dspy.Example(**_fields(example)).with_inputs(*example.inputs) for example in examples]

    def forward(self, module: dspy.Module, inputs: Mapping[str, object]) -> Played:
        """What a student's `forward` returns: the prediction of a rollout with its prompts; the trace is DSPy's.

        Raises:
            Abort: in the place of any error, none of which is the candidate's.
        """
        try:
            need = self._need(module, inputs)
            if self._noted is None:
                self.sampler.obtain([need])
        except Exception as error:
            raise Abort(error) from error
        # Out through all of DSPy's code, whose handlers of `Exception` do not see it: the pass ends here for this item.
        if self._noted is not None:
            self._noted.append(need)
            raise _Noted
        result = self.sampler.results[need.key]
        if dspy.settings.trace is not None:
            dspy.settings.trace.extend(self._trace(dict(module.named_predictors()), result["steps"]))
        return Played.of(result)

    def batch(
        self, function: Callable[[Any], object], data: Sequence[Any]
    ) -> tuple[Callable[[Any], object], list[Need]]:
        """Have all rollouts that `function` asks for on `data`; a function that gets them, and which they were."""
        needs = self._notes(function, data)
        self._obtain(needs)

        def with_item(item: Any) -> object:
            self._item = item
            return function(item)

        return with_item, needs

    def ahead(self, function: Callable[[Any], object], item: Any, following: Sequence[Any]) -> bool:
        """Before `function(item)`: if its rollout is not there yet, have those of `following` items with it.

        Returns:
            Whether it was not there.
        """
        needs = self._notes(function, [item])
        missing = any(need.key not in self.sampler.results for need in needs)
        if missing:
            self._obtain([*needs, *self._notes(function, following)])
        self._item = item
        return missing

    def _notes(self, function: Callable[[Any], object], data: Sequence[Any]) -> list[Need]:
        """The rollouts that a function asks for, each item up to its first one; none is sampled."""
        before, self._noted = self._noted, []
        try:
            for item in data:
                self._item = item
                with suppress(_Noted):
                    function(item)
            return self._noted
        finally:
            self._noted = before

    def _obtain(self, needs: Sequence[Need]) -> None:
        try:
            self.sampler.obtain(needs)
        except Exception as error:
            raise Abort(error) from error

    def _need(self, module: dspy.Module, inputs: Mapping[str, object]) -> Need:
        lms = [predictor.lm for predictor in module.predictors() if predictor.lm is not None]
        options = (lms[0] if lms else dspy.settings.lm).kwargs
        draw = (options.get("temperature"), options.get("rollout_id"))
        # A number alone says that DSPy's cache may answer, which is what the store does.
        return Need(self.sampler.digest(module), self._example(inputs).id, AS_EVALUATED if draw[0] is None else draw)

    def _example(self, inputs: Mapping[str, object]) -> Example:
        same = self._by_inputs[_text(inputs)]
        if len(same) > 1 and self._item is not None:
            # Two examples with the same inputs: the one whose labels DSPy holds in its hands.
            fields = _text(self._item.toDict())
            same = [example for example in same if _text(_fields(example)) == fields] or same
        return same[0]

    def _trace(self, predictors: Mapping[str, Any], steps: Sequence[JsonObject]) -> Iterable[tuple[Any, ...]]:
        for step in steps:
            outputs: object = None
            if step["outputs"] is not None:
                outputs = dspy.Prediction(**step["outputs"])
            elif self.shows_failures:
                outputs = FailedPrediction(completion_text=step["text"])
            if outputs is not None and step["module"] in predictors:
                yield predictors[step["module"]], dict(step["inputs"]), outputs


def _fields(example: Example) -> dict[str, object]:
    inputs = as_json(example.inputs)
    return inputs | {key: value for key, value in as_json(example.metadata).items() if key not in inputs}


def _text(fields: Mapping[str, object]) -> str:
    return json.dumps(as_json(fields), sort_keys=True)


class TaskLM(dspy.BaseLM):
    """The place of the task's model in DSPy's settings: optimisers copy it with the options that they sample with.

    Never called itself: a rollout has an LM of its own.
    """

    def __init__(self) -> None:
        super().__init__(model="mmrl", cache=False)

    def __call__(self, prompt: str | None = None, *, messages: Any = None, **options: Mapping[str, Any]) -> list[str]:
        """Never."""
        raise TypeError("a request outside of a rollout")


@contextmanager
def on_rollouts(rollouts: Rollouts, log: TextIO, ahead: int) -> Iterator[None]:
    """Inside, DSPy's optimisers run on rollouts.

    Args:
        log: what they print.
        ahead: examples that a bootstrapping rolls out at once first.
    """
    settings = {"lm": TaskLM(), "trace": None, "disable_history": True, "track_usage": False, "max_errors": NO_LIMIT}
    # Around rollouts they are what they were: a metric may call the LM that is configured.
    before = {name: dspy.settings[name] for name in settings}
    with ExitStack() as stack:
        stack.enter_context(_printing_to(log, rollouts, before))
        # Settings of this thread, never those that are configured.
        stack.enter_context(dspy.context(**settings))
        stack.enter_context(replaced(ParallelExecutor, "execute", partial(_execute, rollouts)))
        stack.enter_context(replaced(DspyAdapter, "batch_evaluate", _one_by_one))
        one = partial(_bootstrap_one, rollouts, ahead)
        stack.enter_context(replaced(BootstrapFewShot, "_bootstrap_one_example", one))
        yield


# DSPy calls these two as methods of its objects, which come after the first arguments.
_dspy_execute = ParallelExecutor.execute
_dspy_bootstrap_one = BootstrapFewShot._bootstrap_one_example


def _execute(rollouts: Rollouts, executor: Any, function: Callable[[Any], object], data: Sequence[Any]) -> Any:
    """DSPy's evaluations of a program."""
    served, needs = rollouts.batch(function, data)
    # Nothing is left to wait for, and one thread has one order.
    executor.num_threads, executor.disable_progress_bar = 1, True
    results = _dspy_execute(executor, served, data)
    rollouts.on_batch(needs)
    return results


def _bootstrap_one(rollouts: Rollouts, ahead: int, optimiser: Any, example: dspy.Example, round_idx: int = 0) -> Any:
    """One example of DSPy's bootstrapping, with the rollouts of those that may come after it."""

    def attempt(one: dspy.Example) -> object:
        # The original takes the example itself out of the demonstrations, and puts it back only where nothing raises.
        demos = {name: predictor.demos for name, predictor in optimiser.teacher.named_predictors()}
        try:
            return _dspy_bootstrap_one(optimiser, one, round_idx)
        finally:
            for name, predictor in optimiser.teacher.named_predictors():
                predictor.demos = demos[name]

    place = next(i for i, one in enumerate(optimiser.trainset) if one is example)
    size = vars(optimiser).setdefault(AHEAD, ahead)
    # A second round is for the examples that failed in the first, of which the next is not known.
    following = optimiser.trainset[place + 1 : place + size] if round_idx == 0 else []
    if rollouts.ahead(attempt, example, following):
        # Where few go well, one goes through many: at most as many again as are needed are rolled out for nothing.
        setattr(optimiser, AHEAD, min(2 * size, CHUNK))
    return _dspy_bootstrap_one(optimiser, example, round_idx)


def _one_by_one(adapter: Any, items: Sequence[Any], *, capture_traces: bool = True) -> list[Any]:
    """GEPA's evaluations of several candidates, which it runs in threads."""
    return [adapter.evaluate(batch, candidate, capture_traces=capture_traces) for candidate, batch in items]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute inside; a function becomes a method as the one before it was."""
    before = vars(owner)[name]
    if isinstance(owner, type):
        function = value

        def method(self: Any, *args: Any, **options: Any) -> Any:
            return function(self, *args, **options)

        value = method
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass
class _Printed:
    """Standard output or error while DSPy runs: what its code prints goes to a file, all else where it went before."""

    log: TextIO
    before: Any
    thread: int = field(default_factory=threading.get_ident)
    diverted: bool = True

    def write(self, text: str) -> int:
        """See `TextIO.write`."""
        # Other threads draw the display, and run the rollouts of the user's program.
        here = self.diverted and threading.get_ident() == self.thread
        return int((self.log if here else self.before).write(text))

    def flush(self) -> None:
        """See `TextIO.flush`."""
        self.log.flush()
        self.before.flush()

    def __getattr__(self, name: str) -> Any:
        # rich draws to the terminal behind a file that stands in its place
        return getattr(self.before, name)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is diverted: code of the user's runs."""
        before, self.diverted = self.diverted, False
        try:
            yield
        finally:
            self.diverted = before


@contextmanager
def _printing_to(log: TextIO, rollouts: Rollouts, before: Mapping[str, Any]) -> Iterator[None]:
    """What DSPy and Optuna print, log and draw goes to a file.

    Args:
        before: DSPy's settings around rollouts, whose code is the user's.
    """
    out, err = sys.stdout, sys.stderr
    printed, logged = _Printed(log, out), _Printed(log, err)

    @contextmanager
    def aside() -> Iterator[None]:
        with dspy.context(**before), printed.aside(), logged.aside():
            yield

    sys.stdout, sys.stderr, rollouts.sampler.aside = printed, logged, aside
    _optuna_logs_to(logged)
    try:
        yield
    finally:
        sys.stdout, sys.stderr, rollouts.sampler.aside = out, err, nullcontext
        _optuna_logs_to(err)
        log.flush()


def _optuna_logs_to(stream: Any) -> None:
    """Have Optuna's logger, if it is there, write to `stream`.

    Its handler keeps the standard error of the moment in which Optuna was first imported: before this stage (a sweeper,
    a plugin), the log would go to the terminal; in an earlier stage, to a file that is closed.
    """
    for handler in logging.getLogger("optuna").handlers:
        # Not files and handlers of others. `setStream` would flush the old one, which may be closed.
        if type(handler) is logging.StreamHandler:
            handler.stream = stream
