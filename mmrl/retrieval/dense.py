"""Dense retrieval: one vector a passage, by any encoder that sentence-transformers loads. Over FAISS.

How texts become vectors (pooling, length, prompts) is named, or read from the model's own files by
sentence-transformers. It (hence torch) and FAISS are imported when a passage or query is encoded, never at import time.
Vectors are encoded in shards that survive a kill, and searched through a memory map.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from mmrl.config.retriever import DenseConfig
from mmrl.errors import DataError
from mmrl.retrieval.base import Document, Retriever
from mmrl.system.bar import progress
from mmrl.system.files import atomic_write, user_path

if TYPE_CHECKING:
    import faiss
    from sentence_transformers import SentenceTransformer

DEFAULT_MODEL = "facebook/contriever"
SHARD = 4096
"""Passages of a shard: what a killed build loses at most."""
HNSW_LINKS = 32
HNSW_BUILD, HNSW_SEARCH = 128, 128
"""Breadth of the graph search while building and searching: recall against time."""
FAISS_FILE = "vectors.faiss"
PIECE = 4
"""Batches after which progress is reported."""

UNKNOWN = "main"
"""Stands for the commit of a hub id of which nothing is on this machine."""

Advance = Callable[[int], object]
"""Called with how many further passages are encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Steps on a text before and after the network; part of an index, whose queries are treated alike."""

    encoder: str
    """`own`, or a name of `PRESETS`."""
    normalise: bool | None = None
    """True if vectors have length 1, so that inner products are cosines; None: if the model is compared by those."""
    query_prompt: str | None = None
    passage_prompt: str | None = None
    """Texts in front of every query and passage; None: the model's own."""


