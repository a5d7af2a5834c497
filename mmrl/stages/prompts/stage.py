"""The stage that optimises prompts: DSPy's optimiser on the run's task, engine and examples; resumable at any moment.

Writes below the run directory:

    prompts.json, prompts.yaml   the optimised prompts, as `task.prompts=` reads them (yaml: no DSPy program)
    prompts/start.json           what it started from, and
    prompts/result.json          what it ended with, for people
    prompts/trials.jsonl         every trial: its candidate, its score, the best so far
    prompts/proposals.jsonl      every instruction that the prompt model proposed, and why one was not used
    prompts/rollouts.jsonl       every rollout; a resume reads it instead of sampling again
    prompts/completions.jsonl    every completion of the prompt model, likewise
    prompts/optimiser.log        what DSPy prints
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TextIO

import dspy

from mmrl.config import PromptCommandConfig
from mmrl.config.other_stages import ProposingConfig
from mmrl.engines.base import total_usage
from mmrl.models.policy import write_policy
from mmrl.records import Example
from mmrl.report.rundir import RunDir
from mmrl.report.trials import COMPLETIONS, FOLDER, PROPOSALS, ROLLOUTS, STORED, TRIALS, nothing_went_well
from mmrl.stages import Stage
from mmrl.stages.evaluate import Evaluations
from mmrl.stages.prompts.model import WRITING_COSTS, Writer
from mmrl.stages.prompts.optimisers import Bench, optimise
from mmrl.stages.prompts.rollouts import COSTS, Loop, Need, Rollouts, TrainExample
from mmrl.stages.prompts.split import compared, split
from mmrl.stages.prompts.students import State, state_of
from mmrl.stages.step_metrics import failed_share
from mmrl.system.files import JsonObject, atomic_write, dumps
from mmrl.system.json_lines import Store, Table
from mmrl.tasks.base import Task

PAID = ("rollouts", *COSTS, "writer/requests", *(f"writer/{name}" for name in WRITING_COSTS))
"""Counters of a stage: those of the task's own calls, and those of the prompt model's."""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Result of a search for prompts."""

    prompts: Path
    """The prompts to go on with, in the run directory; those of the start where nothing was better."""
    improved: bool
    start: float
    """Reward of the start on the optimiser's validation examples."""
    best: float
    """Reward of `prompts`."""


