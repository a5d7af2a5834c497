"""Base of question answering tasks: data, corpora, the tool `search`, answer metrics, facts for summaries.

Base of the task classes in `search_program` and `agents`.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

from typing_extensions import override

from mmrl.config.base import MINI, SPLITS
from mmrl.config.retriever import Bm25Config, RetrieverConfig
from mmrl.config.tasks import AgentJudgedConfig, OpenQaConfig
from mmrl.errors import ConfigError, gathered, refuse
from mmrl.records import Call, Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.select import retriever_problems
from mmrl.tasks import metrics
from mmrl.tasks.agents.judge import Judge, build_judge
from mmrl.tasks.base import Passage, Program, Score, Task, Tool
from mmrl.tasks.data.corpus import coverage, label, warn_of_gaps
from mmrl.tasks.data.layouts import LAYOUTS, Record, load_records, merge_paragraphs, subset_of, to_example
from mmrl.tasks.data.rows import Source, same_rows
from mmrl.tasks.mini.examples import mini_corpus, mini_questions
from mmrl.tasks.prompts import PromptedTask, Prompts, Shot, Templates, load_prompts, prompts_file, shot_of
from mmrl.tasks.search_tool import Results, SearchTool, named_corpus

log = logging.getLogger("mmrl.data")


def gold_share(name: str, titles: Collection[str], example: Example) -> dict[str, float]:
    """Return the share of the example's gold titles among `titles`; empty if its data names none."""
    gold = set(example.metadata.get("titles", ()))
    return {name: len(gold & set(titles)) / len(gold)} if gold else {}


