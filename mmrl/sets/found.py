"""A set made of runs that exist already: rows and columns are read from their configs, not from a spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmrl.config.base import literal
from mmrl.report.overview import Overview
from mmrl.sets.cells import SetResult
from mmrl.sets.plan import main_metrics
from mmrl.sets.queue import CellRun
from mmrl.sets.settings import NOT_VARIANTS, STARTED, settings_in
from mmrl.sets.spec import Column, Row, SetSpec
from mmrl.store.policy import CHECKPOINTS, MARKER, run_of
from mmrl.store.rundir import RunDir
from mmrl.system.files import file_digest


def set_of_run_dirs(name: str, paths: Sequence[Path], shows: str = "runs side by side") -> SetResult:
    """Group existing runs into a set: a row per algorithm (and config), a column per task and split.

    Raises:
        CheckpointError, DataError: a damaged run.
    """
    # Scores are comparable only on the same task and split, so each pair is a column.
    tasks: dict[tuple[str, str], list[Overview]] = {}
    for path in paths:
        run = Overview.from_run(RunDir.read(path))
        tasks.setdefault((str(run.get("task.name", "?")), run.split), []).append(run)
    several_splits = len({split for _, split in tasks}) > 1
    columns: dict[str, Column] = {}
    runs: dict[tuple[str, str], list[CellRun]] = {}
    notes: list[str] = []
    for (task, split), members in tasks.items():
        column = f"{task} ({split})" if several_splits else task
        recorded = next((metric for run in members if (metric := run.recorded_metric)), "")
        metric = recorded or main_metrics().get(task) or members[0].main_metric or ""
        rows: dict[str, list[Overview]] = {}
        for label, run in zip(_labels(members), members, strict=True):
            rows.setdefault(label, []).append(run)
        columns[column] = Column(rows=tuple(rows))
        for row, row_runs in rows.items():
            runs[row, column] = [_existing_run(run.run.path, metric) for run in _one_per_seed(row, row_runs, notes)]
    spec = SetSpec(shows=shows, rows={row: Row() for row, _ in runs}, columns=columns)
    return SetResult(name=name, spec=spec, rows=[*spec.rows], columns=[*columns], runs=runs, extra_notes=notes)


def _existing_run(path: Path, metric: str = "") -> CellRun:
    """Return an existing run, with the runs that it starts from."""
    config = RunDir.read(path).config
    start = run_of(config["start"]["run"]) if config.get("start") else None
    # The folder that holds both may have been moved, or be looked at from elsewhere: a set's paths begin where it ran.
    folders = [start, *(folder / start for folder in path.absolute().parents)] if start is not None else []
    digest = (config.get("start") or {}).get("weights")
    if start is not None and _has_made(path.parent / start.name, digest):
        folders.append(path.parent / start.name)  # a name alone, which another run may have
    others = (folder for folder in folders if (folder / "config.yaml").is_file() and folder.resolve() != path.resolve())
    before = next((folder for folder in others if _has_made(folder, digest) is not False), None)
    after = _existing_run(before) if before is not None else None
    return CellRun(seed=int(config.get("seed", 0)), path=path, after=after, metric=metric)


def _has_made(folder: Path, digest: str | None) -> bool | None:
    """Return whether a checkpoint of a run is the one with this list of files; None: there is nothing to tell by."""
    markers = [*folder.glob(f"{CHECKPOINTS}/*/{MARKER}")]
    return any(file_digest(marker) == digest for marker in markers) if markers and digest is not None else None


def _labels(members: Sequence[Overview]) -> Iterator[str]:
    """Yield the label of each run: the algorithm's name, with the values, or the folder, by which its runs differ."""
    chains = [[RunDir.read(link.path).config for link in _existing_run(run.run.path).chain] for run in members]
    names = []
    for chain in chains:
        # A chain that begins with a run from another one has lost that.
        lost = [f"({Path(chain[0]['start']['run']).name} is not here)"] if chain[0].get("start") else []
        names.append("+".join([*lost, *(str(config["algo"]["name"]) for config in chain)]))
    settings = [
        {
            f"{config['algo']['name']}.{path}" if before else path: value
            for before, config in zip([*[True] * (len(chain) - 1), False], chain, strict=True)
            for path, value in settings_in(config, STARTED if config.get("start") else NOT_VARIANTS).items()
        }
        for chain in chains
    ]
    labels: list[str] = []
    for name, values in zip(names, settings, strict=True):
        same = [other for other_name, other in zip(names, settings, strict=True) if other_name == name]
        # A mapping that another run has not (`algo.distill`, `model.lora`) is a difference, too.
        paths = [path for path in values if len({repr(other.get(path)) for other in same}) > 1]
        labels.append(" ".join([name, *(f"{path}={literal(values[path])}" for path in paths)]))
    # Finished runs of one config and seed, as before and after the user's own code was changed, are rows by folder.
    finished = Counter((label, run.get("seed", 0)) for label, run in zip(labels, members, strict=True) if run.summary)
    for label, run in zip(labels, members, strict=True):
        several = run.summary and finished[label, run.get("seed", 0)] > 1
        yield f"{label} ({run.run.path.name})" if several else label


def _one_per_seed(row: str, runs: Sequence[Overview], notes: list[str]) -> list[Overview]:
    """Keep one run per seed, in the order of seeds: of repeated runs the one with the most steps."""
    best: dict[int, Overview] = {}
    # A finished run first, then the one with more steps.
    for run in sorted(runs, key=lambda run: (int(run.get("seed", 0)), not run.summary, -run.done)):
        seed = int(run.get("seed", 0))
        if (best_run := best.setdefault(seed, run)) is not run:
            notes.append(f"{run.run.path}: left out, {best_run.run.path} is {row} with seed {seed} too")
    return [*best.values()]
