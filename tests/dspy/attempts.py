"""Programs that try several times and choose. Programs after DSPy's own, written anew."""

from __future__ import annotations

from typing import Any

import dspy

from tests.dspy.case import Works

SO = {"reasoning": "so"}


class Votes(dspy.Module):
    """The majority of three calls of one predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.vote = dspy.ChainOfThought("question -> answer")

    def forward(self, question: str) -> Any:
        votes = [self.vote(question=question, config={"rollout_id": number}) for number in range(3)]
        return dspy.majority([dict(vote.items()) for vote in votes], field="answer")


def short(inputs: dict[str, Any], prediction: Any) -> float:
    return float(len(prediction.answer.split()) == 1)


def attempts(kind: Any) -> dspy.Module:
    return kind(module=dspy.ChainOfThought("question -> answer"), N=2, reward_fn=short, threshold=1.0)


def compared() -> dspy.Module:
    made = dspy.MultiChainComparison("question -> answer", M=2)
    made.predict.config = {}
    return made


CHAINS = [dspy.Prediction(rationale="two and two", answer=answer) for answer in ("4", "5")]


class Checked(dspy.Module):
    """`Refine` inside of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.refined = attempts(dspy.Refine)

    def forward(self, question: str) -> Any:
        return self.refined(question=question)


ADVICE = {"discussion": "too long", "advice": {"predict": "one word"}}
ATTEMPTS = [
    Works(
        name="`dspy.majority` of several calls",
        source="learn/programming/modules.md",
        make=Votes,
        inputs={"question": "2+2?"},
        good=[{**SO, "answer": answer} for answer in ("4", "5", "4")],
        bad=[{**SO, "answer": answer} for answer in ("5", "5", "4")],
        solved=lambda prediction: prediction.answer == "4",
        calls={"vote.predict": 3},
        says="calls instead of `n=3`",
    ),
    Works(
        name="`dspy.MultiChainComparison` with `module.predict.config = {}`",
        source="api/modules/MultiChainComparison.md",
        make=compared,
        inputs={"completions": CHAINS, "question": "2+2?"},
        good=[{"rationale": "so", "answer": "4"}],
        bad=[{"rationale": "so", "answer": "5"}],
        solved=lambda prediction: prediction.answer == "4",
        calls={"predict": 1},
    ),
    Works(
        name="`dspy.BestOfN`",
        source="tutorials/output_refinement",
        make=lambda: attempts(dspy.BestOfN),
        inputs={"question": "Capital of Italy?"},
        good=[{**SO, "answer": "it is Rome"}, {**SO, "answer": "Rome"}],
        bad=[{**SO, "answer": "Oslo"}],
        solved=lambda prediction: prediction.answer == "Rome",
        calls={"module.predict": 2},
        bad_calls={"module.predict": 1},
        says="all attempts are calls of the module that is tried; sampled as `algo.*` says",
    ),
    Works(
        name="`dspy.Refine`",
        source="tutorials/output_refinement",
        make=Checked,
        inputs={"question": "Capital of Italy?"},
        good=[{**SO, "answer": "it is Rome"}, ADVICE, {**SO, "answer": "Rome"}],
        bad=[{**SO, "answer": "Oslo"}],
        solved=lambda prediction: prediction.answer == "Rome",
        calls={"refined.module.predict": 2, "refined.offer_feedback": 1},
        bad_calls={"refined.module.predict": 1},
        says="who gives the advice is a module too, `<path>.offer_feedback`",
    ),
]
