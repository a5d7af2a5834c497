"""Programs of several predictors: retrieval, hops, votes, threads, async. Programs after DSPy's own, written anew."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import dspy
import numpy as np

from mmrl.tasks.dspy.tools import use_tool, use_tool_sync
from tests.dspy import Works

SO = {"reasoning": "so"}
FACTS = ["Rome lies on the Tiber.", "Paris lies on the Seine.", "Oslo lies on a fjord."]


def search(query: str, k: int = 1) -> list[str]:
    words = set(query.lower().split())
    return sorted(FACTS, key=lambda fact: -len(words & set(fact.lower().split())))[:k]


class Rag(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.respond = dspy.ChainOfThought("context, question -> response")

    def forward(self, question: str) -> Any:
        return self.respond(context=search(question), question=question)


def letters(texts: list[str]) -> Any:
    return np.array([[text.lower().count(chr(97 + i)) + 1e-3 for i in range(26)] for text in texts])


class EmbeddingRag(Rag):
    """Retrieval by `dspy.Embeddings`, with letters for an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.search = dspy.Embeddings(corpus=FACTS, embedder=letters, k=1)

    def forward(self, question: str) -> Any:
        return self.respond(context=self.search(question).passages, question=question)


class Hops(dspy.Module):
    """Queries and notes by turns, each by one predictor that is called twice."""

    def __init__(self, hops: int = 2) -> None:
        super().__init__()
        self.hops = hops
        self.generate_query = dspy.ChainOfThought("claim, notes -> query")
        self.append_notes = dspy.ChainOfThought("claim, notes, context -> new_notes: list[str]")

    def forward(self, claim: str) -> Any:
        notes: list[str] = []
        for _ in range(self.hops):
            query = self.generate_query(claim=claim, notes=notes).query
            notes.extend(self.append_notes(claim=claim, notes=notes, context=search(query)).new_notes)
        return dspy.Prediction(notes=notes)


class HopsInAList(dspy.Module):
    """A predictor of its own for each hop."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = [dspy.ChainOfThought("context, question -> query") for _ in range(2)]
        self.answers = {"final": dspy.Predict("context, question -> answer")}

    def forward(self, question: str) -> Any:
        context: list[str] = []
        for query in self.queries:
            context += search(query(context=context, question=question).query)
        return self.answers["final"](context=context, question=question)


class Private(dspy.Module):
    """A request without private facts, an external model, an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.redact = dspy.ChainOfThought("user_query -> llm_request")
        self.respond = dspy.Predict("llm_request, llm_response, user_query -> response")

    def forward(self, user_query: str) -> Any:
        request = self.redact(user_query=user_query).llm_request
        answer = use_tool_sync("echo", text=f"on {request}")
        response = self.respond(llm_request=request, llm_response=answer, user_query=user_query).response
        return dspy.Prediction(request=request, response=response)


