"""The program of `hover` (arXiv 2508.04660, C.3): search, take notes, ask further, over several hops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import dspy

from mmrl.tasks.dspy.tools import use_tool


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
        top_k: passages per query, and kept per hop, before the last hop.
        last_top_k: passages per query in the last hop, which keeps as many as `passages` has room for.
        passages: passages returned, at most.
    """

    def __init__(self, hops: int, top_k: int, last_top_k: int, passages: int):
        super().__init__()
        self.hops, self.top_k, self.last_top_k, self.passages = hops, top_k, last_top_k, passages
        self.generate_query = dspy.ChainOfThought(GenerateThreeQueries)
        self.append_notes = dspy.ChainOfThought(AppendNotes)

    async def aforward(self, claim: str) -> dspy.Prediction:
        """Returns key_facts and retrieved_docs."""
        key_facts: list[str] = []
        committed: list[str] = []
        for hop in range(self.hops):
            last = hop == self.hops - 1
            queries = [claim]
            if hop:
                prediction = await self.generate_query.acall(claim=claim, key_facts=key_facts)
                queries = needed([prediction.search_query1, prediction.search_query2, prediction.search_query3])
            # The last hop fills what is left of the budget; earlier ones keep `top_k` each.
            keep = max(0, self.passages - len(committed)) if last else self.top_k
            passages = await self._search(queries, self.last_top_k if last else self.top_k)
            committed += passages[:keep]
            if not last:
                notes = await self.append_notes.acall(
                    claim=claim, key_facts=key_facts, new_search_results=passages[:keep]
                )
                key_facts.append(notes.new_key_facts)
        return dspy.Prediction(key_facts=key_facts, retrieved_docs=committed[: self.passages])

    async def _search(self, queries: Sequence[str], top_k: int) -> list[str]:
        """Passages of all queries by score, best first, none twice."""
        if not queries:
            return []
        results = await use_tool("search", queries=list(queries), top_k=top_k)
        # Stable: passages of equal score stay in the order of the queries that brought them.
        ranked = sorted(results, key=lambda result: result["score"], reverse=True)
        return list(dict.fromkeys(result["long_text"] for result in ranked))


def needed(queries: Iterable[str | None]) -> list[str]:
    """The queries without those that say None or nothing, and without repetition."""
    texts = [(query or "").strip() for query in queries]
    return list(dict.fromkeys(text for text in texts if text and text.strip("\"'.").lower() != "none"))
