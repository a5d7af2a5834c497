"""Dense retrieval: one vector a passage, mean-pooled; contriever, E5, or any Hugging Face encoder. Over FAISS.

Torch, transformers and FAISS are imported when a passage or query is encoded, never at import time.

- contriever (arXiv 2112.09118): mean of the last hidden states, inner product, no prefixes.
- E5 (arXiv 2212.03533): the same mean, normalised to length 1, `query: ` and `passage: ` in front, as Search-R1 uses
  it, whose limit of 256 query tokens holds for both.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.vectors import FAISS_FILE, build_faiss, encode_shards, nearest, open_faiss

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "facebook/contriever"
QUERY_TOKENS, PASSAGE_TOKENS = 256, 512
"""Limits of tokens; a model that takes fewer lowers them."""


@dataclass(frozen=True, slots=True)
class Convention:
    """What a family of encoders expects in front of texts, and whether vectors have length 1."""

    query: str
    passage: str
    normalised: bool


CONVENTIONS = {
    "contriever": Convention("", "", False),
    "e5": Convention("query: ", "passage: ", True),
}


def convention_of(model: str, encoder: str | None) -> str:
    """The convention by name, or by the name of the model where none is given."""
    return encoder or ("e5" if "e5" in Path(model).name.lower() else "contriever")


class Encoder:
    """Texts to vectors; loads its weights at the first text.

    Args:
        model: folder or hub id of a Hugging Face encoder.
        encoder: a name of `CONVENTIONS`.
        device: `cpu` or `cuda`.
        batch_size: texts encoded at once.
    """

    def __init__(self, model: str, encoder: str, *, device: str = "cpu", batch_size: int = 32):
        self.model, self.device, self.batch_size = model, device, batch_size
        self.convention = CONVENTIONS[encoder]
        self._lock = threading.Lock()

    @cached_property
    def _parts(self) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
        from transformers import AutoModel, AutoTokenizer

        # Named, since transformers would otherwise ask at the terminal whether to run a model's own code.
        network = AutoModel.from_pretrained(self.model, trust_remote_code=False).eval().to(self.device)
        return AutoTokenizer.from_pretrained(self.model, trust_remote_code=False), network

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries: float32, shape (texts, dimension)."""
        return self._encode([self.convention.query + text for text in texts], QUERY_TOKENS)

    def passages(self, documents: Sequence[Document]) -> np.ndarray:
        """Vectors of passages (title and text): float32, shape (documents, dimension)."""
        texts = [f"{self.convention.passage}{d.title} {d.text}" for d in documents]
        # Passages of like length side by side: little padding in a batch. `back` restores the order of the corpus.
        order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
        vectors = self._encode([texts[n] for n in order], PASSAGE_TOKENS)
        back = np.empty_like(vectors)
        back[order] = vectors
        return back

    def _encode(self, texts: list[str], limit: int) -> np.ndarray:
        import torch

        # One text at a time through the network: fast tokenizers refuse to be shared by threads.
        with self._lock, torch.inference_mode():
            tokenizer, network = self._parts
            # Encoders differ in their number of positions; a longer text would index beyond them.
            limit = min(limit, network.config.max_position_embeddings)
            vectors = []
            for start in range(0, len(texts), self.batch_size):
                batch = tokenizer(
                    texts[start : start + self.batch_size],
                    padding=True,
                    truncation=True,
                    max_length=limit,
                    return_tensors="pt",
                ).to(self.device)
                # hidden: (batch, tokens, dimension); mask: (batch, tokens, 1); mean: (batch, dimension)
                hidden = network(**batch).last_hidden_state.float()
                mask = batch["attention_mask"].unsqueeze(-1).float()
                # Padding must not enter the mean.
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
                if self.convention.normalised:
                    mean = torch.nn.functional.normalize(mean, dim=-1)
                vectors.append(mean.cpu().numpy())
        return np.concatenate(vectors)


class DenseRetriever(Retriever):
    """Searches an index folder's vectors by inner product.

    Args:
        folder: with `vectors.faiss`, from `build`.
        documents: the passages, in the order of the vectors.
        encoder: the one that the passages were encoded with.
    """

    def __init__(self, folder: Path, documents: Sequence[Document], encoder: Encoder):
        self.documents = documents
        self._encoder = encoder
        self._index = open_faiss(folder / FAISS_FILE)
        if self._index.ntotal != len(documents):
            raise ValueError(f"{FAISS_FILE} has {self._index.ntotal} vectors, expected {len(documents)}")

    def search(self, queries: Sequence[str], top_k: Sequence[int]) -> list[list[Document]]:
        """See `mmrl.retrieval.base.Retriever.search`. Every passage matches; a small corpus gives short results."""
        # A budget of 0 costs no encoding.
        active = [n for n, k in enumerate(top_k) if k > 0]
        results: list[list[Document]] = [[] for _ in queries]
        if len(queries) != len(top_k):
            raise ValueError(f"got {len(queries)} queries and {len(top_k)} numbers")
        if not active:
            return results
        vectors = self._encoder.queries([queries[n] for n in active])
        # both of shape (active queries, k)
        scores, numbers = nearest(self._index, vectors, max(top_k))
        for row, query in enumerate(active):
            matches = [(float(s), int(n)) for s, n in zip(scores[row], numbers[row], strict=True) if n >= 0]
            # FAISS leaves the order of equal scores open; ours is the corpus's.
            matches.sort(key=lambda pair: (-pair[0], pair[1]))
            results[query] = [replace(self.documents[n], score=score) for score, n in matches[: top_k[query]]]
        return results


def build(folder: Path, documents: Sequence[Document], encoder: Encoder, form: str) -> None:
    """Encode a corpus in shards and write its FAISS index; a build that was killed goes on where it was."""
    shards = encode_shards(folder / "shards", documents, lambda part: {"vectors": encoder.passages(part)}, "encoding")
    first = np.load(shards[0])["vectors"]
    blocks = (np.load(shard)["vectors"] for shard in shards)
    build_faiss(blocks, first.shape[1], form, folder / FAISS_FILE)