@dataclass(kw_only=True)
class PromptStage(Stage[PromptCommandConfig]):
    """Optimisation of prompts.

    `improve` again on the same run directory, in any process, goes on where it was: DSPy's optimiser runs from its
    seed, and all that is stored is answered from the store.
    """

    task_with: Callable[[str], Task]
    """The task with a file of prompts."""
    resources: ExitStack = field(default_factory=ExitStack)
    """Closed with the stage: the engine."""
    result: PromptResult = field(init=False)
    validation: frozenset[str] = field(init=False)
    """Examples that candidates are compared on."""
    paid: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(PAID, 0)))
    """From the beginning of the stage, also what came from the store: so a resume has the same records."""
    trials: int = field(init=False, default=0)
    unusable: int = field(init=False, default=0)
    """Trials whose rollouts have all failed."""
    _best: float | None = field(init=False, default=None)
    _until_now: Mapping[str, float] = field(init=False, default_factory=dict)
    """Counters up to which `_since` has reported."""

    @property
    def rundir(self) -> RunDir:
        """The run's."""
        return self.log.rundir

    def sync(self, version: int) -> None:
        """Do nothing: the weights stay."""

    def improve(self, evaluations: Evaluations, checkpoint: Path | None) -> None:
        """Optimise, and go on with the best prompts; raises as `search`."""
        self.result = result = self.search()
        # Known only now: the optimiser decides how many trials it makes.
        evaluations.last_step = max(1, self.trials)
        if result.improved:
            self.task = self.task_with(str(result.prompts))
        prompts = str(result.prompts) if result.improved else self.config.task.prompts
        write_policy(self.rundir.path, weights=self.config.model.path, prompts=prompts, task=self.task.name)

    def describe(self) -> dict[str, str]:
        """Return facts for the summary, after `improve`."""
        result, paid = self.result, self.paid
        change = f"nothing better than the start ({result.start:.4f})"
        if result.improved:
            change = f"{result.start:.4f} to {result.best:.4f}"
        tokens = paid["prompt_tokens"] + paid["completion_tokens"]
        facts = {
            "prompts": f"{change} on {len(self.validation)} validation examples, {self.trials} trials",
            "paid": f"{paid['rollouts']} rollouts, {paid['calls']} calls, {tokens} tokens",
        }
        if self.unusable:
            facts["failed trials"] = f"{self.unusable} of {self.trials}, in which every rollout failed"
        if requests := paid["writer/requests"]:
            tokens = paid["writer/prompt_tokens"] + paid["writer/completion_tokens"]
            cost = f", {paid['writer/cost']:.4f} USD" if paid["writer/cost"] else ""
            facts["prompt model"] = f"{requests} requests, {tokens} tokens{cost}"
        return {**facts, **self.engine.describe()}

    def close(self) -> None:
        """Free the engine."""
        self.resources.close()

    def search(self) -> PromptResult:
        """Run the optimiser.

        Raises:
            TooManyFailures: more than `eval.max_failed_share` of a batch failed by no doing of the model.
            EngineFailure: the prompt model's endpoint gave no completion.
            CheckpointError: the stored trials are not those of this run.
        """
        folder, algo, seed = self.rundir.path / FOLDER, self.config.algo, self.config.seed
        examples = self.task.examples("train")
        train, heldout = split(algo, examples, seed)
        validation = compared(algo, heldout, random.Random(seed))
        self.validation = frozenset(example.id for example in validation)
        self.log.begin()
        # A resumed stage makes its trials again, from the store: those that have a record get no second one.
        self._logged = {int(record["step"]) for record in self.rundir.history()}
        self._table, self._proposals = (Table(folder / name, STORED[name]) for name in (TRIALS, PROPOSALS))
        loop = Loop()
        self._rollouts = rollouts = Rollouts(
            stage=self, store=Store(folder / ROLLOUTS, STORED[ROLLOUTS]), loop=loop, paid=self.paid
        )
        self._since()
        # An optimiser may change the module that it is given.
        start = rollouts.student.module.deepcopy()
        self._note_prompts("start", start)
        writer = self._make_writer(folder, loop)
        bench = Bench(
            rollouts=rollouts,
            train=[TrainExample.from_example(example) for example in train],
            validation=[TrainExample.from_example(example) for example in heldout],
            writer=writer,
            note=self._note,
            on_batch=self._trial,
        )

        def searched() -> tuple[dspy.Module, float, float]:
            program = optimise(algo, bench)
            # On the same examples and draws, whatever the optimiser has compared on its way; mostly from the store.
            return program, self._compared(start, validation), self._compared(program, validation)

        try:
            # Appended: what a start that was killed has printed stays. Bootstrapping has one rollout after the other,
            # whose prompts share most of what they have.
            with open(folder / "optimiser.log", "a", encoding="utf-8") as log, printing_to(log), self.engine.keeping():
                program, before, best = loop.run(searched)
        finally:
            if writer is not None:
                writer.close()
        # At a tie the start stays: a person has written it.
        improved = best > before
        selected = program if improved else start
        self._note_prompts("result", selected, improved=improved, validation=len(validation), start=before, best=best)
        path = (self.rundir.path / "prompts").with_suffix(rollouts.student.suffix)
        rollouts.student.save(state_of(selected), path)
        return PromptResult(path, improved, before, max(before, best))

    def _make_writer(self, folder: Path, loop: Loop) -> Writer | None:
        if not isinstance(self.config.algo, ProposingConfig) or getattr(self.config.algo, "instructions", None):
            return None
        store = Store(folder / COMPLETIONS, STORED[COMPLETIONS])
        return Writer(stage=self, algo=self.config.algo, store=store, loop=loop, paid=self.paid)

    def _note_prompts(self, name: str, module: dspy.Module, **facts: object) -> None:
        """Write prompts for people, with facts about them."""
        text = dumps({**facts, "modules": readable_prompts(state_of(module))}, indent=1)
        atomic_write(self.rundir.path / FOLDER / f"{name}.json", text + "\n")

    def _compared(self, module: dspy.Module, validation: Sequence[Example]) -> float:
        """Return the reward of a candidate on the validation examples."""
        digest = self._rollouts.digest(module)
        needs = [Need(digest, example.id) for example in validation]
        results = self._rollouts.obtain(needs)
        self._rollouts.check(needs)
        return fmean(float(result["score"]) for result in results)

    # --- trials

    def _note(self, module: str, proposal: str, problem: str) -> None:
        # What failed by an error that ends the search is no proposal.
        if self._rollouts.loop.failure is None:
            with self._rollouts.loop.noting():
                self._rollouts.check(())  # proposals may have read of failures that a resume will not meet again
                line = {"module": module, "instructions": proposal, "usable": not problem, "problem": problem}
                self._proposals.add(line)

    def _trial(self, needs: Sequence[Need]) -> None:
        """Record an evaluation of DSPy's as a trial."""
        self._rollouts.check(needs)
        spent = self._since()
        for part in ("generate", "rollout"):
            self.log.add(part, spent.pop(part))
        self.trials += 1
        results = [self._rollouts.result(need) for need in needs]
        score = fmean(float(result["score"]) for result in results)
        # Scores on minibatches are noisier: no best is taken from them.
        full = {need.example for need in needs} == self.validation
        if full and (self._best is None or score > self._best):
            self._best = score
        failures = [(result["error"], result["message"] or "") for result in results if result["error"] is not None]
        failed = dict(Counter(kind for kind, _ in failures))
        trial: JsonObject = {
            "trial": self.trials,
            "candidate": needs[0].candidate[:12],
            "score": score,
            "items": len(needs),
            "full": full,
            "best": self._best,
            "failed": failed,
            "modules": readable_prompts(self._rollouts.states[needs[0].candidate]),
        }
        self.log.note_own_code(f"trial {self.trials}", failures, len(needs))
        if len(failures) == len(needs):
            self.unusable += 1
            trial["unusable"] = _example(results)
        self._table.add(trial)
        metrics = {
            "prompts/score": score,
            "prompts/items": float(len(needs)),
            "prompts/full": float(full),
            "rollouts/failed_share": failed_share([result["error"] for result in results]),
            **{f"rollouts/failed/{kind}": float(count) for kind, count in failed.items()},
            **({} if self._best is None else {"prompts/best": self._best}),
            **spent,
            **total_usage([self.engine, self.task]),
        }
        if self.trials not in self._logged:
            if problem := nothing_went_well(trial):
                self.log.progress.note(f"warning: {problem}")
            record = self.log.record(metrics)
            record["rate/tokens_per_s"] = metrics["prompts/completion_tokens"] / record["time/step"]
            self.log.write(self.trials, record)
        self.log.begin()

    def _since(self) -> dict[str, float]:
        """Return the seconds of rollouts and costs since the last call."""
        now = {"generate": self.engine.busy_s, "rollout": self._rollouts.sampling.seconds}
        now |= {f"prompts/{name}": float(count) for name, count in self.paid.items()}
        since = {name: count - self._until_now.get(name, 0.0) for name, count in now.items()}
        self._until_now = now
        return since


@contextmanager
def printing_to(log: TextIO) -> Iterator[None]:
    """Print to a file inside: DSPy prints much of its progress, and its bars and its logger too."""
    import optuna

    # Optuna's own handler has the standard error of the moment in which it was first imported.
    optuna.logging.disable_default_handler()
    handler, logger = logging.StreamHandler(log), logging.getLogger("optuna")
    logger.addHandler(handler)
    try:
        with redirect_stdout(log), redirect_stderr(log):
            yield
    finally:
        logger.removeHandler(handler)
        optuna.logging.enable_default_handler()


def _example(results: Sequence[JsonObject]) -> JsonObject:
    """Pick one of the failed rollouts, if possible with a reply that could not be parsed."""
    for result in results:
        for step in result["steps"]:
            if step["outputs"] is None:
                return {"module": step["module"] or "", "reply": step["text"], "message": result["message"] or ""}
    return {"module": "", "reply": "", "message": results[0]["message"] or ""}


def readable_prompts(state: State) -> dict[str, JsonObject]:
    """Return module -> its instructions and demonstrations, for people."""
    return {
        name: {"instructions": part["signature"]["instructions"], "demonstrations": part["demos"]}
        for name, part in state.items()
    }
