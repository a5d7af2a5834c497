"""The rollouts that an optimiser needs: sampled all at once, stored before they are used, each paid for once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import dspy

from mmrl import rng
from mmrl.config import EvalConfig, TaskConfig
from mmrl.engines.base import Completion, Engine, Request
from mmrl.errors import TooManyFailures, failed_how
from mmrl.records import Example, Forest, Rollout
from mmrl.rollout.environment import make_environment, sampling_settings
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import sample
from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.students import Candidate, State, Student, as_json, state_of
from mmrl.stages.step_log import StepLog
from mmrl.stages.step_metrics import failed_share
from mmrl.system.files import JsonObject
from mmrl.system.json_lines import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


class _InOrder(Engine):
    """An engine for one of several candidates whose rollouts are sampled at once.

    Their requests have equal names, and the order of a batch must not be that of arrival.
    """

    def __init__(self, engine: Engine, number: int):
        self.engine, self.number = engine, number
        self.repeats_greedy = engine.repeats_greedy

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
class Sampler:
    """Samples and stores the rollouts of one stage."""

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
    student: Student = field(init=False)
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around sampling: there the user's code runs, and not DSPy's optimiser."""
    usage: Usage = field(default_factory=Usage)
    """Of what this process has needed, whether it was sampled now or before a kill."""
    states: dict[str, State] = field(default_factory=dict)
    """Digest -> state of each candidate so far."""
    results: dict[str, JsonObject] = field(default_factory=dict)
    """Key -> result of each rollout that this process has needed."""
    _stored: dict[str, JsonObject] = field(default_factory=dict)
    _candidates: dict[str, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.store.lines:
            self._stored |= {result["key"]: result for result in line["rollouts"]}

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

    def obtain(self, needs: Sequence[Need]) -> None:
        """Have the results of all of these: from the store, or sampled now, all at once.

        Raises:
            TooManyFailures: more than `eval.max_failed_share` failed by no doing of the model; they are not stored.
        """
        new = list({need.key: need for need in needs if need.key not in self.results}.values())
        missing = [need for need in new if need.key not in self._stored]
        for start in range(0, len(missing), CHUNK):
            with self.aside():
                sampled = asyncio.run(self._sampled(missing[start : start + CHUNK]))
            # Before any of them is used: what an optimiser has seen is never sampled again.
            line = self.store.append({"rollouts": sampled})
            self._stored |= {result["key"]: result for result in line["rollouts"]}
        for need in new:
            self.results[need.key] = self._stored[need.key]
            self.usage.add(self.results[need.key])

    async def _sampled(self, needs: Sequence[Need]) -> list[JsonObject]:
        """One rollout each, all in flight at once."""
        started, busy = time.perf_counter(), self.engine.busy_s
        groups: dict[tuple[str, Draw], list[Need]] = {}
        for need in needs:
            groups.setdefault((need.candidate, need.draw), []).append(need)
        tasks = []
        # Until all have begun: no batch may start without those that begin last.
        self.engine.enter()
        try:
            for number, ((digest, draw), members) in enumerate(groups.items()):
                tasks.append(asyncio.create_task(self._group(number, digest, draw, members)))
            await asyncio.sleep(0)
        finally:
            self.engine.leave()
        try:
            sampled = await asyncio.gather(*tasks)
        # Where one has failed, the others must not go on sampling for nobody.
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.log.add("generate", self.engine.busy_s - busy)
        self.log.add("rollout", time.perf_counter() - started)
        self._check_failures([rollout for _, forest in sampled for rollout in forest.rollouts])
        results: list[JsonObject] = []
        # By candidate, then by example: the order of a stored line must not be that in which rollouts ended.
        for ((digest, draw), members), (played, forest) in zip(groups.items(), sampled, strict=True):
            rollouts = {rollout.example: rollout for rollout in forest.rollouts}
            results += [
                {"key": need.key, "candidate": digest[:12], "temperature": draw[0], "number": draw[1]}
                | self._result(played, forest, rollouts[need.example])
                for need in members
            ]
        return results

    async def _group(self, number: int, digest: str, draw: Draw, needs: Sequence[Need]) -> tuple[Candidate, Forest]:
        """Rollouts of one candidate."""
        if digest not in self._candidates:
            # Each is a copy of the program, and whatever it holds: the oldest go.
            if len(self._candidates) >= MOST_CANDIDATES:
                self._candidates.pop(next(iter(self._candidates)))
            self._candidates[digest] = self.student.candidate(self.states[digest])
        candidate = self._candidates[digest]
        settings = sampling_settings(self.settings, self.task)
        if draw[0] is not None:
            settings = replace(settings, temperature=draw[0])
        # Without the candidate: candidates are compared on the same draws.
        key: rng.Key = (self.seed, "prompts", *_plain(draw))
        env = make_environment(candidate.task, _InOrder(self.engine, number), self.tokenizer, settings, key)
        by_id = {example.id: example for example in self.examples}
        plans = [(by_id[need.example], (Tree(),)) for need in needs]
        return candidate, await sample(env, plans, self.reward_set)

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
        # Before anything is stored: a resume samples the whole batch again.
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


def _plain(draw: Draw) -> tuple[str | None, int | None]:
    temperature, number = draw
    return None if temperature is None else repr(temperature), number
