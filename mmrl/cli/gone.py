"""Words that earlier versions had, and what replaces them; deleted at the first release."""

from __future__ import annotations

import re
from collections.abc import Sequence

CHAIN = (
    "a run has one algorithm; prompts, then weights: mmrl compare algo=miprov2+mmgrpo (any algorithms, joined by +), "
    "in Python algo=['miprov2', 'mmgrpo'], in a set from: ROW"
)
STEP = "a key of one step of mmrl compare algo=A+B is A.KEY=VALUE: miprov2.algo.auto=light"
STEPS = "rollouts of several servers are measured, not foretold: train a few steps and read its `time/` metrics"
PUSH = "full weights reach vLLM's servers through disk, adapters too; leave it out"
SETS = "mmrl compare set=NAME runs a set, python -m scripts.papers NAME (make NAME) in a checkout a table of a paper"
GONE = {
    **{(command, "engine.push"): PUSH for command in ("train", "eval", "compare", "serve", "plan", "doctor")},
    ("fetch", ""): "in a clone of mmrl: python -m scripts.fetch_model smollm2_135m FOLDER, then model.path=FOLDER",
    ("table", ""): SETS,
    ("compare", "scale"): "the papers' tables have scales: python -m scripts.papers NAME scale=mini",
    ("plan", "replicas"): STEPS,
    ("plan", "token_ms"): STEPS,
    **{(command, key): CHAIN for command in ("train", "plan", "doctor") for key in ("stages", "algo=better_together")},
    **{(command, "stage"): STEP for command in ("train", "plan", "doctor", "compare")},
    ("compare", "algo=better_together"): "it is algo=miprov2+mmgrpo",
    ("index", "info"): "the folder's index.json has all of it",
    ("index", "search"): "mmrl serve-retriever index=DIR answers POST /retrieve, and mmrl show RUN has a run's queries",
}
"""(command, key, section, KEY=VALUE or argument; empty: the command itself) -> what replaces it."""


def problems(words: Sequence[str]) -> list[str]:
    """Return a sentence for each word of a command line that is gone."""
    command = words[0] if words else ""
    if (command, "") in GONE:
        return [f"mmrl {command}: is gone; {GONE[command, '']}"]
    found: list[str] = []
    for word in words[1:]:
        key, _, value = word.lstrip("+~").partition("=")
        forms = dict.fromkeys([key, key.partition(".")[0], *(f"{key}={one}" for one in value.strip("[]").split(","))])
        found += [f"{form}: is gone; {says}" for form in forms if form and (says := GONE.get((command, form)))]
    return found


def explained(problem: str) -> str:
    """Return a problem of a key or choice in a file (`experiment=`, a set, a run's config), with what replaces it."""
    for (command, key), says in GONE.items():
        group, _, choice = key.partition("=")
        unknown = rf"(?<![\w.]){re.escape(key)}: unknown key.*"
        if choice:
            unknown = rf"{group}: got '{choice}', .*|In '.*{group}/{choice}'"
        if command == "train" and (match := re.search(unknown, problem)):
            return f"{problem[: match.start()]}{key}: is gone; {says}"
    return problem
