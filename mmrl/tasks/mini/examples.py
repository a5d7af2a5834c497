"""The mini world's files as examples, corpus and external model: what the task loaders ask for under `mini`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmrl import rng
from mmrl.records import Example
from mmrl.retrieval.base import Document

FOLDER = Path(__file__).parents[2] / "assets" / "mini"
SINGLE_HOP = ("nq", "triviaqa", "popqa")


def _records(name: str) -> tuple[dict[str, Any], ...]:
    return _lines(FOLDER / f"{name}.jsonl")


# Nothing changes a record, and each build of a task asks for all of them. By path: the tiny models learn from worlds in
# other folders.
@lru_cache(maxsize=64)
def _lines(file: Path) -> tuple[dict[str, Any], ...]:
    with file.open(encoding="utf-8") as lines:
        return tuple(json.loads(line) for line in lines)


def mini_corpus() -> tuple[Document, ...]:
    """Return one document for each entity of the world."""
    return _documents(FOLDER)


@lru_cache(maxsize=2)
def _documents(folder: Path) -> tuple[Document, ...]:
    return tuple(Document(**record) for record in _records("documents"))


def mini_multihop(split: str, corpus: str = "mini", dataset: str = "hotpotqa", stepwise: bool = False) -> list[Example]:
    """Return the multi-hop questions of a split; `metadata["hops"]` has the reasoning for demonstrations.

    The kinds are mixed as `dataset` has them: `hotpotqa` all (a quarter comparisons), `2wiki` as many comparisons as
    bridges, `musique` bridges alone. The questions of the last two are among those of the first, in the same split.
    `stepwise`: the second hop of a bridge names the result of the first, instead of describing it.
    """
    records = _records(f"{split}/questions")
    if dataset in ("2wiki", "musique"):
        bridges = [record for record in records if record["metadata"]["type"] == "bridge"]
        comparisons = (
            [record for record in records if record["metadata"]["type"] != "bridge"] if dataset == "2wiki" else []
        )
        # The mixture is cut from the whole set, in its order: ids and questions stay those of `hotpotqa`.
        mixed = {record["id"] for record in [*comparisons, *bridges[: len(comparisons) or None]]}
        records = tuple(record for record in records if record["id"] in mixed)
    return [_question(record, corpus, stepwise) for record in records]


def mini_questions(dataset: str, split: str, corpus: str, stepwise: bool = False) -> list[Example]:
    """Return single-hop questions for a data set of such, else multi-hop ones (`stepwise`: see `mini_multihop`)."""
    return mini_single(split, corpus) if dataset in SINGLE_HOP else mini_multihop(split, corpus, dataset, stepwise)


def mini_single(split: str, corpus: str = "mini") -> list[Example]:
    """Return the single-hop questions of a split."""
    return [_question(record, corpus) for record in _records(f"{split}/singles")]


def mini_search(split: str, corpus: str = "mini") -> list[Example]:
    """Return single-hop questions and half as many two-hop ones, mixed in a fixed order."""
    singles = mini_single(split, corpus)
    bridges = mini_multihop(split, corpus, "musique", stepwise=True)[: len(singles) // 2]
    return sorted([*singles, *bridges], key=lambda example: rng.digest("mini", "search", example.id))


def mini_records(split: str, kind: str) -> list[Example]:
    """Return the `claims`, `support` queries or private `requests` of a split.

    Demonstrations are made from `notes`, `reason` and `ask` of their metadata.
    """
    return [Example(**record) for record in _records(f"{split}/{kind}")]


def _question(record: dict[str, Any], corpus: str, stepwise: bool = False) -> Example:
    """Build a question; `stepwise` puts the query that names the first hop's result into the second hop."""
    inputs, metadata = record["inputs"], record["metadata"]
    if stepwise and "second_query" in record:
        first, second = metadata["hops"]
        metadata = {**metadata, "hops": [first, {**second, "query": record["second_query"]}]}
    return Example(id=record["id"], inputs={**inputs, "corpus": corpus}, metadata=metadata)


LETTERS = {
    # what marks the request -> its request, what the letter says
    "price": (
        "Write a letter to {m} that asks for the price of the {x}.",
        "Dear {m}, I would like to know the price of the {x}. Yours, {name}",
    ),
    "repair": (
        "Write a letter to {m} that asks for a repair of the {x}.",
        "Dear {m}, my {x} does not work and needs a repair. Yours, {name}",
    ),
}
FACTS = {
    # relation of a company -> the request, what is answered, the word that shows that a request asks for it
    "city": ("In which city is {m} based?", "{m} is based in {value}.", "based"),
    "founder": ("Who founded {m}?", "{m} was founded by {value}.", "founded"),
    "head": ("Who leads {m}?", "{m} is led by {value}.", "leads"),
}
UNNAMED = "(name)"
"""Stands for the asker in a letter by somebody who does not know them."""


def make_external() -> Callable[[str], str]:
    """Build a deterministic stand-in for a powerful external model: it knows the companies and products of the world
    and writes the letters above, whatever else a request says; to anything else it has one polite sentence."""
    companies = {record["name"]: record for record in _records("companies")}
    products = {record["name"]: record for record in _records("products")}

    # Rules, so that the mini world needs no server and every rollout of one request gets the same response.
    def external(request: str) -> str:
        names = re.findall(r"(?=\b([A-Z]\w* [A-Z]\w*))", request)
        company = next((companies[name] for name in names if name in companies), None)
        product = next((products[name] for name in names if name in products), None)
        # by a single word of the request: a redacted request in the policy's own words must still be understood
        words = set(re.findall(r"\w+", request.lower()))
        if company is not None and product is not None:
            for mark, (_, letter) in LETTERS.items():
                if mark in words:
                    return letter.format(m=company["name"], x=product["name"], name=UNNAMED)
        if company is not None:
            for relation, (_, answer, mark) in FACTS.items():
                if mark in words:
                    return answer.format(m=company["name"], value=company[relation])
        return "I can not help with this."

    return external