class InParallel(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.summarise = dspy.Predict("part -> summary")
        self.join = dspy.Predict("summaries: list[str] -> text")

    def forward(self, parts: list[str]) -> Any:
        run = dspy.Parallel(num_threads=4, disable_progress_bar=True)
        summaries = [made.summary for made in run([(self.summarise, {"part": part}) for part in parts])]
        return self.join(summaries=summaries)


class InBatches(InParallel):
    def forward(self, parts: list[str]) -> Any:
        examples = [dspy.Example(part=part).with_inputs("part") for part in parts]
        made = self.summarise.batch(examples, num_threads=3, disable_progress_bar=True)
        return self.join(summaries=[part.summary for part in made])


class Gathered(dspy.Module):
    """Two strands of two calls each at once, with a tool in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pro = dspy.ChainOfThought("topic -> argument")
        self.contra = dspy.ChainOfThought("topic -> argument")
        self.shorten = dspy.Predict("argument -> line")
        self.judge = dspy.Predict("pro, contra -> verdict: bool")

    async def side(self, predictor: Any, topic: str) -> str:
        argument = (await predictor.acall(topic=topic)).argument
        if predictor is self.pro:
            argument = await use_tool("echo", text=argument)
        return (await self.shorten.acall(argument=argument)).line

    async def aforward(self, topic: str) -> Any:
        pro, contra = await asyncio.gather(self.side(self.pro, topic), self.side(self.contra, topic))
        return await self.judge.acall(pro=pro, contra=contra)


class InThreads(dspy.Module):
    """A blocking module, awaited by `dspy.asyncify`."""

    def __init__(self) -> None:
        super().__init__()
        self.rag = Rag()

    async def aforward(self, question: str) -> Any:
        return await dspy.asyncify(self.rag)(question=question)


class Async(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draft = dspy.ChainOfThought("question -> draft")
        self.answer = dspy.ChainOfThought("question, draft -> answer")

    async def aforward(self, question: str) -> Any:
        draft = (await self.draft.acall(question=question)).draft
        return await self.answer.acall(question=question, draft=draft)


class Outer(dspy.Module):
    """Modules in modules; one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rag = Rag()
        self.again = self.rag
        self.check = dspy.Predict("response -> fine: bool")

    def forward(self, question: str) -> Any:
        response = self.rag(question=question).response
        if self.check(response=response).fine:
            return dspy.Prediction(response=response)
        return self.again(question=question)


RAG = Works(
    name="Retrieval, then an answer (RAG)",
    # tutorials/rag
    make=Rag,
    inputs={"question": "On which river lies Rome?"},
    good=[{**SO, "response": "Tiber"}],
    bad=[{**SO, "response": "Seine"}],
    calls={"respond.predict": 1},
)
PARALLEL = Works(
    name="`dspy.Parallel`",
    # api/modules/Parallel.md
    make=InParallel,
    inputs={"parts": ["one", "two", "three"]},
    good=[*({"summary": part} for part in "123"), {"text": "123"}],
    bad=[*({"summary": part} for part in "000"), {"text": "000"}],
    calls={"summarise": 3, "join": 1},
    says="one after another inside a rollout, in order",
)
ASYNC = Works(
    name="`aforward` with `acall`",
    # tutorials/async
    make=Async,
    inputs={"question": "2+2?"},
    good=[{**SO, "draft": "four"}, {**SO, "answer": "4"}],
    bad=[{**SO, "draft": "five"}, {**SO, "answer": "5"}],
    calls={"draft.predict": 1, "answer.predict": 1},
)
COMPOSED = [
    RAG,
    # tutorials/rag
    replace(RAG, name="Retrieval by `dspy.Embeddings`", make=EmbeddingRag),
    Works(
        name="Two predictors by turns over hops",
        # tutorials/multihop_search
        make=Hops,
        inputs={"claim": "Rome and Paris lie on rivers."},
        good=[
            {**SO, "query": "Rome"},
            {**SO, "new_notes": ["Tiber"]},
            {**SO, "query": "Paris"},
            {**SO, "new_notes": ["Seine"]},
        ],
        bad=[{**SO, "query": "x"}, {**SO, "new_notes": []}, {**SO, "query": "y"}, {**SO, "new_notes": []}],
        solved=lambda prediction: prediction.notes == ["Tiber", "Seine"],
        calls={"generate_query.predict": 2, "append_notes.predict": 2},
    ),
    Works(
        name="A predictor for each hop, in lists and mappings",
        # tutorials/rl_multihop
        make=HopsInAList,
        inputs={"question": "Which river?"},
        good=[{**SO, "query": "Rome"}, {**SO, "query": "Tiber"}, {"answer": "Tiber"}],
        bad=[{**SO, "query": "Oslo"}, {**SO, "query": "fjord"}, {"answer": "none"}],
        calls={"queries[0].predict": 1, "queries[1].predict": 1, "answers['final']": 1},
    ),
    Works(
        name="Private requests to an external model (PAPILLON)",
        # tutorials/rl_papillon
        make=Private,
        inputs={"user_query": "I am Ada: write a poem."},
        good=[{**SO, "llm_request": "a poem"}, {"response": "roses"}],
        bad=[{**SO, "llm_request": "a poem for Ada"}, {"response": "roses"}],
        solved=lambda prediction: "Ada" not in prediction.request,
        calls={"redact.predict": 1, "respond": 1},
        says="the external model is a tool of the task (`use_tool_sync`)",
    ),
    PARALLEL,
    # api/modules/Predict.md
    replace(PARALLEL, name="`module.batch`", make=InBatches),
    ASYNC,
    Works(
        name="`asyncio.gather` of strands with several calls",
        # tutorials/async
        make=Gathered,
        inputs={"topic": "rain"},
        good=[
            {**SO, "argument": "it feeds"},
            {**SO, "argument": "it wets"},
            {"line": "feeds"},
            {"line": "wets"},
            {"verdict": True},
        ],
        bad=[{**SO, "argument": ""}, {**SO, "argument": ""}, {"line": "-"}, {"line": "-"}, {"verdict": False}],
        calls={"pro.predict": 1, "contra.predict": 1, "shorten": 2, "judge": 1},
    ),
    # tutorials/async
    replace(RAG, name="`dspy.asyncify`", make=InThreads, calls={"rag.respond.predict": 1}),
    replace(
        ASYNC,
        name="`dspy.syncify`",
        # tests/utils/test_syncify.py
        make=lambda: dspy.syncify(Async()),
    ),
    Works(
        name="Modules in modules, one of them called twice",
        # tutorials/custom_module
        make=Outer,
        inputs={"question": "On which river lies Rome?"},
        good=[{**SO, "response": "Tiber"}, {"fine": True}],
        bad=[{**SO, "response": "?"}, {"fine": False}, {**SO, "response": "??"}],
        solved=lambda prediction: prediction.response == "Tiber",
        calls={"rag.respond.predict": 1, "check": 1},
        bad_calls={"rag.respond.predict": 2, "check": 1},
    ),
]
