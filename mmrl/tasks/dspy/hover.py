"""Finding all documents that bear on a claim, over several hops: the task `hover` (arXiv 2508.04660; semantics §1.8).

Reward: Recall@100, or the strict score (every gold title found). Data: HoVer's official JSON, its hub copy, or the
mini world's claims. Of files, the paper's sample is used: one claim per HotpotQA question, shuffled with seed 0.
"""

from __future__ import annotations

import html
import logging
import random
import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

from mmrl.config.task import TaskConfig
from mmrl.errors import ConfigError, DataError
from mmrl.records import Call, Example
from mmrl.retrieval.base import AsyncRetriever, Document, Retriever
from mmrl.retrieval.select import open_index_corpus, open_retriever, retriever_problems
from mmrl.system.artifacts import cache_root
from mmrl.tasks import metrics
from mmrl.tasks.base import Demonstration, Score
from mmrl.tasks.data.coverage import coverage, label
from mmrl.tasks.data.layouts import load_corpus
from mmrl.tasks.data.rows import Row
from mmrl.tasks.dspy.base import SPLITS, DspyTask, text_of, unique
from mmrl.tasks.mini.examples import mini_claims, mini_corpus
from mmrl.tasks.open_qa import counted

log = logging.getLogger("mmrl.data")

ITEMS: Mapping[str, tuple[int, int]] = {"train": (0, 500), "dev": (500, 1000), "test": (1000, 1500)}
"""Places in the shuffled file; the paper has no test split: the items after its own."""
SAMPLE_SEED = 0
PAPER_TOP_K = (10, 30)
"""Passages per query, and in the last hop."""
MINI_TOP_K = (1, 1)
"""The same in the mini world, whose documents are found by name, and whose model has a short memory."""
CORPUS = "corpus"
QUERY, NOTES = "generate_query.predict", "append_notes.predict"


