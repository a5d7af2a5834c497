"""Overrides of each run of a set, from the set's file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from mmrl.config.rules import OF_WEIGHTS
from mmrl.config.schema import RlRunConfig, stage_schema
from mmrl.config.validate import as_tuples, explain
from mmrl.errors import ConfigError, refuse, unknown
from mmrl.sets.spec import Layer, SetSpec, undeclared
from mmrl.system.conf import algo_name, conf_dir, later_wins, options, user_dirs
from mmrl.system.files import read_yaml

SpecT = TypeVar("SpecT", bound=SetSpec)
OF_PAPERS = (
    *("source", "scores", "counts", "order", "means", "agree", "claims", "figure", "case", "paper", "mini", "real"),
    *("eval", "items", "policy", "checkpoint", "values", "std"),
)
"""Keys that tables of papers have besides (scripts/papers)."""
SHARED = ("task.name", "eval", "seed", "plugins")
"""Sections and keys that are the same for all steps of `algo=A+B`, whose scores are compared; but `eval.every`."""


def set_folders(config_dir: str | None = None) -> list[Path]:
    """Return the folders of sets, first wins."""
    return [folder / "set" for folder in (*user_dirs(config_dir), conf_dir())]


def read_set(schema: type[SpecT], name: str, folders: Sequence[Path], config_dir: str | None = None) -> SpecT:
    """Read a set, with the content of its base.

    Args:
        folders: of sets, with their bases in `base/`; first wins.

    Raises:
        ConfigError: there is none of this name, or every problem of the two files.
    """
    path = _file_of("set", name, folders)
    content = read_yaml(path)
    if isinstance(content, dict) and isinstance(base := content.get("base"), str):
        content["base"] = read_yaml(_file_of("set/base", base, [folder / "base" for folder in folders]))
    try:
        spec = schema.model_validate(as_tuples(content))
    except ValidationError as error:
        problems: list[str] = []
        of_papers: list[str] = []
        for problem in explain(schema, error):
            key, unknown_key, _ = problem.partition(": unknown key")
            theirs = unknown_key and key.rpartition(".")[2] in OF_PAPERS
            (of_papers if theirs else problems).append(key if theirs else problem)
        if of_papers:
            problems.append(f"{', '.join(of_papers)}: for tables of papers, which python -m scripts.papers NAME runs")
        raise ConfigError(f"{path}: {problem}" for problem in problems) from None
    declared = options("algo", config_dir)
    layers = (("algos", spec.algos), ("base.algos", spec.base.algos))
    if problems := [problem for key, algos in layers for problem in undeclared(key, algos, declared)]:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    return spec


def set_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of all sets, figure 10 after figure 9."""
    return sorted(
        {path.stem for folder in folders for path in folder.glob("*.yaml")},
        key=lambda name: [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)],
    )


def words_of(
    spec: SetSpec,
    row: str,
    column: str,
    overrides: Sequence[str] = (),
    said: Callable[[Layer], Sequence[str]] = lambda layer: [*layer.set, *layer.train],
) -> list[str]:
    """Return the overrides of one run of a cell, each key once; later ones win.

    In turn: of base, set, algorithm, column, its cell, row, and `overrides`.

    Args:
        said: gives the words of one of them.
    """
    method, task = spec.rows[row], spec.columns[column]
    shared = [*said(spec.base), *said(spec)]
    column_words = [*said(task), *(said(task.cells[row]) if row in task.cells else ())]
    words_read = [*shared, *column_words, *said(method)]
    # An evaluation has no `algo=`.
    algo = next((word.partition("=")[2] for word in reversed(words_read) if word.startswith("algo=")), "")
    algo_words = [word for base in (spec.base, spec) if algo in base.algos for word in said(base.algos[algo])]
    # The row's words come last, so that they override those of its algorithm.
    words = [word for word in [*shared, *algo_words, *column_words] if not is_below(word, method.without)]
    return later_wins([*words, *said(method), *overrides])


def words_of_steps(
    words: Sequence[str], steps: Sequence[str], config_dir: str | None, problems: list[str]
) -> dict[str, list[str]]:
    """Return the overrides of each step of `algo=A+B`: those of all steps, and its own (`A.KEY=VALUE`), which win.

    Keys about weights that are typed for all hold for the steps that train some, where there are any.

    Args:
        steps: names of algorithms; a wrong one is refused with its config.
        problems: every key of no step, or that all share, is added.

    Raises:
        ConfigError: a step without a name (`algo=A+`), which no row can have.
    """
    choices, sections = options("algo", config_dir), RlRunConfig.model_fields
    refuse(unknown("algo", step, choices) for step in steps if not step)
    shared: list[str] = []
    own: dict[str, list[str]] = {step: [] for step in steps}
    for word in words:
        typed = word.lstrip("+~").partition("=")[0]
        step, _, key = typed.partition(".")
        if step not in own:
            # A section's name before another's is no key: a step that is misspelt.
            if step in choices or (step not in sections and key.partition(".")[0] in sections):
                problems.append(unknown(typed, step, own))
            else:
                shared.append(word)
        elif key in ("algo", "algo.name"):
            problems.append(f"{typed}: a step is its algorithm, which algo= names")
        elif key == "run.dir":
            problems.append(f"{typed}: a set has a directory for each run; leave it out")
        elif key == "task" or (is_below(key, SHARED) and key != "eval.every"):
            problems.append(f"{typed}: is the same for all; type {key}= or leave it out")
        else:
            own[step].append(word.replace(f"{step}.", "", 1))
    training = {step: "train" in stage_schema(algo_name(step, config_dir)).model_fields for step in steps}
    return {
        step: later_wins(
            [f"algo={step}", *(w for w in shared if trains or not (any(training.values()) and is_below(w, OF_WEIGHTS)))]
            + own[step]
        )
        for step, trains in training.items()
    }


def as_typed(problem: str, words: Sequence[str], steps: Sequence[str]) -> str:
    """Return a problem `KEY: …` with the key as it was typed, where it was for a step alone: `grpo.algo.clip: …`."""
    key, _, rest = problem.partition(":")
    typed = dict.fromkeys(word.lstrip("+~").partition("=")[0] for word in words)
    own = [name for name in typed if name in {f"{step}.{key}" for step in steps}]
    return problem if key in typed or not own else f"{', '.join(own)}:{rest}"


def is_below(word: str, keys: Sequence[str]) -> bool:
    """True for an override that sets one of some keys or sections, or something in one."""
    return any(f"{word.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.") for key in keys)


def _file_of(kind: str, name: str, folders: Sequence[Path]) -> Path:
    if name not in (names := set_names(folders)):
        raise ConfigError(unknown(kind, name, names))
    path = next(path for folder in folders if os.path.lexists(path := folder / f"{name}.yaml"))
    if not path.is_file():
        raise ConfigError(f"{path}: is not a file")
    return path
