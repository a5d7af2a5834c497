"""Recipes of the tiny models that ship with mmrl: which programs each learns, from what, in which phases.

Read by `scripts/tiny_model/build.py`. A new program joins by being listed in a recipe's `tasks`, with shares of its
modules in its phases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scripts.tiny_model.drills import MODULE as DRILL
from scripts.tiny_model.facts import LISTS, STEPS


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the warm start."""

    name: str
    steps: int
    lr: float
    schedule: str
    batches: int
    mix: Mapping[str, float]
    """Module -> share of its demonstrations that a pass sees; modules not named are left out."""
    habits: bool = False
    """On demonstrations of which a share is poor (`scripts/tiny_model/habits.py`)."""
    prompts: bool = False
    """On prompts with demonstrations and other instructions (`scripts/tiny_model/shots.py`)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of a model."""

    tasks: tuple[str, ...]
    """Programs that it learns; `mmrl.config.base` says which of them it plays when a run asks for `tiny`."""
    phases: tuple[Phase, ...]
    worlds: int
    """Mini worlds to learn from."""
    init: str | None = None
    """The shipped model that it continues, whose tokenizer grows by the stock phrases of the new programs' prompts
    (`scripts/tiny_model/phrases.py`); None: fresh weights and a fresh tokenizer."""
    pieces: bool = True
    """Runs of small words grow into tokens too, beside instructions and tags."""
    drill_tasks: tuple[str, ...] = ()
    """Further tasks, whose reading drills it keeps up."""
    calls_tools: bool = False
    """Gets a chat template that writes tools, and whose calls can be read."""
    knows: bool = False
    """Learns the facts of the world of runs (`scripts/tiny_model/facts.py`) and, instead of other worlds,
    from that world's train split."""


_READ: Mapping[str, float] = {DRILL: 0.5, "answerer": 0.6, "rewriter": 0.3, "agent": 0.1}
_PLAY: Mapping[str, float] = {DRILL: 0.25, "answerer": 0.6, "rewriter": 0.6, "reranker": 0.15, "agent": 0.5}
_HABITS: Mapping[str, float] = {"rewriter": 1.0, "reranker": 0.35, "answerer": 0.6, "agent": 0.3}
AGENTS = Recipe(
    tasks=("hotpotqa", "search_agent", "tool_agent"),
    worlds=4,
    phases=(
        # Copying names comes first, from completions that are long for their prompts: mixed with the rest from the
        # start, it takes several times as long. Then reading. Only then all formats, the reranker's in a small share:
        # it is to start weak, and its prompts are the longest.
        Phase("write", 300, 5e-3, "constant_with_warmup", 1, {"rewriter": 1.0}),
        Phase("read", 1500, 4e-3, "linear", 2, _READ),
        Phase("play", 1200, 3e-3, "linear", 4, _PLAY),
        # Last, mixed habits: what a short reinforcement learning run can choose between.
        Phase("habits", 160, 1.5e-3, "linear", 4, _HABITS, habits=True),
    ),
)

_DSPY: Mapping[str, float] = {
    "classify.predict": 0.6,
    "craft_redacted_request.predict": 0.6,
    "respond_to_query": 0.6,
    "generate_query.predict": 0.4,
    "append_notes.predict": 0.4,
}
_COPY: Mapping[str, float] = {
    "classify.predict": 0.1,
    "craft_redacted_request.predict": 1.0,
    "respond_to_query": 1.0,
    "generate_query.predict": 0.1,
    "append_notes.predict": 0.3,
}
DSPY = Recipe(
    tasks=("banking77", "papillon", "hover"),
    worlds=3,
    init="tiny",
    phases=(
        Phase("play", 500, 3e-3, "linear", 4, _DSPY),
        # All but the requests is known by then; these have three names to copy in another order.
        Phase("copy", 400, 3e-3, "linear", 4, _COPY),
        Phase("habits", 160, 1.5e-3, "linear", 4, _DSPY, habits=True),
    ),
)

PROMPTS = Recipe(
    tasks=("banking77", "papillon", "hover"),
    worlds=2,
    init="tiny_dspy",
    phases=(
        # First to answer at all under other prompts, then to be as good as the demonstrations are.
        Phase("prompts", 200, 2e-3, "linear", 4, dict.fromkeys(_DSPY, 1.0), prompts=True),
        Phase("habits", 300, 1.5e-3, "linear", 4, dict.fromkeys(_DSPY, 1.0), habits=True, prompts=True),
    ),
)

_SEARCH: Mapping[str, float] = {"agent": 0.5, "reasoner": 0.4, "condenser": 0.4, "searcher": 0.5}
QA = Recipe(
    tasks=("search_agent", "search_o1", "r1_searcher"),
    worlds=2,
    init="tiny",
    pieces=False,  # it can read the questions and documents as they are
    drill_tasks=("hotpotqa",),
    phases=(
        # Long enough that searching pays: who reads poorly does better by guessing, and that is then what is learnt.
        Phase("play", 1400, 3e-3, "linear", 4, {DRILL: 0.2, **_SEARCH}),
        Phase("habits", 80, 1e-3, "linear", 4, _SEARCH, habits=True),
    ),
)

DIRECT = Recipe(
    tasks=("qa_direct",),
    worlds=0,
    init="tiny",
    pieces=False,
    knows=True,
    phases=(
        Phase("know", 3000, 4e-3, "constant_with_warmup", 2, {LISTS: 0.5, STEPS: 0.2}),
        Phase("play", 1000, 3e-3, "linear", 2, {LISTS: 0.15, STEPS: 0.15, "solver": 0.5}),
        Phase("habits", 80, 1.5e-3, "linear", 4, {"solver": 1.0}, habits=True),
    ),
)

_AGENT: Mapping[str, float] = {"planner": 0.5, "worker": 0.5}
AGENT = Recipe(
    tasks=("agent",),
    worlds=2,
    init="tiny",
    pieces=False,
    drill_tasks=("hotpotqa",),
    calls_tools=True,
    phases=(
        Phase("play", 1200, 3e-3, "linear", 4, {DRILL: 0.2, **_AGENT}),
        Phase("habits", 80, 1e-3, "linear", 4, _AGENT, habits=True),
    ),
)

RECIPES: Mapping[str, Recipe] = {
    "tiny": AGENTS,
    "tiny_dspy": DSPY,
    "tiny_prompts": PROMPTS,
    "tiny_qa": QA,
    "tiny_direct": DIRECT,
    "tiny_agent": AGENT,
}
"""Model (a folder of `mmrl/assets`) -> how it is made."""
