"""Finding all documents that bear on a claim, over several hops: the task `hover` (arXiv 2508.04660, App. C.3).

Reward: Recall@100, or the strict score (every gold title retrieved). Data: HoVer's official JSON, its hub copy, or the
mini world's claims. Of files, the paper's sample is used: one claim per HotpotQA question, shuffled with seed 0.
"""

from __future__ import annotations

import html
import random
import unicodedata
from collections.abc import Awaitable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypedDict

from pydantic import BaseModel, BeforeValidator, Field, StrictInt
from typing_extensions import override

from mmrl.config.tasks import HoverConfig
from mmrl.errors import ConfigError, DataError, gathered, refuse
from mmrl.records import Call, Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.select import retriever_problems
from mmrl.tasks import metrics
from mmrl.tasks.base import Score
from mmrl.tasks.data.corpus import coverage, label, warn_of_gaps
from mmrl.tasks.data.rows import Text, check_unique, read_as
from mmrl.tasks.dspy.base import DspyTask
from mmrl.tasks.mini.examples import mini_corpus
from mmrl.tasks.search_tool import Results, SearchTool, named_corpus

ITEMS: Mapping[str, tuple[int, int]] = {"train": (0, 500), "dev": (500, 1000), "test": (1000, 1500)}
"""Places in the shuffled file; the paper has no test split: the items after its own."""
SAMPLE_SEED = 0
PAPER_TOP_K = (10, 30)
"""Passages per query, and in the last hop."""
MINI_TOP_K = (1, 1)
"""The same in the mini world, whose documents are retrieved by name, and whose model has a short memory."""
CORPUS = "corpus"
TITLE_CHARS = 1000
"""Characters of a title that are compared."""
Passage = dict[str, str | float]
"""Document as the program sees it: `long_text` ("title | text") and `score`."""


def _titles(facts: object) -> object:
    """Read the different titles of `[[title, sentence], ...]`, or of the hub's `key`."""
    if isinstance(facts, Mapping):
        facts = [{"key": title} for title in facts.get("key") or ()]
    if not isinstance(facts, list):
        return facts
    titles = [f.get("key") if isinstance(f, Mapping) else f[0] if isinstance(f, list) and f else None for f in facts]
    return list(dict.fromkeys(titles)) if all(isinstance(title, str) for title in titles) else titles


class Claim(BaseModel):
    """Row of a data file."""

    uid: Text
    claim: Text
    hpqa_id: Text
    num_hops: StrictInt
    supporting_facts: Annotated[list[Text], BeforeValidator(_titles)] = Field(min_length=1)
    label: Any = ""


class HoverPrediction(TypedDict):
    """Result of the program."""

    key_facts: list[str]
    retrieved_docs: list[str]
    """`title | text`, best first within a hop."""