class HoverTask(DspyTask):
    """Implements `mmrl.tasks.base.Task`; see `DspyTask` for arguments and errors."""

    main_metric = "recall"
    failed_metrics: ClassVar[Mapping[str, float]] = {"recall": 0.0, "all_titles": 0.0}
    reward_sets: tuple[str, ...] = ("outcome", "strict")
    parts = frozenset(ITEMS)
    unread = ("dataset", "punctuation")

    def __init__(self, config: TaskConfig, seed: int):
        problems = []
        try:
            super().__init__(config, seed)
        except ConfigError as error:
            problems += error.problems
        problems += retriever_problems(config.retriever)
        documents: Sequence[Document] = ()
        try:
            documents = self._corpus()
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        self.documents = documents
        self.tools = {"search": self.search}
        self._opened: Retriever | None = None
        self._counts: Counter[str] = Counter()
        """Of retrievers that were closed."""
        self.shares = self._gold_shares()
        for split, share in self.shares.items():
            if share < 1:
                log.warning(
                    "task.data.%s: %.1f %% of the claims have all gold titles in the corpus", split, 100 * share
                )

    def option_problems(self) -> list[str]:
        """See `DspyTask.option_problems`; a retriever's options that belong to other programs count too."""
        retriever = self.config.retriever
        fields = type(retriever).model_fields
        instead = {"top_k": "; use task.hop_top_k and task.last_top_k"}
        return super().option_problems() + [
            f"task.retriever.{name}: has no effect with task hover{instead.get(name, '')}"
            for name in ("top_k", "dedup", "snippet_words")
            if getattr(retriever, name) != fields[name].default
        ]

    def _corpus(self) -> Sequence[Document]:
        """The corpus; empty where a server has it and it is not known."""
        config = self.config
        brought = config.retriever.name == "remote" or config.retriever.index is not None
        if brought and config.corpus is not None:
            raise ConfigError("task.corpus: has no effect with a retriever that brings its own passages; leave it out")
        if config.retriever.index is not None:
            return open_index_corpus(config.retriever)
        if brought:
            return ()
        if config.corpus not in (None, "mini"):
            return load_corpus("task.corpus", str(config.corpus))
        if self.sources and config.corpus is None:
            raise ConfigError(
                "task.corpus: got null, and HoVer's claims bring no passages to search; expected a file or hub id of "
                "documents with title and text, or task.retriever.index or task.retriever.name=remote"
            )
        return mini_corpus()

    def load(self) -> Mapping[str, Sequence[Example]]:
        """The mini world's splits, or those of the files; a split left at `mini` beside files is empty."""
        if not self.sources:
            if self.config.claim_hops not in (None, 3):
                raise ConfigError(
                    f"task.claim_hops: got {self.config.claim_hops}, the claims of the mini world have 3 hops"
                )
            return {split: mini_claims(split) for split in SPLITS}
        return {split: self._read(split) if split in self.sources else [] for split in SPLITS}

    def _read(self, split: str) -> list[Example]:
        key = f"task.data.{split}"
        rows = self.rows(split, ("uid", "claim", "supporting_facts", "num_hops", "hpqa_id"))
        found = []
        questions: list[str] = []
        for row in rows:
            question = text_of(key, row, "hpqa_id")
            example = self._example(key, row)
            if self.config.claim_hops in (None, example.metadata["hops"]):
                found.append((row, example))
                questions.append(question)
        if not found:
            raise DataError(
                f"{key}: {self.sources[split]} has no claims of task.claim_hops={self.config.claim_hops} (null: of any)"
            )
        examples = unique(key, found)
        if self.config.sample == "all":
            return examples
        first_of: dict[str, Example] = {}
        for question, example in zip(questions, examples, strict=True):
            first_of.setdefault(question, example)
        chosen = list(first_of.values())
        random.Random(SAMPLE_SEED).shuffle(chosen)
        first, end = ITEMS[split]
        if len(chosen) <= first:
            raise DataError(
                f"{key}: {self.sources[split]} has {len(chosen)} claims of task.claim_hops={self.config.claim_hops} "
                f"on different questions, the paper's {split} split begins after {first}; set task.sample=all"
            )
        return chosen[first:end]

    def _example(self, key: str, row: Row) -> Example:
        facts = row.values.get("supporting_facts")
        if facts is None:
            fields = ", ".join(map(str, row.values))
            raise DataError(f"{key}: {row.where}: supporting_facts is missing (fields: {fields})")
        titles = _gold_titles(facts)
        if titles is None:
            raise DataError(f"{key}: {row.where}: supporting_facts: expected [title, sentence] pairs")
        hops = row.values.get("num_hops")
        if not titles:
            raise DataError(f"{key}: {row.where}: supporting_facts: is empty")
        if not isinstance(hops, int) or isinstance(hops, bool):
            raise DataError(f"{key}: {row.where}: num_hops: got {hops!r}, expected a number")
        return Example(
            id=text_of(key, row, "uid"),
            inputs={"claim": text_of(key, row, "claim")},
            metadata={"titles": list(dict.fromkeys(titles)), "hops": hops, "label": str(row.values.get("label", ""))},
        )

    @property
    def top_k(self) -> tuple[int, int]:
        """Passages per query, and in the last hop."""
        each, last = PAPER_TOP_K if self.sources else MINI_TOP_K
        return self.config.hop_top_k or each, self.config.last_top_k or last

    def make_program(self) -> Any:
        """See `DspyTask.make_program`."""
        from mmrl.tasks.dspy.hover_program import Hover

        return Hover(self.config.search_hops, *self.top_k, self.config.passages)

    def search(self, queries: Sequence[str], top_k: int) -> list[dict[str, Any]] | Awaitable[list[dict[str, Any]]]:
        """The tool `search`: `top_k` passages for each query ("title | text", with score), one list after the other.

        To be awaited where the retriever is behind HTTP.
        """
        if self._opened is None:
            self._opened = open_retriever(self.config.retriever, self.documents)
        if isinstance(self._opened, AsyncRetriever):
            return self._search_async(self._opened, queries, top_k)
        return _shown(self._opened.search(queries, [top_k] * len(queries)))

    async def _search_async(
        self, retriever: AsyncRetriever, queries: Sequence[str], top_k: int
    ) -> list[dict[str, Any]]:
        return _shown(await retriever.search_async(queries, [top_k] * len(queries)))

    def close(self) -> None:
        """Stop a retriever's child process and close its connections; a later search starts them again."""
        opened, self._opened = self._opened, None
        self._counts.update(getattr(opened, "counts", {}))
        stop = getattr(opened, "close", None)
        if stop is not None:
            stop()

    def reset_counts(self) -> None:
        """See `mmrl.tasks.base.Task`."""
        self._counts.clear()

    def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        """Metrics: `recall` (share of gold titles among the passages) and `all_titles` (whether all are there)."""
        self.check_reward_set(reward_set)
        found = {same_title(text.split(" | ")[0]) for text in prediction["retrieved_docs"][: self.config.passages]}
        gold = {same_title(title) for title in example.metadata["titles"]}
        recall = len(gold & found) / len(gold)
        strict = float(recall == 1)
        reward = strict if reward_set == "strict" else recall
        return Score(
            reward=reward,
            metrics={"recall": recall, "all_titles": strict, "passages": float(len(prediction["retrieved_docs"]))},
            parts={reward_set: reward},
        )

    def demonstrations(self, example: Example) -> Sequence[Demonstration]:
        """A mini-world claim played well: each hop notes what its document says and asks for what that names."""
        notes, titles = example.metadata.get("notes"), example.metadata["titles"]
        if notes is None:
            return []
        claim, found = example.inputs["claim"], []
        keep = self.top_k[0]
        for hop in range(self.config.search_hops):
            # the subject is found by the claim, what it names by its name; after the city nothing is missing
            asked = titles[hop] if 0 < hop < len(titles) else "None"
            told = {"claim": claim, "key_facts": list(notes[:hop])}
            if hop:
                outputs = {"search_query1": asked, "search_query2": "None", "search_query3": "None"}
                reasoning = f"{asked} is next" if hop < len(titles) else "all is found"
                found.append(self.shown(QUERY, told, {"reasoning": reasoning, **outputs}))
            if hop < min(self.config.search_hops - 1, len(titles)):
                results = [r["long_text"] for r in _now(self.search([asked if hop else claim], keep))]
                if any(result.startswith(f"{titles[hop]} | ") for result in results):
                    shown = {**told, "new_search_results": results}
                    outputs = {"reasoning": f"{titles[hop]} tells", "new_key_facts": notes[hop]}
                    found.append(self.shown(NOTES, shown, outputs))
        return found

    def _gold_shares(self) -> dict[str, float]:
        """Split -> share of its claims whose gold titles are all in the corpus; absent where that is not known."""
        return self._shares(lambda titles: [titles])

    def _title_shares(self) -> dict[str, float]:
        """Split -> share of its claims' gold titles that are in the corpus."""
        return self._shares(lambda titles: [[title] for title in titles])

    def _shares(self, parts: Callable[[list[str]], list[list[str]]]) -> dict[str, float]:
        told = {
            split: [
                Example(id=example.id, inputs={"corpus": CORPUS}, metadata={"titles": wanted})
                for example in self._examples[split]
                for wanted in parts(example.metadata["titles"])
            ]
            for split in SPLITS
        }
        return coverage(told, {CORPUS: self.documents}, cache_root(self.config.retriever.cache_dir))

    def describe(self) -> Mapping[str, Any]:
        """See `mmrl.tasks.base.Task.describe`."""
        config, (each, last) = self.config, self.top_k
        facts = dict(super().describe())
        if self.sources:
            hops = f"{config.claim_hops}-hop claims" if config.claim_hops else "claims of any number of hops"
            chosen = f", one per question, shuffled with seed {SAMPLE_SEED}" if config.sample == "paper" else ""
            facts["sample"] = f"{hops}{chosen}"
        facts["corpus"] = f"{len(self.documents)} documents" if len(self.documents) else "passages not known"
        facts["retriever"] = (
            f"{config.retriever.name}, {each} passages a query, {last} in the last of {config.search_hops}"
            + counted(self._counts + Counter(getattr(self._opened, "counts", {})))
        )
        if not len(self.documents):
            facts["corpus coverage"] = "not known"
        told = label("claims with all gold titles in it", self.shares, len(self.documents), real=bool(self.sources))
        titles = ", ".join(f"{split} {share:.1%}" for split, share in self._title_shares().items())
        return facts | {
            name: f"{text}; gold titles in it, about the most that recall can be: {titles}"
            for name, text in told.items()
        }


def same_title(title: str) -> str:
    """What is equal for titles that name one page: normalised as the reference code does (NFD, then as answers are).

    Copies of Wikipedia also differ in whether `&amp;` stands for `&`.
    """
    return metrics.normalize(unicodedata.normalize("NFD", html.unescape(title))) or title


def _gold_titles(facts: Any) -> list[str] | None:
    """Titles in `[[title, sentence], ...]`, or as the hub has it, with `key` for the title; None in another shape."""
    if isinstance(facts, Mapping):
        facts = [{"key": title} for title in facts.get("key") or ()]
    if not isinstance(facts, list):
        return None
    titles: list[str] = []
    for fact in facts:
        title = fact.get("key") if isinstance(fact, Mapping) else fact[0] if isinstance(fact, list) and fact else None
        if not isinstance(title, str) or not title.strip():
            return None
        titles.append(title)
    return titles


def _shown(results: Sequence[Sequence[Document]]) -> list[dict[str, Any]]:
    return [{"long_text": f"{d.title} | {d.text}", "score": d.score} for result in results for d in result]


def _now(results: Any) -> list[dict[str, Any]]:
    """What a retriever in process found; demonstrations are made with no other."""
    return results if isinstance(results, list) else []
