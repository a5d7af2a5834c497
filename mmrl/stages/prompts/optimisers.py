"""DSPy's optimisers as `algo.*` says, on mmrl's rollouts and prompt model.

A proposal of the prompt model that cannot be used is noted, and ends no search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dspy
from dspy.propose import GroundedProposer
from dspy.propose.dataset_summary_generator import (
    DatasetDescriptor,
    DatasetDescriptorWithPriorObservations,
    ObservationSummarizer,
)
from dspy.propose.grounded_proposer import DescribeModule, DescribeProgram
from dspy.teleprompt import BootstrapFewShotWithRandomSearch, MIPROv2, Teleprompter, mipro_optimizer_v2
from dspy.teleprompt.gepa.gepa import GEPA
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer
from dspy.utils.callback import BaseCallback

from mmrl.config.prompts import BootstrapFewshotConfig, GepaConfig, Miprov2Config, PromptConfig
from mmrl.stages.prompts.model import Writer
from mmrl.stages.prompts.rollouts import Evaluated, Played, Rollouts, TrainExample, played
from mmrl.stages.prompts.split import labeled_demos, read_instructions


@dataclass(kw_only=True)
class SearchSetup:
    """Everything that an optimiser works with."""

    rollouts: Rollouts
    train: list[TrainExample]
    validation: list[TrainExample]
    writer: Writer | None
    """None for an optimiser that proposes no instructions, or takes them from a file."""
    note: Callable[[str, str, str], None]
    """Called with a module, the instruction that was proposed for it, and why it cannot be used (empty: it can)."""
    note_undescribed: Callable[[str, str], None]
    """Called with what the prompt model was to describe before it proposes, and why it did not."""
    on_batch: Callable[[Sequence[Played]], None]
    """Called with the rollouts of each evaluation."""


DESCRIPTIONS = {
    DatasetDescriptor: "data summary",
    DatasetDescriptorWithPriorObservations: "data summary of all examples",
    ObservationSummarizer: "data summary",
    DescribeProgram: "description of the program",
    DescribeModule: "description of a module",
}
"""Signatures by which MIPROv2 has described what proposals are made from; where one fails it goes on without a word."""


@dataclass
class Undescribed(BaseCallback):
    """Callback that calls a function where one of `DESCRIPTIONS` fails, with its name and the reason."""

    note: Callable[[str, str], None]
    _asked: dict[str, str] = field(default_factory=dict)

    def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """See `BaseCallback`."""
        if isinstance(instance, dspy.Predict) and (name := DESCRIPTIONS.get(instance.signature)):
            self._asked[call_id] = name

    def on_module_end(self, call_id: str, outputs: Any | None, exception: BaseException | None = None) -> None:
        """See `BaseCallback`."""
        name = self._asked.pop(call_id, None)
        if name is not None and exception is not None:
            self.note(name, _reason(exception))


@contextmanager
def optimising(setup: SearchSetup) -> Iterator[None]:
    """Set DSPy up for an optimiser inside."""
    settings = {
        # Optimisers copy it with the options that they sample with. Never called: a rollout has an LM of its own.
        "lm": dspy.LM("mmrl", cache=False),
        "callbacks": [
            *(dspy.settings.callbacks or ()),
            Evaluated(setup.rollouts.loop, setup.on_batch),
            Undescribed(setup.note_undescribed),
        ],
        # A failed rollout is no error here; an error is no candidate's, and ends the search.
        "max_errors": 1,
        # So many rollouts are in flight at once in an evaluation.
        "num_threads": 64,
    }
    with dspy.context(**settings, trace=None, disable_history=True, track_usage=False):
        yield


def optimise(algo: PromptConfig, setup: SearchSetup) -> dspy.Module:
    """Return the program that an optimiser of DSPy returns."""
    run: Any = {"miprov2": _miprov2, "bootstrap_fewshot": _bootstrap_fewshot, "gepa": _gepa}[algo.name]
    program: dspy.Module = run(algo, setup)
    return program


def score(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
    """Return the reward of a rollout, as DSPy's metric."""
    return played(prediction).score