PRESETS: Mapping[str, Treatment] = {
    # arXiv 2112.09118: the mean of the last hidden states, compared by inner product
    "contriever": Treatment(encoder="contriever", normalise=False, query_prompt="", passage_prompt=""),
    # arXiv 2212.03533: the same mean with length 1, and a word in front that says what a text is
    "e5": Treatment(encoder="e5", normalise=True, query_prompt="query: ", passage_prompt="passage: "),
}
# Whole names: `e5-mistral-7b-instruct`, say, is another kind of model.
FAMILIES = {
    "contriever": re.compile(r"m?contriever(-msmarco)?"),
    "e5": re.compile(r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?"),
}


def treatment_of(config: DenseConfig, model: str) -> Treatment:
    """Return the treatment that a section describes for a model, a folder or hub id."""
    path = Path(model)
    # Of a folder of the hub's cache (models--OWNER--NAME/snapshots/COMMIT), the name is further up.
    cached = path.parent.parent.name if path.parent.name == "snapshots" else ""
    name = (cached.rpartition("--")[2] or path.name).lower()
    family = next((family for family, names in FAMILIES.items() if names.fullmatch(name)), "own")
    base = PRESETS.get(config.encoder or family, Treatment(encoder="own"))
    fields = config.model_dump(include={"normalise", "query_prompt", "passage_prompt"}, exclude_none=True)
    return replace(base, **fields)


class Encoder:
    """Texts to vectors; loads its weights at the first text.

    Args:
        model: folder or hub id of an encoder.
        treatment: of texts, by sentence-transformers' `encode_query` and `encode_document`.
        device: `cpu` or `cuda`.
        batch_size: texts encoded at once.
        revision: commit of a hub id; None: the newest.
    """

    def __init__(
        self,
        model: str,
        treatment: Treatment,
        *,
        device: str = "cpu",
        batch_size: int = 32,
        revision: str | None = None,
    ):
        self.model, self.treatment, self.device, self.batch_size = model, treatment, device, batch_size
        self.revision = revision
        self._lock = threading.Lock()

    @cached_property
    def _network(self) -> SentenceTransformer:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize

        try:
            # Of a model whose files say nothing, such as contriever, it takes the mean of the last hidden states.
            encoder = SentenceTransformer(
                self.model, device=self.device, trust_remote_code=False, revision=self.revision
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise DataError(f"encoder '{self.model}': cannot be loaded by sentence-transformers: {error}") from None
        if encoder.similarity_fn_name not in (None, "cosine", "dot"):
            problem = f"is compared by {encoder.similarity_fn_name}, expected cosine or dot (inner product)"
            raise DataError(f"encoder '{self.model}': {problem}")
        if self.treatment.normalise is False and any(isinstance(module, Normalize) for module in encoder):
            raise DataError(f"encoder '{self.model}': normalise=false has no effect: its own files normalise")
        return encoder

    def load(self) -> None:
        """Load the weights, if they are not."""
        with self._lock:
            _ = self._network

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encode queries: float32, shape (texts, dimension)."""
        # The lock: the network is loaded once, and its tokenizer is not safe in two threads.
        with self._lock:
            return self._encoded(self._network.encode_query, texts, self.treatment.query_prompt)

    def passages(self, documents: Sequence[Document], advance: Advance = lambda done: None) -> np.ndarray:
        """Encode passages (title and text): float32, shape (documents, dimension).

        Args:
            documents: the passages.
            advance: called with how many further ones are encoded.
        """
        texts = [f"{document.title} {document.text}" for document in documents]
        # Texts of like length side by side: little padding in a batch.
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        vectors: dict[int, np.ndarray] = {}
        with self._lock:
            encode = self._network.encode_document
            for start in range(0, len(order), PIECE * self.batch_size):
                numbers = order[start : start + PIECE * self.batch_size]
                part = self._encoded(encode, [texts[number] for number in numbers], self.treatment.passage_prompt)
                vectors.update(zip(numbers, part, strict=True))
                advance(len(numbers))
        return np.stack([vectors[number] for number in range(len(texts))])

    def _encoded(self, encode: Callable[..., Any], texts: Sequence[str], prompt: str | None) -> np.ndarray:
        normalise = self.treatment.normalise
        vectors = encode(
            list(texts),
            prompt=prompt,
            batch_size=self.batch_size,
            show_progress_bar=False,
            normalize_embeddings=self._network.similarity_fn_name != "dot" if normalise is None else normalise,
        )
        return np.asarray(vectors, dtype=np.float32)


class DenseRetriever(Retriever):
    """Searches an index folder's vectors by inner product.

    Args:
        folder: with `vectors.faiss`, from `build`.
        documents: the passages, in the order of the vectors.
        encoder: the one that the passages were encoded with.
    """

    def __init__(self, folder: Path, documents: Sequence[Document], encoder: Encoder):
        import faiss

        self.documents = documents
        self._encoder = encoder
        # Memory-mapped: opens at once, and processes that search the same file share its pages.
        self._index = faiss.read_index(str(folder / FAISS_FILE), faiss.IO_FLAG_MMAP_IFC)
        if self._index.ntotal != len(documents):
            raise ValueError(f"{FAISS_FILE} has {self._index.ntotal} vectors, expected {len(documents)}")

    @override
    def load(self) -> None:
        self._encoder.load()

    @override
    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """Every passage matches; a small corpus gives short results."""
        # A budget of 0 costs no encoding.
        active = [n for n, k in enumerate(top_k) if k > 0]
        results: list[list[Document]] = [[] for _ in queries]
        if not active:
            return results
        vectors = self._encoder.queries([queries[n] for n in active])
        k, breadth = min(max(top_k), self._index.ntotal), None
        if hasattr(self._index, "hnsw"):
            import faiss

            # At least k: a graph search returns no more vectors than its breadth. FAISS's type stubs miss the class.
            breadth = faiss.SearchParametersHNSW(efSearch=max(HNSW_SEARCH, k))  # type: ignore[attr-defined]
        # both of shape (active queries, k); number -1 where a graph search reached fewer
        scores, numbers = self._index.search(vectors, k, params=breadth)
        for row, query in enumerate(active):
            matches = [(float(s), int(n)) for s, n in zip(scores[row], numbers[row], strict=True) if n >= 0]
            # FAISS leaves the order of equal scores open; ours is the corpus's.
            matches.sort(key=lambda pair: (-pair[0], pair[1]))
            results[query] = [replace(self.documents[n], score=score) for score, n in matches[: top_k[query]]]
        return results


def build(folder: Path, documents: Sequence[Document], encoder: Encoder, form: str) -> None:
    """Encode a corpus in shards and write its FAISS index; a build that was killed goes on where it was.

    Args:
        form: `flat` (exact) or `hnsw`.
    """
    import faiss

    shards = _encode_shards(folder / "shards", documents, encoder)
    dimension = np.load(shards[0])["vectors"].shape[1]
    index: faiss.Index
    if form == "flat":
        index = faiss.IndexFlatIP(dimension)
    else:
        index = faiss.IndexHNSWFlat(dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILD
    for shard in shards:
        index.add(np.load(shard)["vectors"])
    faiss.write_index(index, str(folder / FAISS_FILE))


def _encode_shards(folder: Path, documents: Sequence[Document], encoder: Encoder) -> list[Path]:
    """Encode all shards and return their files, in corpus order.

    Those of an earlier attempt are reused where they are of the same passages and the same weights.
    """
    folder.mkdir(exist_ok=True)
    files = []
    # A hub id's commit is known once its files are here.
    if not user_path(encoder.model).is_dir():
        encoder.load()
    identity = model_identity(encoder.model)
    with progress("encoding", len(documents)) as advance:
        for start in range(0, len(documents), SHARD):
            file = folder / f"shard-{start // SHARD:05d}.npz"
            part = [documents[number] for number in range(start, min(start + SHARD, len(documents)))]
            origin = _origin(part, identity)
            if file.is_file() and str(np.load(file)["origin"]) == origin:
                advance(len(part))
            else:
                content = io.BytesIO()
                np.savez(content, vectors=encoder.passages(part, advance), origin=origin)
                atomic_write(file, content.getvalue())
            files.append(file)
    return files


def _origin(documents: Sequence[Document], identity: str) -> str:
    """Return a text that changes with what the vectors of a shard are made of."""
    state = hashlib.blake2b(identity.encode(), digest_size=16)
    for document in documents:
        state.update(f"\x1e{document.title}\x1f{document.text}".encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def commit_in(identity: str) -> str | None:
    """Return the commit of a hub id in its `model_identity`; None where it is not known, and of a folder."""
    commit = identity.rpartition("@")[2] if "@" in identity else UNKNOWN
    return None if commit == UNKNOWN else commit


def model_identity(model: str) -> str:
    """Return a text that changes with the weights behind a model's name: hash of a folder's files, or a revision."""
    folder = user_path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        # The folder of a cached file is named by the commit that the hub's `main` was at.
        file = try_to_load_from_cache(model, "config.json")
        return f"{model}@{Path(file).parent.name if isinstance(file, str) else UNKNOWN}"
    state = hashlib.blake2b(digest_size=16)
    # The first and last megabyte of each file: weights are gigabytes, and training changes those at the ends too.
    for path in sorted(f for f in folder.rglob("*") if f.is_file()):
        stat = path.stat()
        state.update(f"{path.relative_to(folder)} {stat.st_size} ".encode())
        with path.open("rb") as content:
            state.update(content.read(2**20))
            content.seek(max(0, stat.st_size - 2**20))
            state.update(content.read())
    return state.hexdigest()
