"""`mmrl compare`: several runs; a comparison starts what is missing and shows all side by side."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pydantic import Field

from mmrl.config import StageConfig, StagedCommandConfig
from mmrl.config.base import Section
from mmrl.errors import ConfigError, Stopped, unknown
from mmrl.report.compare import Comparison, compare_runs
from mmrl.report.html import check_docs, write_comparison, write_docs
from mmrl.report.overview import damage_named, find_runs
from mmrl.report.tables import comparison_text
from mmrl.run.check import check_all
from mmrl.run.queue import QueuedRun, RunQueue, read_as, whole_numbers
from mmrl.run.settle import allocate
from mmrl.system.conf import conf_dir, later_wins, options, user_dirs
from mmrl.system.stop import stoppable
from mmrl.tasks import TASKS

TOP = Path("outputs") / "compare"
KEYS = ("plan", "algo", "task", "seed", "name", "jobs", "runs", "out", "docs")
"""Keys of the command itself; all others are overrides of its runs."""

Compose = Callable[[Sequence[str]], StageConfig | StagedCommandConfig]
"""Overrides to a validated config; raises `ConfigError`. Composition is the command line's: Hydra is not known here."""


class ComparisonPart(Section):
    """Algorithms that are compared with each other on each of some tasks."""

    task: tuple[str, ...] = Field(min_length=1)
    algo: tuple[str, ...] = Field(min_length=1, description="names; A+B is the list of stages [A, B]")
    settings: tuple[str, ...] = Field((), description="overrides of every run of the part")


class ComparisonFile(Section):
    """`conf/compare/<name>.yaml`; settings are overrides as on the command line, later ones win."""

    seed: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    settings: tuple[str, ...] = Field((), description="overrides of every run")
    parts: tuple[ComparisonPart, ...] = Field(min_length=1)
    algo: Mapping[str, tuple[str, ...]] = Field({}, description="overrides of every run of an algorithm")


