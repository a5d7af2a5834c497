"""`task.retriever.*`: one schema per retriever, so that a key which has no effect with a retriever is not there.

And what `mmrl index` and `mmrl serve-retriever` take, whose keys are those of the retrievers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Literal

from pydantic import Field, create_model, field_validator

from mmrl.config.base import Idle, Section, ServerArguments, address_problem


class RetrieverConfig(Section):
    """Settings of every retriever."""

    encodes: ClassVar[bool] = False
    """True if texts become vectors."""
    name: Literal["bm25", "dense", "remote"] = Field(
        "bm25", description="docs/retrieval.md; dense needs the extra `dense`"
    )
    top_k: int = Field(10, ge=1, description="budget of candidate documents of a question, split over its queries")
    dedup: bool = Field(False, description="drop a document that an earlier query already brought")
    snippet_words: int = Field(100, ge=1, description="a document's text is cut to this many words in prompts")

    def get(self, key: str) -> Any:
        """Return the value of a key; None if the retriever has no such key (`index`, `url`, `cache_dir`)."""
        return getattr(self, key, None)


class LocalRetrieverConfig(RetrieverConfig):
    """Settings of retrievers over an index on this machine."""

    index: str | None = Field(None, description="folder made by `mmrl index build`; it brings its own corpus")
    idle: ClassVar[list[Idle[Any]]] = [
        Idle(
            "k1 b stemmer stopwords model encoder normalise query_prompt passage_prompt faiss cache_dir",
            lambda retriever: retriever.index is not None,
            lambda retriever: f"with index={retriever.index}, which was built with its own",
        ),
    ]


# fmt: off
Stemmer = Literal[
    "none", "porter", "english", "arabic", "armenian", "basque", "catalan", "czech", "danish", "dutch",
    "esperanto", "estonian", "finnish", "french", "german", "greek", "hindi", "hungarian", "indonesian", "irish",
    "italian", "lithuanian", "nepali", "norwegian", "persian", "polish", "portuguese", "romanian", "russian",
    "serbian", "sesotho", "spanish", "swedish", "tamil", "turkish", "yiddish",
]
# fmt: on
"""PyStemmer's algorithms; `porter` is the classic one of English, `english` its successor."""
# fmt: off
Stopwords = Literal[
    "none", "english", "danish", "dutch", "french", "german", "italian", "norwegian", "portuguese", "russian",
    "spanish", "swedish", "turkish",
]
# fmt: on
"""bm25s' lists of the languages that put spaces between words; `english` is Lucene's."""


class Bm25Config(LocalRetrieverConfig):
    """BM25 over words."""

    # the only one with a default name: it needs no encoder, no server and no index
    name: Literal["bm25"] = "bm25"
    k1: float = Field(0.9, gt=0, description="saturation of a word's frequency")
    b: float = Field(0.4, ge=0, le=1, description="normalisation by document length")
    stemmer: Stemmer = Field("none", description="Snowball's stemming algorithm")
    stopwords: Stopwords = Field("english", description="words that are left out of index and queries")


class DenseConfig(LocalRetrieverConfig):
    """Dense retrieval: one vector per passage."""

    encodes: ClassVar[bool] = True
    name: Literal["dense"]
    cache_dir: str | None = Field(None, description="index cache; null: $MMRL_CACHE or ~/.cache/mmrl")
    model: str | None = Field(None, description="folder or hub id; null: facebook/contriever")
    faiss: Literal["flat", "hnsw"] = Field("flat", description="exact, or a graph (faster, inexact)")
    batch_size: int = Field(32, ge=1, description="texts encoded at once")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the encoder runs")
    encoder: Literal["own", "contriever", "e5"] | None = Field(
        None,
        description="pooling and prompts of texts (docs/retrieval.md); null: by the name of a known model, else own",
    )
    normalise: bool | None = Field(None, description="vectors of length 1 (cosine); null: as the encoder does")
    query_prompt: str | None = Field(None, description="text in front of queries; null: the encoder's")
    passage_prompt: str | None = Field(None, description="text in front of passages; null: the encoder's")


class RemoteRetrieverConfig(RetrieverConfig):
    """A server that is running already."""

    name: Literal["remote"]
    timeout_s: float = Field(30.0, gt=0, description="seconds for one request")
    retries: int = Field(3, ge=0, description="further attempts of a request that failed")
    concurrency: int = Field(64, ge=1, description="requests in flight at once")
    # by query and number of documents: the same query with another top_k is another request
    cache_size: int = Field(10_000, ge=0, description="results cached in memory, by query and number")
    # required: there is no server that could be meant otherwise
    url: str = Field(description="address of the server; /retrieve is added for search_r1")
    protocol: Literal["search_r1", "dspy"] = Field(
        "search_r1", description="POST /retrieve as in Search-R1, or GET ?query=&k= as DSPy's ColBERT server"
    )
    token_env: str | None = Field(None, description="environment variable with the server's token; null: none is sent")

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        if problem := address_problem(url):
            raise ValueError(problem)
        return url


RETRIEVER_SCHEMAS: dict[str, type[RetrieverConfig]] = {
    "bm25": Bm25Config,
    "dense": DenseConfig,
    "remote": RemoteRetrieverConfig,
}
"""`task.retriever.name` -> schema."""


class IndexArguments(Section):
    """Keys by which `mmrl serve-retriever` uses an index."""

    index: str = Field(description="folder of the index")
    device: Literal["cpu", "cuda"] = "cpu"
    batch_size: int = Field(32, ge=1, description="dense: texts encoded at once")


class BuildIndexArguments(Section):
    """`mmrl index build`, beside what the retriever's own schema says of the index (`build_schema`)."""

    corpus: tuple[str, ...]
    index: str
    retriever: Literal["bm25", "dense"] = "bm25"

    def section(self) -> RetrieverConfig:
        """Return the keys as a `task.retriever` section."""
        schema = RETRIEVER_SCHEMAS[self.retriever]
        return schema(name=self.retriever, **self.model_dump(exclude=set(BuildIndexArguments.model_fields)))


def build_schema(words: Collection[str]) -> type[BuildIndexArguments]:
    """Return the keys of `mmrl index build` with the retriever that its words name."""
    name = next((word.partition("=")[2] for word in words if word.startswith("retriever=")), "bm25")
    fields = RETRIEVER_SCHEMAS.get(name, Bm25Config).model_fields
    searching = {*LocalRetrieverConfig.model_fields, "cache_dir"}
    index_fields: dict[str, Any] = {
        key: (field.annotation, field) for key, field in fields.items() if key not in searching
    }
    return create_model("BuildIndexArguments", __base__=BuildIndexArguments, **index_fields)


class ServeIndexArguments(ServerArguments, IndexArguments):
    """`mmrl serve-retriever`."""

    max_batch: int = Field(64, ge=1, description="queries of one search")
