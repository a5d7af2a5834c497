"""Rollouts of candidate prompts for DSPy's optimisers: all of a batch at once, each paid for once.

DSPy runs a program example by example, in threads or one after the other. Here a first pass over a batch only notes
which rollouts it needs; they are sampled together and stored; then DSPy's own code runs, answered from the store. An
optimiser that is run again from its seed asks for the same rollouts in the same batches, so a run that was killed goes
on where its store ends.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import dspy

from mmrl import rng
from mmrl.config import EvalConfig, TaskConfig
from mmrl.engines.base import Completion, Engine, Request
from mmrl.errors import TooManyFailures, failed_how
from mmrl.records import Example, Forest, Rollout
from mmrl.rollout.environment import make_environment, sampling_settings
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import sample
from mmrl.stages.evaluate import chunks
from mmrl.stages.prompts.store import Store, as_json
from mmrl.stages.step_log import StepLog
from mmrl.stages.step_metrics import failed_share
from mmrl.system.files import JsonObject
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

State = Mapping[str, JsonObject]
"""Module -> what DSPy saves of its predictor: instructions, fields, demonstrations. All that a candidate is."""
AS_EVALUATED: tuple[float | None, int | None] = (None, None)


class Abort(BaseException):
    """What ends the stage from within DSPy's code, which takes any `Exception` for a bad candidate."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class _Noted(BaseException):
    """A rollout was only noted: the pass over a batch that finds out what it needs."""


@dataclass(frozen=True, slots=True)
class Need:
    """One rollout that an optimiser needs."""

    candidate: str
    """Digest of its state."""
    example: str
    draw: tuple[float | None, int | None] = AS_EVALUATED
    """Temperature and DSPy's number of the sample, where it wants others than an evaluation would get."""

    @property
    def key(self) -> str:
        """Its name in the store."""
        temperature, number = self.draw
        shown = None if temperature is None else repr(temperature)
        return f"{rng.digest(self.candidate, self.example, shown, number):032x}"


class Candidate(Protocol):
    """Some prompts as a program."""

    task: Task

    def steps(self, forest: Forest, rollout: Rollout) -> list[JsonObject]:
        """What each module was given and gave: `module`, `inputs`, `outputs`."""
        ...

    def save(self, path: Path) -> None:
        """Write its prompts as `task.prompts=` reads them."""
        ...


class Student(Protocol):
    """The program that DSPy optimises in the place of the task's."""

    module: dspy.Module

    def candidate(self, state: State) -> Candidate:
        """The task's program with other prompts."""
        ...


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
class Usage:
    """What was paid for."""

    rollouts: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, result: Mapping[str, int]) -> None:
        """Count a rollout."""
        self.rollouts += 1
        self.calls += result["calls"]
        self.prompt_tokens += result["prompt_tokens"]
        self.completion_tokens += result["completion_tokens"]


