"""The forest of a step: its examples, their rollouts, and what credit needs of models.

Part of the stage of reinforcement learning (`stages.rl`). With several processes each samples its share;
then every process holds the whole forest. With `train.staleness` the rollouts of the next steps start here
(`prefetch`), with `algo.zero_variance=refill` examples without signal are replaced (dynamic sampling).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

from mmrl import rng
from mmrl.algorithms import ALGORITHMS
from mmrl.config import RlRunConfig
from mmrl.config.tasks import PRIVILEGED
from mmrl.credit.entries import Credit, Entry
from mmrl.models.chat import encode_text, end_of_turn
from mmrl.models.encode import tokenizer_seconds
from mmrl.records import EMPTY, Call, Example, Forest, Rollout
from mmrl.rollout.environment import Environment
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import reserialised, sample
from mmrl.rollout.teachers import LoadedTeacher, teachers_of_step
from mmrl.stages import Stage
from mmrl.stages.distillation import Teachers
from mmrl.stages.information_gain import with_gains
from mmrl.stages.step_metrics import lag_metrics, refuse_context, refuse_failures
from mmrl.system.portal import STOP_S, Job, rollout_loop
from mmrl.tasks.base import Canonical, Closing
from mmrl.trainer.forwards import annotate
from mmrl.trainer.objective import TrainCall

if TYPE_CHECKING:
    from mmrl.trainer.trl_trainer import MmrlTrainer


Batch = TypeVar("Batch")
Plan: TypeAlias = tuple[Example, Sequence[Tree]]
"""An example and the trees to sample for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """Examples and rollouts of one step."""

    examples: tuple[Example, ...]
    """The step trains on these."""
    forest: Forest
    """Everything sampled, for the journal; after dynamic sampling `meta["refill"]` names the rounds and the rest."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of sampling (docs/metrics.md: `rollouts/policy_lag*`, `refill/*`)."""

    @property
    def trained(self) -> Forest:
        """The part of the forest that belongs to `examples`."""
        return self.forest.part(example.id for example in self.examples)


Rollouts: TypeAlias = tuple[Forest, Mapping[str, float]]
"""Rollouts of this process for a step, and their seconds: generate, retrieve, tokenize, rollout (clock)."""


