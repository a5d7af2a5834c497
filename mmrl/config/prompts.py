"""`algo.*` of stages that optimise prompts: DSPy's optimisers."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from mmrl.config.base import Idle, MethodConfig, Section, needs
from mmrl.config.endpoint import EndpointConfig

Auto = Literal["light", "medium", "heavy"]
SMALLEST_MINIBATCHED = 50
"""Validation examples up to which DSPy's MIPROv2 evaluates every trial on all of them."""
AUTO_VALIDATION = {"light": 100, "medium": 300, "heavy": 1000}
"""DSPy's numbers of validation examples for MIPROv2's `auto`."""


class PromptConfig(MethodConfig):
    """Settings of every optimiser of prompts.

    Rollouts are sampled as in evaluation (`eval.temperature`, `eval.top_p`, `eval.top_k`, `eval.parse_retries`).
    """

    validation: float = Field(
        0.8,
        gt=0,
        lt=1,
        description="share of the train split to compare candidates on: its end, of files after a shuffle by seed",
    )
    validation_items: int | None = Field(None, ge=1, description="at most so many of these; null: 1000, as in MIPROv2")
    train_items: int | None = Field(
        None,
        ge=1,
        description="at most so many of the others to learn from; null: all, and all are asked where few go well",
    )
    shuffles: ClassVar[bool] = False
    """True if the run's seed orders the train part, since DSPy has no seed for it."""

    def expected_trials(self, modules: int, validation: int) -> int:
        """Estimate the number of trials, for a progress bar; 0: as many as the budget of rollouts allows.

        Args:
            modules: number of modules of the program.
            validation: examples that candidates are compared on.
        """
        return 0

    @property
    def drawn(self) -> int | None:
        """Number of validation examples that DSPy draws; None: it takes all."""
        return None

    def minibatch_of(self, validation: int) -> int | None:
        """Return the number of examples of a trial, if trials use fewer than all."""
        return None


class BootstrapConfig(PromptConfig):
    """Settings of optimisers that take demonstrations from rollouts that went well (DSPy's BootstrapFewShot)."""

    max_bootstrapped_demos: int = Field(4, ge=0, description="most demonstrations from rollouts, per module")
    max_labeled_demos: int | None = Field(
        None,
        ge=0,
        description="most demonstrations per module, plain examples included; null: 4 (bootstrap_fewshot: 16), 0 "
        "without DSPy",
    )
    metric_threshold: float | None = Field(None, description="least reward of a demonstration; null: any above 0")

    plain_demos: ClassVar[int] = 4
    """DSPy's default of `max_labeled_demos`."""

    @field_validator("metric_threshold")
    @classmethod
    def _threshold(cls, threshold: float | None) -> float | None:
        # DSPy takes 0 for no threshold
        if threshold == 0:
            raise ValueError("got 0, which DSPy takes for none; expected another number, or null: any above 0")
        return threshold


class ProposingConfig(Section):
    """Settings of optimisers for which a model writes instructions."""

    prompt_model: EndpointConfig | None = Field(
        None, description="the model that writes instructions, behind an endpoint; null: the policy itself"
    )
    prompt_max_tokens: int = Field(1024, ge=16, description="longest completion of the prompt model, in tokens")


