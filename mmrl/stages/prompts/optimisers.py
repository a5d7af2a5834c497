"""DSPy's optimisers as `algo.*` says: their own classes, on mmrl's rollouts and prompt model.

What they do one after the other, or in threads, is replaced here while they run: batches go to `Rollouts.batch`,
bootstrapping looks ahead, and proposals that cannot be used are noted instead of ending the search.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import dspy
from dspy.propose import GroundedProposer
from dspy.teleprompt import BootstrapFewShot, BootstrapFewShotWithRandomSearch, MIPROv2, mipro_optimizer_v2
from dspy.utils.parallelizer import ParallelExecutor

from mmrl.config.optimisers import BootstrapConfig, BootstrapFewshotConfig, Miprov2Config, PromptConfig
from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.model import PromptLM, TaskLM, Writer
from mmrl.stages.prompts.rollouts import Played, Rollouts
from mmrl.stages.prompts.split import minibatched

NO_LIMIT = 10**9
"""Of errors: a failed rollout is no error here, so that DSPy's limits have nothing to count."""
AHEAD = "mmrl_ahead"
"""Attribute of one bootstrapping: how many examples it rolls out at once next."""
Metric = Callable[..., Any]
Note = Callable[[str, str, str], None]
"""Called with a module, the instruction that was proposed for it, and why it cannot be used (empty: it can)."""


@dataclass(kw_only=True)
class Bench:
    """What an optimiser works with."""

    rollouts: Rollouts
    student: dspy.Module
    train: list[dspy.Example]
    validation: list[dspy.Example]
    seed: int
    writer: Writer | None
    """None for an optimiser that proposes no instructions."""
    note: Note
    log: TextIO
    """What DSPy prints."""


def optimise(algo: PromptConfig, bench: Bench) -> dspy.Module:
    """The program that an optimiser of DSPy returns.

    Raises:
        Abort: a rollout or a completion could not be had.
    """
    run = {"miprov2": _miprov2, "bootstrap_fewshot": _bootstrap_fewshot}[algo.name]
    with ExitStack() as stack:
        stack.enter_context(_printing_to(bench.log, bench.rollouts))
        stack.enter_context(
            dspy.context(lm=TaskLM(), trace=None, disable_history=True, track_usage=False, max_errors=NO_LIMIT)
        )
        stack.enter_context(_replaced(ParallelExecutor, "execute", partial(_execute, bench.rollouts)))
        if isinstance(algo, BootstrapConfig):
            ahead = partial(_bootstrap_one, bench.rollouts, algo.bootstrap_ahead)
            stack.enter_context(_replaced(BootstrapFewShot, "_bootstrap_one_example", ahead))
        return run(algo, bench)


def score(example: dspy.Example, prediction: Played, trace: object = None) -> float:
    """The reward of a rollout, as DSPy's metric."""
    return float(prediction.rollout_result["score"])


def worth_showing(threshold: float | None) -> Metric:
    """The metric of optimisers that bootstrap: a failed rollout is no demonstration, whatever its reward.

    Args:
        threshold: `algo.metric_threshold`, which DSPy compares with the metric; without one it takes what is not 0.
    """

    def metric(example: dspy.Example, prediction: Played, trace: object = None) -> float:
        reward = score(example, prediction)
        if trace is None:
            return reward  # an evaluation
        if prediction.rollout_result["error"] is not None:
            return 0.0 if threshold is None else float("-inf")
        return max(reward, 0.0) if threshold is None else reward

    return metric


def _miprov2(algo: PromptConfig, bench: Bench) -> dspy.Module:
    assert isinstance(algo, Miprov2Config) and bench.writer is not None
    optimiser = MIPROv2(
        metric=worth_showing(algo.metric_threshold),
        prompt_model=PromptLM(bench.writer, algo.init_temperature),
        task_model=TaskLM(),
        max_bootstrapped_demos=algo.max_bootstrapped_demos,
        max_labeled_demos=algo.max_labeled_demos,
        auto=algo.auto,
        num_candidates=algo.num_candidates,
        seed=bench.seed,
        init_temperature=algo.init_temperature,
        track_stats=False,
        metric_threshold=algo.metric_threshold,
    )
    if algo.num_instruct_candidates is not None:
        optimiser.num_instruct_candidates = algo.num_instruct_candidates
    with _replaced(mipro_optimizer_v2, "GroundedProposer", partial(_Proposer, bench.note)):
        program: dspy.Module = optimiser.compile(
            bench.student,
            trainset=bench.train,
            valset=bench.validation,
            num_trials=algo.num_trials,
            minibatch=minibatched(algo, len(bench.validation)),
            minibatch_size=algo.minibatch_size,
            minibatch_full_eval_steps=algo.minibatch_full_eval_steps,
            program_aware_proposer=algo.program_aware_proposer,
            data_aware_proposer=algo.data_aware_proposer,
            view_data_batch_size=algo.view_data_batch_size,
            tip_aware_proposer=algo.tip_aware_proposer,
            fewshot_aware_proposer=algo.fewshot_aware_proposer,
        )
    return program


