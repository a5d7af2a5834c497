"""`mmrl compare`: plan, run and show a set of runs; or compare existing runs.

Every run lies in a folder named by the digest of its config, so sets share runs, and the same command continues what
was stopped.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mmrl.config.base import PathText, Section
from mmrl.errors import ConfigError, Stopped, gathered, print_error, refuse, unknown
from mmrl.report.overview import damage_named, find_runs
from mmrl.run.check import check_all
from mmrl.run.settle import allocate
from mmrl.sets.cells import SetResult
from mmrl.sets.found import set_of_run_dirs
from mmrl.sets.page import SetPage, redraw, refuse_foreign
from mmrl.sets.plan import TOP, Compose, Planner
from mmrl.sets.queue import RunQueue, by_cell, run_state
from mmrl.sets.spec import Column, Row, SetSpec
from mmrl.sets.words import is_below, read_set, set_folders, words_of_steps
from mmrl.system.conf import row_keys
from mmrl.system.stop import stoppable


class RunKeys(Section):
    """Keys of a command that runs a set; all others are overrides of the runs."""

    rows: str | None = Field(None, description="names of rows; null: all")
    columns: str | None = Field(None, description="names of columns; null: all")
    seed: tuple[Annotated[int, Field(ge=0, strict=False)], ...] = Field((), description="none: the set's")
    jobs: int = Field(1, ge=1, description="runs at once")
    through: str | None = Field(None, description="a command that starts each run")
    do: Literal["run", "plan", "show"] = "run"
    out: PathText | None = Field(None, description="folder of the page; null: one below outputs/sets")

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


class SetKeys(RunKeys):
    """Keys of `mmrl compare`."""

    set: str | None = Field(None, description="a file conf/set/NAME.yaml, in place of algo= and task=")
    algo: tuple[str, ...] = ()
    task: tuple[str, ...] = Field(("hotpotqa",), min_length=1)
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the page's folder")


@dataclass(frozen=True, slots=True)
class SetRequest:
    """Arguments of a command that runs a set."""

    names: Sequence[str]
    """Words that are no `KEY=VALUE`."""
    keys: RunKeys
    overrides: Sequence[str]
    """Settings of every run, as typed."""
    config_dir: str | None
    command: Sequence[str] = ("mmrl", "compare")
    problems: list[str] = field(default_factory=list)
    """Those of `keys`, to be refused with those of the runs."""


def compare(request: SetRequest, compose: Compose) -> int:
    """Run `mmrl compare`: of run directories, of algorithms on tasks, or of a set's file. Returns the exit code.

    Raises:
        ConfigError: every problem of the words, the file or the runs' configs; nothing has started.
    """
    try:
        return _compare(request, compose)
    except ConfigError as error:
        problems = dict.fromkeys([*request.problems, *error.problems])
        raise ConfigError(_by_step(problem, request.overrides) for problem in problems) from None


def _compare(request: SetRequest, compose: Compose) -> int:
    keys = request.keys
    assert isinstance(keys, SetKeys)
    if request.names:
        return _compare_runs(request, keys)
    if keys.set is not None:
        stray = [key for key in ("algo", "task") if key in keys.model_fields_set]
        refuse(f"{key}: a set's file says it; leave it or set= out" for key in stray)
        spec = read_set(SetSpec, keys.set, set_folders(request.config_dir), request.config_dir)
        # What is typed changes or selects.
        typed, seeds = request.overrides, keys.seed
    elif keys.algo:
        # What is typed makes the set, `seed=` too.
        spec, typed, seeds = _spec_of_algorithms(request, keys), (), ()
    else:
        raise ConfigError("algo: missing, expected algorithms (algo=a,b), a set (set=NAME) or run directories")
    name = keys.name or keys.set or _default_name(spec, keys.algo, request.config_dir)
    planner = Planner(spec, compose, typed, typed, config_dir=request.config_dir)
    return run_set(request, name, planner, seeds, TOP / name)


def _default_name(spec: SetSpec, algos: Sequence[str], config_dir: str | None) -> str:
    """Return the name of a comparison that was given none: the same for the same one, another for any other."""
    compared = json.dumps([spec.model_dump(mode="json"), config_dir])
    return f"{'-'.join(algos).replace('+', '-')[:60]}-{hashlib.sha256(compared.encode()).hexdigest()[:8]}"


def _by_step(problem: str, words: Sequence[str]) -> str:
    """Return a problem `ROW: KEY: …` with the key as it was typed, where it was typed for the row's last step."""
    row, _, rest = problem.partition(": ")
    key = f"{row.partition(' on ')[0].rpartition('+')[2]}.{rest.partition(':')[0]}"
    typed = {word.lstrip("+~").partition("=")[0] for word in words}
    return f"{key}:{rest.partition(':')[2]}" if key in typed else problem


