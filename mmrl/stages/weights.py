"""The weight stage: sample -> credit -> update -> sync, on one screen.

With `train.staleness=1` the next batch is sampled (`ahead`) while this one is credited and trained on. Reads a config,
a task and an algorithm; drives an engine and a trainer; writes journal, metrics and evaluations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmrl import rng
from mmrl.algorithms import ALGORITHMS, assign_credit
from mmrl.config import TrainCommandConfig
from mmrl.config.algo import GroupConfig
from mmrl.credit.entries import Credit
from mmrl.engines.base import total_usage
from mmrl.errors import SyncFailure, TooManyFailures
from mmrl.models.assignment import ModuleAssignment
from mmrl.models.chat import encode_text, tokenizer_seconds
from mmrl.records import Example, Forest
from mmrl.report.journal import Writer
from mmrl.report.progress import Progress
from mmrl.report.rundir import RunDir
from mmrl.report.trackers import Trackers
from mmrl.rollout.context import Environment, SamplingSettings
from mmrl.rollout.reserialise import reserialised
from mmrl.rollout.sample import sample
from mmrl.stages.ahead import Ahead
from mmrl.stages.batches import batch_of, minibatches, train_calls
from mmrl.stages.environment import eval_settings, make_environment
from mmrl.stages.evaluate import Item, evaluate, evaluation_metrics, outside_failures
from mmrl.stages.metrics import credit_metrics, failed_share, forest_metrics, lag_metrics, never
from mmrl.stages.refill import only, refill, refills
from mmrl.stages.teachers import TeacherParts, teachers_of_step
from mmrl.system.processes import ALONE, Processes
from mmrl.tasks.base import Canonical, Task
from mmrl.trainer.adapters import make_adapters
from mmrl.trainer.annotate import annotate
from mmrl.trainer.trl_trainer import MmrlTrainer, StepBatch, build_trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """The rollouts that this process sampled for a step, and the seconds that it took."""

    forest: Forest
    seconds: Mapping[str, float]
    """generate, retrieve, tokenize, rollout (wall clock)."""


@dataclass(slots=True, kw_only=True)
class WeightStage:
    """One training run of a policy's weights."""

    config: TrainCommandConfig
    task: Task
    tokenizer: Any
    rundir: RunDir
    progress: Progress
    trackers: Trackers
    train: Sequence[Example]
    heldout: Sequence[Example]
    """The split that is evaluated."""
    reward_set: str
    assignment: ModuleAssignment
    """Which module speaks with which weights."""
    processes: Processes = ALONE
    engine: Any = None
    """Set once the trainer has the model."""
    updates: Any = None
    """The trainer, once made."""
    teachers: Mapping[str, TeacherParts] = field(default_factory=dict)
    """Teachers by name (mmGRPO)."""
    times: dict[str, float] = field(default_factory=dict)
    step_started: float = 0.0
    pending: dict[str, float] = field(default_factory=dict)
    """Metrics of the step under way, from sampling and credit."""
    ahead: Ahead[Rolled] = field(default_factory=Ahead)
    """The next batch, with `train.staleness=1`."""
    journal: Writer = field(default_factory=Writer)
    """Writes what a step sampled while it trains."""

    def trainer(self, model: Any, resume_from: Any = None) -> MmrlTrainer:
        """The TRL trainer that calls back into this stage."""
        self.updates = build_trainer(
            model=model,
            tokenizer=self.tokenizer,
            train=self.config.train,
            algo=self.config.algo,
            model_config=self.config.model,
            seed=self.config.seed,
            output_dir=self.rundir.checkpoints,
            next_batch=self.next_batch,
            on_step_end=self.on_step_end,
            resume_from=resume_from,
            extra=lambda step: self.assignment.record(),
            adapters=make_adapters(self.assignment),
        )
        return self.updates

    def next_batch(self, step: int) -> StepBatch:
        """Sample and credit step number `step` (from 1).

        Raises:
            TooManyFailures: a larger share than `train.max_failed_share` failed from outside causes.
            SyncFailure: the engine did not take the newest weights.
        """
        self.step_started = time.perf_counter()
        self.times = dict.fromkeys(("generate", "retrieve", "rollout", "annotate", "tokenize"), 0.0)
        examples = self._examples(step)
        if self.config.train.staleness:
            forest = self._sampled_ahead(examples, step)
        else:
            self._sync(step - 1)
            if refills(self.config.algo):
                return self._refilled_batch(examples, step)
            forest = self._sample(examples, step)
            self.engine.sleep()
        started = time.perf_counter()
        minibatch = minibatches(examples, self.config.algo.minibatches)
        credit = self._credit(forest, minibatch)
        self.times["credit"] = time.perf_counter() - started
        self.pending = (
            forest_metrics(forest, never(self.task)) | credit_metrics(forest, credit.entries) | dict(credit.metrics)
        )
        if self.config.train.staleness:
            self.pending |= lag_metrics(forest, step)
        if self.processes.main:
            self.journal.write(self.rundir, forest, credit.entries)
        calls = train_calls(forest, credit, minibatch)
        return StepBatch(step=step, calls=calls, minibatches=self.config.algo.minibatches, metrics={})

    def _refilled_batch(self, examples: Sequence[Example], step: int) -> StepBatch:
        """As `next_batch`, with examples without signal replaced; journal and rollout metrics cover all sampled."""
        algo, started = self.config.algo, time.perf_counter()
        assert isinstance(algo, GroupConfig)
        key = (self.config.seed, step)
        filled = refill(
            examples,
            self.train,
            lambda chosen: self._sample(chosen, step),
            self._credit,
            rounds=algo.refill_rounds,
            key=key,
        )
        self.engine.sleep()
        minibatch = minibatches(filled.kept, algo.minibatches)
        trained = filled.trained
        credit = self._credit(trained, minibatch)
        self.times["credit"] = time.perf_counter() - started - self.times["rollout"]
        self.pending = forest_metrics(filled.forest, never(self.task)) | credit_metrics(trained, credit.entries)
        self.pending |= dict(credit.metrics) | filled.metrics()
        if self.processes.main:
            self.journal.write(self.rundir, filled.forest, credit.entries)
        calls = train_calls(trained, credit, minibatch)
        return StepBatch(step=step, calls=calls, minibatches=algo.minibatches, metrics={})

    def _credit(self, forest: Forest, minibatch: dict[str, int] | None = None) -> Credit:
        return assign_credit(forest, self.config.algo, self.config.seed, minibatch, self.assignment.frozen)

    def _examples(self, step: int) -> list[Example]:
        return batch_of(self.train, self.config.train.batch_size, step, self.config.seed)

    def _sampled_ahead(self, examples: Sequence[Example], step: int) -> Forest:
        """As `_sample`, of rollouts made while the step before trained; starts those of the next step.

        The first batch of a run, or after a resume, is sampled here, from the newest weights.
        """
        started = time.perf_counter()
        if self.ahead.step == step:
            rolled = self.ahead.take(step)
            self.times["wait"] = time.perf_counter() - started
            self._sync(step - 1)
        else:
            self._sync(step - 1)
            rolled = self._rolled(examples, step)
            self.times["wait"] = time.perf_counter() - started - self.times.get("sync", 0.0)
        following = step + 1
        if following <= self.config.train.steps:
            self.ahead.start(following, lambda: self._roll(self._examples(following), following))
        return self._complete(rolled, examples, step)

    def _sync(self, version: int) -> None:
        """Before anything is sampled: the engine serves the weights after `version` steps.

        Raises:
            SyncFailure: on every process, so that all stop at the same point and can save together.
        """
        self.ahead.wait()  # a batch comes from one version of the weights
        if self.engine.policy_version == version:
            return
        started, failure = time.perf_counter(), None
        state = self.updates.whole_state()
        try:
            if state is None:
                self.engine.set_version(version)
            else:
                self.engine.set_version(version, state)
        except SyncFailure as error:
            failure = error
        if self.processes.one_samples:  # only the main process pushes
            said = self.processes.first(None if failure is None else str(failure))
            failure = failure or (None if said is None else SyncFailure(said))
        if failure is not None:
            raise failure
        self.times["sync"] = time.perf_counter() - started

    def _sample(self, examples: Sequence[Example], step: int) -> Forest:
        """The forest of some examples, whole on every process: groups form over it, and all compute the same credit.

        Raises:
            TooManyFailures: see `next_batch`.
        """
        return self._complete(self._rolled(examples, step), examples, step)

    def _rolled(self, examples: Sequence[Example], step: int) -> Rolled:
        """`_roll` to its end, when the engine has freed what it held."""
        started, busy = time.perf_counter(), self.engine.busy_s
        rolled = asyncio.run(self._roll(examples, step))
        whole = {"generate": self.engine.busy_s - busy, "rollout": time.perf_counter() - started}
        return replace(rolled, seconds={**rolled.seconds, **whole})

    async def _roll(self, examples: Sequence[Example], step: int) -> Rolled:
        """This process's rollouts of some examples; reads nothing that training changes."""
        algo, seed = self.config.algo, self.config.seed
        algorithm = ALGORITHMS[algo.name]
        settings = SamplingSettings(
            temperature=algo.temperature,
            top_p=algo.top_p,
            top_k=algo.top_k,
            parse_retries=algo.parse_retries,
            max_tokens=self.config.task.max_tokens,
            max_context=self.config.task.max_context,
        )
        env = make_environment(self.config, self.task, self.engine, self.tokenizer, settings, (seed, step))
        env.teachers = teachers_of_step(self.teachers, self.config, settings, (seed, step), self.tokenizer)
        modules, own = self.task.program.modules, self.processes.share(examples)
        plans = [(example, algorithm.plan(algo, modules, (seed, step, example.id))) for example in own]
        started, busy, tokenized = time.perf_counter(), self.engine.busy_s, tokenizer_seconds()
        forest = await sample(env, plans, self.reward_set, step)
        seconds = {
            "generate": self.engine.busy_s - busy,
            "tokenize": tokenizer_seconds() - tokenized,
            "retrieve": env.retrieve_s,
            "rollout": time.perf_counter() - started,
        }
        return Rolled(forest=forest, seconds=seconds)

    def _complete(self, rolled: Rolled, examples: Sequence[Example], step: int) -> Forest:
        """Rollouts of all processes together, with what credit wants to know from models."""
        forest = rolled.forest
        for name, seconds in rolled.seconds.items():
            self.times[name] += seconds
        if self.processes.one_samples:
            forest = only(self.processes.forest(forest, examples), [e.id for e in self.processes.part(examples)])
        started = time.perf_counter()
        # The critic's values and the reference's log-probabilities, for the algorithms that credit with them.
        forest = annotate(self.updates, forest)
        self.times["annotate"] += time.perf_counter() - started
        forest = self.processes.forest(forest, examples)
        share = failed_share(forest.rollouts)
        if share > self.config.train.max_failed_share:
            first = next(r for r in forest.rollouts if r.reward is None)
            raise TooManyFailures(
                f"step {step}: {share:.0%} of the rollouts failed from outside causes, more than "
                f"train.max_failed_share={self.config.train.max_failed_share:.0%}; the first: "
                f"{first.error} in {first.id}: {first.error_message}"
            )
        program = self.task.program
        if getattr(self.config.algo, "reserialise", False) and isinstance(program, Canonical):
            end = self.tokenizer.eos_token_id
            forest = reserialised(forest, program, lambda text: encode_text(self.tokenizer, text), end)
        return forest

    def close(self) -> None:
        """Cancel what is being sampled ahead, and free the engine."""
        self.ahead.close()
        self.journal.close()
        try:
            for engine in self._other_engines():
                engine.close()
        finally:
            self.engine.close()

    def _other_engines(self) -> list[Any]:
        """The teachers' own."""
        found = {id(teacher.engine): teacher.engine for teacher in self.teachers.values()}
        return [engine for engine in found.values() if engine is not self.engine]

    def _asked(self) -> dict[str, float]:
        """What endpoints were asked so far and what it cost, by all processes together."""
        found: dict[str, float] = {}
        for own in self.processes.gather(total_usage([self.engine, *self._other_engines()])):
            found |= {name: found.get(name, 0.0) + count for name, count in own.items()}
        return found

    def on_step_end(self, step: int, update: dict[str, float]) -> None:
        """After the last optimizer step of `step`: log, evaluate when due."""
        self.journal.wait()  # a step whose metrics are there has its journal
        spent = time.perf_counter() - self.step_started
        update_s = update.pop("time/update", 0.0)
        # What is sampled ahead costs a step only the wait for it.
        parts = (
            ("wait", "annotate") if self.config.train.staleness else ("generate", "retrieve", "annotate", "tokenize")
        )
        known = update_s + sum(self.times[part] for part in parts)
        generated = self.pending.get("rollouts/tokens", 0.0)
        metrics = self.pending | update
        metrics |= {f"time/{name}": seconds for name, seconds in self.times.items()}
        metrics |= {
            "time/update": update_s,
            "time/step": spent,
            "time/overhead": spent - known,
            "rate/tokens_per_s": generated / spent,
            "memory/rss_mb": resident_mb(),
        }
        metrics |= self.engine.metrics() | self._asked()
        every = self.config.eval.every
        if step == self.config.train.steps or (every and step % every == 0):
            metrics |= self.evaluate(step)
        self._log(step, metrics)

    def baseline(self) -> list[Item]:
        """Evaluate before training; on a resumed run, read back what was found then.

        Raises:
            TooManyFailures: see `next_batch`; nothing of it is kept, since all later evaluations compare with it.
        """
        logged = self.processes.first(any(record["step"] == 0 for record in self.rundir.history()))
        if logged:
            return self.items(0)
        metrics = self.evaluate(0)
        self._refuse_failed_baseline(metrics[f"eval/{self.config.eval.split}/failed_share"], self.items(0))
        self._log(0, metrics)
        return self.items(0)

    def _refuse_failed_baseline(self, share: float, items: Sequence[Item]) -> None:
        limit = self.config.train.max_failed_share
        if share <= limit:
            return
        if self.processes.main:
            self.rundir.eval_path(0, self.config.eval.split).unlink(missing_ok=True)
        raise TooManyFailures(
            f"evaluation before training: {share:.0%} of the rollouts failed from outside causes, more than "
            f"train.max_failed_share={limit:.0%} ({outside_failures(items)})"
        )

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if not self.processes.main:
            return
        self.rundir.append_metrics(step, metrics)
        self.trackers.log(step, metrics)
        if step:
            self.progress.step(step, metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on `eval.split` after `step` steps; per-item results stay in the run directory."""
        started = time.perf_counter()
        split = self.config.eval.split
        self.progress.status(f"evaluating {split}")
        found = evaluation_metrics(self.items(step), self.config.eval, self.config.seed)
        self.progress.evaluation(step, split, found)
        return {f"eval/{split}/{name}": value for name, value in found.items()} | {
            "time/eval": time.perf_counter() - started
        }

    def items(self, step: int) -> list[Item]:
        """Per-item results after `step` steps, evaluated now or read back."""
        settings = eval_settings(self.config, self.config.eval)

        def environment(key: rng.Key) -> Environment:  # only asked for when something is left to evaluate
            self._sync(step)
            return make_environment(self.config, self.task, self.engine, self.tokenizer, settings, key)

        return evaluate(
            environment,
            self.heldout,
            self.config.eval,
            self.config.seed,
            self.reward_set,
            self.rundir.eval_path(step, self.config.eval.split),
            processes=self.processes,
        )


def resident_mb() -> float:
    """Resident memory of this process in MB (0 where the platform does not say)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096 / 1e6
    except OSError:
        return 0.0
