"""Single predictors, and programs that try several times and choose. Programs after DSPy's own, written anew."""

from __future__ import annotations

import datetime
import enum
from dataclasses import replace
from typing import Any, Literal

import dspy
import pydantic
from dspy.adapters.baml_adapter import BAMLAdapter

from tests.dspy import Reply, Works

SO = {"reasoning": "so"}
BOTH: dict[str, Any] = {"evidence": {"three times": ["twice"]}}


class Grounds(dspy.Signature):
    """Check a text against its context."""

    context: str = dspy.InputField(desc="facts that are taken as true")
    text: str = dspy.InputField()
    faithful: bool = dspy.OutputField()
    evidence: dict[str, list[str]] = dspy.OutputField(desc="evidence for each claim")


class Person(pydantic.BaseModel):
    name: str
    born: int | None = None


ADA = Person(name="Ada", born=1815)


class Urgency(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Ticket(dspy.Signature):
    """Read a message of a customer."""

    message: str = dspy.InputField()
    urgency: Urgency = dspy.OutputField()
    tags: set[str] = dspy.OutputField()
    due: datetime.date = dspy.OutputField()


TICKET = {"urgency": "high", "tags": ["help"], "due": "2026-01-02"}


def with_demos() -> dspy.Module:
    made = dspy.Predict("question -> answer")
    made.demos = [dspy.Example(question="1+1?", answer="2"), {"question": "2+2?", "answer": "4"}]
    return made


HISTORY = dspy.History(messages=[{"question": "Capital of France?", "answer": "Paris"}])


def simple(name: str, signature: Any, good: Reply, bad: Reply, inputs: Any = None, **more: Any) -> Works:
    """A single predictor with a right and a wrong reply; of its inputs those that are no text are given."""
    texts = dict.fromkeys(dspy.ensure_signature(signature).input_fields, "a text")
    usual: dict[str, Any] = {"make": lambda: dspy.Predict(signature), "calls": {"self": 1}}
    return Works(name=name, good=[good], bad=[bad], inputs=texts | (inputs or {}), **(usual | more))


def of_type(field: str, kind: Any, signature: str = "question -> answer") -> Any:
    return dspy.Signature(signature).with_updated_fields(field, type_=kind)


def typed(name: str, kind: Any, right: object, wrong: object, **more: Any) -> Works:
    """A predictor whose answer has a type."""
    return simple(name, of_type("answer", kind), {"answer": right}, {"answer": wrong}, **more)


SIMPLE = [
    # learn/programming/signatures.md
    simple(
        "A predictor with a typed output (`sentence -> sentiment: bool`)",
        "sentence -> sentiment: bool",
        {"sentiment": True},
        {"sentiment": False},
    ),
    # tutorials/classification
    typed("A label out of a `Literal`", Literal["joy", "fear"], "joy", "fear"),
    # learn/programming/signatures.md
    simple(
        "Summaries with `ChainOfThought`",
        "document -> summary",
        {**SO, "summary": "short"},
        {**SO, "summary": "long and long"},
        make=lambda: dspy.ChainOfThought("document -> summary"),
        calls={"predict": 1},
    ),
    # learn/programming/signatures.md
    simple(
        "A class signature with a mapping of lists", Grounds, {**BOTH, "faithful": False}, {**BOTH, "faithful": True}
    ),
    # learn/programming/signatures.md
    simple(
        "Several outputs, lists as inputs",
        "question, choices: list[str] -> why: str, selection: int",
        {"why": "it grows", "selection": 1},
        {"why": "it grows", "selection": 0},
        {"choices": ["stone", "plum"]},
    ),
    # learn/programming/signatures.md
    simple(
        "A pydantic model as output, read by the metric as an object (`pred.entity.born`)",
        of_type("entity", Person, "text -> entity"),
        {"entity": ADA},
        {"entity": Person(name="Ada")},
        solved=lambda prediction: prediction.entity.born == 1815,
    ),
    # tutorials/entity_extraction
    typed("A list of pydantic models (extraction of people)", list[Person], [ADA], []),
    # tests/adapters/test_chat_adapter.py
    simple(
        "`Enum`, `set` and `date` as outputs",
        Ticket,
        TICKET,
        {**TICKET, "urgency": "low"},
        solved=lambda p: p.urgency is Urgency.HIGH and p.tags == {"help"} and p.due.day == 2,
    ),
    # tests/predict/test_predict.py
    simple(
        "A pydantic model as input",
        of_type("guest", Person, "guest, wish -> choice"),
        {"choice": "tea"},
        {"choice": "rain"},
        {"guest": ADA},
    ),
    # api/primitives/Code.md
    typed(
        "`dspy.Code` as output",
        dspy.Code["python"],
        "```python\nprint(2)\n```",
        "```python\nprint(3)\n```",
        solved=lambda prediction: "print(2)" in prediction.answer.code,
    ),
    # api/primitives/Reasoning.md
    simple(
        "`dspy.Reasoning` as output",
        of_type("thoughts", dspy.Reasoning, "question -> thoughts, answer"),
        {"thoughts": "two and two", "answer": "4"},
        {"thoughts": "two and two", "answer": "5"},
        solved=lambda prediction: prediction.answer == "4" and "two" in prediction.thoughts,
    ),
    # learn/optimization/overview.md
    typed("Demonstrations (`predictor.demos`)", str, "6", "7", make=with_demos),
    # tutorials/conversation_history
    simple(
        "`dspy.History` of a conversation",
        of_type("history", dspy.History, "history, question -> answer"),
        {"answer": "Rome"},
        {"answer": "Oslo"},
        {"history": HISTORY},
    ),
    # learn/programming/adapters.md
    typed("`JSONAdapter`", int, 4, 5, adapter=dspy.JSONAdapter()),
    # learn/programming/adapters.md
    simple(
        "`XMLAdapter`",
        "question -> answer, unit",
        {"answer": "4", "unit": "apples"},
        {"answer": "5", "unit": "apples"},
        adapter=dspy.XMLAdapter(),
    ),
    # tests/adapters/test_baml_adapter.py
    typed("`BAMLAdapter`", Person, ADA, Person(name="Bob"), adapter=BAMLAdapter()),
]


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
BEST = Works(
    name="`dspy.BestOfN`",
    # tutorials/output_refinement
    make=lambda: attempts(dspy.BestOfN),
    inputs={"question": "Capital of Italy?"},
    good=[{**SO, "answer": "it is Rome"}, {**SO, "answer": "Rome"}],
    bad=[{**SO, "answer": "Oslo"}],
    calls={"module.predict": 2},
    bad_calls={"module.predict": 1},
    says="all attempts are calls of the module that is tried; sampled as `algo.*` says",
)
ATTEMPTS = [
    Works(
        name="`dspy.majority` of several calls",
        # learn/programming/modules.md
        make=Votes,
        inputs={"question": "2+2?"},
        good=[{**SO, "answer": answer} for answer in ("4", "5", "4")],
        bad=[{**SO, "answer": answer} for answer in ("5", "5", "4")],
        calls={"vote.predict": 3},
        says="calls instead of `n=3`",
    ),
    Works(
        name="`dspy.MultiChainComparison` with `module.predict.config = {}`",
        # api/modules/MultiChainComparison.md
        make=compared,
        inputs={"completions": CHAINS, "question": "2+2?"},
        good=[{"rationale": "so", "answer": "4"}],
        bad=[{"rationale": "so", "answer": "5"}],
        calls={"predict": 1},
    ),
    BEST,
    replace(
        BEST,
        name="`dspy.Refine`",
        make=Checked,
        good=[BEST.good[0], ADVICE, BEST.good[1]],
        calls={"refined.module.predict": 2, "refined.offer_feedback": 1},
        bad_calls={"refined.module.predict": 1},
        says="who gives the advice is a module too, `<path>.offer_feedback`",
    ),
]
