"""Multi-hop question answering by three agents: the tasks `hotpotqa`, `2wiki` and `musique`.

The search program of MHGPO (arXiv 2506.02718, App. B.3): rewriter -> retriever -> reranker -> answerer. Nothing in it
fails on bad model text: what cannot be read has a defined fallback, and a penalty. Data come from the mini world,
official files or the hub; the reward is token F1, penalties and behaviour metrics are those of App. B.4
(docs/mhgpo.md has the readings).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from typing_extensions import override

from mmrl.records import Call, Example
from mmrl.tasks.base import Canonical, Context, ModuleScore, Passage, Program
from mmrl.tasks.mini.examples import mini_multihop
from mmrl.tasks.open_qa import OpenQaTask, gold_share
from mmrl.tasks.prompts import QUESTION, Prompts, Template, Templates, document_template

MODULES = ("rewriter", "reranker", "answerer")
USED_QUERIES = 4
"""Sub-queries that are searched for; further ones are ignored (and penalised)."""

LONG_ANSWER_WORDS = 30
"""An answerer's output of more whitespace words is penalised."""
PENALTIES: Mapping[str, float] = {"rewriter": -0.5, "reranker": -0.5, "answerer": -1.0}

_WITH_DOCUMENTS = frozenset({"question", "documents"})
_DOCUMENT = document_template("Document{index}: {title} | {text}")
TEMPLATES: Templates = {
    "rewriter": {
        "system": Template(
            "Split the question into at most four simple sub-questions for a search engine. Each must help with the "
            "next, none may repeat another. Output only: ### sub-question 1; sub-question 2 ###",
            optional=QUESTION,
            instructions=True,
        ),
        "user": Template("Question: {question}", required=QUESTION),
    },
    "reranker": {
        "system": Template(
            "Choose the documents that help to answer the question. Output their numbers, the most helpful first.",
            optional=QUESTION,
            instructions=True,
        ),
        "user": Template(
            "Question: {question}\n{documents}\nOutput only the numbers, such as 3, 0.", required=_WITH_DOCUMENTS
        ),
        "document": _DOCUMENT,
    },
    "answerer": {
        "system": Template(
            "Answer the question from the documents, as briefly as possible. If you do not know, say so.",
            optional=QUESTION,
            instructions=True,
        ),
        "user": Template("Question: {question}\n{documents}\nNow answer: {question}", required=_WITH_DOCUMENTS),
        "user_without_documents": Template("Question: {question}", required=QUESTION),
        "document": _DOCUMENT,
    },
}
"""Module -> role -> default text. `document` writes one document; `task.prompts` replaces any of them."""


# Indices beyond the candidates and repetitions are dropped for the program and penalised by the task: a rollout goes
# on with what is usable.
@dataclass(frozen=True, slots=True)
class Selection:
    """Parsed output of a reranker."""

    indices: tuple[int, ...]
    """Indices in range, first occurrences, in the order written."""
    invalid: bool
    """A duplicate, an index out of range, or no index although there were candidates."""


def parse_queries(text: str) -> list[str]:
    """Parse sub-queries between the first two `###`, split on `;`; empty without such a block or with nothing in it."""
    # the first two marks only: what a model writes after its list is ignored
    parts = text.split("###", 2)
    if len(parts) < 3:
        return []
    return [query for query in (part.strip(" \t\r\n<>") for part in parts[1].split(";")) if query]


def parse_selection(text: str, candidates: int) -> Selection:
    """Parse the indices in a reranker's output, against the number of candidate documents."""
    # Python refuses to read thousands of digits; 12 are beyond any number of documents.
    # A minus is a sign where nothing stands before it: "0-2" are two indices.
    written = [int(digits[:12]) for digits in re.findall(r"(?:(?<![\w\])])-)?[0-9]+", text)]
    valid = tuple(dict.fromkeys(index for index in written if 0 <= index < candidates))
    return Selection(valid, len(valid) < len(written) or (not written and candidates > 0))


