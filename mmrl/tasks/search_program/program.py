"""The three-agent search program of MHGPO: rewriter -> retriever -> reranker -> answerer.

arXiv 2506.02718, App. B.3. Prompts, parsers and the program. Nothing in it fails on bad model text: what cannot be read
has a defined fallback, and `mmrl.tasks.search_program.task` penalises it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from mmrl.records import Call, Example
from mmrl.tasks.base import Context, Passage
from mmrl.tasks.prompts import Prompts, Template, Templates

MODULES = ("rewriter", "reranker", "answerer")
USED_QUERIES = 4
"""Sub-queries that are searched for; further ones are ignored (and penalised)."""

_QUESTION = frozenset({"question"})
_WITH_DOCUMENTS = frozenset({"question", "documents"})
_DOCUMENT = Template(
    "Document{index}: {title} | {text}", required=frozenset({"text"}), optional=frozenset({"index", "title"})
)
TEMPLATES: Templates = {
    "rewriter": {
        "system": Template(
            "Split the question into at most four simple sub-questions for a search engine. Each must help with the "
            "next, none may repeat another. Output only: ### sub-question 1; sub-question 2 ###",
            optional=_QUESTION,
            instructions=True,
        ),
        "user": Template("Question: {question}", required=_QUESTION),
    },
    "reranker": {
        "system": Template(
            "Choose the documents that help to answer the question. Output their numbers, the most helpful first.",
            optional=_QUESTION,
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
            optional=_QUESTION,
            instructions=True,
        ),
        "user": Template("Question: {question}\n{documents}\nNow answer: {question}", required=_WITH_DOCUMENTS),
        "user_without_documents": Template("Question: {question}", required=_QUESTION),
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
    written = [int(digits[:12]) for digits in re.findall(r"[0-9]+", text)]
    valid = tuple(dict.fromkeys(index for index in written if index < candidates))
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
class SearchProgram:
    """Implements `mmrl.tasks.base.Program`.

    Reads `inputs["question"]` and, where a task has several corpora, `inputs["corpus"]`.
    """

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

    def canonical(self, call: Call) -> str | None:
        """See `mmrl.tasks.base.Canonical`: what each parser read, without anything around it."""
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