def read_comparison(path: Path) -> ComparisonFile:
    """Read and validate a comparison file.

    Raises:
        ConfigError: every problem in it, with the file's name.
    """
    file = read_as(ComparisonFile, path, "plan")
    known = {algo for part in file.parts for algo in part.algo}
    # A misspelt name would leave its settings without effect.
    stray = [f"plan: {path}: algo.{name}: no part runs this algorithm" for name in file.algo if name not in known]
    if stray:
        raise ConfigError(stray)
    return file


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """The words after `mmrl compare`."""

    given: Mapping[str, str]
    """The command's own keys, as typed."""
    paths: Sequence[str]
    """Run directories, or folders of them."""
    overrides: Sequence[str]
    """Of every run, as typed."""
    override_keys: Sequence[str]
    config_dir: str | None

    @property
    def of_existing_runs(self) -> bool:
        """Whether run directories are named; nothing is started then."""
        return bool(self.paths) or "runs" in self.given

    def listed(self, key: str) -> tuple[str, ...]:
        """The parts of a list, each once."""
        text = self.given.get(key, "").strip("[]")
        return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def look_at_runs(request: ComparisonRequest) -> int:
    """Compare runs that are there. Returns the exit code."""
    given = request.given
    stray = [key for key in given if key not in ("runs", "name", "out", "docs")] + list(request.override_keys)
    problems = [f"{key}: has no effect on runs that are there; leave it or the run directories out" for key in stray]
    paths = [Path(path) for path in dict.fromkeys([*request.paths, *request.listed("runs")])]
    problems += [] if paths else ["runs: got an empty list, expected run directories"]
    problems += _name_problems(given.get("name"))
    if problems:
        raise ConfigError(problems)
    runs = find_runs(paths)
    # A folder of runs is a comparison by itself and is named by it; single run directories are not.
    one_folder = len(paths) == 1 and runs[0].resolve() != paths[0].resolve()
    name = given.get("name") or (paths[0].resolve().name if one_folder else "runs")
    # Before the runs are read, which takes a while: a document without a place for the table is refused at once.
    if "docs" in given:
        check_docs(Path(given["docs"]), name)
    if "out" in given:
        out = Path(given["out"])
    else:
        out = paths[0] if one_folder else allocate(TOP, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    with damage_named(" ".join(map(str, paths))):
        comparison = compare_runs(runs, name, main_metrics())
        _show(comparison, out, given.get("docs"))
    return 0


def run_comparison(request: ComparisonRequest, compose: Compose) -> int:
    """Start and resume runs, then compare them. Returns the exit code."""
    given = request.given
    name = given.get("name") or given.get("plan") or "default"
    at_once, runs = _checked(request, name, compose)
    out = Path(given["out"]) if "out" in given else TOP / name
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    print(f"comparison {name}: {count} below {TOP / name}, {at_once} at once", flush=True)

    def so_far(notes: Sequence[str] = ()) -> Comparison:
        comparison = compare_runs(find_runs([TOP / name]), name, main_metrics())
        return replace(comparison, notes=(*comparison.notes, *notes))

    def redraw() -> None:
        try:
            write_comparison(so_far(), out)
        # Hours of training must not end because a chart could not be drawn.
        except Exception as error:  # a drawing problem must not stop the runs; the end shows it
            print(f"comparison not drawn ({type(error).__name__}: {error})", file=sys.stderr)

    with stoppable(), output() as (say, show):
        try:
            failed = RunQueue(runs, at_once, request.config_dir, say, show, redraw).run()
        except KeyboardInterrupt as stop:
            say("stopped; the same command continues where this one stopped")
            return stop.exit_code if isinstance(stop, Stopped) else 130
    notes = [f"{run.name}: failed: {run.trouble()}" for run in runs if run.code != 0]
    # Nothing was even begun, so there is nothing to compare; the reasons are all that can be said.
    if not any((run.path / "config.yaml").is_file() for run in runs):
        print("\n".join(f"error: {note}" for note in notes), file=sys.stderr)
        return 1
    _show(so_far(notes), out, given.get("docs"))
    if failed:
        print(f"error: {failed} of {len(runs)} runs failed; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def _checked(request: ComparisonRequest, name: str, compose: Compose) -> tuple[int, list[QueuedRun]]:
    """How many runs at once, and the runs; nothing is started before all are known to be right.

    Raises:
        ConfigError: every problem of the words, else of the runs' configs, else of their directories.
    """
    problems: list[str] = []
    file = _requested(request, problems)
    (at_once,) = whole_numbers([request.given.get("jobs", "1")], "jobs", 1, problems)
    problems += _name_problems(name)
    problems += [
        f"{key}: a comparison gives each run its own directory; leave it out, or set name="
        for key in request.override_keys
        if key in ("run.dir", "resume")
    ]
    if "docs" in request.given:
        problems += _problems_of(lambda: check_docs(Path(request.given["docs"]), name))
    _raise(problems)
    runs = _runs(file, request, TOP / name, at_once, compose)
    # Seeds of one pair differ in nothing that a check looks at, and each check may ask servers.
    first = {(run.task, run.algo): run.config for run in reversed(runs)}
    check_all(list(first.values()))
    _raise([problem for run in runs for problem in _problems_of(run.state)])
    return at_once, runs


def _problems_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return error.problems
    return []


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def _show(comparison: Comparison, out: Path, docs: str | None) -> None:
    """Print, write, and fill the document."""
    print(comparison_text(comparison))
    files = write_comparison(comparison, out)
    if docs is not None:
        files += write_docs(comparison, Path(docs))
    print("\nwritten: " + ", ".join(map(str, files)))


def _requested(request: ComparisonRequest, problems: list[str]) -> ComparisonFile:
    """The comparison's file or one made from `algo=`, `task=` and `seed=`; with a file, these choose from it."""
    chosen = {key: request.listed(key) for key in ("algo", "task")}
    seeds = whole_numbers(request.listed("seed"), "seed", 0, problems)
    for key, names in chosen.items():
        known = options(key, request.config_dir)
        problems += [unknown(key, part, known) for name in names for part in name.split("+") if part not in known]
        problems += [f"{key}: got an empty list, expected one or more names"] * (key in request.given and not names)
    plan = request.given.get("plan")
    if plan is None:
        if "algo" not in request.given:
            problems.append(
                "algo: missing, expected algorithms to compare (algo=a,b), a plan (plan=mini), or run directories"
            )
        _raise(problems)
        part = ComparisonPart(task=chosen["task"] or ("hotpotqa",), algo=chosen["algo"])
        return ComparisonFile(parts=(part,), seed=seeds or (0, 1, 2))
    file = read_comparison(_comparison_path(plan, request.config_dir))
    for key, names in chosen.items():
        has = {name for part in file.parts for name in (part.algo if key == "algo" else part.task)}
        problems += [unknown(f"{key} (of plan {plan})", name, has) for name in names if name not in has]
    # A plan's settings belong to its parts, so choosing from it takes parts apart and leaves their settings.
    parts = []
    for part in file.parts:
        algos = tuple(name for name in part.algo if not chosen["algo"] or name in chosen["algo"])
        tasks = tuple(name for name in part.task if not chosen["task"] or name in chosen["task"])
        if algos and tasks:
            parts.append(part.model_copy(update={"algo": algos, "task": tasks}))
    if not parts and not problems:
        problems.append(f"algo, task: plan {plan} runs none of these algorithms on these tasks")
    return file.model_copy(update={"parts": tuple(parts), **({"seed": seeds} if seeds else {})})


def _comparison_path(name: str, config_dir: str | None) -> Path:
    folders = [folder / "compare" for folder in (*user_dirs(config_dir), conf_dir())]
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    if name not in names:
        raise ConfigError(unknown("plan", name, names))
    return next(folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file())


def _runs(
    file: ComparisonFile, request: ComparisonRequest, top: Path, at_once: int, compose: Compose
) -> list[QueuedRun]:
    """Seed by seed, so that one seed of everything is there early.

    Raises:
        ConfigError: the problems of all runs together.
    """
    problems: list[str] = []
    runs: dict[Path, QueuedRun] = {}
    metrics = main_metrics()
    # In the overrides too, not in the environment alone: config.yaml must say how a run was made.
    single = ["hardware.threads=1"] if at_once > 1 else []
    every = [
        (seed, part, task, algo)
        for seed in file.seed
        for part in file.parts
        for task in part.task
        for algo in part.algo
    ]
    for seed, part, task, algo in every:
        settings = [*file.settings, *part.settings, *file.algo.get(algo, ()), *single, *request.overrides]
        words = later_wins([f"task={task}", method_word(algo), f"seed={seed}", *settings])
        path = top / task / algo / f"s{seed}"
        try:
            config = compose(words)
        except ConfigError as error:
            problems += error.problems
            continue
        # Parts may overlap; the first to name a run decides its settings.
        if path not in runs:
            runs[path] = QueuedRun(task, algo, seed, words, config, path, metrics.get(config.task.name, "reward"))
    _raise(problems)
    return list(runs.values())


def method_word(algo: str) -> str:
    """The override that chooses an algorithm of a comparison; `A+B` is the list of stages [A, B]."""
    return f"stages=[{algo.replace('+', ',')}]" if "+" in algo else f"algo={algo}"


def main_metrics() -> dict[str, str]:
    """Task -> its main metric, of tasks whose class says it."""
    return {name: str(task.main_metric) for name, task in TASKS.items() if hasattr(task, "main_metric")}


def _name_problems(name: str | None) -> list[str]:
    fine = name is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
    return [] if fine else [f"name: got '{name}', expected letters, digits, '.', '_' or '-'"]


@contextmanager
def output() -> Iterator[tuple[Callable[[str], None], Callable[[Sequence[str]], None] | None]]:
    """How to print a line that stays, and lines that are replaced (None without a terminal)."""
    if not sys.stdout.isatty():
        yield lambda text: print(text, flush=True), None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    # Without highlighting: rich would colour numbers and paths within names.
    console = Console(highlight=False)
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        yield lambda text: console.print(Text(text)), lambda lines: live.update(Text("\n".join(lines)))
