"""Words of a command line that earlier versions had, and what replaces them; deleted at the first release."""

from __future__ import annotations

from collections.abc import Sequence

STEPS = "rollouts of several servers are measured, not foretold: train a few steps and read its `time/` metrics"
SETS = "mmrl compare set=NAME runs a set, python -m scripts.papers NAME (make NAME) in a checkout a table of a paper"
GONE = {
    ("table", ""): SETS,
    ("compare", "scale"): "the papers' tables have scales: python -m scripts.papers NAME scale=mini",
    ("plan", "replicas"): STEPS,
    ("plan", "token_ms"): STEPS,
    ("index", "info"): "the folder's index.json has all of it",
    ("index", "search"): "mmrl serve-retriever index=DIR answers POST /retrieve, and mmrl show RUN has a run's queries",
}
"""(command, key or argument; empty: the command itself) -> what replaces it."""


def problems(words: Sequence[str]) -> list[str]:
    """Return a sentence for each word of a command line that is gone."""
    command, keys = words[0] if words else "", [word.lstrip("+~").partition("=")[0] for word in words[1:]]
    if (command, "") in GONE:
        return [f"mmrl {command}: is gone; {GONE[command, '']}"]
    return [f"{key}: is gone; {GONE[command, key]}" for key in keys if (command, key) in GONE]