class Miprov2Config(BootstrapConfig, ProposingConfig):
    """MIPROv2: instructions and demonstrations of all modules together, by Bayesian search (arXiv 2406.11695)."""

    name: Literal["miprov2"]
    auto: Auto | None = Field(
        "medium",
        description="light, medium, heavy: 6, 12, 18 sets of demonstrations, half as many instructions (as many "
        "without demonstrations), at most 100, 300, 1000 validation examples; null: by num_candidates and num_trials",
    )
    num_candidates: int | None = Field(None, ge=1, description="sets of demonstrations per module; null: as auto says")
    num_instruct_candidates: int | None = Field(
        None, ge=1, description="instructions per module, the start's included; null: as auto or num_candidates says"
    )
    instructions: str | None = Field(
        None,
        description="YAML file, module: [text, ...], of instructions to try beside the start's; null: the prompt model "
        "writes them",
    )
    num_trials: int | None = Field(None, ge=1, description="combinations that are tried; null: as auto says")
    minibatch: bool | None = Field(
        None,
        description=f"trials on minibatches; null: with more than {SMALLEST_MINIBATCHED} validation examples, as auto",
    )
    minibatch_size: int = Field(35, ge=1, description="validation examples of a trial on a minibatch")
    minibatch_full_eval_steps: int = Field(
        5, ge=1, description="trials on minibatches before the best one is evaluated on all validation examples"
    )
    program_aware_proposer: bool = Field(True, description="the prompt model sees the program's source")
    data_aware_proposer: bool = Field(True, description="the prompt model sees a summary of the train part")
    tip_aware_proposer: bool = Field(True, description="the prompt model gets one of DSPy's tips, drawn each time")
    fewshot_aware_proposer: bool = Field(True, description="the prompt model sees demonstrations")
    init_temperature: float = Field(1.0, ge=0, description="sampling temperature of the prompt model's instructions")
    idle: ClassVar[list[Idle[Any]]] = [
        needs("num_candidates num_instruct_candidates num_trials minibatch", "auto", None),
        needs(
            "prompt_model prompt_max_tokens num_instruct_candidates program_aware_proposer data_aware_proposer "
            "tip_aware_proposer fewshot_aware_proposer init_temperature",
            "instructions",
            None,
        ),
    ]

    def expected_trials(self, modules: int, validation: int) -> int:
        """See `PromptConfig.expected_trials`."""
        trials = self.num_trials
        if trials is None:
            candidates = {"light": 6, "medium": 12, "heavy": 18}[self.auto or "medium"]
            # As DSPy counts: instructions are one choice of a module, demonstrations another.
            sets = 2 if self.max_bootstrapped_demos else 1
            trials = int(max(2 * sets * modules * math.log2(candidates), 1.5 * candidates))
        every = self.minibatch_full_eval_steps
        # The start comes first; where trials are minibatches, the best so far is evaluated on all every so often.
        return 1 + trials + (trials // every + bool(trials % every) if self.minibatch_of(validation) else 0)

    @property
    def drawn(self) -> int | None:
        """See `PromptConfig.drawn`."""
        return AUTO_VALIDATION[self.auto] if self.auto is not None else None

    def minibatch_of(self, validation: int) -> int | None:
        """See `PromptConfig.minibatch_of`."""
        split = self.minibatch if self.minibatch is not None else validation > SMALLEST_MINIBATCHED
        return self.minibatch_size if split else None

    @model_validator(mode="after")
    def _counts(self) -> Self:
        numbers = {} if self.auto else {"num_candidates": self.num_candidates, "num_trials": self.num_trials}
        problems = [f"{name}: got null with auto=null, expected a number" for name, n in numbers.items() if n is None]
        if self.max_bootstrapped_demos == 0 and self.max_labeled_demos != 0:
            # DSPy draws a number of demonstrations between 1 and this one
            problems.append(
                "max_bootstrapped_demos: got 0 without max_labeled_demos=0, which MIPROv2 cannot; set both to 0 "
                "(instructions alone), or this one to at least 1"
            )
        if self.num_candidates is not None and (self.num_instruct_candidates or 0) > self.num_candidates:
            problems.append(
                f"num_instruct_candidates: got {self.num_instruct_candidates}, and MIPROv2 writes no more instructions "
                f"than it has sets of demonstrations; expected at most num_candidates={self.num_candidates}"
            )
        if problems:
            raise ValueError(*problems)
        return self


class BootstrapFewshotConfig(BootstrapConfig):
    """BootstrapFewShotWithRandomSearch: demonstrations alone, the best of several random sets."""

    name: Literal["bootstrap_fewshot"]
    max_bootstrapped_demos: int = Field(4, ge=1, description="most demonstrations from rollouts, per module")
    max_rounds: int = Field(
        1, ge=1, description="rollouts per example until one goes well; from the second at temperature 1"
    )
    num_candidate_programs: int = Field(
        16, ge=0, description="random sets that are tried, beside none, plain examples alone, and one in their order"
    )
    shuffles: ClassVar[bool] = True
    plain_demos: ClassVar[int] = 16

    def expected_trials(self, modules: int, validation: int) -> int:
        """See `PromptConfig.expected_trials`."""
        # Besides: the start, demonstrations by label alone, and one bootstrapping in the order of the examples.
        return self.num_candidate_programs + 3


class GepaConfig(PromptConfig, ProposingConfig):
    """GEPA: instructions that the prompt model rewrites after reading rollouts and what was wrong with them
    (arXiv 2507.19457)."""

    name: Literal["gepa"]
    validation: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="share of the train split to compare candidates on: its end, of files after a shuffle by seed",
    )
    auto: Auto | None = Field("light", description="rollouts by DSPy's formula; null: as one of the next two says")
    max_full_evals: int | None = Field(None, ge=1, description="rollouts of so many evaluations on all examples")
    max_metric_calls: int | None = Field(None, ge=1, description="rollouts")
    reflection_minibatch_size: int = Field(3, ge=1, description="rollouts that the prompt model reads at once")
    candidate_selection_strategy: Literal["pareto", "current_best"] = Field(
        "pareto",
        description="whose instructions are rewritten: one of those best on some example, or the best on average",
    )
    skip_perfect_score: bool = Field(True, description="nothing is rewritten where all rollouts read were perfect")
    perfect_score: float = Field(1.0, description="the reward that is perfect")
    component_selector: Literal["round_robin", "all"] = Field(
        "round_robin", description="modules rewritten at once: one after the other, or all"
    )
    use_merge: bool = Field(True, description="instructions of two candidates are merged")
    max_merge_invocations: int | None = Field(5, ge=1, description="merges that are tried; null: no limit")
    prompt_temperature: float = Field(1.0, ge=0, description="sampling temperature of the prompt model")
    idle: ClassVar[list[Idle[Any]]] = [needs("max_merge_invocations", "use_merge", True)]

    @model_validator(mode="after")
    def _budget(self) -> Self:
        budgets = ("auto", "max_full_evals", "max_metric_calls")
        limits = [f"{name}={vars(self)[name]}" for name in budgets if vars(self)[name] is not None]
        if len(limits) != 1:
            raise ValueError(
                f"got {', '.join(limits) or 'no budget'}, expected one of {', '.join(budgets)} (and the others null)"
            )
        return self


PROMPT_SCHEMAS: dict[str, type[PromptConfig]] = {
    "miprov2": Miprov2Config,
    "bootstrap_fewshot": BootstrapFewshotConfig,
    "gepa": GepaConfig,
}
"""Optimiser -> schema. The same names are in `conf/algo/`."""