def _bootstrap_fewshot(algo: PromptConfig, bench: Bench) -> dspy.Module:
    assert isinstance(algo, BootstrapFewshotConfig)
    optimiser = BootstrapFewShotWithRandomSearch(
        metric=worth_showing(algo.metric_threshold),
        max_bootstrapped_demos=algo.max_bootstrapped_demos,
        max_labeled_demos=algo.max_labeled_demos,
        max_rounds=algo.max_rounds,
        num_candidate_programs=algo.num_candidate_programs,
        stop_at_score=algo.stop_at_score,
        metric_threshold=algo.metric_threshold,
    )
    program: dspy.Module = optimiser.compile(
        bench.student, trainset=bench.train, valset=bench.validation, labeled_sample=algo.labeled_sample
    )
    return program


class _Proposer(GroundedProposer):
    """DSPy's proposer, where a proposal that cannot be used leaves the instruction as it is.

    DSPy's own ends the whole search at a reply that does not parse.
    """

    def __init__(self, note: Note, **options: Any):
        super().__init__(**options)
        self._note = note

    def propose_instruction_for_predictor(
        self, program: dspy.Module, predictor: Any, pred_i: int, **options: Any
    ) -> str:
        """See `GroundedProposer.propose_instruction_for_predictor`."""
        proposal, problem = "", ""
        try:
            proposal = super().propose_instruction_for_predictor(
                program=program, predictor=predictor, pred_i=pred_i, **options
            )
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem and not proposal.strip():
            problem = "empty"
        self._note(program.named_predictors()[pred_i][0], proposal, problem)
        return str(predictor.signature.instructions) if problem else proposal


# DSPy calls these two as methods of its objects, which come after the first arguments.
_dspy_execute = ParallelExecutor.execute
_dspy_bootstrap_one = BootstrapFewShot._bootstrap_one_example


def _execute(rollouts: Rollouts, executor: Any, function: Callable[[Any], object], data: Sequence[Any]) -> Any:
    """DSPy's batches: evaluations, and pairs of program and example."""
    served, needs = rollouts.batch(function, data)
    # Nothing is left to wait for, and one thread has one order.
    executor.num_threads, executor.disable_progress_bar = 1, True
    results = _dspy_execute(executor, served, data)
    rollouts.on_batch(needs)
    return results


def _bootstrap_one(rollouts: Rollouts, ahead: int, optimiser: Any, example: dspy.Example, round_idx: int = 0) -> Any:
    """One example of DSPy's bootstrapping, with the rollouts of those that may come after it."""

    def attempt(one: dspy.Example) -> object:
        # The original takes the example itself out of the demonstrations, and puts it back only where nothing raises.
        demos = {name: predictor.demos for name, predictor in optimiser.teacher.named_predictors()}
        try:
            return _dspy_bootstrap_one(optimiser, one, round_idx)
        finally:
            for name, predictor in optimiser.teacher.named_predictors():
                predictor.demos = demos[name]

    place = next(i for i, one in enumerate(optimiser.trainset) if one is example)
    size = vars(optimiser).setdefault(AHEAD, ahead)
    # A second round is for the examples that failed in the first, of which the next is not known.
    following = optimiser.trainset[place + 1 : place + size] if round_idx == 0 else []
    if rollouts.ahead(attempt, example, following):
        # Where few go well, one goes through many: at most as many again as are needed are rolled out for nothing.
        setattr(optimiser, AHEAD, min(2 * size, CHUNK))
    return _dspy_bootstrap_one(optimiser, example, round_idx)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute inside; a function becomes a method as the one before it was."""
    before = vars(owner)[name]
    if isinstance(owner, type):
        function = value

        def method(self: Any, *args: Any, **options: Any) -> Any:
            return function(self, *args, **options)

        value = method
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass
class _Printed:
    """Standard output or error while DSPy runs: what its code prints goes to a file, all else where it went before."""

    log: TextIO
    before: Any
    thread: int = field(default_factory=threading.get_ident)
    diverted: bool = True

    def write(self, text: str) -> int:
        """See `TextIO.write`."""
        # Other threads draw the display, and run the rollouts of the user's program.
        here = self.diverted and threading.get_ident() == self.thread
        return int((self.log if here else self.before).write(text))

    def flush(self) -> None:
        """See `TextIO.flush`."""
        self.log.flush()
        self.before.flush()

    def __getattr__(self, name: str) -> Any:
        # rich draws to the terminal behind a file that stands in its place
        return getattr(self.before, name)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is diverted: code of the user's runs."""
        before, self.diverted = self.diverted, False
        try:
            yield
        finally:
            self.diverted = before


@contextmanager
def _printing_to(log: TextIO, rollouts: Rollouts) -> Iterator[None]:
    """What DSPy and Optuna print, log and draw goes to a file."""
    out, err = sys.stdout, sys.stderr
    printed, logged = _Printed(log, out), _Printed(log, err)

    @contextmanager
    def aside() -> Iterator[None]:
        with printed.aside(), logged.aside():
            yield

    sys.stdout, sys.stderr, rollouts.aside = printed, logged, aside  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr, rollouts.aside = out, err, nullcontext
        log.flush()
