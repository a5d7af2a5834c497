"""Whether a corpus can answer a task's questions: the share of items whose gold titles, or an answer, are in it.

Used by `open_qa` for the label 'partial corpus' that every result carries. An item that names gold titles counts when
all of them are titles of its corpus; one that names none counts when an accepted answer occurs in a passage, as a run
of whole lower-cased words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.store import PassageStore

SCANNED = 200_000
"""Passages up to which answers are looked for; a larger corpus is known by its titles alone."""
LONGEST = 12
"""Words of an answer that are looked for; a longer answer counts by its first ones."""
WORD = re.compile(r"\w+")
_MIX = np.uint64(0x9E3779B97F4A7C15)


def covered(examples: Sequence[Example], corpora: Mapping[str, Sequence[Document]]) -> dict[str, bool]:
    """Example id -> whether its corpus holds its gold titles or answer; examples that cannot be judged are absent.

    Args:
        examples: with `inputs["corpus"]`, and `metadata["titles"]` or `metadata["answers"]`.
        corpora: name -> passages; an empty one (a remote retriever's) is unknown.
    """
    found: dict[str, bool] = {}
    for name, documents in corpora.items():
        own = [example for example in examples if example.inputs.get("corpus") == name]
        if not own or not len(documents):
            continue
        has = _titles(documents)
        titled = [example for example in own if example.metadata.get("titles")]
        found |= {e.id: all(title in has for title in e.metadata["titles"]) for e in titled}
        rest = [example for example in own if not example.metadata.get("titles")]
        if rest and len(documents) <= SCANNED:
            found |= _answered(rest, documents)
    return found


class _Titles:
    """`title in` for a corpus on disk."""

    def __init__(self, store: PassageStore):
        self._store = store

    def __contains__(self, title: str) -> bool:
        return self._store.has_title(title)


def _titles(documents: Sequence[Document]) -> set[str] | _Titles:
    if isinstance(documents, PassageStore):
        return _Titles(documents)
    return {document.title for document in documents}


def _answered(examples: Sequence[Example], documents: Iterable[Document]) -> dict[str, bool]:
    """Example id -> whether one of its answers occurs in a passage."""
    numbers: dict[str, int] = {}
    wanted: dict[str, list[list[int]]] = {}
    for example in examples:
        answers = [_words(str(answer))[:LONGEST] for answer in example.metadata.get("answers", ())]
        wanted[example.id] = [[numbers.setdefault(w, len(numbers) + 1) for w in words] for words in answers if words]
    lengths = sorted({len(run) for runs in wanted.values() for run in runs})
    asked = {n: np.unique([_run_hash(r) for runs in wanted.values() for r in runs if len(r) == n]) for n in lengths}
    there: dict[int, set[int]] = {n: set() for n in lengths}
    for block in _blocks(documents, numbers):
        for n in lengths:
            hashes = _run_hashes(block, n)
            there[n].update(int(value) for value in asked[n][np.isin(asked[n], hashes)])
    return {name: any(_run_hash(run) in there[len(run)] for run in runs) for name, runs in wanted.items()}


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _blocks(documents: Iterable[Document], numbers: Mapping[str, int]) -> Iterable[np.ndarray]:
    """Passages as word numbers, 0 for words in no answer and between passages; some thousand passages a block."""
    block: list[int] = []
    for document in documents:
        block += [numbers.get(word, 0) for word in _words(f"{document.title} {document.text}")]
        block.append(0)
        if len(block) > 2**20:
            yield np.array(block, dtype=np.uint64)
            block = []
    yield np.array(block, dtype=np.uint64)


def _run_hashes(block: np.ndarray, length: int) -> np.ndarray:
    """Hash of each run of `length` known words in a block of word numbers."""
    if len(block) < length:
        return np.empty(0, dtype=np.uint64)
    places = len(block) - length + 1
    state = np.zeros(places, dtype=np.uint64)
    known = np.ones(places, dtype=bool)
    with np.errstate(over="ignore"):
        for offset in range(length):
            part = block[offset : offset + places]
            known &= part > 0
            state = (state ^ part) * _MIX
            state ^= state >> np.uint64(29)
    return state[known]


def _run_hash(run: Sequence[int]) -> int:
    return int(_run_hashes(np.array(run, dtype=np.uint64), len(run))[0])
