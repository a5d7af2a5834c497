"""Multi-hop question answering with the three-agent search program: the task `hotpotqa`. Built by `mmrl.tasks.TASKS`.

Data come from the mini world, official files or the hub; retrieval is BM25; the reward is token F1, penalties and
behaviour metrics are those of MHGPO (semantics §2.1, §2.7).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mmrl.config.task import TaskConfig
from mmrl.errors import ConfigError, DataError, unknown
from mmrl.records import Call, Example
from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.cache import cache_root
from mmrl.tasks import metrics
from mmrl.tasks.base import Demonstration, Message, ModuleScore, Program, Score, Tool
from mmrl.tasks.data import (
    LAYOUTS,
    Record,
    gold_share,
    load_corpus,
    load_records,
    paragraphs_of,
    subset,
    to_example,
)
from mmrl.tasks.files import Source
from mmrl.tasks.mini.examples import mini_corpus, mini_multihop
from mmrl.tasks.mini.names import Draws
from mmrl.tasks.prompts import load_prompts
from mmrl.tasks.search_program import (
    TEMPLATES,
    USED_QUERIES,
    SearchProgram,
    SearchPrompts,
    parse_queries,
    parse_selection,
)

SPLITS = ("train", "dev", "test")
LONG_ANSWER_WORDS = 30
"""An answerer's output of more whitespace words is penalised."""
PENALTIES: Mapping[str, float] = {"rewriter": -0.5, "reranker": -0.5, "answerer": -1.0}

log = logging.getLogger("mmrl.data")


