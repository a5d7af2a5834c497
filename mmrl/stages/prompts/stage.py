"""The stage that optimises prompts: DSPy's optimiser on the run's task, engine and examples.

Writes below the run directory:

    prompts.json, prompts.yaml   the optimised prompts, as `task.prompts=` reads them (yaml: no DSPy program)
    prompts/start.json           what it started from, and
    prompts/result.json          what it ended with, for people
    prompts/trials.jsonl         every trial: its candidate, its score, the best so far
    prompts/proposals.jsonl      every instruction that the prompt model proposed, and why one was not used
    prompts/memo.jsonl           every reply of a model, from which a killed search goes on
    prompts/optimiser.log        what DSPy logs and prints
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import dspy

from mmrl.config import PromptRunConfig
from mmrl.config.prompts import ProposingConfig
from mmrl.engines.base import total_usage
from mmrl.report.trials import FOLDER, MEMO, PROPOSALS, TRIALS, nothing_went_well
from mmrl.stages import Stage
from mmrl.stages.evaluate import Evaluations
from mmrl.stages.prompts.log import logged_to
from mmrl.stages.prompts.loop import Loop
from mmrl.stages.prompts.model import COSTS, WRITING_COSTS, Writer
from mmrl.stages.prompts.optimisers import SearchSetup, optimise, optimising, score
from mmrl.stages.prompts.rollouts import ID, Played, Rollouts, TrainExample
from mmrl.stages.prompts.split import split
from mmrl.stages.prompts.students import State, digest_of, module_state
from mmrl.stages.step_metrics import failed_share
from mmrl.store.policy import write_policy
from mmrl.store.rundir import RunDir
from mmrl.system.files import JsonObject, append_jsonl, atomic_write, dumps
from mmrl.system.memo import Memo
from mmrl.tasks.base import Task

PAID = ("rollouts", *COSTS, *(f"writer/{name}" for name in WRITING_COSTS))
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
class PromptStage(Stage[PromptRunConfig]):
    """Optimisation of prompts.

    `improve` again on the same run directory, in any process, goes on where it was: DSPy's optimiser runs from its
    seed, and the memo has the replies that it had.
    """

    task_with: Callable[[str], Task]
    """The task with a file of prompts."""
    resources: ExitStack = field(default_factory=ExitStack)
    """Closed with the stage: the engine."""
    result: PromptResult = field(init=False)
    validation: frozenset[str] = frozenset()
    """Examples that candidates are compared on: those of the first trial, which is the start's."""
    paid: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(PAID, 0)))
    """From the beginning of the stage, also what came from the memo."""
    trials: int = field(init=False, default=0)
    unusable: int = field(init=False, default=0)
    """Trials whose rollouts have all failed."""
    _undescribed: set[str] = field(init=False, default_factory=set)
    """What was said on the display to be missing."""
    proposals: Counter[bool] = field(init=False, default_factory=Counter)
    """Whether it became a candidate -> instructions that were proposed."""
    _rewards: dict[str, list[float]] = field(init=False, default_factory=dict)
    """Digest of each candidate that was compared -> its rewards."""
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
        if proposed := self.proposals.total():
            usable = self.proposals[True]
            facts["proposals"] = f"{usable} of {proposed} instructions became candidates" + (
                "" if usable else f"; {self.rundir.path / FOLDER / PROPOSALS} has the reasons"
            )
        return {**facts, **self.engine.describe()}

    def close(self) -> None:
        """Free the engine."""
        self.resources.close()

    def search(self) -> PromptResult:
        """Run the optimiser.

        Raises:
            TooManyFailures: more than `eval.max_failed_share` of a batch failed by no doing of the model.
            EngineFailure: the prompt model's endpoint gave no completion.
            CheckpointError: the memo is damaged.
        """
        folder, algo = self.rundir.path / FOLDER, self.config.algo
        memo, loop = Memo(folder / MEMO), Loop()
        # Made again, in seconds, with the replies of the memo; trials that have a record get no second one.
        for name in (TRIALS, PROPOSALS):
            (folder / name).unlink(missing_ok=True)
        self._logged = {int(record["step"]) for record in self.rundir.history()}
        # From there on costs of endpoints are counted anew: what the memo has is not asked, and has no second record.
        self.rundir.note_resumed(max(self._logged, default=0))
        self.log.begin()
        self._rollouts = rollouts = Rollouts(self, memo, loop, self.paid)
        self._since()
        # An optimiser may change the module that it is given.
        start = rollouts.student.module.deepcopy()
        self._note_prompts("start", start)
        train, heldout = split(self.config, self.task.examples("train"))
        writer = self._make_writer(memo, loop)
        setup = SearchSetup(
            rollouts=rollouts,
            train=[TrainExample.from_example(example) for example in train],
            validation=[TrainExample.from_example(example) for example in heldout],
            writer=writer,
            note=self._note,
            note_undescribed=self._note_undescribed,
            on_batch=self._trial,
        )

        def searched() -> tuple[dspy.Module, float, float]:
            with optimising(setup):
                program = optimise(algo, setup)
                return program, self._reward(start, setup.validation), self._reward(program, setup.validation)

        try:
            # Bootstrapping has one rollout after the other, whose prompts share most of what they have.
            with logged_to(folder / "optimiser.log"), self._remembering(memo), self.engine.prefix_cache_kept():
                program, before, best = loop.run(searched)
        finally:
            if writer is not None:
                writer.close()
        # At a tie the start stays: a person has written it.
        improved = best > before
        selected = program if improved else start
        validation = len(self.validation)
        self._note_prompts("result", selected, improved=improved, validation=validation, start=before, best=best)
        path = (self.rundir.path / "prompts").with_suffix(rollouts.student.suffix)
        rollouts.student.save(selected, path)
        return PromptResult(path, improved, before, max(before, best))

    def _make_writer(self, memo: Memo, loop: Loop) -> Writer | None:
        algo = self.config.algo
        if not isinstance(algo, ProposingConfig) or getattr(algo, "instructions", None):
            return None
        return Writer(self, algo, memo, loop, self.paid)

    @contextmanager
    def _remembering(self, memo: Memo) -> Iterator[None]:
        """Answer requests to the task's judges and external models from the memo inside, as those to the policy."""
        chats = list(self.task.endpoints.values())
        for chat in chats:
            chat.memo = memo
        try:
            yield
        finally:
            for chat in chats:
                chat.memo = None

    def _note_prompts(self, name: str, module: dspy.Module, **facts: object) -> None:
        """Write prompts for people, with facts about them."""
        text = dumps({**facts, "modules": readable_prompts(module_state(module))}, indent=1)
        atomic_write(self.rundir.path / FOLDER / f"{name}.json", text + "\n")

    def _reward(self, candidate: dspy.Module, validation: Sequence[TrainExample]) -> float:
        """Return the reward of a candidate; nearly every one has had its trial on all validation examples."""
        digest = digest_of(module_state(candidate))
        if digest not in self._rewards:
            examples = [example for example in validation if example.inputs()[ID] in self.validation]
            dspy.Evaluate(devset=examples, metric=score)(candidate)
        return fmean(self._rewards[digest])

    def _note(self, module: str, proposal: str, problem: str) -> None:
        # What failed by an error that ends the search is no proposal.
        if self._rollouts.loop.failure is None:
            line = {"module": module, "instructions": proposal, "usable": not problem, "problem": problem}
            append_jsonl(self.rundir.path / FOLDER / PROPOSALS, [line])
            self.proposals[not problem] += 1

    def _note_undescribed(self, what: str, problem: str) -> None:
        if self._rollouts.loop.failure is not None:
            return
        line = {"module": None, "instructions": "", "usable": False, "problem": f"{what}: {problem}"}
        append_jsonl(self.rundir.path / FOLDER / PROPOSALS, [line])
        if what not in self._undescribed:
            self._undescribed.add(what)
            self.log.progress.note(f"warning: the prompt model gave no {what}, and proposes without it ({problem})")

    def _trial(self, batch: Sequence[Played]) -> None:
        """Record an evaluation of DSPy's as a trial."""
        self._rollouts.judge()
        state = module_state(batch[0].candidate)
        spent = self._since()
        for part in ("generate", "rollout"):
            self.log.add(part, spent.pop(part))
        self.trials += 1
        candidate, reward = digest_of(state), fmean(one.score for one in batch)
        examples = frozenset(one.rollout.example for one in batch)
        self.validation = self.validation or examples
        full = examples == self.validation
        if full:  # scores on minibatches are noisier: no best is taken from them
            self._rewards.setdefault(candidate, []).append(reward)
        best = max(max(rewards) for rewards in self._rewards.values())
        errors = [one.rollout.error for one in batch]
        failures = [(one.rollout.error, one.rollout.error_message) for one in batch if one.rollout.error is not None]
        failed = dict(Counter(kind for kind, _ in failures))
        trial: JsonObject = {
            "trial": self.trials,
            "candidate": candidate[:12],
            "score": reward,
            "items": len(batch),
            "full": full,
            "best": best,
            "failed": failed,
            "modules": readable_prompts(state),
        }
        self.log.note_own_code(f"trial {self.trials}", failures, len(batch))
        if len(failures) == len(batch):
            self.unusable += 1
            trial["unusable"] = _example(batch)
        append_jsonl(self.rundir.path / FOLDER / TRIALS, [trial])
        metrics = {
            "prompts/score": reward,
            "prompts/items": float(len(batch)),
            "prompts/full": float(full),
            "prompts/best": best,
            "rollouts/failed_share": failed_share(errors),
            **{f"rollouts/failed/{kind}": float(count) for kind, count in failed.items()},
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
        now = {"generate": self.engine.busy_s, "rollout": self._rollouts.clock.seconds}
        now |= {f"prompts/{name}": float(count) for name, count in self.paid.items()}
        since = {name: count - self._until_now.get(name, 0.0) for name, count in now.items()}
        self._until_now = now
        return since


def _example(batch: Sequence[Played]) -> JsonObject:
    """Pick one of the failed rollouts, if possible with a reply that could not be parsed."""
    one = next((one for one in batch if one.unread is not None), batch[0])
    module, reply = ("", "") if one.unread is None else (one.unread.module, one.unread.text)
    return {"module": module, "reply": reply, "message": one.rollout.error_message}


def readable_prompts(state: State) -> dict[str, JsonObject]:
    """Return module -> its instructions and demonstrations, for people."""
    return {
        name: {"instructions": part["signature"]["instructions"], "demonstrations": part["demos"]}
        for name, part in state.items()
    }
