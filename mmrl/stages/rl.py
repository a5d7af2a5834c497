"""The stage of reinforcement learning: sample -> credit -> update -> sync, on one screen.

TRL's trainer runs the updates and calls back: `next_batch` samples and credits a step, `on_step_end` writes its record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.algorithms import assign_credit, minibatches
from mmrl.credit.entries import Credit
from mmrl.engines.base import Engine, total_usage
from mmrl.models.assignment import ModuleAssignment
from mmrl.records import Forest
from mmrl.report.stats import modules_in
from mmrl.stages.collect import RolloutSampler, train_calls
from mmrl.stages.evaluate import Evaluations
from mmrl.stages.step_metrics import credit_metrics, forest_metrics, never_metrics
from mmrl.store.journal import JournalWriter, decode_step, encode_step
from mmrl.store.policy import checkpoint_step
from mmrl.system.files import JsonObject
from mmrl.system.processes import merge_forests
from mmrl.trainer.checkpoint import saved_extra
from mmrl.trainer.objective import StepBatch

AHEAD = "sampled_ahead"
"""Key of the next steps' rollouts in a checkpoint."""


@dataclass(kw_only=True)
class RlStage(RolloutSampler):
    """Training of a policy's weights by reinforcement learning."""

    engines: Sequence[Engine]
    """The one that samples first, then those of teachers."""
    assignment: ModuleAssignment
    """Weights of each module."""
    evaluations: Evaluations = field(init=False)
    journal: JournalWriter = field(default_factory=JournalWriter)
    """Writes what a step sampled while it trains."""

    def improve(self, evaluations: Evaluations, checkpoint: Path | None) -> None:
        """Train to `train.steps`, from a checkpoint where there is one; a stop (`system.stop`) saves first."""
        self.evaluations = evaluations
        if checkpoint is not None and self.log.processes.main:
            # Again: what was lost of the file comes back.
            for step in range(1, (checkpoint_step(checkpoint) or 0) + 1):
                self.log.rundir.note_examples("train", self._examples(step))
        for lines in saved_extra(checkpoint).get(AHEAD, ()) if checkpoint is not None else ():
            forest, _ = decode_step(lines)
            mine = [example.id for example in self.log.processes.share(self._examples(forest.step))]
            self.prefetch.put(forest.step, (forest.part(mine), {}))
        with self.log.stop.held():
            self.trainer.follow(self.next_batch, self.on_step_end, self.recorded)
            self.trainer.train(checkpoint)
        self.log.obey_stop()

    def recorded(self) -> JsonObject:
        """Return, for a checkpoint, the batches that are sampled ahead: a resumed run trains on them as this one will.

        A collective.
        """
        ahead = self.log.processes.gather(self.prefetch.sampled())
        # A part of a batch is none: what one process could not sample is sampled again.
        steps = [step for step in ahead[0] if all(step in batches for batches in ahead)]
        forests = [merge_forests([batches[step][0] for batches in ahead], self._examples(step)) for step in steps]
        return {**self.assignment.record(), AHEAD: [encode_step(forest, ()) for forest in forests]}

    def next_batch(self, step: int) -> StepBatch:
        """Sample and credit step number `step` (from 1); raises as `RolloutSampler.collect`."""
        self.log.begin()
        count = self.config.algo.minibatches
        with self.log.sampling():
            batch = self.collect(step, self.credit)
        self.log.progress.status("updating the weights")
        trained, minibatch = batch.trained, minibatches([example.id for example in batch.examples], count)
        credit = self.credit(trained, minibatch)
        metrics = forest_metrics(batch.forest, never_metrics(self.task), self.task.failed_metrics)
        metrics |= credit_metrics(trained, credit.entries) | dict(credit.metrics)
        self.log.metrics = metrics | dict(batch.metrics)
        # Written by a thread while the trainer works: compressing a large batch takes as long as an update.
        self.log.keep(self.journal, batch.forest, credit.entries, batch.examples)
        views = self.scorers.views(trained, {example.id: example for example in batch.examples})
        calls = train_calls(trained, credit, minibatch, views)
        return StepBatch(step=step, calls=calls, minibatches=count, metrics={})

    def credit(self, forest: Forest, minibatch: Mapping[str, int] | None = None) -> Credit:
        """Compute the advantages and weights of every token of a forest."""
        with self.log.timed("credit"):
            return assign_credit(forest, self.config.algo, self.config.seed, minibatch, self.assignment.frozen)

    def on_step_end(self, step: int, update: Mapping[str, float]) -> None:
        """Evaluate when due and write the record of `step`, after its last optimizer step."""
        self.journal.wait()  # a step whose metrics are there has its journal
        metrics = self.log.record(update) | dict(self.engines[0].metrics())
        if evaluated := self.evaluations.due(step):
            metrics |= self.evaluations.metrics(step)
        # Requests to endpoints so far and their cost, the evaluation's too. A collective, so every process comes here,
        # also those that make no request.
        costs: dict[str, float] = {}
        for usage in self.log.processes.gather(total_usage([*self.engines, self.task])):
            costs |= {name: costs.get(name, 0.0) + count for name, count in usage.items()}
        self.log.write(step, metrics | costs)
        if evaluated and step < self.config.train.steps:
            self.log.draw_page()

    def sync(self, version: int) -> None:
        """Let the engine serve the weights after `version` steps, before anything is sampled.

        Raises:
            SyncFailure: on every process, so that all stop at the same point and can save together.
        """
        if self.config.train.staleness == 1:  # a batch comes from one version of the weights
            self.prefetch.wait()
        engine = self.engines[0]
        # Once per version: the evaluation after a step and the next batch both come here.
        if engine.policy_version == version:
            return
        with self.log.timed("sync"):
            # Sharded weights are gathered, which takes all processes; so does the push to servers that they share.
            engine.set_version(version, self.trainer.whole_state())

    def describe(self) -> dict[str, str]:
        """Return facts for the summary."""
        facts = {**self.assignment.describe(), **self.trainer.facts, **self.scorers.describe()}
        facts |= {key: fact for engine in self.engines for key, fact in engine.describe().items()}
        called = modules_in(self.log.rundir.history())
        # Nothing has trained them.
        if unused := [module for module in self.task.program.modules if module not in called]:
            facts["never called"] = f"{', '.join(unused)} (in no step of training)"
        return facts

    def close(self) -> None:
        """Cancel what is being sampled ahead, and free the engines; each is tried, whatever the others raise."""
        # Callbacks run backwards: the prefetch ends first, then the journal, then the engines that both use.
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)
            stack.callback(self.journal.close)
            self.prefetch.close()
