"""Mini-world questions as examples, and its documents as a corpus: what the task loaders ask for under `mini`."""

from __future__ import annotations

from mmrl import rng
from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.tasks.mini.questions import Question, in_steps, make_bridges, make_questions, make_singles
from mmrl.tasks.mini.world import make_world

KINDS = ("2wiki", "musique")
"""Data sets whose mini version has its own mix of kinds of questions."""

SINGLE_HOP = ("nq", "triviaqa", "popqa")


def mini_corpus() -> tuple[Document, ...]:
    """One document for each entity of the world."""
    return make_world().documents


def mini_multihop(split: str, corpus: str = "mini", dataset: str = "hotpotqa", stepwise: bool = False) -> list[Example]:
    """The multi-hop questions of a split; `metadata["hops"]` has the reasoning that demonstrations are made from.

    The kinds are mixed as `dataset` has them: `hotpotqa` all (a quarter comparisons), `2wiki` as many comparisons as
    bridges, `musique` bridges alone. The questions of the last two are among those of the first, in the same split.
    `stepwise`: the second hop of a bridge names the result of the first, instead of describing it.
    """
    questions = make_questions(split)
    if dataset in KINDS:
        bridges = [question for question in questions if question.kind == "bridge"]
        others = [question for question in questions if question.kind != "bridge"] if dataset == "2wiki" else []
        # The mixture is cut from the whole set, in its order: ids and questions stay those of `hotpotqa`.
        chosen = {question.id for question in [*others, *bridges[: len(others) or None]]}
        questions = tuple(question for question in questions if question.id in chosen)
    return [_example(in_steps(question) if stepwise else question, corpus) for question in questions]


def mini_questions(dataset: str, split: str, corpus: str = "mini", stepwise: bool = False) -> list[Example]:
    """Single-hop questions for a data set of such questions, else multi-hop ones (`stepwise`: see `mini_multihop`)."""
    return mini_single(split, corpus) if dataset in SINGLE_HOP else mini_multihop(split, corpus, dataset, stepwise)


def mini_single(split: str, corpus: str = "mini") -> list[Example]:
    """The single-hop questions of a split."""
    return [_example(question, corpus) for question in make_singles(split)]


def mini_search(split: str, corpus: str = "mini") -> list[Example]:
    """Single-hop questions and half as many two-hop ones, mixed in a fixed order."""
    questions = [*make_singles(split), *make_bridges(split)]
    questions.sort(key=lambda question: rng.digest("mini", "search", question.id))
    return [_example(question, corpus) for question in questions]


def _example(question: Question, corpus: str) -> Example:
    return Example(
        id=question.id,
        inputs={"question": question.text, "corpus": corpus},
        metadata={
            "answers": [question.answer],
            "titles": [hop.title for hop in question.hops],
            "type": question.kind,
            "form": question.form,
            "hops": [{"query": hop.query, "title": hop.title, "answer": hop.answer} for hop in question.hops],
        },
    )
