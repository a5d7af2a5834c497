"""DSPy's optimisers as `algo.*` says, on mmrl's rollouts and prompt model.

A proposal of the prompt model that cannot be used is noted, and ends no search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dspy
from dspy.propose import GroundedProposer
from dspy.teleprompt import BootstrapFewShotWithRandomSearch, MIPROv2, Teleprompter
from dspy.teleprompt.gepa.gepa import GEPA
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer
from dspy.teleprompt.mipro_optimizer_v2 import BOOTSTRAPPED_FEWSHOT_EXAMPLES_IN_CONTEXT

from mmrl.config.other_stages import BootstrapFewshotConfig, GepaConfig, Miprov2Config, PromptConfig
from mmrl.stages.prompts.model import Writer
from mmrl.stages.prompts.rollouts import THREADS, Evaluated, Need, Played, Rollouts, TrainExample
from mmrl.stages.prompts.split import labeled_demos, read_instructions

Metric = Callable[..., Any]
Note = Callable[[str, str, str], None]
"""Called with a module, the instruction that was proposed for it, and why it cannot be used (empty: it can)."""


@dataclass(kw_only=True)
class Bench:
    """Everything that an optimiser works with."""

    rollouts: Rollouts
    train: list[TrainExample]
    validation: list[TrainExample]
    writer: Writer | None
    """None for an optimiser that proposes no instructions, or takes them from a file."""
    note: Note
    on_batch: Callable[[Sequence[Need]], None]
    """Called with the rollouts of each evaluation."""


def optimise(algo: PromptConfig, bench: Bench) -> dspy.Module:
    """Return the program that an optimiser of DSPy returns.

    Raises:
        Exception: a rollout or a completion could not be had.
    """
    run: Any = {"miprov2": _miprov2, "bootstrap_fewshot": _bootstrap_fewshot, "gepa": _gepa}[algo.name]
    program, loop = None, bench.rollouts.loop
    settings = {
        # Optimisers copy it with the options that they sample with. Never called: a rollout has an LM of its own.
        "lm": dspy.LM("mmrl", cache=False),
        "callbacks": [*(dspy.settings.callbacks or ()), Evaluated(loop, bench.on_batch)],
        # A failed rollout is no error here; an error is no candidate's, and ends the search.
        "max_errors": 1,
    }
    try:
        with dspy.context(**settings, trace=None, disable_history=True, track_usage=False):
            program = run(algo, bench)
    except Exception:
        if loop.failure is None:
            raise
    # Whatever DSPy has made of it.
    if loop.failure is not None:
        raise loop.failure
    return program


def score(example: dspy.Example, prediction: Played, trace: object = None) -> float:
    """Return the reward of a rollout, as DSPy's metric."""
    return float(prediction.rollout_result["score"])


def worth_showing(threshold: float | None) -> Metric:
    """Return the metric of optimisers that bootstrap: a failed rollout is no demonstration, whatever its reward.

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


def _options(algo: PromptConfig, names: str) -> dict[str, Any]:
    """Return the options that have DSPy's names."""
    return {name: getattr(algo, name) for name in names.split()}


def _compiled(optimiser: Teleprompter, bench: Bench, **options: Any) -> dspy.Module:
    module = bench.rollouts.student.module
    program: dspy.Module = optimiser.compile(module, trainset=bench.train, valset=bench.validation, **options)
    return program


def _miprov2(algo: Miprov2Config, bench: Bench) -> dspy.Module:
    optimiser = _Mipro(
        bench,
        algo.instructions,
        metric=worth_showing(algo.metric_threshold),
        prompt_model=None if bench.writer is None else bench.writer.lm(algo.init_temperature),
        max_labeled_demos=labeled_demos(algo, bench.rollouts.stage.task),
        num_threads=THREADS,
        seed=bench.rollouts.stage.config.seed,
        track_stats=False,
        **_options(algo, "max_bootstrapped_demos auto num_candidates init_temperature metric_threshold"),
    )
    if algo.num_instruct_candidates is not None:
        # DSPy has it as an attribute alone, which its constructor sets to the number of all candidates.
        optimiser.num_instruct_candidates = algo.num_instruct_candidates
    return _compiled(
        optimiser,
        bench,
        minibatch=algo.minibatch_of(len(bench.validation)) is not None,
        **_options(algo, "num_trials minibatch_size minibatch_full_eval_steps"),
        **_options(algo, "program_aware_proposer data_aware_proposer tip_aware_proposer fewshot_aware_proposer"),
    )


def _bootstrap_fewshot(algo: BootstrapFewshotConfig, bench: Bench) -> dspy.Module:
    optimiser = BootstrapFewShotWithRandomSearch(
        metric=worth_showing(algo.metric_threshold),
        max_labeled_demos=labeled_demos(algo, bench.rollouts.stage.task),
        num_threads=THREADS,
        **_options(algo, "max_bootstrapped_demos max_rounds num_candidate_programs metric_threshold"),
    )
    return _compiled(optimiser, bench)


