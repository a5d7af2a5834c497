"""Structure of a DSPy program: the names of its modules, and why it cannot be trained, before it has ever run.

Read from the objects: predictors, their options, nested modules. What `forward` makes only when it runs ends its
rollouts with a sentence of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dspy
from dspy.predict.refine import OfferFeedback

from mmrl.errors import ConfigError

Signature = type[dspy.Signature]

PASSED_ON = frozenset({"max_tokens", "stop"})
"""Options of a predictor that reach the engine."""
WITHOUT_EFFECT = frozenset({"rollout_id", "cache", "num_retries"})
"""Options about DSPy's cache and network retries: there is neither here."""
COPYING = (dspy.BestOfN, dspy.Refine)
"""Modules that may be made while a program runs: they have no predictors of their own, and copies are known."""
FEEDBACK = "offer_feedback"
"""Name of the predictor that `dspy.Refine` makes when it runs."""
_PROGRAMS = itertools.count()


class Structure:
    """The modules of a program and the predictors behind them.

    `modules` are the attribute paths of the predictors (`craft.predict`), as `named_predictors` gives them, and for
    each `dspy.Refine` the predictor that gives its advice (`<path>.offer_feedback`).

    Raises:
        ConfigError: what cannot be trained, one sentence for each reason.
    """

    def __init__(self, module: dspy.Module):
        predictors = module.named_predictors()
        # Wherever they are; the program itself is `self`.
        refines = list(module.named_sub_modules(dspy.Refine))
        self._feedback = tuple(f"{path}.{FEEDBACK}".removeprefix("self.") for path, _ in refines)
        problems = list(_problems(module, predictors))
        if problems:
            raise ConfigError([f"task.program: {problem}" for problem in problems])
        self.module = module
        self.modules: tuple[str, ...] = (*(name for name, _ in predictors), *self._feedback)
        self._names: Mapping[int, str] = {id(predictor): name for name, predictor in predictors}
        # `BestOfN` and `Refine` copy it for each attempt, optimisers copy the program. A name of this program's own:
        # another program may have the same predictor in another place.
        self._mark = f"mmrl_module_{next(_PROGRAMS)}"
        for name, predictor in predictors:
            setattr(predictor, self._mark, name)
        for (_, refine), name in zip(refines, self._feedback, strict=True):
            setattr(refine, self._mark, name)

    def name_of(self, callers: Sequence[Any]) -> str | None:
        """Find the module that makes a request: the innermost of DSPy's calling modules, or the one it is a copy of."""
        # A request of another module is its own: a reward function's within `Refine`, a tool's within an agent.
        if not callers or not isinstance(caller := callers[-1], dspy.Predict):
            return None
        # By identity first: a predictor is known by the object that makes the request, not by a name in it.
        name = self._names.get(id(caller)) or vars(caller).get(self._mark)
        if name is None and caller.signature is OfferFeedback:
            refines = (part for part in reversed(callers) if isinstance(part, dspy.Refine))
            name = next((vars(refine)[self._mark] for refine in refines if self._mark in vars(refine)), None)
        return name if name in self.modules else None

    def __getstate__(self) -> dict[str, Any]:
        # Of a program that is saved whole: in another process ids are of other objects, and marks are enough.
        return {**vars(self), "_names": {}}

    def signature(self, module: str) -> Signature:
        """Return the signature of a module, as it is now: `task.prompts` may have changed it."""
        if module in self._feedback:
            feedback: Signature = OfferFeedback
            return feedback
        signature: Signature = dict(self.module.named_predictors())[module].signature
        return signature


def option_problem(name: str, options: Mapping[str, object]) -> str | None:
    """Return the sentence about options of a predictor that would have no effect; None where there are none."""
    # None is DSPy's way to leave an option out.
    passed = {key for key, value in options.items() if value is not None and (key, value) != ("n", 1)}
    refused = sorted(passed - WITHOUT_EFFECT - PASSED_ON)
    if not refused:
        return None
    return (
        f"predictor '{name}' sets {', '.join(refused)}; sampling is set by algo.* and eval.*, and a call is one "
        "completion: leave these out (call a predictor several times for several completions)"
    )


def _problems(module: dspy.Module, predictors: Sequence[tuple[str, dspy.Predict]]) -> Iterator[str]:
    kind = type(module).__name__
    named_ids = {id(predictor) for _, predictor in predictors}
    every = module.named_sub_modules(dspy.Predict)
    hidden = [path.removeprefix("self.") for path, part in every if id(part) not in named_ids]
    if hidden:
        yield (
            f"{', '.join(hidden)} would not be trained: DSPy does not list predictors of modules that are marked as "
            "compiled, nor those in lists within lists; set `_compiled = False`, or keep them in one list"
        )
    elif not predictors:
        yield f"{kind} has no predictors (dspy.Predict), nothing to train"
    for name, predictor in predictors:
        if predictor.lm is not None:
            yield (
                f"predictor '{name}' has an LM of its own, whose calls would not be recorded; "
                "leave `lm` unset, or make a frozen model a tool of the task"
            )
        if problem := option_problem(name, predictor.config):
            yield problem
    if isinstance(dspy.settings.adapter, dspy.TwoStepAdapter):
        yield "TwoStepAdapter asks a second model to read each reply, whose calls would not be recorded; use another"