def parse_answer(text: str) -> str:
    """Parse the answer from an answerer's output: the last paragraph without `*`, after an "Answer:" if it has one."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text.replace("*", "")) if part.strip()]
    if not paragraphs:
        return ""
    return re.split(r"(?:The answer is|Answer):\s*", paragraphs[-1])[-1].strip()


class SearchProgramPrediction(TypedDict):
    """Result of the program."""

    answer: str
    queries: list[str]
    """Queries that were searched for."""
    candidates: list[str]
    """Titles of all documents that the reranker saw."""
    selected: list[str]
    """Titles of those that it chose."""


@dataclass(slots=True)
class SearchProgram(Program, Canonical):
    """Reads `inputs["question"]` and, where a task has several corpora, `inputs["corpus"]`."""

    prompts: Prompts
    snippet_words: int
    """A document's text is cut to this many whitespace words."""
    modules: tuple[str, ...] = MODULES

    def rewriter(self, question: str) -> list[dict[str, str]]:
        """Ask for sub-questions."""
        return self._messages("rewriter", "user", question)

    def reranker(self, question: str, documents: Sequence[Passage]) -> list[dict[str, str]]:
        """Ask for a selection among the candidates, numbered from 0."""
        return self._messages("reranker", "user", question, documents)

    def answerer(self, question: str, documents: Sequence[Passage]) -> list[dict[str, str]]:
        """Ask for the answer; without documents by a prompt that has none."""
        return self._messages("answerer", "user" if documents else "user_without_documents", question, documents)

    def _messages(
        self, module: str, role: str, question: str, documents: Sequence[Passage] = ()
    ) -> list[dict[str, str]]:
        listing = "\n".join(self.prompts.documents(module, documents, self.snippet_words, first=0)) if documents else ""
        return self.prompts.messages(module, user=role, question=question, documents=listing)

    @override
    def canonical(self, call: Call) -> str | None:
        """Write what each parser read, without anything around it."""
        if call.module == "rewriter":
            queries = parse_queries(call.text)
            return f"### {'; '.join(queries)} ###" if queries else None
        if call.module == "reranker":
            indices = parse_selection(call.text, call.facts["candidates"]).indices
            return ", ".join(map(str, indices)) or None
        return parse_answer(call.text) or None

    async def run(self, example: Example, ctx: Context) -> SearchProgramPrediction:
        """Call each module once; the search lies between the first and the second."""
        question = example.inputs["question"]
        reply = await ctx.call("rewriter", self.rewriter(question))
        # without a readable sub-question the question itself is searched for: the penalty, not the retrieval, teaches
        # the format
        queries = parse_queries(reply.text)[:USED_QUERIES] or [question]
        documents: list[Passage] = await ctx.tool("search", queries=queries, corpus=example.inputs["corpus"])
        reply = await ctx.call("reranker", self.reranker(question, documents), facts={"candidates": len(documents)})
        selected = [documents[index] for index in parse_selection(reply.text, len(documents)).indices]
        reply = await ctx.call("answerer", self.answerer(question, selected))
        return {
            "answer": parse_answer(reply.text),
            "queries": queries,
            "candidates": [document["title"] for document in documents],
            "selected": [document["title"] for document in selected],
        }


class MultihopQaTask(OpenQaTask):
    """Implements `mmrl.tasks.base.Task`; see `OpenQaTask` for arguments and errors."""

    templates = TEMPLATES
    main_metric = "f1"
    absent_features = frozenset({"observations", "parse_failures", "repeated_calls"})

    @override
    def make_program(self, prompts: Prompts) -> SearchProgram:
        return SearchProgram(prompts, self.retriever.snippet_words)

    def mini_examples(self, split: str, corpus: str) -> list[Example]:
        """Return bridge and comparison questions, mixed as the data set has them."""
        return mini_multihop(split, corpus, self.dataset)

    @override
    def search_metrics(self, prediction: SearchProgramPrediction, example: Example) -> dict[str, float]:
        retrieved = gold_share("gold_retrieved", prediction["candidates"], example)
        return retrieved | gold_share("gold_selected", prediction["selected"], example)

    def score_call(self, call: Call) -> ModuleScore:
        """Format penalty of one call and its behaviour facts."""
        if call.module == "rewriter":
            queries = parse_queries(call.text)
            # The paper calls this penalty proportional and then gives one number, which is what is done.
            faulty = not queries or len(queries) > USED_QUERIES
            facts = {"sub_queries": float(len(queries)), "unparsable": float(not queries)}
        elif call.module == "reranker":
            selection = parse_selection(call.text, call.facts["candidates"])
            faulty = selection.invalid
            facts = {"selected_documents": float(len(selection.indices)), "invalid_selection": float(faulty)}
        else:
            words = len(call.text.split())
            faulty = words > LONG_ANSWER_WORDS
            facts = {"answer_words": float(words)}
        return ModuleScore(penalty=PENALTIES[call.module] if faulty else 0.0, facts=facts)
