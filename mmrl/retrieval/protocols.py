"""Replies of retrieval servers as documents: Search-R1's protocol and DSPy's ColBERT-server's. Used by `remote`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmrl.retrieval.base import Document, whole_text


def read_search_r1(reply: Any, queries: int) -> list[list[Document]]:
    """`{"result": [[{"document": {"contents": "title\\ntext"}, "score": s}, ...], ...]}`, or bare documents.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: another shape, or another number of results than of queries.
    """
    if not isinstance(reply, Mapping):
        raise TypeError(f"got {type(reply).__name__}, expected an object")
    results = reply["result"]
    if not isinstance(results, list) or len(results) != queries:
        got = f"{len(results)} results" if isinstance(results, list) else type(results).__name__
        raise ValueError(f"got {got} for {queries} queries")
    return [[_search_r1_document(item) for item in _listed(result)] for result in results]


def _search_r1_document(item: Any) -> Document:
    scored = "document" in item
    fields = item["document"] if scored else item
    if not isinstance(fields, Mapping):
        raise TypeError(f"document: got {type(fields).__name__}, expected an object")
    if isinstance(fields.get("text"), str) and isinstance(fields.get("title"), str):
        title, text = fields["title"], fields["text"]
    else:
        title, _, text = _string(fields["contents"], "contents").partition("\n")
        title = title.strip()
        if len(title) > 1 and title[0] == title[-1] == '"':  # as wiki-18's contents have it
            title = title[1:-1]
    return _document(fields.get("id"), title, text, item.get("score", 0.0) if scored else 0.0)


def read_dspy(reply: Any) -> list[Document]:
    """`{"topk": [{"text": "title | text", "pid": …, "score": s}, ...]}`.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: another shape, or an error message of the server.
    """
    if not isinstance(reply, Mapping):
        raise TypeError(f"got {type(reply).__name__}, expected an object")
    if reply.get("error"):
        raise ValueError(f"the server says: {str(reply.get('message', reply['error']))[:200]}")
    documents = []
    for item in _listed(reply["topk"]):
        title, mark, text = _string(item["text"], "text").partition(" | ")
        documents.append(_document(item.get("pid"), *((title, text) if mark else ("", title)), item.get("score", 0.0)))
    return documents


def _document(name: Any, title: str, text: str, score: Any) -> Document:
    title, text = whole_text(title), whole_text(text)
    value = float(score)
    if not math.isfinite(value):
        raise ValueError(f"score: got {score}")
    if name is None:
        name = hashlib.blake2b(f"{title}\x1f{text}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return replace(Document(id=str(name), title=title, text=text), score=value)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise TypeError(f"got {type(value).__name__}, expected a list of objects")
    return value


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{field}: got {type(value).__name__}, expected text")
    return value
