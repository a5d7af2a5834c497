"""`mmrl table` and `mmrl compare`: plan, run and show a set of runs; or compare existing runs.

Every run lies in a folder named by the digest of its config, so sets share runs, and the same command continues what
was stopped.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from mmrl.config.base import Section
from mmrl.errors import ConfigError, Stopped, gathered, print_error, refuse, unknown
from mmrl.report.overview import damage_named, find_runs
from mmrl.report.text import align
from mmrl.run.check import check_all
from mmrl.run.settle import allocate
from mmrl.sets.cells import SetResult
from mmrl.sets.cost import cost_text
from mmrl.sets.found import found_set
from mmrl.sets.page import SetPage, redraw
from mmrl.sets.plan import TOP, Compose, Planner
from mmrl.sets.queue import RunQueue, SetRun, by_cell, state_of
from mmrl.sets.spec import Column, Row, SetSpec
from mmrl.sets.words import is_below, read_set, scales_of, set_names, words_of_steps
from mmrl.system.stop import stoppable


class SetKeys(Section):
    """Keys of the set commands; all others are overrides of the runs."""

    rows: str | None = Field(None, description="names of rows; null: all")
    columns: str | None = Field(None, description="names of columns; null: all")
    seed: tuple[Annotated[int, Field(ge=0, strict=False)], ...] = Field((), description="none: the set's")
    scale: str | None = Field(None, description="null: the set's first")
    jobs: int = Field(1, ge=1, description="runs at once")
    through: str | None = Field(None, description="a command that starts each run")
    do: Literal["run", "plan", "show"] = "run"
    out: str | None = Field(None, description="folder of the page; null: one below outputs/sets")
    algo: tuple[str, ...] = ()
    task: tuple[str, ...] = ("hotpotqa",)
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the page's folder")

    @field_validator("through")
    @classmethod
    def _is_a_command(cls, text: str | None) -> str | None:
        try:
            words = shlex.split(text) if text is not None else None
        except ValueError:
            words = []
        if words is not None and not (words and shutil.which(words[0])):
            raise ValueError(f"got {text!r}, expected a command that is here, such as 'srun --gpus-per-node=8'")
        return text


ONE_SEED = "one seed, as algo=A+B has where none is typed; seed=0,1,2 shows how much the others differ"
TABLE_KEYS = tuple(key for key in SetKeys.model_fields if key not in ("algo", "task", "name"))
"""Keys of `mmrl table`; `mmrl compare` has all."""


@dataclass(frozen=True, slots=True)
class SetRequest:
    """Arguments of `mmrl table` or `mmrl compare`."""

    names: Sequence[str]
    """Words that are no `KEY=VALUE`."""
    keys: SetKeys
    overrides: Sequence[str]
    """Settings of every run, as typed."""
    config_dir: str | None


def table(request: SetRequest, compose: Compose) -> int:
    """Run `mmrl table`. Returns the exit code.

    Raises:
        ConfigError: every problem of the words, the files or the runs' configs; nothing has started.
    """
    if len(request.names) > 1:
        raise ConfigError(f"table: got {len(request.names)} names, expected one")
    if request.names:
        (name,) = request.names
        return _run_set(request, name, read_set(name, request.config_dir), compose)
    if request.keys.model_fields_set or request.overrides:
        raise ConfigError("table: which one? `mmrl table` lists them")
    print(_listing(request.config_dir))
    return 0


def compare(request: SetRequest, compose: Compose) -> int:
    """Run `mmrl compare`: of run directories, or of algorithms on tasks. Returns the exit code."""
    keys = request.keys
    if request.names:
        return _compare_runs(request)
    if not keys.algo:
        raise ConfigError("algo: missing, expected algorithms (algo=a,b) or run directories")
    return _run_set(request, keys.name or "default", _spec_of_algorithms(request), compose, own=True)


def _spec_of_algorithms(request: SetRequest) -> SetSpec:
    """Return the set of `algo=A,B+C task=T,U`: a row for the policy after each step."""
    algos, tasks = request.keys.algo, request.keys.task
    steps = words_of_steps(request.overrides, [*dict.fromkeys("+".join(algos).split("+"))], request.config_dir)
    rows: dict[str, Row] = {}
    for names in (algo.split("+") for algo in algos):
        for position, step in enumerate(names):
            start = "+".join(names[:position])
            rows["+".join(filter(None, [start, step]))] = Row.model_validate({"from": start, "train": steps[step]})
    columns = {task: Column(train=(f"task={task}",)) for task in tasks}
    shows = f"{', '.join(algos)} on {', '.join(tasks)}"
    alone = not request.keys.seed and len(algos) == 1 and "+" in algos[0]
    seeds, notes = request.keys.seed or ((0,) if alone else (0, 1, 2)), (ONE_SEED,) if alone else ()
    return SetSpec(shows=shows, seeds=seeds, rows=rows, columns=columns, notes=notes)


def _compare_runs(request: SetRequest) -> int:
    """Show finished or running runs side by side."""
    keys = request.keys
    stray = [key for key in keys.model_fields_set if key not in ("name", "out")]
    stray += [word.partition("=")[0] for word in request.overrides]
    if stray:
        says = "has no effect on runs that are there; leave it or the run directories out"
        raise ConfigError(f"{key}: {says}" for key in stray)
    paths = [Path(path) for path in dict.fromkeys(request.names)]
    runs = find_runs(paths)
    # A folder of runs is a set with the folder's name; single run directories have no common name.
    one_folder = len(paths) == 1 and runs[0].resolve() != paths[0].resolve()
    with damage_named(" ".join(map(str, paths))):
        result = found_set(keys.name or (paths[0].resolve().name if one_folder else "runs"), runs)
    result = replace(result, command=_typed(request, False))
    out = keys.out or (paths[0] if one_folder else allocate(TOP, keys.name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"))
    _show(result, Path(out))
    return 0


# --- what runs


def _run_set(request: SetRequest, name: str, spec: SetSpec, compose: Compose, own: bool = False) -> int:
    """Plan, run or show a set.

    Args:
        own: what is typed makes the set, as in `mmrl compare`; else a file does, and what is typed changes or selects.
    """
    keys, scales = request.keys, scales_of(spec)
    typed, seeds = ((), ()) if own else (request.overrides, keys.seed)
    problems: list[str] = []
    scale = keys.scale or scales[0]
    if scale not in scales:
        has = f"words for {', '.join(scales)} alone" if scales != [""] else "no scales"
        problems.append(f"scale: got {scale}, and {name} has {has}")
    rows = _selected("rows", keys.rows, [row for row, method in spec.rows.items() if method.shown], problems)
    columns = _selected("columns", keys.columns, [*spec.columns], problems)
    if any(word.lstrip("+").startswith("run.dir=") for word in request.overrides):
        problems.append("run.dir: a set has a directory for each run; leave it out")
    refuse(problems)
    through = shlex.split(keys.through or "")
    # Side by side on this machine; a scheduler gives each run what it asks for.
    threads = any(is_below(word, ("hardware.threads",)) for word in request.overrides)
    single = ["hardware.threads=1"] if keys.jobs > 1 and not through and not threads else []
    planner = Planner(spec, scale, compose, [*single, *typed], typed, config_dir=request.config_dir)
    plan = planner.plan(name, rows, columns, seeds)
    plan = replace(plan, command=_typed(request, not own), settings=request.overrides)
    if keys.do == "plan":
        print(_plan_text(plan, f"{keys.through} " if through else ""))
        return 0
    # The page of a selection, or of other settings, must not overwrite the page of the whole set.
    part = keys.rows or keys.columns or seeds or any(run.other for run in plan.queue)
    out = Path(keys.out) if keys.out else TOP / name / scale / ("selected" if part else "")
    if keys.do == "show":
        _show(plan, out)
        return 0
    return _run(plan, keys.jobs, through, request.config_dir, out)


def _typed(request: SetRequest, table: bool) -> list[str]:
    """Return the command without what changes no number: how many runs at once, where, and what to do."""
    keys = request.keys
    words = ["mmrl", "table" if table else "compare", *request.names]
    for key in (key for key in SetKeys.model_fields if key in keys.model_fields_set - {"jobs", "through", "do", "out"}):
        value = getattr(keys, key)
        words.append(f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return [*words, *request.overrides, *(["--config-dir", request.config_dir] if request.config_dir else [])]


def _selected(key: str, text: str | None, names: Sequence[str], problems: list[str]) -> list[str]:
    """Return the listed names in the set's order, whatever their case; all names for None."""
    if text is None:
        return list(names)
    # A name may contain commas and parentheses, so the whole text is tried as a name first.
    folded = [name.casefold() for name in names]
    parts = [text] if text.casefold() in folded else [part.strip() for part in text.strip("[]").split(",")]
    problems += [unknown(key, part, names) for part in parts if part.casefold() not in folded]
    return [name for name in names if name.casefold() in [part.casefold() for part in parts]]


