"""`task.*`: which data, program limits, retriever and reward set."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmrl.config.base import Section


class DataConfig(Section):
    """Where examples come from: `mini` (the embedded world), a file path, or a hub id (`owner/name[:config]`)."""

    train: str = "mini"
    dev: str = "mini"
    test: str = "mini"
    train_items: int | None = Field(None, ge=1, description="use only the first N after a seeded shuffle; null: all")
    dev_items: int | None = Field(None, ge=1)
    test_items: int | None = Field(None, ge=1)


class RetrieverConfig(Section):
    """Retrieval for tasks that search."""

    name: Literal["bm25"] = "bm25"
    top_k: int = Field(10, ge=1, description="budget of candidate documents of a question, split over its queries")
    dedup: bool = Field(False, description="drop a document that an earlier query already brought")
    k1: float = Field(0.9, gt=0)
    b: float = Field(0.4, ge=0, le=1)
    snippet_words: int = Field(100, ge=1, description="a document's text is cut to this many words in prompts")
    cache_dir: str | None = Field(None, description="index cache; null: $MMRL_CACHE or ~/.cache/mmrl")


class TaskConfig(Section):
    """One task."""

    name: str
    dataset: str | None = Field(None, description="record layout of the data, for tasks that read several")
    data: DataConfig = DataConfig()
    corpus: str | None = Field(None, description="null: the mini world's, or the paragraphs of the data files")
    retriever: RetrieverConfig = RetrieverConfig()
    reward: str | None = Field(None, description="a named reward set of the task; null: the algorithm's own")
    prompts: str | None = Field(None, description="YAML file that replaces prompts, by module and role")
    punctuation: Literal["delete", "space"] = Field(
        "delete", description="answer normalisation: as in SQuAD and HotpotQA, or punctuation to spaces (MMOA-RAG)"
    )
    failure_score: float = Field(0.0, description="reward of a rollout that failed by the model's own doing")
    max_tokens: int = Field(100, ge=1, description="completion limit of a call")
    max_context: int | None = Field(None, ge=16, description="prompt + completion limit; null: the model's")
    timeout_s: float = Field(600.0, gt=0, description="wall-clock limit of one rollout")