def _spec_of_algorithms(request: SetRequest, keys: SetKeys) -> SetSpec:
    """Return the set of `algo=A,B+C task=T,U`: a row for the policy after each step."""
    algos, tasks = keys.algo, keys.task
    steps = words_of_steps(
        request.overrides, [*dict.fromkeys("+".join(algos).split("+"))], request.config_dir, request.problems
    )
    rows: dict[str, Row] = {}
    for names in (algo.split("+") for algo in algos):
        for position, step in enumerate(names):
            start = "+".join(names[:position])
            rows["+".join(filter(None, [start, step]))] = Row.model_validate({"from": start, "train": steps[step]})
    columns, where = {task: Column(train=(f"task={task}",)) for task in tasks}, f"on {', '.join(tasks)}"
    experiments = [word for word in request.overrides if is_below(word, ("experiment",))]
    # The default task would win over that of an experiment.
    if "task" not in keys.model_fields_set and {"task", "task.name"} & {*row_keys(experiments, request.config_dir)}:
        columns, where = {"": Column()}, f"with {', '.join(experiments)}"
    shows = f"{', '.join(algos)} {where}"
    alone = not keys.seed and len(algos) == 1 and "+" in algos[0]
    seeds, notes = keys.seed or ((0,) if alone else (0, 1, 2)), (ONE_SEED,) if alone else ()
    return SetSpec(shows=shows, seeds=seeds, rows=rows, columns=columns, notes=notes)


