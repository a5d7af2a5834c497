"""Intent classification with one chain of thought: the task `banking77` (arXiv 2508.04660, App. C.1).

Exact match, 0 or 1. Data: the official CSV files (`text`, `category`), the hub's copy (`text`, `label_text`), JSON with
either, or the mini world's support queries. Of files, the paper's sample is used unless the config says how many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypedDict

from pydantic import AliasChoices, BaseModel, Field
from typing_extensions import override

from mmrl import rng
from mmrl.config.base import SPLITS
from mmrl.config.tasks import Banking77Config
from mmrl.errors import DataError
from mmrl.records import Call, Example
from mmrl.tasks.base import Score
from mmrl.tasks.data.rows import Row, Text, read_as, record_id
from mmrl.tasks.dspy.base import DspyTask, read_json

SAMPLE: Mapping[str, tuple[int, int]] = {"train": (0, 250), "dev": (250, 750)}
"""Places, in a shuffle of their source, of the items that the paper draws (250 and 500); all test items are used."""
SAMPLE_SEED = 0
"""The paper does not state its own."""


class Query(BaseModel):
    """Row of a data file: the official CSV files, the hub's copy, or JSON with either's fields."""

    text: Text
    label: Text = Field(validation_alias=AliasChoices("category", "label_text", "label"))


class BankingPrediction(TypedDict):
    """Result of the program."""

    reasoning: str
    label: str


class Banking77Task(DspyTask):
    """Implements `mmrl.tasks.base.Task`; see `DspyTask` for arguments and errors."""

    config: Banking77Config
    absent_features = frozenset({"penalties", "observations", "repeated_calls"})
    main_metric = "em"
    failed_metrics: ClassVar[Mapping[str, float]] = {"em": 0.0}
    mini_kind = "support"
    places = SAMPLE

    @override
    def load(self) -> Mapping[str, Sequence[Example]]:
        """The labels are known after it."""
        examples = super().load()
        # Without a label file the first source's labels are the classes (all of the mini world's); a label that only
        # another one has would be unreachable.
        first = next(iter(self.sources), None)
        splits = SPLITS if first is None else (first,)
        found = sorted({example.metadata["label"] for split in splits for example in examples[split]})
        self.labels: tuple[str, ...] = self._given_labels() or tuple(found)
        whose = f"task.data.{first}" if self.config.labels is None else "task.labels"
        for split, rows in examples.items():
            if unknown := sorted({example.metadata["label"] for example in rows} - set(self.labels)):
                listed = ", ".join(map(repr, unknown[:3]))
                count = f"{len(unknown)} labels are not among the {len(self.labels)}"
                raise DataError(f"task.data.{split}: {count} of {whose}: {listed}{', …' * (len(unknown) > 3)}")
        return {split: self._sample(split, examples[split]) for split in SPLITS}

    @override
    def read(self, split: str) -> Sequence[Example]:
        return self.read_all(split, self._example)

    def _example(self, key: str, row: Row, number: str) -> Example:
        query = read_as(Query, key, row)
        name = record_id(row.values, "id", otherwise=number)
        return Example(id=name, inputs={"text": query.text}, metadata={"label": query.label})

    def _given_labels(self) -> tuple[str, ...]:
        path = self.config.labels
        if path is None:
            return ()
        labels = read_json("task.labels", path)
        if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
            raise DataError(f"task.labels: {path}: expected a list of texts")
        return tuple(dict.fromkeys(labels))

    def _sample(self, split: str, examples: Sequence[Example]) -> Sequence[Example]:
        """The paper's number of items, at their places in a shuffle of the source, so that train and dev may share one;
        or all rows."""
        if split not in self.sources or split not in SAMPLE or self.config.sample != "paper":
            return examples
        # Shuffled by text, not by place: copies of the data whose rows are in another order give the same sample.
        order = sorted(examples, key=lambda example: rng.digest("banking77", SAMPLE_SEED, example.inputs["text"]))
        return self.sampled(split, order, "rows")

    @override
    def make_program(self) -> object:
        from mmrl.tasks.dspy.built_in import Banking77

        return Banking77(self.labels)

    def score(self, example: Example, prediction: BankingPrediction, path: Sequence[Call], reward_set: str) -> Score:
        """Score 1 if the label is the gold one, letter for letter, else 0."""
        hit = float(prediction["label"] == example.metadata["label"])
        return Score(reward=hit, metrics={"em": hit}, parts={"em": hit})

    @override
    def describe(self) -> Mapping[str, object]:
        facts = {**super().describe(), "labels": len(self.labels)}
        drawn = self.config.sample == "paper" and not SAMPLE.keys().isdisjoint(self.sources)
        return facts | ({"sample": f"the paper's, drawn with seed {SAMPLE_SEED}"} if drawn else {})
