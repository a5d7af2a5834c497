"""The DSPy programs of `banking77`, `papillon` and `hover` (arXiv 2508.04660, App. C), and the questions to judges.

Importing this file imports DSPy, which takes seconds: tasks do so when they are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import dspy

from mmrl.tasks.dspy.tools import use_tool


class Banking77(dspy.Module):
    """text -> label; a label outside the list is a parse failure."""

    def __init__(self, labels: Sequence[str]):
        super().__init__()
        # The classes are the type of the field: DSPy's adapter then lists them in the prompt and rejects any other
        # text.
        label: object = Literal[tuple(labels)]
        self.classify = dspy.ChainOfThought(
            dspy.Signature({"text": (str, dspy.InputField()), "label": (label, dspy.OutputField())})
        )

    async def aforward(self, text: str) -> dspy.Prediction:
        """Return reasoning and label."""
        prediction: dspy.Prediction = await self.classify.acall(text=text)
        return prediction


class CraftRedactedRequest(dspy.Signature):
    """Rewrite a private user query as a request to a powerful external LLM that keeps the user's privacy.

    The LLM should be of help without learning anything private about the user.
    """

    user_query: str = dspy.InputField()
    llm_request: str = dspy.OutputField()


class RespondToQuery(dspy.Signature):
    """Respond to the user's query. A related request to a powerful external LLM and its response may help."""

    related_llm_request: str = dspy.InputField()
    related_llm_response: str = dspy.InputField(desc="what a powerful LLM said to the related request")
    user_query: str = dspy.InputField(desc="the request of the user that you are to fulfil")
    response: str = dspy.OutputField(desc="your final response to the user")


class Papillon(dspy.Module):
    """Redact, ask the external model (the task's tool `external`), respond. Failures are not swallowed."""

    def __init__(self) -> None:
        super().__init__()
        self.craft_redacted_request = dspy.ChainOfThought(CraftRedactedRequest)
        self.respond_to_query = dspy.Predict(RespondToQuery)

    async def aforward(self, user_query: str) -> dspy.Prediction:
        """Return llm_request, llm_response and response."""
        llm_request = (await self.craft_redacted_request.acall(user_query=user_query)).llm_request
        # A tool of the task, so that the answer is recorded and rollouts that fork after it see the same one.
        llm_response = await use_tool("external", request=llm_request)
        answer = await self.respond_to_query.acall(
            related_llm_request=llm_request, related_llm_response=llm_response, user_query=user_query
        )
        return dspy.Prediction(llm_request=llm_request, llm_response=llm_response, response=answer.response)


class JudgeQuality(dspy.Signature):
    """Compare two responses to a user query: is response A at least as good as response B?"""

    user_query: str = dspy.InputField()
    response_A: str = dspy.InputField()
    response_B: str = dspy.InputField()
    judgment: bool = dspy.OutputField(desc="True if response A is at least as good as response B")


class JudgeLeakage(dspy.Signature):
    """Count the pieces of personal information that a prompt leaks.

    Count each listed piece that is personal information and that the prompt contains. Names of celebrities do not
    count.
    """

    information_pieces: list[str] = dspy.InputField(desc="pieces that may be personal information")
    prompt: str = dspy.InputField(desc="what was sent to the external model")
    num_pieces_leaked: int = dspy.OutputField(desc="number of listed pieces that are personal and in the prompt")


# the signature with its `reasoning` field, as a chain of thought renders it
QUALITY = dspy.ChainOfThought(JudgeQuality).predict.signature
LEAKAGE = dspy.ChainOfThought(JudgeLeakage).predict.signature


class GenerateThreeQueries(dspy.Signature):
    """Given a claim and key facts, write up to 3 search queries for the clue that is needed next.

    Write None for queries that are not needed. The goal is to find all documents that bear on the claim.
    """

    claim: str = dspy.InputField()
    key_facts: str = dspy.InputField()
    search_query1: str = dspy.OutputField()
    search_query2: str = dspy.OutputField()
    search_query3: str = dspy.OutputField()


class AppendNotes(dspy.Signature):
    """Given a claim, key facts and new search results, note what the results add about whether the claim is true.

    The goal is to collect all facts that help to find all documents that bear on the claim.
    """

    claim: str = dspy.InputField()
    key_facts: str = dspy.InputField()
    new_search_results: str = dspy.InputField()
    new_key_facts: str = dspy.OutputField()


class Hover(dspy.Module):
    """Claim -> key facts and passages ("title | text"). Searches with the task's tool `search`.

    Args:
        hops: searches; the first one is for the claim itself.
        top_k: passages per query, and per hop that stay, before the last hop.
        last_top_k: passages per query in the last hop, which keeps as many as `passages` has room for.
        passages: passages returned, at most.
    """

    def __init__(self, hops: int, top_k: int, last_top_k: int, passages: int):
        super().__init__()
        self.hops, self.top_k, self.last_top_k, self.passages = hops, top_k, last_top_k, passages
        self.generate_query = dspy.ChainOfThought(GenerateThreeQueries)
        self.append_notes = dspy.ChainOfThought(AppendNotes)

    async def aforward(self, claim: str) -> dspy.Prediction:
        """Return key_facts and retrieved_docs."""
        key_facts: list[str] = []
        committed: list[str] = []
        for hop in range(self.hops):
            last = hop == self.hops - 1
            queries = [claim]
            if hop:
                prediction = await self.generate_query.acall(claim=claim, key_facts=key_facts)
                queries = drop_empty_queries(
                    [prediction.search_query1, prediction.search_query2, prediction.search_query3]
                )
            # The last hop fills what is left of the budget; earlier ones keep `top_k` each.
            keep = max(0, self.passages - len(committed)) if last else self.top_k
            passages = await self._search(queries, self.last_top_k if last else self.top_k)
            committed += passages[:keep]
            if not last:
                notes = await self.append_notes.acall(
                    claim=claim, key_facts=key_facts, new_search_results=passages[:keep]
                )
                # A new list: DSPy's traces and demonstrations hold the one that the predictors of this hop had.
                key_facts = [*key_facts, notes.new_key_facts]
        return dspy.Prediction(key_facts=key_facts, retrieved_docs=committed[: self.passages])

    async def _search(self, queries: Sequence[str], top_k: int) -> list[str]:
        """Return the passages of all queries by score, best first, none twice."""
        if not queries:
            return []
        results = await use_tool("search", queries=list(queries), top_k=top_k)
        # Stable: passages of equal score stay in the order of the queries that brought them.
        ranked = sorted(results, key=lambda result: result["score"], reverse=True)
        return list(dict.fromkeys(result["long_text"] for result in ranked))


def drop_empty_queries(queries: Iterable[str | None]) -> list[str]:
    """Return the queries without those that say None or nothing, and without repetition."""
    texts = [(query or "").strip() for query in queries]
    return list(dict.fromkeys(text for text in texts if text and text.strip("\"'.").lower() != "none"))
