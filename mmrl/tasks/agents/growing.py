"""What single-context search programs share: marked blocks in text, and how documents are listed.

Used by `search_o1` and `r1_searcher`, whose tags look like special tokens (`<|begin_of_query|>`) but are plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.tasks.prompts import snippet


def last_block(text: str, opening: str, closing: str) -> str | None:
    """Stripped text between the last `closing` and the nearest `opening` before it; None without such a block."""
    before, found, _ = text.rpartition(closing)
    _, opened, content = before.rpartition(opening)
    return content.strip() if found and opened else None


def asked(text: str, markers: tuple[str, str]) -> str | None:
    """The query with which a turn ends, or None: its ending marker is a stop string, so nothing follows a query."""
    return last_block(text, *markers) if text.rstrip().endswith(markers[1]) else None


def disarm_markers(text: str) -> str:
    """`text` in which nothing can be or become `<|…|>`: the brackets of its halves are parentheses."""
    return text.replace("<|", "(|").replace("|>", "|)")


def listed(template: str, found: Sequence[Mapping[str, Any]], words: int) -> str:
    """Retrieved documents, numbered from 1, each cut to `words` words."""
    return "\n".join(
        template.format(index=index, title=document["title"], text=snippet(document["text"], words))
        for index, document in enumerate(found, 1)
    )
