"""The tiny models that ship with mmrl, and which of them `tiny` stands for: the one that plays the task.

The one place that says so; `validate` puts the name in, `mmrl.models.load` finds the folder.
"""

from __future__ import annotations

from collections.abc import Mapping

SHIPPED: Mapping[str, tuple[str, ...]] = {
    "tiny": ("hotpotqa", "2wiki", "musique", "tool_agent"),
    "tiny_dspy": ("banking77", "papillon", "hover"),
    "tiny_qa": ("search_agent", "search_o1", "r1_searcher"),
    "tiny_direct": ("qa_direct",),
}
"""Model (a folder of `mmrl/assets`) -> tasks whose mini version it plays."""


def shipped_for(task: str) -> str:
    """What `tiny` stands for with `task`; the first model where none was made for it."""
    return next((model for model, tasks in SHIPPED.items() if task in tasks), "tiny")