class Prefetch(Generic[Batch]):
    """Batches that are sampled ahead (`train.staleness`), each of one version of the policy.

    `RolloutSampler` starts them after the engine has new weights. With one batch ahead the stage waits for it before
    the next ones are pushed; with more, an engine serves the versions of all.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, Job[Batch]] = {}
        self._batches: dict[int, Future[Batch]] = {}

    @property
    def steps(self) -> list[int]:
        """Steps whose batch is being sampled, or has been."""
        return sorted(self._batches)

    def start(self, step: int, work: Callable[[], Coroutine[object, object, Batch]]) -> None:
        """Begin `work` for `step`."""
        self._under_way[step] = Job(work(), rollout_loop())
        self._batches[step] = self._under_way[step].ended

    def wait(self, step: int | None = None) -> None:
        """Return when the batch of a step is there; None: all of them."""
        futures.wait(self._batches.values() if step is None else [self._batches[step]])

    def sampled(self) -> dict[int, Batch]:
        """Return the batches by step, once all are there, up to the first that could not be sampled."""
        self.wait()
        complete = takewhile(lambda step: self._batches[step].exception() is None, self.steps)
        return {step: self._batches[step].result() for step in complete}

    def put(self, step: int, batch: Batch) -> None:
        """Have the batch of `step`, which a checkpoint holds, for `take`."""
        self._batches[step] = Future()
        self._batches[step].set_result(batch)

    def take(self, step: int) -> Batch:
        """Return the batch of `step`; raises what sampling it raised."""
        self._under_way.pop(step, None)
        return self._batches.pop(step).result()

    def close(self) -> None:
        """Cancel what is under way and drop it; may be called twice."""
        for job in self._under_way.values():
            job.cancel()
        # Not for ever: a run that is being killed must not wait for a server that does not answer.
        futures.wait([job.ended for job in self._under_way.values()], STOP_S)


@dataclass(kw_only=True)
class RolloutSampler(Stage[RlRunConfig]):
    """The half of the stage that samples: makes the batches of one run, on each of its processes."""

    trainer: MmrlTrainer
    """Trainer, also for the critic's values and the reference's log-probabilities."""
    examples: Sequence[Example]
    """The train split."""
    prefetch: Prefetch[Rollouts] = field(default_factory=Prefetch)
    scorers: Teachers
    """Teachers that score what the policy has sampled."""
    teachers: Mapping[str, LoadedTeacher] = field(default_factory=dict)
    """Teachers that sample, by name."""

    def collect(self, step: int, credit: Callable[[Forest], Credit]) -> SampledBatch:
        """Return the batch of step number `step` (from 1), whole on every process, so that all compute the same credit.

        Args:
            credit: credits a forest; decides in dynamic sampling which examples have signal.

        Raises:
            TooManyFailures: more than `train.max_failed_share` of the rollouts failed by no doing of the model.
            SyncFailure: the engine did not take the newest weights.
        """
        examples = self._examples(step)
        if self.config.train.staleness:
            forest = self._prefetched(examples, step)
            return SampledBatch(examples=examples, forest=forest, metrics=lag_metrics(forest, step))
        self.sync(step - 1)
        algo = self.config.algo
        if algo.refills:
            # The key has the step and not the time, so that a resumed step refills with the same examples.
            key = (self.config.seed, step)
            # Failures are counted over the step: a round may have a single example.
            sampler = partial(self._sample, step=step, earlier=[])
            batch = dynamic_sampling(examples, self.examples, sampler, credit, rounds=algo.refills, key=key)
        else:
            batch = SampledBatch(examples=examples, forest=self._sample(examples, step, []))
        # Until the next batch the trainer needs the memory that a server on the same GPU would hold.
        self.engine.sleep()
        return batch

    def _examples(self, step: int) -> tuple[Example, ...]:
        return tuple(batch_of(self.examples, self.config.train.batch_size, step, self.config.seed))

    def _prefetched(self, examples: Sequence[Example], step: int) -> Forest:
        """Return the forest of rollouts made while steps before trained; starts those of the next steps.

        The first batch of a run is sampled here, from the newest weights; those after a resume are in the checkpoint.
        """
        started = time.perf_counter()
        if step in self.prefetch.steps:
            # All sampled before the push; taken after it, so that a run that stops at a failed push saves its batch.
            self.prefetch.wait(step)
            self.log.add("wait", time.perf_counter() - started)
            self.sync(step - 1)
            rollouts = self.prefetch.take(step)
        else:
            self.sync(step - 1)
            rollouts = asyncio.run(self._roll_out(examples, step, None))
            self.log.add("wait", time.perf_counter() - started - self.log.times.get("sync", 0.0))
        # After the push, so that whole batches come from the weights of this step.
        last = min(step + self.config.train.staleness, self.config.train.steps)
        for following in range(step + 1, last + 1):
            if following not in self.prefetch.steps:
                batch = self._examples(following)
                self.prefetch.start(following, partial(self._roll_out, batch, following, self.engine.policy_version))
        return self.complete(rollouts, examples, step, [])

    def _sample(self, examples: Sequence[Example], step: int, earlier: list[Rollout]) -> Forest:
        return self.complete(asyncio.run(self._roll_out(examples, step, None)), examples, step, earlier)

    def planned(self, examples: Sequence[Example], key: rng.Key) -> tuple[Environment, list[Plan]]:
        """Return this process's share of the examples with the trees to sample for each, and their environment.

        Args:
            key: (run seed, step or phase), the source of every draw.
        """
        algo = self.config.algo
        env = self.environment(algo, key)
        env.teachers = teachers_of_step(self.teachers, env.settings, key, self.tokenizer)
        plan, modules = ALGORITHMS[algo.name].plan, self.task.program.modules
        return env, [(e, plan(algo, modules, (*key, e.id))) for e in self.log.processes.share(examples)]

    async def _roll_out(self, examples: Sequence[Example], step: int, version: int | None) -> Rollouts:
        """Sample this process's rollouts of some examples, by a version of the policy; None: the newest."""
        # May run on the loop of rollouts while the trainer works: reads nothing that training changes.
        env, plans = self.planned(examples, (self.config.seed, step))
        env.version = version
        if version is None:
            count = sum(tree.size for _, trees in plans for tree in trees)
            self.log.progress.status(lambda: f"sampling: {env.scoring.calls} of {count} rollouts scored")
        started, busy, tokenized = time.perf_counter(), self.engine.busy_s, tokenizer_seconds()
        forest = await sample(env, plans, self.reward_set, step)
        seconds = {
            "generate": self.engine.busy_s - busy,
            "tokenize": tokenizer_seconds() - tokenized,
            "retrieve": env.retrieving.seconds,
            "rollout": time.perf_counter() - started,
        }
        return forest, seconds

    def complete(self, rollouts: Rollouts, examples: Sequence[Example], step: int, earlier: list[Rollout]) -> Forest:
        """Return the rollouts of all processes together, with the numbers of models that credit needs.

        Args:
            earlier: rollouts of the step's rounds before, to which those of this one are added.

        Raises:
            TooManyFailures: see `collect`.
        """
        forest, times = rollouts
        for name, seconds in times.items():
            self.log.add(name, seconds)
        if not self.log.processes.all_sample:
            # Forwards of the trainer are split evenly over all processes, whoever sampled.
            mine = [example.id for example in self.log.processes.part(examples)]
            forest = self.log.processes.forest(forest, examples).part(mine)
        with self.log.timed("annotate"):
            # Each process scores its part; the numbers of all are gathered after it.
            forest = annotate(self.trainer.forwards, forest)
            by_id = {example.id: example for example in examples}
            if self.reward_set == "gain":
                encode, score = partial(encode_text, self.tokenizer), self.trainer.forwards.policy_logprobs
                # A plugin's own section need not have the key.
                kind = getattr(self.config.task, "gain", "probability")
                forest = with_gains(forest, cast("Closing", self.task), by_id, encode, score, kind)
            privileged = self.config.task.reward == PRIVILEGED
            if self.config.algo.distill is not None or privileged:
                evidence = self.config.task.privileged if privileged else None
                forest = self.scorers.complete(forest, by_id, evidence)
        forest = self.log.processes.forest(forest, examples)
        failures = [(rollout.error, rollout.error_message) for rollout in forest.rollouts if rollout.error is not None]
        self.log.note_own_code(f"step {step}", failures, len(forest.rollouts))
        # On the whole forest, so that all processes stop together.
        earlier += forest.rollouts
        refuse_failures(earlier, self.config.train.max_failed_share, f"step {step}")
        if step == 1:  # later it is chance
            refuse_context(earlier)
        algo, program = self.config.algo, self.task.program
        if getattr(algo, "reserialise", False) and isinstance(program, Canonical):
            encode = partial(encode_text, self.tokenizer)
            forest = reserialised(forest, program, encode, end_of_turn(self.tokenizer))
        return forest