def _compare_runs(request: SetRequest, keys: SetKeys) -> int:
    """Show finished or running runs side by side."""
    stray = [key for key in keys.model_fields_set if key not in ("name", "out")]
    stray += [word.partition("=")[0] for word in request.overrides]
    says = "has no effect on runs that are there; leave it or the run directories out"
    refuse([*request.problems, *(f"{key}: {says}" for key in stray)])
    paths = [Path(path) for path in dict.fromkeys(request.names)]
    runs = find_runs(paths)
    # A folder of runs is a set with the folder's name; single run directories have no common name.
    one_folder = len(paths) == 1 and runs[0].resolve() != paths[0].resolve()
    with damage_named(" ".join(map(str, paths))):
        result = set_of_run_dirs(keys.name or (paths[0].resolve().name if one_folder else "runs"), runs)
    result = replace(result, command=typed_command(request))
    out = keys.out or (paths[0] if one_folder else allocate(TOP, keys.name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"))
    refuse_foreign(Path(out))
    _show(SetPage(result), Path(out))
    return 0


# --- what runs


def run_set(
    request: SetRequest,
    name: str,
    planner: Planner,
    seeds: Sequence[int],
    folder: Path,
    page: Callable[[Any], SetPage] = SetPage,
) -> int:
    """Plan, run or show a set. Returns the exit code.

    Args:
        seeds: typed ones that select; none: the set's.
        folder: of its page.
        page: of the planner's kind of result.
    """
    keys, spec = request.keys, planner.spec
    problems = [*request.problems]
    rows = _selected("rows", keys.rows, [row for row, method in spec.rows.items() if method.shown], problems)
    columns = _selected("columns", keys.columns, [*spec.columns], problems)
    if any(word.lstrip("+").startswith("run.dir=") for word in request.overrides):
        problems.append("run.dir: a set has a directory for each run; leave it out")
    launcher = shlex.split(keys.through or "")
    # Side by side on this machine; a scheduler gives each run what it asks for.
    threads = any(is_below(word, ("hardware.threads",)) for word in request.overrides)
    single = ["hardware.threads=1"] if keys.jobs > 1 and not launcher and not threads else []
    planner.overrides = [*single, *planner.overrides]
    with gathered(problems):
        plan = planner.plan(name, rows, columns, seeds)
    refuse(problems)
    plan = replace(plan, command=typed_command(request), settings=request.overrides)
    if keys.do == "plan":
        print(_plan_text(plan, f"{keys.through} " if launcher else ""))
        return 0
    # The page of a selection, or of other settings, must not overwrite the page of the whole set.
    part = keys.rows or keys.columns or seeds or any(run.other for run in plan.queue)
    out = Path(keys.out) if keys.out else folder / ("selected" if part else "")
    refuse_foreign(out)
    if keys.do == "show":
        _show(page(plan), out)
        return 0
    # A result caches its runs, so each page gets a fresh one.
    return _run(plan, keys.jobs, launcher, request.config_dir, lambda: page(replace(plan)), out)


def typed_command(request: SetRequest) -> list[str]:
    """Return the command without what changes no number: how many runs at once, where, and what to do."""
    keys = request.keys
    words = [*request.command, *request.names]
    typed = keys.model_fields_set - {"jobs", "through", "do", "out"}
    for key in (key for key in type(keys).model_fields if key in typed):
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
    # one at least, by which the other words are judged
    return [name for name in names if name.casefold() in [part.casefold() for part in parts]] or [*names[:1]]


def _run(
    plan: SetResult,
    at_once: int,
    launcher: Sequence[str],
    config_dir: str | None,
    page: Callable[[], SetPage],
    out: Path,
) -> int:
    problems: list[str] = []
    missing = []
    for run in plan.queue:
        with gathered(problems):
            missing += [run] if run_state(run.path) != "finished" else []
    refuse(dict.fromkeys(problems))
    print(plan.opening(missing), flush=True)
    first = [runs[0] for runs in by_cell(missing).values()]
    if launcher:
        from mmrl.commands.plan import problems_elsewhere

        # The data and devices of another machine are checked there, when each run starts.
        refuse(dict.fromkeys([problem for run in first for problem in problems_elsewhere(run.config)]))
    else:
        # The policy that an evaluation takes is checked when it starts. What trains from another run is checked now
        # with what that run starts from: its own start comes hours later.
        for run in first:
            if run.after is None or run.command == "train":
                with gathered(problems):
                    check_all([run.config.in_folder(None)])
        refuse(dict.fromkeys(problems))

    queue = RunQueue(plan.queue, at_once, config_dir, lambda: redraw(page, out), launcher)
    with stoppable():
        try:
            queue.run()
        except KeyboardInterrupt as stop:
            print("stopped; the same command continues where this one stopped", file=sys.stderr)
            return stop.exit_code if isinstance(stop, Stopped) else 130
    _show(page(), out)
    if not (failed := [run for run in plan.queue if run.code]):
        return 0
    lines = [f"{run.name}: {run.failure()}" for run in failed]
    lines.append(f"{len(failed)} of {len(plan.queue)} runs failed; the same command tries them again")
    print_error(ConfigError(lines))
    return 1


def _show(page: SetPage, out: Path) -> None:
    print(page.text())
    print("\nwritten: " + ", ".join(map(str, page.write(out))))


def _plan_text(plan: SetResult, launcher: str) -> str:
    parts = [plan.opening([run for run in plan.queue if run_state(run.path) != "finished"])]
    for (command, row, column), runs in by_cell(plan.queue).items():
        states = [(run.seed, run_state(run.path)) for run in runs]
        seeds = " ".join(f"{seed}{'' if state == 'new' else f' ({state})'}" for seed, state in states)
        where = f" on {column}" if column else ""
        parts.append(f"{command} {row}{where}, seeds {seeds}:\n  {launcher}{runs[0].command_line()}")
    return "\n\n".join(parts)