def _run(plan: SetResult, at_once: int, through: Sequence[str], config_dir: str | None, out: Path) -> int:
    problems: list[str] = []
    missing = []
    for run in plan.queue:
        with gathered(problems):
            missing += [run] if state_of(run.path) != "finished" else []
    refuse(dict.fromkeys(problems))
    print(_head(plan, missing), flush=True)
    first = [runs[0] for runs in by_cell(missing).values()]
    if through:
        from mmrl.run.plan import problems_elsewhere

        # The data and devices of another machine are checked there, when each run starts.
        refuse(dict.fromkeys([problem for run in first for problem in problems_elsewhere(run.config)]))
    else:
        # The policy that an evaluation takes is checked when it starts. What trains from another run is checked now
        # with what that run starts from: its own start comes hours later.
        for run in first:
            if run.after is None or run.command == "train":
                with gathered(problems):
                    check_all([run.config.in_folder(None)], [word.partition("=")[0].lstrip("+~") for word in run.words])
        refuse(dict.fromkeys(problems))

    # A result caches its runs, so each page gets a fresh one.
    queue = RunQueue(plan.queue, at_once, config_dir, lambda: redraw(lambda: SetPage(replace(plan)), out), through)
    with stoppable():
        try:
            queue.run()
        except KeyboardInterrupt as stop:
            print("stopped; the same command continues where this one stopped", file=sys.stderr)
            return stop.exit_code if isinstance(stop, Stopped) else 130
    _show(replace(plan), out)
    if not (failed := [run for run in plan.queue if run.code]):
        return 0
    lines = [f"{run.name}: {run.failure()}" for run in failed]
    lines.append(f"{len(failed)} of {len(plan.queue)} runs failed; the same command tries them again")
    print_error(ConfigError(lines))
    return 1