def _gepa(algo: GepaConfig, bench: Bench) -> dspy.Module:
    assert bench.writer is not None

    def metric(
        gold: dspy.Example, pred: Played, trace: object = None, pred_name: str | None = None, pred_trace: object = None
    ) -> Any:
        # GEPA asks twice: for the score of a batch, and with a predictor's name for what it is to reflect on.
        return score(gold, pred) if pred_name is None else with_feedback(gold, pred, pred_name)

    optimiser = GEPA(
        metric=metric,
        reflection_lm=bench.writer.lm(algo.prompt_temperature),
        instruction_proposer=_Rewriter(bench),
        num_threads=THREADS,
        failure_score=bench.rollouts.stage.task.failure_score,
        add_format_failure_as_feedback=True,
        warn_on_score_mismatch=False,
        seed=bench.rollouts.stage.config.seed,
        gepa_kwargs={"stop_callbacks": lambda state: bench.rollouts.loop.failure is not None},
        **_options(algo, "auto max_full_evals max_metric_calls reflection_minibatch_size component_selector"),
        **_options(algo, "candidate_selection_strategy skip_perfect_score"),
        **_options(algo, "use_merge max_merge_invocations perfect_score"),
    )
    return _compiled(optimiser, bench)


LONGEST = 1000
"""Characters of one value in the feedback of a rollout."""


def with_feedback(example: dspy.Example, prediction: Played, module: str) -> dspy.Prediction:
    """Return the reward of a rollout and, in words, its failure and what the metric says of it (`feedback`).

    Of a metric that says nothing: metrics, parts of the reward and labels.
    """
    result = prediction.rollout_result
    lines = [f"The reward is {result['score']:g}."]
    if result["error"] is not None:
        lines.append(f"It failed ({result['error']}): {result['message'][:LONGEST]}")
    said = result["feedback"]
    if said:
        lines.append(said.get(module) or said.get("", ""))
        return dspy.Prediction(score=float(result["score"]), feedback="\n".join(lines).rstrip())
    # Everything that the task knows of a rollout: a bare number tells a prompt model nothing about what to change.
    for title, numbers in (("Metrics", result["metrics"]), ("Parts of the reward", result["parts"])):
        if numbers:
            lines.append(f"{title}: " + ", ".join(f"{name} {value:g}" for name, value in numbers.items()))
    for name, value in example.labels().items():
        lines.append(f"{name} of this example: {str(value)[:LONGEST]}")
    return dspy.Prediction(score=float(result["score"]), feedback="\n".join(lines))


class _Mipro(MIPROv2):
    """MIPROv2 with `_Proposer`; DSPy's own ends the whole search at a reply that does not parse."""

    def __init__(self, bench: Bench, instructions: str | None, **options: Any):
        super().__init__(**options)
        self._bench, self._file = bench, instructions

    def _propose_instructions(
        self, program: Any, trainset: Any, demos: Any, batch: int, *aware: bool, num_instruct_candidates: int
    ) -> Any:
        if self._file is not None:
            return self._read(self._file, program)
        of_program, of_data, of_tips, of_demos = aware
        proposer = _Proposer(
            prompt_model=self.prompt_model,
            program=program,
            trainset=trainset,
            view_data_batch_size=batch,
            use_dataset_summary=of_data,
            program_aware=of_program,
            use_task_demos=of_demos,
            num_demos_in_context=BOOTSTRAPPED_FEWSHOT_EXAMPLES_IN_CONTEXT,
            use_tip=of_tips,
            set_tip_randomly=of_tips,
            use_instruct_history=False,
            set_history_randomly=False,
            rng=self.rng,
            init_temperature=self.init_temperature,
        )
        proposer.bench = self._bench
        proposed = proposer.propose_instructions_for_program(trainset, program, demos, {}, num_instruct_candidates)
        # The start is a candidate too.
        for number, predictor in enumerate(program.predictors()):
            proposed[number][0] = predictor.signature.instructions
        return proposed

    def _read(self, path: str, program: dspy.Module) -> dict[int, list[str]]:
        """Return the instructions of each predictor, by its number: the start's, then those of the file."""
        predictors = dict(program.named_predictors())
        candidates = read_instructions(path, list(predictors))
        return {
            number: [predictor.signature.instructions]
            + [text for text in candidates[name] if _usable(self._bench, name, partial(str, text))]
            for number, (name, predictor) in enumerate(predictors.items())
        }


class _Proposer(GroundedProposer):
    """MIPROv2's proposer, where a proposal that cannot be used leaves the instruction as it is."""

    bench: Bench

    def propose_instruction_for_predictor(
        self, program: dspy.Module, predictor: Any, pred_i: int, **options: Any
    ) -> str:
        """See `GroundedProposer.propose_instruction_for_predictor`."""
        propose = partial(super().propose_instruction_for_predictor, program, predictor, pred_i, **options)
        return _usable(self.bench, program.named_predictors()[pred_i][0], propose) or predictor.signature.instructions


class _Rewriter(InstructionProposer):
    """GEPA's proposer; GEPA itself passes over a proposal that cannot be used."""

    def __init__(self, bench: Bench):
        super().__init__()
        self._bench = bench

    def __call__(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        """See `InstructionProposer.__call__`."""
        rewrite, texts = partial(super().__call__, candidate, reflective_dataset), {}
        for name in components_to_update:
            texts[name] = _usable(self._bench, name, lambda name=name: rewrite([name]).get(name, ""))  # type: ignore[misc]
        return {name: text for name, text in texts.items() if text}


def _usable(bench: Bench, module: str, propose: Callable[[], str]) -> str:
    """Return the proposed instructions of a module, empty where it cannot have them; the proposal is noted."""
    proposal, problem = "", ""
    try:
        proposal = propose()
    # A reply without the fields that DSPy reads, or a prompt that is too long: a model's failure, not the run's.
    except Exception as error:
        # DSPy's messages quote the whole reply, which is among the completions.
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    problem = problem or ("" if proposal.strip() else "empty") or bench.rollouts.student.problem(module, proposal)
    bench.note(module, proposal, problem)
    return "" if problem else proposal