class _InOrder(Engine):
    """An engine for one of several candidates whose rollouts are sampled at once.

    Their requests have equal names, and the order of a batch must not be that of arrival.
    """

    def __init__(self, engine: Engine, number: int):
        self.engine, self.number = engine, number

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        return await self.engine.generate(replace(request, order=(self.number, *request.order)))

    def enter(self) -> None:
        """See `Engine.enter`."""
        self.engine.enter()

    def leave(self) -> None:
        """See `Engine.leave`."""
        self.engine.leave()


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """The rollouts of one stage."""

    examples: Sequence[Example]
    """The train split."""
    task: TaskConfig
    settings: EvalConfig
    """Rollouts are sampled as in evaluation."""
    seed: int
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    reward_set: str
    failure_score: float
    store: Store
    log: StepLog
    on_batch: Callable[[Sequence[Need]], None] = lambda needs: None
    """Called when DSPy has seen all results of a batch."""
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around sampling: there the user's code runs, and not DSPy's optimiser."""
    student: Student = field(init=False)
    usage: Usage = field(default_factory=Usage)
    """Of what this process needs, whether it was sampled now or before a kill."""
    states: dict[str, State] = field(default_factory=dict)
    """Digest -> state of each candidate so far."""
    results: dict[str, JsonObject] = field(default_factory=dict)
    _stored: dict[str, JsonObject] = field(default_factory=dict)
    _candidates: dict[str, Candidate] = field(default_factory=dict)
    _by_fields: dict[str, list[Example]] = field(default_factory=dict)
    _item: dspy.Example | None = None
    _noted: list[Need] | None = None

    def __post_init__(self) -> None:
        for line in self.store.lines:
            self._stored |= {result["key"]: result for result in line["rollouts"]}
        for example in self.examples:
            self._by_fields.setdefault(_text(as_json(example.inputs)), []).append(example)

    # --- what DSPy sees

    def given(self, examples: Iterable[Example]) -> list[dspy.Example]:
        """Examples as DSPy takes them: metadata are labels, which demonstrations may show."""
        return [dspy.Example(**{**as_json(e.metadata), **as_json(e.inputs)}).with_inputs(*e.inputs) for e in examples]

    def forward(self, module: dspy.Module, inputs: Mapping[str, object]) -> Played:
        """What a student's `forward` returns: the prediction of a rollout with its prompts; the trace is DSPy's.

        Raises:
            Abort: in the place of any error, none of which is the candidate's.
        """
        try:
            need = self._need(module, inputs)
            if self._noted is None:
                self.obtain([need])
        except Exception as error:
            raise Abort(error) from error
        if self._noted is not None:
            self._noted.append(need)
            raise _Noted
        result = self.results[need.key]
        trace = dspy.settings.trace
        if trace is not None:
            predictors = dict(module.named_predictors())
            for step in result["steps"]:
                if step["module"] in predictors:
                    outputs = dspy.Prediction(**step["outputs"])
                    trace.append((predictors[step["module"]], dict(step["inputs"]), outputs))
        return Played.of(result)

    def batch(
        self, function: Callable[[Any], object], data: Sequence[Any]
    ) -> tuple[Callable[[Any], object], list[Need]]:
        """Have all rollouts that `function` asks for on `data`; a function that gets them, and which they were."""
        needs = self.noted(function, data)
        self._guarded(needs)

        def with_item(item: Any) -> object:
            self._item = _example_in(item)
            return function(item)

        return with_item, needs

    def _guarded(self, needs: Sequence[Need]) -> None:
        try:
            self.obtain(needs)
        except Exception as error:
            raise Abort(error) from error

    def ahead(self, function: Callable[[Any], object], item: Any, following: Sequence[Any]) -> bool:
        """Before `function(item)`: if its rollout is not there yet, have those of `following` items with it.

        Returns:
            Whether it was not there.
        """
        needs = self.noted(function, [item])
        missing = any(one.key not in self.results for one in needs)
        if missing:
            self._guarded([*needs, *self.noted(function, following)])
        self._item = _example_in(item)
        return missing

    def noted(self, function: Callable[[Any], object], data: Sequence[Any]) -> list[Need]:
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

    # --- sampling

    def needs(self, module: dspy.Module, examples: Iterable[Example]) -> list[Need]:
        """Rollouts of a program's prompts as an evaluation would sample them."""
        candidate = self._digest(module)
        return [Need(candidate, example.id) for example in examples]

    def obtain(self, needs: Sequence[Need]) -> None:
        """Have the results of all of these: from the store, or sampled now, all at once.

        Raises:
            TooManyFailures: more than `eval.max_failed_share` failed by no doing of the model; they are not stored.
        """
        new = list({one.key: one for one in needs if one.key not in self.results}.values())
        for part in chunks([one for one in new if one.key not in self._stored]):
            with self.aside():
                sampled = asyncio.run(self._sampled(part))
            # Before any of them is used: what an optimiser has seen is never sampled again.
            line = self.store.append({"rollouts": sampled})
            self._stored |= {result["key"]: result for result in line["rollouts"]}
        for one in new:
            self.results[one.key] = self._stored[one.key]
            self.usage.add(self.results[one.key])

    async def _sampled(self, needs: Sequence[Need]) -> list[JsonObject]:
        """One rollout each, all in flight at once."""
        started, busy = time.perf_counter(), self.engine.busy_s
        by_id = {example.id: example for example in self.examples}
        groups: dict[tuple[str, tuple[float | None, int | None]], list[Need]] = {}
        for one in needs:
            groups.setdefault((one.candidate, one.draw), []).append(one)
        # Until all have begun: no batch may start without those that begin last.
        self.engine.enter()
        tasks = []
        try:
            for number, ((candidate, draw), members) in enumerate(groups.items()):
                tasks.append(
                    asyncio.create_task(self._group(number, candidate, draw, [by_id[m.example] for m in members]))
                )
            await asyncio.sleep(0)
        finally:
            self.engine.leave()
        try:
            sampled = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.log.add("generate", self.engine.busy_s - busy)
        self.log.add("rollout", time.perf_counter() - started)
        self._check_failures([rollout for _, forest in sampled for rollout in forest.rollouts])
        results: list[JsonObject] = []
        for ((name, draw), members), (candidate, forest) in zip(groups.items(), sampled, strict=True):
            rollouts = {rollout.example: rollout for rollout in forest.rollouts}
            results += [
                {"key": one.key, "candidate": name[:12], "temperature": draw[0], "number": draw[1]}
                | self._result(candidate, forest, rollouts[one.example])
                for one in members
            ]
        return results

    async def _group(
        self, number: int, digest: str, draw: tuple[float | None, int | None], examples: Sequence[Example]
    ) -> tuple[Candidate, Forest]:
        """Rollouts of one candidate."""
        if digest not in self._candidates:
            self._candidates[digest] = self.student.candidate(self.states[digest])
        candidate = self._candidates[digest]
        settings = sampling_settings(self.settings, self.task)
        temperature, sample_number = draw
        if temperature is not None:
            settings = replace(settings, temperature=temperature)
        # Neither the candidate nor the time: candidates are compared on the same draws.
        shown = None if temperature is None else repr(temperature)
        key: rng.Key = (self.seed, "prompts", shown, sample_number)
        env = make_environment(candidate.task, _InOrder(self.engine, number), self.tokenizer, settings, key)
        forest = await sample(env, [(example, (Tree(),)) for example in examples], self.reward_set)
        return candidate, forest

    def _result(self, candidate: Candidate, forest: Forest, rollout: Rollout) -> JsonObject:
        calls = forest.path(rollout)
        return {
            "example": rollout.example,
            "score": self.failure_score if rollout.reward is None else rollout.reward,
            "error": rollout.error,
            "message": rollout.error_message,
            "prediction": as_json(rollout.prediction) if rollout.error is None else {},
            "metrics": dict(rollout.metrics),
            "parts": dict(rollout.parts),
            "steps": candidate.steps(forest, rollout),
            "calls": sum(call.attempts for call in calls),
            "prompt_tokens": sum(call.prompt_tokens or 0 for call in calls),
            "completion_tokens": sum(call.completion_tokens for call in calls),
        }

    def _check_failures(self, rollouts: Sequence[Rollout]) -> None:
        share, limit = failed_share(rollouts), self.settings.max_failed_share
        if share <= limit:
            return
        failed = [rollout for rollout in rollouts if rollout.reward is None]
        how, first = failed_how(rollout.error or "" for rollout in failed), failed[0]
        trace = f"\n{first.error_traceback.rstrip()}" if first.error_traceback else ""
        raise TooManyFailures(
            f"{share:.0%} of the rollouts of a batch failed {how}, more than eval.max_failed_share={limit:.0%}; "
            f"the first: {first.error} in {first.id}: {first.error_message}{trace}"
        )

    # --- who asks

    def _need(self, module: dspy.Module, inputs: Mapping[str, object]) -> Need:
        lms = [predictor.lm for predictor in module.predictors() if predictor.lm is not None]
        options = (lms[0] if lms else dspy.settings.lm).kwargs
        draw = (options.get("temperature"), options.get("rollout_id"))
        # A number alone says that DSPy's cache may answer, which is what the store does.
        return Need(self._digest(module), self._example(inputs).id, AS_EVALUATED if draw[0] is None else draw)

    def _digest(self, module: dspy.Module) -> str:
        state = state_of(module)
        digest = f"{rng.digest(_text(state)):032x}"
        self.states.setdefault(digest, state)
        return digest

    def _example(self, inputs: Mapping[str, object]) -> Example:
        same = self._by_fields[_text(as_json(inputs))]
        if len(same) > 1 and self._item is not None:
            # Two examples with the same inputs: the one whose labels DSPy holds in its hands.
            fields = _text(as_json(self._item.toDict()))
            same = [e for e in same if _text({**as_json(e.metadata), **as_json(e.inputs)}) == fields] or same
        return same[0]


def state_of(module: dspy.Module) -> State:
    """All that a candidate is, as JSON: what a saved program is loaded from, but for LMs."""
    own = ("demos", "signature", "fields")
    state = {
        name: {key: value for key, value in predictor.dump_state().items() if key in own}
        for name, predictor in module.named_predictors()
    }
    made: State = as_json(state)
    return made


def failures(results: Iterable[JsonObject]) -> dict[str, int]:
    """Kind -> how many rollouts failed in that way."""
    return dict(Counter(result["error"] for result in results if result["error"] is not None))


def _example_in(item: object) -> dspy.Example | None:
    """The example of an item of a batch: the item itself, or the second of a pair of program and example."""
    if isinstance(item, tuple) and len(item) == 2:
        item = item[1]
    return item if isinstance(item, dspy.Example) else None


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)