def worth_showing(threshold: float | None) -> Callable[..., float]:
    """Return the metric of optimisers that bootstrap: a failed rollout is no demonstration, whatever its reward.

    Args:
        threshold: `algo.metric_threshold`, which DSPy compares with the metric; without one it takes what is not 0.
    """

    def metric(example: dspy.Example, prediction: dspy.Prediction, trace: object = None) -> float:
        if trace is None:
            return score(example, prediction)  # an evaluation
        worth = played(prediction).worth
        if played(prediction).rollout.error is not None:
            # DSPy shows what is not 0, or what reaches the threshold, which may be below 0.
            return 0.0 if threshold is None else float("-inf")
        return max(worth, 0.0) if threshold is None else worth

    return metric


def _options(algo: PromptConfig, names: str) -> dict[str, Any]:
    """Return the options that have DSPy's names."""
    return {name: getattr(algo, name) for name in names.split()}


def _compiled(optimiser: Teleprompter, setup: SearchSetup, **options: Any) -> dspy.Module:
    module = setup.rollouts.student.module
    program: dspy.Module = optimiser.compile(module, trainset=setup.train, valset=setup.validation, **options)
    return program


def _miprov2(algo: Miprov2Config, setup: SearchSetup) -> dspy.Module:
    optimiser = _Mipro(
        setup,
        algo.instructions,
        metric=worth_showing(algo.metric_threshold),
        prompt_model=None if setup.writer is None else setup.writer.lm(algo.init_temperature),
        max_labeled_demos=labeled_demos(algo, setup.rollouts.stage.task),
        seed=setup.rollouts.stage.config.seed,
        track_stats=False,
        **_options(algo, "max_bootstrapped_demos auto num_candidates init_temperature metric_threshold"),
    )
    if algo.num_instruct_candidates is not None:
        # DSPy has it as an attribute alone, which its constructor sets to the number of all candidates.
        optimiser.num_instruct_candidates = algo.num_instruct_candidates
    return _compiled(
        optimiser,
        setup,
        minibatch=algo.minibatch_of(len(setup.validation)) is not None,
        **_options(algo, "num_trials minibatch_size minibatch_full_eval_steps"),
        **_options(algo, "program_aware_proposer data_aware_proposer tip_aware_proposer fewshot_aware_proposer"),
    )


def _bootstrap_fewshot(algo: BootstrapFewshotConfig, setup: SearchSetup) -> dspy.Module:
    optimiser = BootstrapFewShotWithRandomSearch(
        metric=worth_showing(algo.metric_threshold),
        max_labeled_demos=labeled_demos(algo, setup.rollouts.stage.task),
        **_options(algo, "max_bootstrapped_demos max_rounds num_candidate_programs metric_threshold"),
    )
    return _compiled(optimiser, setup)


def _gepa(algo: GepaConfig, setup: SearchSetup) -> dspy.Module:
    assert setup.writer is not None

    def metric(
        gold: dspy.Example,
        pred: dspy.Prediction,
        trace: object = None,
        pred_name: str | None = None,
        pred_trace: object = None,
    ) -> Any:
        # GEPA asks twice: for the score of a batch, and with a predictor's name for what it is to reflect on.
        return score(gold, pred) if pred_name is None else with_feedback(gold, played(pred), pred_name)

    optimiser = GEPA(
        metric=metric,
        reflection_lm=setup.writer.lm(algo.prompt_temperature),
        instruction_proposer=_Rewriter(setup),
        failure_score=setup.rollouts.stage.task.failure_score,
        add_format_failure_as_feedback=True,
        warn_on_score_mismatch=False,
        seed=setup.rollouts.stage.config.seed,
        gepa_kwargs={"stop_callbacks": lambda state: setup.rollouts.loop.failure is not None},
        **_options(algo, "auto max_full_evals max_metric_calls reflection_minibatch_size component_selector"),
        **_options(algo, "candidate_selection_strategy skip_perfect_score"),
        **_options(algo, "use_merge max_merge_invocations perfect_score"),
    )
    return _compiled(optimiser, setup)


LONGEST = 1000
"""Characters of one value in the feedback of a rollout."""


def with_feedback(example: dspy.Example, result: Played, module: str) -> dspy.Prediction:
    """Return the reward of a rollout and, in words, its failure and what the metric says of it (`feedback`).

    Of a metric that says nothing: metrics, parts of the reward and labels.
    """
    rollout, lines = result.rollout, [f"The reward is {result.score:g}."]
    if rollout.error is not None:
        lines.append(f"It failed ({rollout.error}): {(rollout.error_message or '')[:LONGEST]}")
    if said := rollout.feedback:
        lines.append(said.get(module) or said.get("", ""))
        return dspy.Prediction(score=result.score, feedback="\n".join(lines).rstrip())
    # Everything that the task knows of a rollout: a bare number tells a prompt model nothing about what to change.
    for title, numbers in (("Metrics", rollout.metrics), ("Parts of the reward", rollout.parts)):
        if numbers:
            lines.append(f"{title}: " + ", ".join(f"{name} {value:g}" for name, value in numbers.items()))
    for name, value in example.labels().items():
        lines.append(f"{name} of this example: {str(value)[:LONGEST]}")
    return dspy.Prediction(score=result.score, feedback="\n".join(lines))


