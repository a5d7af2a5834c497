"""DSPy's optimisers as `algo.*` says: their own classes, on mmrl's rollouts and prompt model.

A proposal of the prompt model that cannot be used is noted, and ends no search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import dspy
from dspy.propose import GroundedProposer
from dspy.teleprompt import BootstrapFewShotWithRandomSearch, MIPROv2, mipro_optimizer_v2
from dspy.teleprompt.gepa.gepa import GEPA
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer

from mmrl.config.other_stages import (
    BootstrapFewshotConfig,
    GepaConfig,
    Miprov2Config,
    PromptConfig,
)
from mmrl.stages.prompts.model import PromptLM, Writer
from mmrl.stages.prompts.rollouts import Played, Rollouts, TaskLM, on_rollouts, replaced
from mmrl.stages.prompts.split import labeled_demos
from mmrl.stages.prompts.students import Student
from mmrl.tasks.base import Task

Metric = Callable[..., Any]
Note = Callable[[str, str, str], None]
"""Called with a module, the instruction that was proposed for it, and why it cannot be used (empty: it can)."""


@dataclass(kw_only=True)
class Bench:
    """What an optimiser works with."""

    task: Task
    rollouts: Rollouts
    student: Student
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
    run: Any = {
        "miprov2": _miprov2,
        "bootstrap_fewshot": _bootstrap_fewshot,
        "gepa": _gepa,
    }[algo.name]
    ahead = getattr(algo, "bootstrap_ahead", 1)
    # Only optimisers that bootstrap know beforehand which example comes next.
    with on_rollouts(bench.rollouts, bench.log, ahead):
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
            # DSPy shows what is not 0, or what reaches the threshold, which may be below 0.
            return 0.0 if threshold is None else float("-inf")
        return max(reward, 0.0) if threshold is None else reward

    return metric


def _miprov2(algo: Miprov2Config, bench: Bench) -> dspy.Module:
    assert bench.writer is not None
    optimiser = MIPROv2(
        metric=worth_showing(algo.metric_threshold),
        prompt_model=PromptLM(bench.writer, algo.init_temperature),
        task_model=TaskLM(),
        max_bootstrapped_demos=algo.max_bootstrapped_demos,
        max_labeled_demos=labeled_demos(algo, bench.task),
        auto=algo.auto,
        num_candidates=algo.num_candidates,
        seed=bench.seed,
        init_temperature=algo.init_temperature,
        track_stats=False,
        metric_threshold=algo.metric_threshold,
    )
    if algo.num_instruct_candidates is not None:
        # DSPy has it as an attribute alone, which its constructor sets to the number of all candidates.
        optimiser.num_instruct_candidates = algo.num_instruct_candidates
    with replaced(mipro_optimizer_v2, "GroundedProposer", partial(_Proposer, bench)):
        program: dspy.Module = optimiser.compile(
            bench.student.module,
            trainset=bench.train,
            valset=bench.validation,
            num_trials=algo.num_trials,
            minibatch=algo.minibatch_of(len(bench.validation)) is not None,
            minibatch_size=algo.minibatch_size,
            minibatch_full_eval_steps=algo.minibatch_full_eval_steps,
            program_aware_proposer=algo.program_aware_proposer,
            data_aware_proposer=algo.data_aware_proposer,
            view_data_batch_size=algo.view_data_batch_size,
            tip_aware_proposer=algo.tip_aware_proposer,
            fewshot_aware_proposer=algo.fewshot_aware_proposer,
        )
    return program


def _bootstrap_fewshot(algo: BootstrapFewshotConfig, bench: Bench) -> dspy.Module:
    optimiser = BootstrapFewShotWithRandomSearch(
        metric=worth_showing(algo.metric_threshold),
        max_bootstrapped_demos=algo.max_bootstrapped_demos,
        max_labeled_demos=labeled_demos(algo, bench.task),
        max_rounds=algo.max_rounds,
        num_candidate_programs=algo.num_candidate_programs,
        stop_at_score=algo.stop_at_score,
        metric_threshold=algo.metric_threshold,
    )
    program: dspy.Module = optimiser.compile(
        bench.student.module, trainset=bench.train, valset=bench.validation, labeled_sample=algo.labeled_sample
    )
    return program


def _gepa(algo: GepaConfig, bench: Bench) -> dspy.Module:
    assert bench.writer is not None
    bench.rollouts.shows_failures = algo.add_format_failure_as_feedback

    def metric(
        gold: dspy.Example, pred: Played, trace: object = None, pred_name: str | None = None, pred_trace: object = None
    ) -> Any:
        # GEPA asks twice: for the score of a batch, and with a predictor's name for what it is to reflect on.
        return score(gold, pred) if pred_name is None else with_feedback(gold, pred)

    optimiser = GEPA(
        metric=metric,
        auto=algo.auto,
        max_full_evals=algo.max_full_evals,
        max_metric_calls=algo.max_metric_calls,
        reflection_minibatch_size=algo.reflection_minibatch_size,
        candidate_selection_strategy=algo.candidate_selection_strategy,
        reflection_lm=PromptLM(bench.writer, algo.prompt_temperature),
        skip_perfect_score=algo.skip_perfect_score,
        add_format_failure_as_feedback=algo.add_format_failure_as_feedback,
        instruction_proposer=_Rewriter(bench),
        component_selector=algo.component_selector,
        use_merge=algo.use_merge,
        max_merge_invocations=algo.max_merge_invocations,
        # Rollouts of a batch are sampled at once before this code runs; its threads would only change their order.
        num_threads=1,
        failure_score=bench.rollouts.sampler.failure_score,
        perfect_score=algo.perfect_score,
        warn_on_score_mismatch=False,
        seed=bench.seed,
    )
    program: dspy.Module = optimiser.compile(bench.student.module, trainset=bench.train, valset=bench.validation)
    return program


LONGEST = 1000
"""Characters of one value in the feedback of a rollout."""


def with_feedback(example: dspy.Example, prediction: Played, trace: object = None) -> dspy.Prediction:
    """The reward of a rollout and, in words, what is known of it: failure, metrics, parts of the reward, labels."""
    result = prediction.rollout_result
    lines = [f"The reward is {result['score']:g}."]
    if result["error"] is not None:
        lines.append(f"It failed ({result['error']}): {result['message'][:LONGEST]}")
    # Everything that the task knows of a rollout: a bare number tells a prompt model nothing about what to change.
    for title, numbers in (("Metrics", result["metrics"]), ("Parts of the reward", result["parts"])):
        if numbers:
            lines.append(f"{title}: " + ", ".join(f"{name} {value:g}" for name, value in numbers.items()))
    for name, value in example.labels().items():
        lines.append(f"{name} of this example: {str(value)[:LONGEST]}")
    return dspy.Prediction(score=float(result["score"]), feedback="\n".join(lines))


class _Proposer(GroundedProposer):
    """MIPROv2's proposer, where a proposal that cannot be used leaves the instruction as it is.

    DSPy's own ends the whole search at a reply that does not parse.
    """

    def __init__(self, bench: Bench, **options: Any):
        self._bench = bench
        super().__init__(**options)

    def propose_instruction_for_predictor(
        self, program: dspy.Module, predictor: Any, pred_i: int, **options: Any
    ) -> str:
        """See `GroundedProposer.propose_instruction_for_predictor`."""
        proposal, problem = "", ""
        try:
            proposal = super().propose_instruction_for_predictor(
                program=program, predictor=predictor, pred_i=pred_i, **options
            )
        # A reply without the fields that DSPy reads, or a prompt that is too long: a model's failure, not the run's.
        except Exception as error:
            problem = _unusable(error)
        name = program.named_predictors()[pred_i][0]
        return proposal if _usable(self._bench, name, proposal, problem) else str(predictor.signature.instructions)


class _Rewriter(InstructionProposer):
    """GEPA's proposer; GEPA itself passes over a proposal that cannot be used."""

    def __init__(self, bench: Bench):
        super().__init__()
        self._bench = bench

    def __call__(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        """See `InstructionProposer.__call__`."""
        texts: dict[str, str] = {}
        for name in components_to_update:
            proposal, problem = "", ""
            try:
                proposal = super().__call__(candidate, reflective_dataset, [name]).get(name, "")
            except Exception as error:
                problem = _unusable(error)
            if _usable(self._bench, name, proposal, problem):
                texts[name] = proposal
        return texts


def _usable(bench: Bench, module: str, proposal: str, problem: str) -> bool:
    """Whether a module can have the proposed instructions; the proposal is noted."""
    problem = problem or ("" if proposal.strip() else "empty") or bench.student.problem(module, proposal)
    bench.note(module, proposal, problem)
    return not problem


def _unusable(error: Exception) -> str:
    # DSPy's messages quote the whole reply, which is among the completions.
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
