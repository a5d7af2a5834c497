"""Requests to retrieval servers and their replies: Search-R1's protocol, and DSPy's of ColBERT servers (as a client).

- Search-R1: `POST /retrieve` {"queries": [...], "topk": 3, "return_scores": true} ->
  {"result": [[{"document": {"contents": "title\\ntext"}, "score": s}, ...], ...]}, or bare documents.
- DSPy: `GET /api/search?query=…&k=…` -> {"topk": [{"text": "title | text", "pid": …, "rank": 1, "score": s}, ...]}.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictStr, ValidationError

from mmrl.config.base import reasons
from mmrl.retrieval.base import Document, title_and_text, whole_text
from mmrl.system.replies import quoted

T = TypeVar("T")

MAX_QUERIES = 16_384
"""Queries of one request; Search-R1 sends those of a step's whole batch in one, 2,560 by its scripts."""
MAX_TOPK = 1000
MAX_QUERY_CHARS = 20_000
"""Characters of a query that are searched for."""
MAX_URL_QUERY_CHARS = 2_000
"""The same where the query is part of an address: servers refuse long ones, and that would fail the rollout."""
MAX_PASSAGE_CHARS = 2**20
"""Characters of a passage, title included; the longest articles of Wikipedia have half as many."""
MAX_FIELD_CHARS = 1_000
"""Characters of a passage's id or score."""
LARGEST_REQUEST = 32 * 2**20
"""Bytes of a request's body beyond which it is refused unread (413)."""


class BadRequest(ValueError):
    """A request that is not the protocol's; answered with its status and the reason."""

    status = 422


def _shortened(value: object) -> object:
    return whole_text(value[:MAX_QUERY_CHARS]) if isinstance(value, str) else value


def _number(value: object) -> object:
    # Search-R1 sends null for the server's own number; pydantic would take `true` for 1.
    if value is None:
        return 3
    return "true or false" if isinstance(value, bool) else value


class SearchR1Request(BaseModel):
    """Body of `POST /retrieve`."""

    queries: list[Annotated[StrictStr, BeforeValidator(_shortened)]] = Field(max_length=MAX_QUERIES)
    topk: Annotated[int, BeforeValidator(_number), Field(ge=1, le=MAX_TOPK)] = 3
    return_scores: StrictBool = False


def read_request(fields: object) -> SearchR1Request:
    """Parse and check a request of the protocol, within the limits.

    Raises:
        BadRequest: with every field that is wrong, and why.
    """
    try:
        return SearchR1Request.model_validate(fields)
    except ValidationError as error:
        raise BadRequest(reasons(error)) from None


def search_r1_item(document: Document, scored: bool) -> dict[str, object]:
    """Return one passage in the format of a Search-R1 reply."""
    contents = f"{document.title}\n{document.text}"
    fields = {"id": document.id, "title": document.title, "text": document.text, "contents": contents}
    return {"document": fields, "score": document.score} if scored else dict(fields)


# Replies are read by hand: a model of them would copy every passage once more, and servers differ in what they add.


def read_search_r1_reply(reply: object, queries: int) -> list[list[Document]]:
    """Parse the documents of each query from a Search-R1 reply.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: another shape, or another number of results than of queries.
    """
    results = _checked(reply, dict, "an object")["result"]
    if not isinstance(results, list) or len(results) != queries:
        got = f"{len(results)} results" if isinstance(results, list) else type(results).__name__
        raise ValueError(f"got {got} for {queries} queries")
    return [[_search_r1_document(item) for item in _items(result)] for result in results]


def _search_r1_document(item: Mapping[str, object]) -> Document:
    scored = "document" in item
    fields = _checked(item["document"], dict, "an object", "document: ") if scored else item
    title, text = fields.get("title"), fields.get("text")
    if not isinstance(text, str) or not isinstance(title, str):
        title, text = title_and_text(_checked(fields["contents"], str, "text", "contents: "))
    return _document(fields.get("id"), title, text, item.get("score", 0.0) if scored else 0.0)


def read_dspy_reply(reply: object) -> list[Document]:
    """Parse the documents of one query from a DSPy reply.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: another shape, or an error message of the server.
    """
    fields = _checked(reply, dict, "an object")
    if fields.get("error"):
        raise ValueError(f"the server says: {quoted(str(fields.get('message', fields['error'])))}")
    documents = []
    for item in _items(fields["topk"]):
        title, mark, text = _checked(item["text"], str, "text", "text: ").partition(" | ")
        documents.append(_document(item.get("pid"), *((title, text) if mark else ("", title)), item.get("score", 0.0)))
    return documents


def _document(name: object, title: str, text: str, score: object) -> Document:
    if len(title) + len(text) > MAX_PASSAGE_CHARS:
        raise ValueError(f"a passage of {len(title) + len(text)} characters, more than {MAX_PASSAGE_CHARS}")
    title, text = whole_text(title), whole_text(text)
    if not isinstance(score, int | float | str):
        raise TypeError(f"score: got {type(score).__name__}, expected a number")
    if isinstance(score, str) and len(score) > MAX_FIELD_CHARS:
        raise ValueError(f"score: got {len(score)} characters, expected a number")
    value = float(score)
    if not math.isfinite(value):
        raise ValueError(f"score: got {quoted(str(score))}")
    if isinstance(name, str) and len(name) > MAX_FIELD_CHARS:
        raise ValueError(f"id: got {len(name)} characters, at most {MAX_FIELD_CHARS}")
    if isinstance(name, list | dict):
        raise TypeError(f"id: got {type(name).__name__}, expected text or a number")
    # Servers may leave ids out; programs tell passages apart by them.
    if name is None:
        name = hashlib.blake2b(f"{title}\x1f{text}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return Document(id=str(name), title=title, text=text, score=value)


def _checked(value: object, kind: type[T], expected: str, field: str = "") -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{field}got {type(value).__name__}, expected {expected}")
    return value


def _items(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise TypeError(f"got {type(value).__name__}, expected a list of objects")
    return value
