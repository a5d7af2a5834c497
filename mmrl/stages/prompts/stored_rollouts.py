"""The rollouts that an optimiser needs: each stored before it is used, and paid for once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import dspy

from mmrl import rng
from mmrl.config import EvalConfig, TaskConfig
from mmrl.engines.base import Engine
from mmrl.errors import MODEL_CAUSED, TooManyFailures, failed_how
from mmrl.records import Example, Forest, Rollout
from mmrl.rollout.environment import Stopwatch, make_environment, sampling_settings
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import sample
from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.students import Candidate, State, Student, as_json, state_of
from mmrl.system.files import JsonObject, plain
from mmrl.system.json_lines import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Draw = tuple[float | None, int | None]
"""A temperature and DSPy's number of the sample."""
AS_EVALUATED: Draw = (None, None)
"""As an evaluation would sample it."""

MOST_CANDIDATES = 32
"""Candidates that stay built."""


@dataclass(frozen=True, slots=True)
class Need:
    """One rollout that an optimiser needs."""

    candidate: str
    """Digest of its state."""
    example: str
    draw: Draw = AS_EVALUATED

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"{rng.digest(self.candidate, self.example, *_plain(self.draw)):032x}"


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


class Loop:
    """The event loop of a search: rollouts run on it, in the main thread, while the optimiser waits in threads.

    The first error ends the search: whatever is asked for later raises it too. DSPy takes an exception for a bad
    candidate and goes on, so that whoever runs it looks at `failure`.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()

    def run(self, function: Callable[[], T]) -> T:
        """The result of `function`, which runs in a thread and calls `wait`."""
        try:
            return asyncio.run(self._served(function))
        finally:
            # What was asked for as the loop was stopped: nothing else would wake its threads.
            for future in list(self._waiting):
                future.cancel()

    async def _served(self, function: Callable[[], T]) -> T:
        # Rollouts have DSPy's settings of now and not the optimiser's: a metric may call the LM that is configured.
        self._loop, self._context = asyncio.get_running_loop(), copy_context()
        try:
            return await asyncio.to_thread(function)
        finally:
            with self._lock:
                self.failure = self.failure or RuntimeError("the search has ended")

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """The result of `work` on the loop; called from any other thread, which it blocks."""
        with self._lock:
            if self.failure is not None:
                work.close()
                raise self.failure
            future = self._context.copy().run(asyncio.run_coroutine_threadsafe, work, self._loop)
            self._waiting.add(future)
        with self.noting():
            try:
                return future.result()
            finally:
                self._waiting.discard(future)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error that leaves the block."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise


@dataclass(slots=True, kw_only=True)
class Sampler:
    """Samples and stores the rollouts of one stage."""

    examples: Mapping[str, Example]
    """The train split, by id."""
    task: TaskConfig
    settings: EvalConfig
    """Rollouts are sampled as in evaluation."""
    seed: int
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    reward_set: str
    failure_score: float
    store: Store
    loop: Loop
    student: Student = field(init=False)
    usage: Usage = field(default_factory=Usage)
    """Of what this process has needed, whether it was sampled now or before a kill."""
    sampling: Stopwatch = field(default_factory=Stopwatch)
    """How long rollouts ran."""
    states: dict[str, State] = field(default_factory=dict)
    """Digest -> state of each candidate so far."""
    results: dict[str, JsonObject] = field(default_factory=dict)
    """Key -> result of each rollout that this process has needed."""
    _stored: dict[str, JsonObject] = field(default_factory=dict)
    _failed: dict[str, Rollout] = field(default_factory=dict)
    """Key -> rollout that failed by no doing of the model, until `check` of its batch."""
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _candidate: Callable[[str], Candidate] = field(init=False)
    _places: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, CHUNK))

    def __post_init__(self) -> None:
        for line in self.store.lines:
            self._stored |= {result["key"]: result for result in line["rollouts"]}
        # Each is a copy of the program, and whatever it holds: the oldest go.
        self._candidate = lru_cache(MOST_CANDIDATES)(lambda digest: self.student.candidate(self.states[digest]))

    def needs(self, module: dspy.Module, examples: Iterable[Example]) -> list[Need]:
        """Rollouts of a program's prompts as an evaluation would sample them."""
        candidate = self.digest(module)
        return [Need(candidate, example.id) for example in examples]

    def digest(self, module: dspy.Module) -> str:
        """The digest of a program's prompts, whose state is noted under it."""
        state = state_of(module)
        digest = f"{rng.digest(json.dumps(state, sort_keys=True)):032x}"
        self.states.setdefault(digest, state)
        return digest

    def obtain(self, needs: Iterable[Need]) -> None:
        """Have the results of all of these, from the store or sampled now, all at once; blocks a thread of DSPy's."""
        if missing := [need for need in needs if need.key not in self.results]:
            self.loop.wait(self._obtained(missing))

    async def _obtained(self, needs: Sequence[Need]) -> None:
        for need in needs:
            # DSPy asks again where a thread takes long.
            if need.key not in self._tasks:
                self._tasks[need.key] = asyncio.create_task(self._obtain(need))
        await asyncio.gather(*(self._tasks[need.key] for need in needs))

    async def _obtain(self, need: Need) -> None:
        if need.key not in self._stored:
            async with self._places:
                candidate, forest = await self._sampled(need)
            (rollout,) = forest.rollouts
            temperature, number = need.draw
            facts = {"key": need.key, "candidate": need.candidate[:12], "temperature": temperature, "number": number}
            result = facts | self._result(candidate, forest, rollout)
            if rollout.reward is None:
                self._failed[need.key] = rollout
                self._stored[need.key] = plain(result)
            else:
                self._store(result)
        self.results[need.key] = self._stored[need.key]
        self.usage.add(self.results[need.key])

    def _store(self, result: JsonObject) -> None:
        # Before it is used: what an optimiser has seen is never sampled again.
        (self._stored[result["key"]],) = self.store.append({"rollouts": [result]})["rollouts"]

    async def _sampled(self, need: Need) -> tuple[Candidate, Forest]:
        candidate = self._candidate(need.candidate)
        settings = sampling_settings(self.settings, self.task)
        if need.draw[0] is not None:
            settings = replace(settings, temperature=need.draw[0])
        # Without the candidate: candidates are compared on the same draws.
        key: rng.Key = (self.seed, "prompts", *_plain(need.draw))
        env = make_environment(candidate.task, self.engine, self.tokenizer, settings, key)
        started = self.sampling.start()
        try:
            return candidate, await sample(env, [(self.examples[need.example], (Tree(),))], self.reward_set)
        finally:
            self.sampling.end(started)

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

    def check(self, needs: Sequence[Need]) -> None:
        """Store what failed of a batch by no doing of the model: only now is it known not to be too much.

        Raises:
            TooManyFailures: more than `eval.max_failed_share` of the batch; a resume samples it again.
        """
        failed = [(need.key, self._failed.pop(need.key)) for need in needs if need.key in self._failed]
        if not failed:
            return
        kinds = [kind for need in needs if (kind := self.results[need.key]["error"]) not in (None, *MODEL_CAUSED)]
        share, limit = len(kinds) / len(needs), self.settings.max_failed_share
        if share > limit:
            first = failed[0][1]
            trace = f"\n{first.error_traceback.rstrip()}" if first.error_traceback else ""
            raise TooManyFailures(
                f"{share:.0%} of the rollouts of a batch failed {failed_how(kinds)}, more than "
                f"eval.max_failed_share={limit:.0%}; the first: {first.error} in {first.id}: "
                f"{first.error_message}{trace}"
            )
        for key, _ in failed:
            self._store(self._stored[key])


def _plain(draw: Draw) -> tuple[str | None, int | None]:
    temperature, number = draw
    return None if temperature is None else repr(temperature), number