class OpenQaTask(Task, PromptedTask):
    """Data, corpora, retrieval and prompts of a task that answers questions by searching.

    Args:
        config: the `task` section.
        seed: the run's seed; it draws the training subset of `task.data.train_items`, and nothing else.

    Raises:
        ConfigError: bad prompts, data or corpus; all problems at once.
    """

    templates: ClassVar[Templates]
    """Default prompts of the program."""
    # Untyped: an attribute of the protocol `Task`, which a subclass cannot narrow to a program of its own.
    program: Any
    """Program that `make_program` builds with the task's prompts."""
    searches: ClassVar[bool] = True
    """True if the program searches; otherwise there is neither corpus nor tool."""
    reward_sets: tuple[str, ...] = ("outcome",)
    main_metric: str = "em"
    failed_metrics: ClassVar[Mapping[str, float]] = {"em": 0.0, "f1": 0.0, "accuracy": 0.0, "answered": 0.0}
    """Metrics that an evaluation counts for a rollout without a score."""
    absent_features: ClassVar[frozenset[str]] = frozenset({"penalties", "parse_failures"})
    """Features that the program never has, so that options about them are refused (`mmrl.config.rules`)."""

    def __init__(self, config: OpenQaConfig, seed: int):
        self.name = config.name
        self.dataset = config.dataset or (config.name if config.name in LAYOUTS else "hotpotqa")
        self.config = config
        self.failure_score = config.failure_score
        problems: list[str] = []
        self.judge: Judge | None = None
        with gathered(problems):
            prompts = config.prompts
            loaded = load_prompts(self.templates, prompts and str(prompts_file(prompts, config.name)))
            self.all_prompts = replace(loaded, roles={**loaded.roles, **self.instruction_roles()})
            if "judge" in self.templates and hasattr(config, "judge"):
                self.judge = build_judge(cast("AgentJudgedConfig", config), self.all_prompts.texts)
        if self.judge is not None:
            self.endpoints = {"judge": self.judge.chat}
        records: dict[str, list[Record]] = {}
        for split, spec in config.data.files.items():
            with gathered(problems):
                records[split] = load_records(Source(f"task.data.{split}", spec), split, LAYOUTS[self.dataset])
        corpora: dict[str, Sequence[Document]] = {}
        if self.searches:
            problems += retriever_problems(self.retriever)
            with gathered(problems):
                corpora = self._corpora(records)
        refuse(problems)
        self.search_tool = SearchTool(self.retriever, corpora or {"none": ()})
        self._examples = {split: self._split(split, records.get(split), seed, bool(records)) for split in SPLITS}
        self.tools: Mapping[str, Tool] = {"search": self._search} if self.searches else {}
        self.program = self.make_program(self.all_prompts)
        # Warnings last: a task that is refused should say nothing else.
        # Splits may share a file here (a corpus is made of all of them), but nobody should learn so by accident.
        for sentence in same_rows(config.data.files).values():
            log.warning("task.data: %s: what is evaluated may have been trained on", sentence)
        warn_of_gaps(self.gold_shares, "questions have their gold titles, or an answer, in the corpus")

    def as_asked(self, question: str) -> str:
        """Return a data file's question as it is in prompts."""
        return question

    def mini_examples(self, split: str, corpus: str) -> list[Example]:
        """Return the task's questions about the mini world: multi-hop, or single-hop ones for a data set of such."""
        return mini_questions(self.dataset, split, corpus)

    @abstractmethod
    def make_program(self, prompts: Prompts) -> Program:
        """Build the task's program, with these prompts."""

    def instruction_roles(self) -> dict[str, str]:
        """Map each module that has several roles to the role of its instructions."""
        return {}

    @override
    def shot_of(self, path: Sequence[Call], module: str) -> Shot | None:
        return shot_of(path, module)

    @property
    def retriever(self) -> RetrieverConfig:
        """`task.retriever`, for tasks that search; the others have a search tool without documents."""
        return getattr(self.config, "retriever", None) or Bm25Config()

    def _corpora(self, records: Mapping[str, Sequence[Record]]) -> dict[str, Sequence[Document]]:
        """Corpus name -> documents. A given corpus serves every split; else mini questions search the mini world,
        and all others the union of the paragraphs of the files in use.

        Raises:
            ConfigError: nothing to search for the files' questions.
        """
        corpora = named_corpus(self.retriever, getattr(self.config, "corpus", None))
        if corpora:
            return corpora
        # one split with paragraphs is enough
        if records and not any(record.paragraphs for split in records.values() for record in split):
            raise ConfigError(
                f"task.corpus: got null, and the questions of {', '.join(f'task.data.{split}' for split in records)} "
                "bring no paragraphs to search; expected a file or hub id of documents with title and text, or "
                "task.retriever.index=FOLDER made by `mmrl index build`"
            )
        if any(self.config.data.source_of(split) == MINI for split in SPLITS):
            corpora["mini"] = mini_corpus()
        if records:
            corpora["paragraphs"] = merge_paragraphs(record for split in records.values() for record in split)
        return corpora

    def _split(self, split: str, records: Sequence[Record] | None, seed: int, has_files: bool) -> list[Example]:
        if self.config.data.source_of(split) is None:
            return []
        natural = "mini" if records is None else "paragraphs"
        if records is None and has_files and natural not in self.search_tool.corpora and self.searches:
            return []  # the mini world's questions have nothing to search there
        corpus = natural if natural in self.search_tool.corpora else next(iter(self.search_tool.corpora))
        if records is None:
            examples = self.mini_examples(split, corpus)
        else:
            examples = [
                to_example(replace(record, question=self.as_asked(record.question)), corpus) for record in records
            ]
        return subset_of(examples, split, seed, self.config.data.items_of(split))

    @cached_property
    def gold_shares(self) -> dict[str, float]:
        """Split -> share of its questions that the corpus can answer (see `coverage`); absent where not known."""
        if not self.searches:
            return {}
        return coverage(self._examples, self.search_tool.corpora)

    @override
    def examples(self, split: str) -> Sequence[Example]:
        return self._examples[split]

    def search(self, queries: Sequence[str], corpus: str) -> list[Passage]:
        """Search, as the tool `search`; blocks. Programs reach it through `ctx.tool`.

        `top_k` documents in all, split over the queries, remainder to the earliest.

        Returns:
            The documents of the first query first. One that two queries bring is there twice, unless
            `task.retriever.dedup`.
        """
        return self._passages(self.search_tool.search(queries, self._budget(queries), corpus))

    def _search(self, queries: Sequence[str], corpus: str) -> list[Passage] | Awaitable[list[Passage]]:
        return self.search_tool.use(queries, self._budget(queries), corpus, self._passages)

    def _budget(self, queries: Sequence[str]) -> list[int]:
        # The budget belongs to the question: more queries do not bring more documents.
        each, remainder = divmod(self.retriever.top_k, len(queries))
        return [each + (number < remainder) for number in range(len(queries))]

    def _passages(self, results: Results) -> list[Passage]:
        documents = [document for result in results for document in result]
        if self.retriever.dedup:
            # of equal ids the first stays: the mapping keeps the last one, so it is filled backwards
            documents = list({document.id: document for document in reversed(documents)}.values())[::-1]
        return [{"id": d.id, "title": d.title, "text": d.text, "score": d.score} for d in documents]

    @override
    def close(self) -> None:
        self.search_tool.close()

    def best(self, metric: Callable[..., float], answer: str, example: Example, **options: object) -> float:
        """Return the highest value of a metric over the example's accepted answers, under the task's normalisation."""
        options["punctuation"] = self.config.punctuation
        return max((metric(answer, gold, **options) for gold in example.metadata["answers"]), default=0.0)

    def answer_metrics(self, answer: str, example: Example) -> dict[str, float]:
        """Exact match, F1 and accuracy as HotpotQA's script has them (0 without an answer); whether there is one, how
        long it is and how many candidates it names.

        The best over the accepted answers, each metric on its own.
        """
        return {
            "em": self.best(metrics.exact_match, answer, example) if answer else 0.0,
            "f1": self.best(metrics.f1, answer, example, closed=True),
            "accuracy": self.best(metrics.accuracy, answer, example, closed=True) if answer else 0.0,
            "answered": float(bool(answer)),
            **metrics.answer_shape(answer),
        }

    def score(
        self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str
    ) -> Score | Awaitable[Score]:
        """Reward F1 without the yes/no rule, or a prediction of "yes, …" would earn nothing for "yes"."""
        answer = prediction["answer"] or ""
        reward = self.best(metrics.f1, answer, example)
        scores = self.answer_metrics(answer, example) | self.search_metrics(prediction, example)
        return Score(reward=reward, metrics=scores, parts={"f1": reward})

    def search_metrics(self, prediction: Any, example: Example) -> dict[str, float]:
        """Return a rollout's metrics beside those of its answer."""
        return {}

    @override
    def describe(self) -> Mapping[str, object]:
        sources = {split: self.config.data.source_of(split) for split in SPLITS if self._examples[split]}
        facts: dict[str, object] = {
            "data": "mini world"
            if set(sources.values()) == {MINI}
            else ", ".join(f"{split} {spec}" for split, spec in sources.items())
        }
        facts |= {f"{split} items": len(self._examples[split]) for split in SPLITS}
        if self.judge is not None:
            facts["judge"] = self.judge.describe()
        if not self.searches:
            return facts
        facts["corpus"] = " + ".join(
            f"{name} ({len(documents)} documents)" if len(documents) else f"{name} (passages not known)"
            for name, documents in self.search_tool.corpora.items()
        )
        facts["retriever"] = self.search_tool.describe()
        real = self.config.data.files
        shares = {split: share for split, share in self.gold_shares.items() if not real or split in real}
        passages = max(len(documents) for documents in self.search_tool.corpora.values())
        facts |= label("questions with all gold titles, or an answer, in it", shares, passages, real=bool(real))
        unknown_splits = [split for split in SPLITS if self._examples[split] and split not in self.gold_shares]
        if unknown_splits:
            facts["corpus coverage"] = f"not known for {', '.join(unknown_splits)}"
        return facts