class HoverTask(DspyTask):
    """Implements `mmrl.tasks.base.Task`; see `DspyTask` for arguments and errors."""

    config: HoverConfig
    main_metric = "recall"
    failed_metrics: ClassVar[Mapping[str, float]] = {"recall": 0.0, "all_titles": 0.0}
    reward_sets: tuple[str, ...] = ("outcome", "strict")
    mini_kind = "claims"
    places = ITEMS

    def __init__(self, config: HoverConfig, seed: int):
        problems: list[str] = []
        with gathered(problems):
            super().__init__(config, seed)
        # Data, retriever and corpus are all looked at before anything is raised.
        problems += retriever_problems(config.retriever)
        documents: Sequence[Document] = ()
        with gathered(problems):
            corpora = named_corpus(config.retriever, config.corpus)
            if not corpora and self.sources:
                raise ConfigError(
                    "task.corpus: got null, and HoVer's claims bring no passages to search; expected a file or hub id "
                    "of documents with title and text, or task.retriever.index or task.retriever.name=remote"
                )
            documents = next(iter(corpora.values()), mini_corpus())
        refuse(problems)
        self.documents = documents
        self.search_tool = SearchTool(config.retriever, {CORPUS: documents})
        self.tools = {"search": self.search}
        self.gold_shares = coverage(self._examples, self.search_tool.corpora, same_title)
        """Split -> share of its claims whose gold titles are all in the corpus; absent where that is not known."""
        warn_of_gaps(self.gold_shares, "claims have all gold titles in the corpus")

    @override
    def read(self, split: str) -> Sequence[Example]:
        """The paper keeps one claim of each HotpotQA question."""
        key = f"task.data.{split}"
        claims = []
        questions: list[str] = []
        for row in self.rows(split):
            claim = read_as(Claim, key, row)
            if self.config.claim_hops in (None, claim.num_hops):
                metadata = {"titles": claim.supporting_facts, "hops": claim.num_hops, "label": str(claim.label)}
                claims.append((row, Example(id=claim.uid, inputs={"claim": claim.claim}, metadata=metadata)))
                questions.append(claim.hpqa_id)
        if not claims:
            raise DataError(
                f"{key}: {self.sources[split]} has no claims of task.claim_hops={self.config.claim_hops} (null: of any)"
            )
        examples = check_unique(key, claims)
        if self.config.sample == "all":
            return examples
        # HoVer has several claims per HotpotQA question; the paper keeps the first of each before it shuffles.
        first_of: dict[str, Example] = {}
        for question, example in zip(questions, examples, strict=True):
            first_of.setdefault(question, example)
        candidates = list(first_of.values())
        # Python's own shuffle with the reference code's seed: a keyed draw would give other claims than the paper's.
        random.Random(SAMPLE_SEED).shuffle(candidates)
        return self.sampled(
            split, candidates, f"claims of task.claim_hops={self.config.claim_hops} on different questions"
        )

    @property
    def top_k(self) -> tuple[int, int]:
        """Passages per query, and in the last hop."""
        each, last = PAPER_TOP_K if self.sources else MINI_TOP_K
        return self.config.hop_top_k or each, self.config.last_top_k or last

    @override
    def make_program(self) -> object:
        from mmrl.tasks.dspy.built_in import Hover

        return Hover(self.config.search_hops, *self.top_k, self.config.passages)

    def search(self, queries: Sequence[str], top_k: int) -> list[Passage] | Awaitable[list[Passage]]:
        """Search, as the tool `search`: `top_k` passages for each query, one list after the other.

        To be awaited where the retriever is behind HTTP.
        """
        return self.search_tool.use(queries, [top_k] * len(queries), CORPUS, _passages)

    def passages_now(self, queries: Sequence[str], top_k: int) -> list[str]:
        """Search, and return the texts of the passages in the order of the tool `search`; blocks."""
        results = self.search_tool.search(queries, [top_k] * len(queries), CORPUS)
        return [str(passage["long_text"]) for passage in _passages(results)]

    @override
    def close(self) -> None:
        self.search_tool.close()

    def score(self, example: Example, prediction: HoverPrediction, path: Sequence[Call], reward_set: str) -> Score:
        """Score `recall` (share of gold titles among the passages) and `all_titles` (1 if all are there)."""
        # The program returns texts, not documents; the title is what stands before the first bar.
        retrieved = _pages(prediction["retrieved_docs"][: self.config.passages])
        gold = _pages(example.metadata["titles"])
        recall = len(gold & retrieved) / len(gold)
        strict = float(recall == 1)
        reward = strict if reward_set == "strict" else recall
        return Score(
            reward=reward,
            metrics={"recall": recall, "all_titles": strict, "passages": float(len(prediction["retrieved_docs"]))},
            parts={reward_set: reward},
        )

    @override
    def describe(self) -> Mapping[str, object]:
        config, (each, last) = self.config, self.top_k
        facts = dict(super().describe())
        if self.sources:
            hops = f"{config.claim_hops}-hop claims" if config.claim_hops else "claims of any number of hops"
            drawn = f", one per question, shuffled with seed {SAMPLE_SEED}"
            facts["sample"] = hops + (drawn if config.sample == "paper" else "")
        facts["corpus"] = f"{len(self.documents)} documents" if len(self.documents) else "passages not known"
        facts["retriever"] = (
            f"{config.retriever.name}, {each} passages a query, {last} in the last of {config.search_hops}"
        )
        if not len(self.documents):
            facts["corpus coverage"] = "not known"
        criterion = "claims with all gold titles in it"
        return facts | label(criterion, self.gold_shares, len(self.documents), real=bool(self.sources))


def _pages(texts: Sequence[str]) -> set[str]:
    # Gold titles are cut as well: one with a bar would never be found.
    return {same_title(text.split(" | ")[0]) for text in texts}


def same_title(title: str) -> str:
    """Return a key equal for titles of one page: normalised as in the reference code (NFD, then as answers are).

    Copies of Wikipedia also differ in whether `&amp;` stands for `&`.
    """
    # Both take long for megabytes, or raise on thousands of digits; titles have a few hundred characters at most.
    title = title[:TITLE_CHARS]
    return metrics.normalize(unicodedata.normalize("NFD", html.unescape(title))) or title


def _passages(results: Results) -> list[Passage]:
    return [{"long_text": f"{d.title} | {d.text}", "score": d.score} for result in results for d in result]