class _Mipro(MIPROv2):
    """MIPROv2 with `_Proposer`; DSPy's own ends the whole search at a reply that does not parse."""

    def __init__(self, setup: SearchSetup, instructions: str | None, **options: Any):
        super().__init__(**options)
        self._setup, self._file = setup, instructions

    def _bootstrap_fewshot_examples(self, *given: Any, **options: Any) -> Any:
        if self._file is not None and not self.max_bootstrapped_demos and not self.max_labeled_demos:
            return None  # what is bootstrapped then is for a prompt model alone
        return super()._bootstrap_fewshot_examples(*given, **options)

    def _propose_instructions(self, program: dspy.Module, *given: Any, **options: Any) -> Any:
        if self._file is not None:
            return self._read(self._file, program)
        # The one place where DSPy lets no other be passed.
        mipro_optimizer_v2.GroundedProposer = partial(_Proposer, self._setup)
        try:
            return super()._propose_instructions(program, *given, **options)
        finally:
            mipro_optimizer_v2.GroundedProposer = GroundedProposer

    def _read(self, path: str, program: dspy.Module) -> dict[int, list[str]]:
        """Return the instructions of each predictor, by its number: the start's, then those of the file."""
        predictors = dict(program.named_predictors())
        candidates = read_instructions(path, list(predictors))
        return {
            number: [predictor.signature.instructions]
            + [text for text in candidates[name] if _usable(self._setup, name, partial(str, text))]
            for number, (name, predictor) in enumerate(predictors.items())
        }


class _Proposer(GroundedProposer):
    """MIPROv2's proposer, where a proposal that cannot be used leaves the instruction as it is."""

    def __init__(self, setup: SearchSetup, **options: Any):
        super().__init__(**options)
        self._setup, source = setup, setup.rollouts.student.source
        if self.program_aware and source is not None:
            self.program_code_string = source

    def propose_instruction_for_predictor(
        self, program: dspy.Module, predictor: Any, pred_i: int, **options: Any
    ) -> str:
        """See `GroundedProposer.propose_instruction_for_predictor`."""
        propose = partial(super().propose_instruction_for_predictor, program, predictor, pred_i, **options)
        # MIPROv2 overwrites it. Asked for all the same: without it the others of a seed would not be those of before.
        unused = (
            "" if options["demo_set_i"] else "not tried: MIPROv2 tries the start's instructions in place of the first"
        )
        name = program.named_predictors()[pred_i][0]
        return _usable(self._setup, name, propose, unused) or predictor.signature.instructions


class _Rewriter(InstructionProposer):
    """GEPA's proposer; GEPA itself passes over a proposal that cannot be used."""

    def __init__(self, setup: SearchSetup):
        super().__init__()
        self._setup = setup

    def __call__(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        """See `InstructionProposer.__call__`."""
        rewrite, texts = partial(super().__call__, candidate, reflective_dataset), {}
        for name in components_to_update:
            texts[name] = _usable(self._setup, name, lambda name=name: rewrite([name]).get(name, ""))  # type: ignore[misc]
        return {name: text for name, text in texts.items() if text}


def _usable(setup: SearchSetup, module: str, propose: Callable[[], str], unused: str = "") -> str:
    """Return the proposed instructions of a module, empty where it cannot have them; the proposal is noted.

    Args:
        unused: why they are not tried even where it can; empty: they are.
    """
    proposal, problem = "", ""
    try:
        proposal = propose()
    # A reply without the fields that DSPy reads, or a prompt that is too long: a model's failure, not the run's.
    except Exception as error:
        problem = _reason(error)
    problem = (
        problem or ("" if proposal.strip() else "empty") or setup.rollouts.student.problem(module, proposal) or unused
    )
    setup.note(module, proposal, problem)
    return "" if problem else proposal


def _reason(error: BaseException) -> str:
    # DSPy's messages quote the whole reply, which is among the completions.
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
