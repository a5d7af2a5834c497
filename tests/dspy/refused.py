"""Programs that cannot be trained as they are, and what is said of them."""

from __future__ import annotations

from typing import Any

import dspy
from dspy.utils import DummyLM

from tests.dspy import Answer, Refused
from tests.dspy.composed import Async, Rag

SAMPLING = "sampling is set by algo.* and eval.*"


class Made(dspy.Module):
    """Makes a predictor each time it runs, two methods down."""

    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("question -> draft")

    def forward(self, question: str) -> Any:
        return self.second(self.first(question=question).draft)

    def second(self, draft: str) -> Any:
        return dspy.ChainOfThought("draft -> answer")(draft=draft)


class Question(Answer):
    signature = "question -> answer"


class OtherModel(Question):
    def forward(self, question: str) -> Any:
        with dspy.context(lm=DummyLM([{"answer": "x"}])):
            return self.answer(question=question)


class OtherAdapter(Question):
    async def aforward(self, question: str) -> Any:
        with dspy.context(adapter=dspy.JSONAdapter()):
            return await self.answer.acall(question=question)


class Warmer(Question):
    def forward(self, question: str) -> Any:
        return self.answer(question=question, config={"temperature": 0.9, "rollout_id": 1})


class Frozen(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rag = Rag()
        self.rag._compiled = True
        self.check = dspy.Predict("response -> fine: bool")


class Table(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("question -> answer")
        self.rows = [[dspy.Predict("question -> answer")]]


def with_own_model() -> dspy.Module:
    made = Async()
    made.answer.set_lm(DummyLM([{"answer": "x"}]))
    return made


REFUSED = [
    Refused(
        name="`temperature` of a predictor",
        # learn/programming/modules.md
        make=lambda: dspy.Predict("question -> answer", temperature=0.7),
        sentence=f"predictor 'self' sets temperature; {SAMPLING}",
    ),
    Refused(
        name="Several completions of one request (`n=3`)",
        # learn/programming/modules.md
        make=lambda: dspy.ChainOfThought("question -> answer", n=3),
        sentence=f"predictor 'predict' sets n; {SAMPLING}",
    ),
    Refused(
        name='Options of one request (`config={"temperature": …}`)',
        # learn/programming/language_models.md
        make=Warmer,
        sentence=f"predictor 'answer' sets temperature; {SAMPLING}",
        runs=True,
    ),
    Refused(
        name="`dspy.MultiChainComparison`",
        # api/modules/MultiChainComparison.md
        make=lambda: dspy.MultiChainComparison("question -> answer"),
        sentence=f"predictor 'predict' sets temperature; {SAMPLING}, and a call is one completion",
    ),
    Refused(
        name="A predictor made in `forward`",
        # tutorials/custom_module
        make=Made,
        sentence="none of the program's predictors (first)",
        runs=True,
    ),
    Refused(
        name="`dspy.context(lm=…)` in `forward`",
        # learn/programming/language_models.md
        make=OtherModel,
        sentence="a predictor was called with an LM of its own (DummyLM)",
        runs=True,
    ),
    Refused(
        name="`dspy.context(adapter=…)` in `forward`",
        # learn/programming/adapters.md
        make=OtherAdapter,
        sentence="bypassed the adapter",
        runs=True,
    ),
    Refused(
        name="A predictor with a model of its own (`set_lm`)",
        # learn/programming/language_models.md
        make=with_own_model,
        sentence="predictor 'answer.predict' has an LM of its own, whose calls would not be recorded",
    ),
    Refused(
        name="`TwoStepAdapter`",
        # learn/programming/adapters.md
        make=lambda: dspy.Predict("question -> answer"),
        adapter=dspy.TwoStepAdapter(DummyLM([{"answer": "x"}])),
        sentence="TwoStepAdapter asks a second model to read each reply, whose calls would not be recorded",
    ),
    Refused(
        name="Modules that are marked as compiled",
        # tutorials/saving
        make=Frozen,
        sentence="rag.respond.predict would not be trained: DSPy does not list predictors of modules that are marked",
    ),
    Refused(
        name="Predictors in lists within lists",
        # tests/primitives/test_base_module.py
        make=Table,
        sentence="rows[0][0] would not be trained: DSPy does not list predictors",
    ),
    Refused(
        name="A module without predictors",
        # tests/primitives/test_base_module.py
        make=dspy.Module,
        sentence="Module has no predictors (dspy.Predict), nothing to train",
    ),
]