def _show(result: SetResult, out: Path) -> None:
    page = SetPage(result)
    print(page.text())
    print("\nwritten: " + ", ".join(map(str, page.write(out))))


def _head(plan: SetResult, missing: Sequence[SetRun]) -> str:
    """Return the name and runs of a set, and at the scales of real models their cost."""
    source = plan.spec.source
    where = f" (arXiv {source.arxiv}, {source.at})" if source else ""
    scale = f" at scale {plan.scale}" if plan.scale else ""
    lines = [f"set {plan.name}{where}{scale}: {len(plan.queue)} runs, {len(missing)} missing"]
    if plan.scale not in ("", "mini") and missing:
        lines.append(cost_text(plan.spec, missing))
    return "\n\n".join(lines)


def _plan_text(plan: SetResult, through: str) -> str:
    parts = [_head(plan, [run for run in plan.queue if state_of(run.path) != "finished"])]
    for (command, row, column), runs in by_cell(plan.queue).items():
        states = [(run.seed, state_of(run.path)) for run in runs]
        seeds = " ".join(f"{seed}{'' if state == 'new' else f' ({state})'}" for seed, state in states)
        where = f" on {column}" if column else ""
        parts.append(f"{command} {row}{where}, seeds {seeds}:\n  {through}{runs[0].command_line()}")
    return "\n\n".join(parts)


# --- all sets


def _listing(config_dir: str | None) -> str:
    rows = [["set", "paper", "rows x cells", "seeds", "shows"]]
    for name in set_names(config_dir):
        spec = read_set(name, config_dir)
        paper = f"{spec.source.arxiv} {spec.source.at}" if spec.source else ""
        size = f"{sum(row.shown for row in spec.rows.values())} x {len(spec.cells)}"
        rows.append([name, paper, size, str(len(spec.seeds)), spec.shows])
    return align(rows) + "\n\nmmrl table NAME scale=mini runs one here; do=plan says what it will cost"
