"""DSPy's optimisers on rollouts: the `forward` of a student is one rollout, asked for from DSPy's own threads.

An optimiser that is run again from its seed needs the same rollouts, so a run that was killed goes on where its store
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.teleprompt import LabeledFewShot
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.callback import BaseCallback

from mmrl.records import Example
from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.stored_rollouts import AS_EVALUATED, Loop, Need, Sampler
from mmrl.stages.prompts.students import as_json
from mmrl.system.files import JsonObject

THREADS = 64
"""Of DSPy's: so many rollouts are in flight at once in an evaluation."""
ID = "mmrl_id"
"""Input of a student's `forward`: the example's id."""


class Played(dspy.Prediction):
    """The prediction of a rollout, with all that is known of the rollout."""

    rollout_need: Need
    rollout_result: JsonObject

    @classmethod
    def of(cls, need: Need, result: JsonObject) -> Played:
        """The prediction of a stored rollout."""
        fields = result["prediction"]
        played = cls(**(fields if isinstance(fields, dict) else {"prediction": fields}))
        # Not as fields: the prompt model of some optimisers reads all fields.
        object.__setattr__(played, "rollout_need", need)
        object.__setattr__(played, "rollout_result", result)
        return played


class TrainExample(dspy.Example):
    """An example as DSPy takes it: metadata are labels, which demonstrations may show."""

    _id: str

    @classmethod
    def of(cls, example: Example) -> TrainExample:
        """With the inputs and metadata of an example of the task."""
        inputs = as_json(example.inputs)
        labels = {key: value for key, value in as_json(example.metadata).items() if key not in inputs}
        made: TrainExample = cls(**inputs, **labels).with_inputs(*inputs)
        made._id = example.id
        return made

    def inputs(self) -> dspy.Example:
        """What DSPy calls a program with; the id tells two examples with the same inputs apart."""
        return dspy.Example(base=super().inputs().toDict(), **{ID: self._id}).with_inputs(*self._input_keys, ID)


@dataclass(slots=True)
class Ahead:
    """What DSPy's bootstrapping needs next: it goes through examples one by one, which are rolled out together here.

    Where DSPy goes through them in another order, more are rolled out than needed, and nothing else is different.
    """

    student: dspy.Module
    orders: Iterator[Sequence[TrainExample]]
    """Of the examples, for each bootstrapping."""
    labeled: int
    """Demonstrations of its teacher that are plain examples."""
    first: int
    """Examples that are rolled out together at first."""
    _size: int = 0
    _teacher: dspy.Module | None = None
    _order: Sequence[TrainExample] = ()
    _demos: Sequence[list[dspy.Example]] = ()

    def batch(self, sampler: Sampler, teacher: dspy.Module, need: Need) -> list[Need]:
        """A rollout that is needed now, and if it is not there yet those that may come after it."""
        if teacher is not self._teacher:
            self._teacher, self._size, self._order = teacher, self.first, next(self.orders, ())
            # As DSPy makes the teacher, which at this moment lacks the example itself among its demonstrations.
            full = LabeledFewShot(self.labeled).compile(self.student, trainset=self._order) if self.labeled else None
            self._demos = [predictor.demos for predictor in (full or self.student).predictors()]
        # A second round is for the examples that failed in the first, of which the next is not known.
        if need.key in sampler.results or need.draw != AS_EVALUATED:
            return [need]
        batch, other = [need], teacher.deepcopy()
        place = [example._id for example in self._order].index(need.example) if self._order else 0
        for example in self._order[place + 1 : place + self._size]:
            for predictor, demos in zip(other.predictors(), self._demos, strict=True):
                predictor.demos = [demo for demo in demos if demo != example]
            batch.append(Need(sampler.digest(other), example._id))
        # Where few go well, one goes through many: at most as many again as are needed are rolled out for nothing.
        self._size = min(2 * self._size, CHUNK)
        return batch


@dataclass(slots=True)
class Rollouts:
    """What a student's `forward` is answered from."""

    sampler: Sampler
    ahead: Ahead | None = None
    """Of optimisers that bootstrap."""
    shows_failures: bool = False
    """Whether traces have the replies that could not be parsed, as GEPA takes them."""

    def forward(self, module: dspy.Module, inputs: Mapping[str, object]) -> Played:
        """What a student's `forward` returns: the prediction of a rollout with its prompts; the trace is DSPy's."""
        with self.sampler.loop.noting():
            need = Need(self.sampler.digest(module), str(inputs[ID]), _draw(module))
            # Evaluations have no trace; those that have one are GEPA's, which does not bootstrap.
            if self.ahead is None or dspy.settings.trace is None:
                self.sampler.obtain([need])
            else:
                batch = self.ahead.batch(self.sampler, module, need)
                self.sampler.obtain(batch)
                self.sampler.check(batch)
            result = self.sampler.results[need.key]
            if dspy.settings.trace is not None:
                dspy.settings.trace.extend(self._trace(dict(module.named_predictors()), result["steps"]))
            return Played.of(need, result)

    def _trace(self, predictors: Mapping[str, Any], steps: Sequence[JsonObject]) -> Iterable[tuple[Any, ...]]:
        for step in steps:
            outputs: object = None
            if step["outputs"] is not None:
                outputs = dspy.Prediction(**step["outputs"])
            elif self.shows_failures:
                outputs = FailedPrediction(completion_text=step["text"])
            if outputs is not None and step["module"] in predictors:
                yield predictors[step["module"]], dict(step["inputs"]), outputs


def _draw(module: dspy.Module) -> tuple[float | None, int | None]:
    lms = [predictor.lm for predictor in module.predictors() if predictor.lm is not None]
    options = (lms[0] if lms else dspy.settings.lm).kwargs
    temperature = options.get("temperature")
    # A number alone says that DSPy's cache may answer, which is what the store does.
    return AS_EVALUATED if temperature is None else (temperature, options.get("rollout_id"))


@dataclass
class Evaluated(BaseCallback):
    """Calls a function with the rollouts of each evaluation of DSPy's."""

    loop: Loop
    on_batch: Callable[[Sequence[Need]], None]

    def on_evaluate_end(self, call_id: str, outputs: Any | None, exception: BaseException | None = None) -> None:
        """See `BaseCallback`."""
        if outputs is None or self.loop.failure is not None:
            return
        # With a trace beside it where GEPA asked for one.
        played = [found[0] if isinstance(found, tuple) else found for _, found, _ in outputs.results]

        async def called() -> None:
            self.on_batch([prediction.rollout_need for prediction in played])

        self.loop.wait(called())