class MultihopQaTask:
    """Implements `mmrl.tasks.base.Task`.

    Args:
        config: the `task` section.
        seed: the run's seed; it draws the training subset of `task.data.train_items`, and nothing else.

    Raises:
        ConfigError: bad prompts, data or corpus; all problems that can be found at once.
    """

    reward_sets: tuple[str, ...] = ("outcome",)
    main_metric: str = "f1"

    def __init__(self, config: TaskConfig, seed: int):
        self.name = config.name
        self.config = config
        self.failure_score = config.failure_score
        dataset = config.dataset or "hotpotqa"
        problems = [] if dataset in LAYOUTS else [unknown("task.dataset", dataset, LAYOUTS)]
        try:
            prompts = load_prompts(TEMPLATES, config.prompts)
        except ConfigError as error:
            problems += error.problems
        records: dict[str, list[Record]] = {}
        for split in SPLITS if dataset in LAYOUTS else ():
            spec = getattr(config.data, split)
            if spec == "mini":
                continue
            try:
                records[split] = load_records(Source(f"task.data.{split}", spec), split, LAYOUTS[dataset])
            except DataError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        self.corpora = self._corpora(records)
        self._examples = {split: self._split(split, records.get(split), seed) for split in SPLITS}
        self.prompts = SearchPrompts(prompts, config.retriever.snippet_words)
        self.program: Program = SearchProgram(self.prompts)
        self.tools: Mapping[str, Tool] = {"search": self.search}
        self._retrievers: dict[str, Retriever] = {}
        self._warn_missing_titles()

    def _corpora(self, records: Mapping[str, Sequence[Record]]) -> dict[str, Sequence[Document]]:
        """Corpus name -> documents. A given corpus serves every split; else mini questions search the mini world,
        and all others the union of the paragraphs of the files in use."""
        if self.config.corpus not in (None, "mini"):
            return {"given": load_corpus("task.corpus", str(self.config.corpus))}
        if self.config.corpus == "mini":
            return {"mini": mini_corpus()}
        corpora: dict[str, Sequence[Document]] = {}
        if len(records) < len(SPLITS):
            corpora["mini"] = mini_corpus()
        if records:
            corpora["paragraphs"] = paragraphs_of(record for split in records.values() for record in split)
        return corpora

    def _split(self, split: str, records: Sequence[Record] | None, seed: int) -> list[Example]:
        own = "mini" if records is None else "paragraphs"
        corpus = own if own in self.corpora else next(iter(self.corpora))
        if records is None:
            examples = mini_multihop(split, corpus)
        else:
            examples = [to_example(record, corpus) for record in records]
        # dev and test subsets are the same for every seed, so that runs can be compared item by item
        key = (split, seed) if split == "train" else (split,)
        return subset(examples, getattr(self.config.data, f"{split}_items"), *key)

    def _warn_missing_titles(self) -> None:
        for split, share in self.gold_shares.items():
            if share < 1:
                log.warning(
                    "task.data.%s: only %.1f %% of the questions have all their gold titles in the corpus",
                    split,
                    100 * share,
                )

    @cached_property
    def gold_shares(self) -> dict[str, float]:
        """Split -> share of its questions whose gold titles are all in the corpus; splits without titles are absent."""
        shares = {split: gold_share(examples, self.corpora) for split, examples in self._examples.items()}
        return {split: share for split, share in shares.items() if share is not None}

    def examples(self, split: str) -> Sequence[Example]:
        """See `mmrl.tasks.base.Task.examples`."""
        return self._examples[split]

    def search(self, queries: Sequence[str], corpus: str) -> list[dict[str, Any]]:
        """The tool `search`: `top_k` documents in all, split over the queries, remainder to the earliest.

        Returns:
            Documents as mappings with id, title, text and score, those of the first query first. A document that two
            queries bring is there twice, unless `task.retriever.dedup`.
        """
        settings = self.config.retriever
        each, more = divmod(settings.top_k, len(queries))
        budget = [each + (number < more) for number in range(len(queries))]
        found = [document for result in self._retriever(corpus).search(queries, budget) for document in result]
        if settings.dedup:
            found = list({document.id: document for document in reversed(found)}.values())[::-1]
        return [{"id": d.id, "title": d.title, "text": d.text, "score": d.score} for d in found]

    def _retriever(self, corpus: str) -> Retriever:
        if corpus not in self._retrievers:
            settings = self.config.retriever
            self._retrievers[corpus] = Bm25Retriever(
                self.corpora[corpus], k1=settings.k1, b=settings.b, cache=cache_root(settings.cache_dir)
            )
        return self._retrievers[corpus]

    def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        """Reward: F1 without the yes/no rule. Metrics: EM, F1 and accuracy as the official script has them."""
        if reward_set not in self.reward_sets:
            raise ConfigError(unknown("task.reward", reward_set, self.reward_sets))
        golds, answer = example.metadata["answers"], prediction["answer"]
        rule = {"punctuation": self.config.punctuation}
        reward = metrics.best(metrics.f1, answer, golds, **rule)
        scores = {
            "em": metrics.best(metrics.exact_match, answer, golds, **rule),
            "f1": metrics.best(metrics.f1, answer, golds, closed=True, **rule),
            "accuracy": metrics.best(metrics.accuracy, answer, golds, closed=True, **rule),
            "answered": float(bool(answer)),
        }
        titles = set(example.metadata.get("titles", ()))
        if titles:
            scores["gold_retrieved"] = len(titles & set(prediction["candidates"])) / len(titles)
            scores["gold_selected"] = len(titles & set(prediction["selected"])) / len(titles)
        return Score(reward=reward, metrics=scores, parts={"f1": reward})

    def score_call(self, call: Call) -> ModuleScore:
        """Format penalty of one call and its behaviour facts."""
        if call.module == "rewriter":
            queries = parse_queries(call.text)
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

    def demonstrations(self, example: Example) -> Sequence[Demonstration]:
        """What good agents would do on a mini-world question; empty for other data.

        The rewriter's own two sub-questions; then two rerankers, one after those sub-questions and one after a poorer
        rewriter; then two answerers, one with exactly the gold documents and one with others among them. What is poorer
        or added is drawn by the example's id, so that a policy meets in training what it will meet in a run.
        """
        hops = example.metadata.get("hops")
        if not hops:
            return []
        question, answer, prompts = example.inputs["question"], example.metadata["answers"][0], self.prompts
        draws = Draws("demonstration", example.id)
        queries = [hop["query"] for hop in hops]
        found = [_shown("rewriter", prompts.rewriter(question), f"### {'; '.join(queries)} ###")]
        poorer = draws.pick([[question], [queries[0], question], [question, queries[1]], queries[::-1], queries[:1]])
        titles = [hop["title"] for hop in hops]
        for asked in (queries, poorer):
            candidates = self.search(asked, example.inputs["corpus"])
            names = [candidate["title"] for candidate in candidates]
            wanted = [names.index(title) for title in titles if title in names]
            if wanted:
                chosen = ", ".join(str(index) for index in wanted)
                found.append(_shown("reranker", prompts.reranker(question, candidates), chosen))
            if len(wanted) == len(titles):
                selected = [candidates[index] for index in wanted]
                if asked is poorer:
                    others = [other for other in candidates if other["title"] not in titles]
                    draws.shuffle(others)
                    selected += others[: draws.below(3)]
                    draws.shuffle(selected)
                found.append(_shown("answerer", prompts.answerer(question, selected), answer))
        return found

    def describe(self) -> Mapping[str, Any]:
        """See `mmrl.tasks.base.Task.describe`."""
        sources = {getattr(self.config.data, split) for split in SPLITS}
        facts: dict[str, Any] = {
            "data": "mini world"
            if sources == {"mini"}
            else ", ".join(f"{s} {getattr(self.config.data, s)}" for s in SPLITS)
        }
        facts |= {f"{split} items": len(self._examples[split]) for split in SPLITS}
        facts["corpus"] = " + ".join(f"{name} ({len(documents)} documents)" for name, documents in self.corpora.items())
        facts["retriever"] = f"{self.config.retriever.name}, {self.config.retriever.top_k} documents"
        partial = {split: share for split, share in self.gold_shares.items() if share < 1}
        if partial:
            shares = ", ".join(f"{split} {share:.1%}" for split, share in partial.items())
            facts["partial corpus"] = f"questions with all gold titles in it: {shares}"
        return facts


def _shown(module: str, messages: Sequence[Message], completion: str) -> Demonstration:
    return Demonstration(module=module, messages=messages, completion=completion)
