"""`task.retriever.*`: which retriever, over which index, or at which address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from mmrl.config.base import Section, is_address


class RetrieverConfig(Section):
    """Retrieval for tasks that search."""

    name: Literal["bm25", "dense", "colbert", "remote"] = Field(
        "bm25", description="which one (docs/retrieval.md); dense and colbert need the extra `dense`"
    )
    process: Literal["inline", "child"] = Field(
        "inline", description="search in mmrl's own process, or in a server that it starts, checks and stops"
    )
    top_k: int = Field(10, ge=1, description="budget of candidate documents of a question, split over its queries")
    dedup: bool = Field(False, description="drop a document that an earlier query already brought")
    snippet_words: int = Field(100, ge=1, description="a document's text is cut to this many words in prompts")
    index: str | None = Field(None, description="folder made by `mmrl index build`; it brings its own corpus")
    k1: float = Field(0.9, gt=0, description="bm25: how soon repeated words stop to count")
    b: float = Field(0.4, ge=0, le=1, description="bm25: how much long documents are marked down")
    model: str | None = Field(
        None, description="encoder, folder or hub id; null: facebook/contriever (dense), colbert-ir/colbertv2.0"
    )
    encoder: Literal["contriever", "e5"] | None = Field(
        None, description="dense: prefixes and normalisation; null: e5 where the name of the model says e5"
    )
    faiss: Literal["flat", "hnsw"] = Field("flat", description="dense, colbert: exact, or a graph (faster, inexact)")
    candidates: int = Field(
        256, ge=1, description="colbert: nearest tokens of each query token; their passages compete"
    )
    batch_size: int = Field(32, ge=1, description="dense, colbert: texts encoded at once")
    device: Literal["cpu", "cuda"] = Field("cpu", description="dense, colbert: where the encoder runs")
    cache_dir: str | None = Field(None, description="index cache; null: $MMRL_CACHE or ~/.cache/mmrl")
    url: str | None = Field(None, description="remote: address of the server; /retrieve is added for search_r1")
    protocol: Literal["search_r1", "dspy"] = Field(
        "search_r1", description="remote: POST /retrieve as in Search-R1, or GET ?query=&k= as DSPy's ColBERT server"
    )
    timeout_s: float = Field(30.0, gt=0, description="remote, child: of one request")
    retries: int = Field(3, ge=0, description="remote, child: further attempts of a request that failed")
    concurrency: int = Field(64, ge=1, description="remote, child: requests under way at once")
    cache_size: int = Field(10_000, ge=0, description="remote, child: results kept in memory, by query and number")

    @model_validator(mode="after")
    def _options(self) -> Self:
        over_http = self.name == "remote" or self.process == "child"
        wrong = [
            f"task.retriever.{option}: got {getattr(self, option)}, which has no effect with task.retriever.name="
            f"{self.name}; it is an option of {', '.join(owners)}"
            for option, owners in OPTIONS.items()
            if self.name not in owners and self._set(option)
        ]
        wrong += [
            f"task.retriever.{option}: has no effect with a retriever in process; it is an option of "
            "task.retriever.name=remote and task.retriever.process=child"
            for option in HTTP_OPTIONS
            if not over_http and self._set(option)
        ]
        if self.index is not None and self.name != "remote":
            wrong += [
                f"task.retriever.{option}: has no effect with task.retriever.index, which was built with its own"
                for option in ("k1", "b", "model", "encoder", "faiss", "cache_dir")
                if self.name in OPTIONS.get(option, ()) and self._set(option)
            ]
        if self.name == "remote" and self.url is None:
            wrong.append("task.retriever.url: missing, task.retriever.name=remote needs the address of a server")
        if self.url is not None and not is_address(self.url):
            wrong.append(f"task.retriever.url: got '{self.url}', expected http://HOST[:PORT]… or https://…")
        if wrong:
            raise ValueError(*wrong)
        return self

    def _set(self, option: str) -> bool:
        return bool(getattr(self, option) != type(self).model_fields[option].default)


LOCAL = ("bm25", "dense", "colbert")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "process": LOCAL,
    "index": LOCAL,
    "k1": ("bm25",),
    "b": ("bm25",),
    "model": ("dense", "colbert"),
    "encoder": ("dense",),
    "faiss": ("dense", "colbert"),
    "candidates": ("colbert",),
    "batch_size": ("dense", "colbert"),
    "device": ("dense", "colbert"),
    "cache_dir": LOCAL,
    "url": ("remote",),
    "protocol": ("remote",),
}
"""Options that only some retrievers read."""
HTTP_OPTIONS = ("timeout_s", "retries", "concurrency", "cache_size")