def batch_of(examples: Sequence[Example], size: int, step: int, seed: int) -> list[Example]:
    """Return the examples of step number `step` (from 1): shuffled each epoch, cut into batches, the last topped up.

    A batch never holds an example twice. Requires `size` <= number of examples.
    """
    batches = -(-len(examples) // size)
    epoch, index = divmod(step - 1, batches)
    order = list(range(len(examples)))
    # By epoch and seed alone: a resumed run needs no state of the order.
    rng.stream(seed, "order", epoch).shuffle(order)
    batch = order[index * size : (index + 1) * size]
    # Topped up from the epoch's own start, whose examples are not in the last batch.
    batch += order[: size - len(batch)]
    return [examples[i] for i in batch]


def train_calls(
    forest: Forest, credit: Credit, minibatch: Mapping[str, int], views: Mapping[str, Call] = EMPTY
) -> list[TrainCall]:
    """Return each credited call once, with its entries: the trainer's view of a forest.

    Args:
        views: what teachers read of calls, by id (`Teachers.views`).
    """
    entries: dict[str, list[Entry]] = {}
    for entry in credit.entries:
        entries.setdefault(entry.call, []).append(entry)
    calls = [forest.calls[call] for call in entries]
    return [
        TrainCall(
            call=call, entries=tuple(entries[call.id]), minibatch=minibatch[call.example], view=views.get(call.id)
        )
        for call in calls
    ]


def dynamic_sampling(
    first: Sequence[Example],
    pool: Sequence[Example],
    sample: Callable[[Sequence[Example]], Forest],
    credit: Callable[[Forest], Credit],
    *,
    rounds: int,
    key: rng.Key,
) -> SampledBatch:
    """Sample until as many examples as in `first` carry signal, or the rounds or the pool are used up.

    As in DAPO (arXiv 2503.14476, Sec. 3.2), for any group-relative algorithm: credit says which examples have a call
    with an advantage, and as many further examples as are missing are sampled. Which ones depends on `key` alone.

    Args:
        first: the step's own batch.
        pool: all training examples.
        sample: makes the forest of some examples.
        credit: credits a forest; decides which examples have signal.
        rounds: most rounds after the first.
        key: (run seed, step).
    """
    in_batch = {example.id for example in first}
    waiting = [example for example in pool if example.id not in in_batch]
    rng.stream(*key, "refill").shuffle(waiting)
    sampled = list(first)
    forest = sample(first)
    signal = with_signal(forest, credit(forest))
    done = 0
    while len(signal) < len(first) and done < rounds and waiting:
        missing = len(first) - len(signal)
        batch, waiting = waiting[:missing], waiting[missing:]
        added = sample(batch)
        # The two share no example, so groups stay within one of them.
        forest = replace(forest, calls={**forest.calls, **added.calls}, rollouts=(*forest.rollouts, *added.rollouts))
        sampled += batch
        signal = with_signal(forest, credit(forest))
        done += 1
    trained = tuple(example for example in sampled if example.id in signal)[: len(first)]
    names = {example.id for example in trained}
    meta = {"rounds": done, "left_out": [example.id for example in sampled if example.id not in names]}
    count = len(forest.examples)
    return SampledBatch(
        examples=trained,
        forest=replace(forest, meta={**forest.meta, "refill": meta}),
        metrics={
            "refill/rounds": float(done),
            "refill/examples": float(count),
            "refill/kept_share": len(trained) / count if count else 0.0,
        },
    )


def with_signal(forest: Forest, credit: Credit) -> set[str]:
    """Return examples with a token whose advantage and weight are both other than 0."""
    return {
        forest.calls[entry.call].example
        for entry in credit.entries
        if not entry.distilled and any(a and w for a, w in zip(entry.advantages, entry.weights, strict=True))
    }
