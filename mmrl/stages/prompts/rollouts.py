"""The rollouts of a search: the `forward` of a student is one, asked for from DSPy's threads, run on the run's loop."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import dspy
from dspy.utils.callback import BaseCallback

from mmrl import rng
from mmrl.config import PromptRunConfig
from mmrl.config.prompts import BootstrapConfig
from mmrl.engines.base import Engine
from mmrl.records import Call, Example, Rollout
from mmrl.rollout.environment import Stopwatch, make_environment, sampling_settings
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import sample
from mmrl.stages import Stage
from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.loop import Loop
from mmrl.stages.prompts.model import COSTS, RememberedEngine
from mmrl.stages.prompts.students import Step, as_json, student_of
from mmrl.stages.step_metrics import refuse_failures
from mmrl.system.memo import Memo
from mmrl.tasks.dspy.own import ImportedTask

JUDGED = 8
"""Rollouts of bootstrapping, which come one by one, after which their failures are judged."""
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
        converted: TrainExample = cls(base={**inputs, **labels}).with_inputs(*inputs)
        converted._id = example.id
        return converted

    def inputs(self) -> dspy.Example:
        """Return the arguments of a program; the id tells two examples with the same inputs apart."""
        return dspy.Example(base=super().inputs().toDict(), **{ID: self._id}).with_inputs(*self._input_keys, ID)


@dataclass(frozen=True, slots=True)
class Played:
    """A rollout of a candidate."""

    candidate: dspy.Module
    rollout: Rollout
    score: float
    worth: float
    """What decides whether it may be a demonstration: the metric's answer to its trace, else the score."""
    steps: Sequence[Step]
    unread: Call | None
    """The last call whose reply does not parse."""


def played(prediction: dspy.Prediction) -> Played:
    """Return the rollout that a student's prediction comes from."""
    result: Played = prediction._played
    return result


class Rollouts:
    """The student of a stage, and the sampler of its rollouts, which are those of the stage's evaluations.

    Args:
        paid: counts what this process uses, also of the memo.
    """

    def __init__(self, stage: Stage[PromptRunConfig], memo: Memo, loop: Loop, paid: Counter[str]):
        self.stage, self.loop = stage, loop
        # A function, since DSPy copies the student: a method would be copied with all that is here.
        self.student = student_of(stage.task, lambda **inputs: self._forward(**inputs))
        self.clock = Stopwatch()
        self._unjudged = list[Rollout]()
        self._examples = {example.id: example for example in stage.task.examples("train")}
        self._places, self._paid = asyncio.Semaphore(CHUNK), paid
        self._engine = RememberedEngine(stage.engine, memo, stage.config.model.path, self._count)

    def _count(self, *tokens: int) -> None:
        self._paid.update(dict(zip(COSTS, (1, *tokens), strict=True)))

    def judge(self) -> None:
        """Judge the failures since the last call that are no doing of the model.

        Raises:
            TooManyFailures: more than `eval.max_failed_share` of the rollouts; a resume asks again.
        """
        rollouts, self._unjudged = self._unjudged, []
        limit = self.stage.config.eval.max_failed_share
        refuse_failures(rollouts, limit, "a batch of the search", key="eval")

    def _forward(self, **inputs: Any) -> dspy.Prediction:
        # The module whose `forward` this is: a copy of the student, with other prompts.
        candidate, trace = dspy.settings.caller_modules[-1], dspy.settings.trace
        bootstraps = trace is not None and isinstance(self.stage.config.algo, BootstrapConfig)
        example, options = self._examples[inputs[ID]], dspy.settings.lm.kwargs
        result = self.loop.wait(self._play(candidate, example, bootstraps, **options))
        if trace is not None:
            predictors = dict(candidate.named_predictors())
            trace.extend((predictors[name], inputs, outputs) for name, inputs, outputs in result.steps)
            if bootstraps and len(self._unjudged) >= JUDGED:
                with self.loop.recording_failures():
                    self.judge()
        fields = {} if result.rollout.error is not None else as_json(result.rollout.prediction)
        prediction = dspy.Prediction(base=fields if isinstance(fields, dict) else {"prediction": fields})
        # Not as a field: the prompt model of some optimisers reads all fields.
        prediction._played = result
        return prediction

    async def _play(
        self,
        candidate: dspy.Module,
        example: Example,
        bootstraps: bool,
        temperature: float | None = None,
        rollout_id: int | None = None,
        **others: Any,
    ) -> Played:
        stage = self.stage
        # Shallow: data, corpora and tools are large, and no candidate changes them.
        task = copy.copy(stage.task)
        task.program = program = self.student.program(candidate)
        if isinstance(task, ImportedTask):
            task.asked_with_trace = bootstraps
            if stage.config.algo.name == "gepa":
                task.asked_about = program.modules
        settings = sampling_settings(stage.config.eval, stage.config.task)
        # Without the candidate: candidates are compared on the same draws.
        key: rng.Key = (stage.config.seed, "prompts", None, None)
        if temperature is not None:  # else a number says that DSPy's cache may answer
            settings, key = replace(settings, temperature=temperature), (*key[:2], repr(temperature), rollout_id)
        env = make_environment(task, cast("Engine", self._engine), stage.tokenizer, settings, key)
        async with self._places:
            with self.clock.running():
                forest = await sample(env, [(example, (Tree(),))], stage.reward_set)
        (rollout,) = forest.rollouts
        path = forest.path(rollout)
        self._paid["rollouts"] += 1
        self._unjudged.append(rollout)
        score = task.failure_score if rollout.reward is None else float(rollout.reward)
        answer = task.answer_to_trace if isinstance(task, ImportedTask) else None
        return Played(
            candidate=candidate,
            rollout=rollout,
            score=score,
            worth=score if answer is None else answer,
            steps=self.student.steps(program, path, rollout),
            unread=next((call for call in reversed(path) if not call.ok), None),
        )


@dataclass
class Evaluated(BaseCallback):
    """Callback that calls a function with the rollouts of each evaluation of DSPy's, one after the other."""

    loop: Loop
    on_batch: Callable[[Sequence[Played]], None]

    def on_evaluate_end(self, call_id: str, outputs: Any | None, exception: BaseException | None = None) -> None:
        """See `BaseCallback`."""
        if outputs is None or self.loop.failure is not None:
            return
        # With a trace beside it where GEPA asked for one.
        predictions = [output[0] if isinstance(output, tuple) else output for _, output, _ in outputs.results]

        async def called() -> None:
            self.on_batch([played(prediction) for prediction in predictions])

        self.loop.wait(called())
