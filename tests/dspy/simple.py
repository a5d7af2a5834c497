"""Single predictors, and programs that try several times and choose. Programs after DSPy's own, written anew."""

from __future__ import annotations

import datetime
import enum
from dataclasses import replace
from typing import Any, Literal

import dspy
import pydantic
from dspy.adapters.baml_adapter import BAMLAdapter

from tests.dspy import Works

SO = {"reasoning": "so"}


class Feeling(dspy.Signature):
    """Say which feeling a sentence shows."""

    sentence: str = dspy.InputField()
    feeling: Literal["joy", "fear", "anger"] = dspy.OutputField()


class Grounds(dspy.Signature):
    """Check a text against its context."""

    context: str = dspy.InputField(desc="facts that are taken as true")
    text: str = dspy.InputField()
    faithful: bool = dspy.OutputField()
    evidence: dict[str, list[str]] = dspy.OutputField(desc="evidence for each claim")


class Person(pydantic.BaseModel):
    name: str
    born: int | None = None


class Urgency(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Ticket(dspy.Signature):
    """Read a message of a customer."""

    message: str = dspy.InputField()
    urgency: Urgency = dspy.OutputField()
    tags: set[str] = dspy.OutputField()
    due: datetime.date = dspy.OutputField()


class Options(pydantic.BaseModel):
    options: list[str]


def with_demos() -> dspy.Module:
    made = dspy.Predict("question -> answer")
    made.demos = [dspy.Example(question="1+1?", answer="2"), {"question": "2+2?", "answer": "4"}]
    return made


HISTORY = dspy.History(messages=[{"question": "Capital of France?", "answer": "Paris"}])


def simple(name: str, signature: Any, output: str, right: object, wrong: object, **more: Any) -> Works:
    """A single predictor, right where its field `output` is `right`."""
    rest = more.pop("rest", {})
    kind, module = dspy.Predict, "self"
    if more.pop("reasoned", False):
        kind, module, rest = dspy.ChainOfThought, "predict", SO | rest
    return Works(
        **{
            "name": name,
            "make": lambda: kind(signature),
            "good": [{**rest, output: right}],
            "bad": [{**rest, output: wrong}],
            "calls": {module: 1},
            **more,
        }
    )


SIMPLE = [
    simple(
        "A predictor with a typed output (`sentence -> sentiment: bool`)",
        # learn/programming/signatures.md
        "sentence -> sentiment: bool",
        "sentiment",
        True,
        False,
        inputs={"sentence": "A fine film."},
    ),
    simple(
        "A label out of a `Literal`",
        # tutorials/classification
        Feeling,
        "feeling",
        "joy",
        "fear",
        inputs={"sentence": "We won!"},
        reasoned=True,
    ),
    simple(
        "Summaries with `ChainOfThought`",
        # learn/programming/signatures.md
        "document -> summary",
        "summary",
        "short",
        "long and long",
        inputs={"document": "A long text."},
        reasoned=True,
    ),
    simple(
        "A class signature with a mapping of lists",
        # learn/programming/signatures.md
        Grounds,
        "faithful",
        False,
        True,
        inputs={"context": "Lee scored twice.", "text": "Lee scored three times."},
        rest={"evidence": {"three times": ["twice"]}},
    ),
    simple(
        "Several outputs, lists as inputs",
        # learn/programming/signatures.md
        "question, choices: list[str] -> why: str, selection: int",
        "selection",
        1,
        0,
        inputs={"question": "Which is a fruit?", "choices": ["stone", "plum"]},
        rest={"why": "it grows"},
    ),
    simple(
        "A pydantic model as output, read by the metric as an object (`pred.entity.born`)",
        # learn/programming/signatures.md
        dspy.Signature("text -> entity").with_updated_fields("entity", type_=Person),
        "entity",
        Person(name="Ada", born=1815),
        Person(name="Ada"),
        inputs={"text": "Ada, born 1815."},
        solved=lambda prediction: prediction.entity.born == 1815,
    ),
    simple(
        "A list of pydantic models (extraction of people)",
        # tutorials/entity_extraction
        dspy.Signature("tokens: list[str] -> people").with_updated_fields("people", type_=list[Person]),
        "people",
        [Person(name="Ada")],
        [],
        inputs={"tokens": ["Ada", "sat"]},
        reasoned=True,
        solved=lambda prediction: [person.name for person in prediction.people] == ["Ada"],
    ),
    simple(
        "`Enum`, `set` and `date` as outputs",
        # tests/adapters/test_chat_adapter.py
        Ticket,
        "urgency",
        "high",
        "low",
        inputs={"message": "Help by Friday!"},
        rest={"tags": ["help"], "due": "2026-01-02"},
        solved=lambda p: p.urgency is Urgency.HIGH and p.tags == {"help"} and p.due.day == 2,
    ),
    simple(
        "A pydantic model as input",
        # tests/predict/test_predict.py
        dspy.Signature("offer, wish -> choice").with_updated_fields("offer", type_=Options),
        "choice",
        "tea",
        "rain",
        inputs={"offer": Options(options=["tea", "rain"]), "wish": "warm"},
    ),
    simple(
        "`dspy.Code` as output",
        # api/primitives/Code.md
        dspy.Signature("question -> code").with_updated_fields("code", type_=dspy.Code["python"]),
        "code",
        "```python\nprint(2)\n```",
        "```python\nprint(3)\n```",
        inputs={"question": "Print two."},
        solved=lambda prediction: "print(2)" in prediction.code.code,
    ),
    simple(
        "`dspy.Reasoning` as output",
        # api/primitives/Reasoning.md
        dspy.Signature("question -> thoughts, answer").with_updated_fields("thoughts", type_=dspy.Reasoning),
        "answer",
        "4",
        "5",
        inputs={"question": "2+2?"},
        rest={"thoughts": "two and two"},
        solved=lambda prediction: prediction.answer == "4" and "two" in prediction.thoughts,
    ),
    simple(
        "Demonstrations (`predictor.demos`)",
        # learn/optimization/overview.md
        "question -> answer",
        "answer",
        "6",
        "7",
        inputs={"question": "3+3?"},
        make=with_demos,
    ),
    simple(
        "`dspy.History` of a conversation",
        # tutorials/conversation_history
        dspy.Signature("history, question -> answer").with_updated_fields("history", type_=dspy.History),
        "answer",
        "Rome",
        "Oslo",
        inputs={"history": HISTORY, "question": "And of Italy?"},
    ),
    simple(
        "`JSONAdapter`",
        # learn/programming/adapters.md
        "question -> answer: int",
        "answer",
        4,
        5,
        inputs={"question": "2+2?"},
        adapter=dspy.JSONAdapter(),
    ),
    simple(
        "`XMLAdapter`",
        # learn/programming/adapters.md
        "question -> answer, unit",
        "answer",
        "4",
        "5",
        inputs={"question": "2+2?"},
        rest={"unit": "apples"},
        adapter=dspy.XMLAdapter(),
    ),
    simple(
        "`BAMLAdapter`",
        # tests/adapters/test_baml_adapter.py
        dspy.Signature("text -> entity").with_updated_fields("entity", type_=Person),
        "entity",
        Person(name="Ada", born=1815),
        Person(name="Bob"),
        inputs={"text": "Ada, born 1815."},
        solved=lambda prediction: prediction.entity.name == "Ada",
        adapter=BAMLAdapter(),
    ),
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
