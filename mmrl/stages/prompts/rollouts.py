"""Between DSPy's optimisers, which run a program example by example, and rollouts, which are sampled in whole batches.

A first pass over a batch of DSPy's only notes which rollouts it needs; they are sampled together and stored; then
DSPy's own code runs, answered from the store. An optimiser that is run again from its seed needs the same rollouts in
the same batches, so a run that was killed goes on where its store ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy.teleprompt.bootstrap_trace import FailedPrediction

from mmrl.records import Example
from mmrl.stages.prompts.stored_rollouts import AS_EVALUATED, Need, Sampler
from mmrl.stages.prompts.trial_store import as_json
from mmrl.system.files import JsonObject


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
            self._item = _example_in(item)
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
        self._item = _example_in(item)
        return missing

    def _notes(self, function: Callable[[Any], object], data: Sequence[Any]) -> list[Need]:
        """The rollouts that a function asks for, each item up to its first one; none is sampled."""
        before, self._noted = self._noted, []
        try:
            for item in data:
                self._item = _example_in(item)
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


def _example_in(item: object) -> dspy.Example | None:
    """The example of an item of a batch: the item itself, or the second of a pair of program and example."""
    if isinstance(item, tuple) and len(item) == 2:
        item = item[1]
    return item if isinstance(item, dspy.Example) else None


def _text(fields: Mapping[str, object]) -> str:
    return json.dumps(as_json(fields), sort_keys=True)
