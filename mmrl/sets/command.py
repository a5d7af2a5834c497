"""`mmrl table` and `mmrl compare`: a set of runs, planned, run, and shown; and runs that are there side by side.

Every run lies in a folder named by the digest of its config, so sets share runs, and the same command continues what
was stopped.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from mmrl.errors import ConfigError, Stopped, unknown
from mmrl.report.overview import damage_named, find_runs
from mmrl.report.text import align
from mmrl.run.check import check_all
from mmrl.run.settle import allocate
from mmrl.sets.cells import SetResult
from mmrl.sets.cost import cost_text
from mmrl.sets.found import found_set
from mmrl.sets.page import SetPage, redrawn
from mmrl.sets.plan import TOP, Compose, Planner, main_metrics
from mmrl.sets.queue import RunQueue, SetRun
from mmrl.sets.spec import Column, Row, SetSpec
from mmrl.sets.words import read_set, scales_of, set_names
from mmrl.system.conf import chained, conf_dir, options, user_dirs
from mmrl.system.stop import stoppable

DO = ("run", "plan", "show")
TABLE_KEYS = ("rows", "columns", "seed", "scale", "jobs", "through", "do", "out")
"""Keys of the command itself; all others are overrides of its runs."""
COMPARE_KEYS = (*TABLE_KEYS, "algo", "task", "plan", "name")


@dataclass(frozen=True, slots=True)
class SetRequest:
    """The words after `mmrl table` or `mmrl compare`."""

    names: Sequence[str]
    """Words that are no `KEY=VALUE`."""
    keys: Mapping[str, str]
    """The command's own, as typed."""
    overrides: Sequence[str]
    """Of every run, as typed."""
    config_dir: str | None

    @property
    def folders(self) -> list[Path]:
        """Of configs, first wins."""
        return [*user_dirs(self.config_dir), conf_dir()]

    def listed(self, key: str) -> list[str]:
        """The parts of a list, each once."""
        text = self.keys.get(key, "").strip("[]")
        return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def table(request: SetRequest, compose: Compose) -> int:
    """`mmrl table`. Returns the exit code.

    Raises:
        ConfigError: every problem of the words, the files or the runs' configs; nothing has started.
    """
    if len(request.names) > 1:
        raise ConfigError(f"table: got {len(request.names)} names, expected one")
    if request.names:
        (name,) = request.names
        return _go(request, name, read_set(name, request.folders, request.config_dir), compose)
    if request.keys or request.overrides:
        raise ConfigError("table: which one? `mmrl table` lists them")
    print(_listing(request))
    return 0


def compare(request: SetRequest, compose: Compose) -> int:
    """`mmrl compare`: of run directories, of a set, or of algorithms on tasks. Returns the exit code."""
    if request.names:
        return _look(request)
    name = request.keys.get("name") or request.keys.get("plan") or "default"
    problems = _name_problems(name)
    if plan := request.keys.get("plan"):
        problems += [
            f"{key}: has no effect on plan {plan}; choose from it with {other}="
            for key, other in (("algo", "rows"), ("task", "columns"))
            if key in request.keys
        ]
        if problems:
            raise ConfigError(problems)
        return _go(request, name, read_set(plan, request.folders, request.config_dir), compose)
    spec, overrides = _typed_set(request, problems)
    keys = {key: text for key, text in request.keys.items() if key != "seed"}
    return _go(SetRequest((), keys, overrides, request.config_dir), name, spec, compose)


def _typed_set(request: SetRequest, problems: list[str]) -> tuple[SetSpec, list[str]]:
    """The set of `algo=A,B+C task=T,U`, and the overrides of all its runs."""
    algos, tasks = request.listed("algo"), request.listed("task") or ["hotpotqa"]
    seeds = whole_numbers(request.listed("seed"), "seed", 0, problems) or (0, 1, 2)
    known, known_tasks = (options(key, request.config_dir) for key in ("algo", "task"))
    if not algos:
        empty = "got an empty list, expected names" if "algo" in request.keys else "missing, expected algorithms"
        problems.append(f"algo: {empty} (algo=a,b), a plan (plan=mini), or run directories")
    problems += [unknown("algo", part, known) for algo in algos for part in algo.split("+") if part not in known]
    problems += [unknown("task", task, known_tasks) for task in tasks if task not in known_tasks]
    if problems:
        raise ConfigError(problems)
    of_stage = [word.lstrip("+") for word in request.overrides if word.lstrip("+").startswith("stage.")]
    overrides = [word for word in request.overrides if word.lstrip("+") not in of_stage]
    rows: dict[str, Row] = {}
    used: set[str] = set()
    for algo in algos:
        start = ""
        names = [one for part in algo.split("+") for one in chained(part, request.folders)]
        for place, one in enumerate(names, 1):
            row = algo if place == len(names) else "+".join(names[:place])
            words = [word.split(".", 2)[2] for word in of_stage if word.split(".")[1] == one]
            used |= {one} if words else set()
            if row not in rows or row in algos:
                made = {"from": start, "shown": row in algos, "train": (f"algo={one}", *words)}
                rows[row] = Row.model_validate(made)
            start = row
    stray = {word.split(".")[1] for word in of_stage} - used
    if stray:
        raise ConfigError(unknown("stage", name, sorted({n for row in rows for n in row.split("+")})) for name in stray)
    columns = {task: Column(train=(f"task={task}",)) for task in tasks}
    shows = f"{', '.join(algos)} on {', '.join(tasks)}"
    return SetSpec(shows=shows, seeds=seeds, rows=rows, columns=columns), overrides


def _look(request: SetRequest) -> int:
    """Runs that are there."""
    stray = [key for key in request.keys if key not in ("name", "out")]
    stray += [word.partition("=")[0] for word in request.overrides]
    problems = [f"{key}: has no effect on runs that are there; leave it or the run directories out" for key in stray]
    problems += _name_problems(request.keys.get("name", "runs"))
    if problems:
        raise ConfigError(problems)
    paths = [Path(path) for path in dict.fromkeys(request.names)]
    runs = find_runs(paths)
    # A folder of runs is a set by itself and is named by it; single run directories are not.
    one_folder = len(paths) == 1 and runs[0].resolve() != paths[0].resolve()
    name = request.keys.get("name") or (paths[0].resolve().name if one_folder else "runs")
    if "out" in request.keys:
        out = Path(request.keys["out"])
    else:
        out = paths[0] if one_folder else allocate(TOP, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    with damage_named(" ".join(map(str, paths))):
        _show(found_set(name, runs, main_metrics()), out)
    return 0


def _name_problems(name: str) -> list[str]:
    fine = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
    return [] if fine else [f"name: got '{name}', expected letters, digits, '.', '_' or '-'"]


# --- what runs


def _go(request: SetRequest, name: str, spec: SetSpec, compose: Compose) -> int:
    """Plan, run or show a set."""
    keys = request.keys
    do = keys.get("do", "run")
    problems = [] if do in DO else [unknown("do", do, DO)]
    scales = scales_of(spec)
    scale = keys.get("scale", scales[0])
    if scale not in scales:
        has = f"words for {', '.join(scales)} alone" if scales != [""] else "no scales"
        problems.append(f"scale: got {scale}, and {name} has {has}")
    rows = _chosen("rows", keys.get("rows"), [row for row, of in spec.rows.items() if of.shown], problems)
    columns = _chosen("columns", keys.get("columns"), list(spec.columns), problems)
    seeds = whole_numbers(request.listed("seed"), "seed", 0, problems) if "seed" in keys else None
    if seeds == ():
        problems.append("seed: got an empty list, expected whole numbers")
    (at_once,) = whole_numbers([keys.get("jobs", "1")], "jobs", 1, problems)
    problems += _through_problems(keys.get("through"))
    problems += [
        f"{key}: a set has a directory for each run; leave it out"
        for word in request.overrides
        if (key := word.lstrip("+").partition("=")[0]) in ("run.dir", "resume")
    ]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    # Side by side on this machine; a scheduler gives each run what it asks for.
    single = ["hardware.threads=1"] if at_once > 1 and "through" not in keys else []
    plan = Planner(spec, scale, compose, [*single, *request.overrides]).plan(name, rows, columns, seeds)
    through = shlex.split(keys.get("through", ""))
    if do == "plan":
        print(_plan_text(plan, f"{keys['through']} " if through else ""))
        return 0
    whole = not {"rows", "columns", "seed"} & set(keys)
    # A part of a set must not take the place of the whole one's page.
    folder = TOP / name / scale
    out = Path(keys["out"]) if "out" in keys else folder if whole else folder / "selected"
    if do == "show":
        _show(plan, out)
        return 0
    return _run(plan, at_once, through, request.config_dir, out)


def whole_numbers(texts: Sequence[str], key: str, least: int, problems: list[str]) -> tuple[int, ...]:
    """The numbers of a word; a problem, and `least`, for each that is none."""
    numbers = []
    for text in texts:
        fine = bool(re.fullmatch(r"\d{1,9}", text)) and int(text) >= least
        problems += [] if fine else [f"{key}: got '{text}', expected a whole number from {least}"]
        numbers.append(int(text) if fine else least)
    return tuple(numbers)


def _through_problems(command: str | None) -> list[str]:
    """Why runs cannot be started by `through=`."""
    try:
        words = shlex.split(command or "")
    except ValueError as error:
        return [f"through: got {command!r}, which is no command line: {error}"]
    if command is None or (words and shutil.which(words[0])):
        return []
    return [f"through: got {command!r}, expected a command that is here, such as 'srun --gpus-per-node=8'"]


def _chosen(key: str, text: str | None, names: Sequence[str], problems: list[str]) -> list[str]:
    """Names in a list, in whichever case; all for None. In the set's order."""
    if text is None:
        return list(names)
    known = {name.casefold(): name for name in names}
    # A name may hold commas and parentheses of its own: the whole one first.
    parts = (
        [text] if text.casefold() in known else [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    )
    problems += [unknown(key, part, names) for part in parts if part.casefold() not in known]
    if not parts:
        problems.append(f"{key}: got an empty list, expected some of {', '.join(names)}")
    chosen = {known.get(part.casefold()) for part in parts}
    return [name for name in names if name in chosen]


# --- running and showing


def _run(plan: SetResult, at_once: int, through: Sequence[str], config_dir: str | None, out: Path) -> int:
    problems = [problem for run in plan.queue for problem in _problems_of(run.state)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    missing = [run for run in plan.queue if run.state() != "finished"]
    print(_head(plan, missing), flush=True)
    if plan.scale not in ("", "mini") and missing:
        print(cost_text(plan.spec, missing), flush=True)
    # Of seeds of one row one.
    first = {(run.command, run.row, run.column): run for run in reversed(missing)}
    if through:
        from mmrl.run.plan import problems_elsewhere

        # The data and devices of another machine are checked there, when each run starts.
        if problems := [problem for run in first.values() for problem in problems_elsewhere(run.config)]:
            raise ConfigError(dict.fromkeys(problems))
    else:
        # What starts from another run is checked when it starts.
        check_all([run.config.in_folder(None) for run in first.values() if run.after is None])

    redraw = redrawn(lambda: SetPage(replace(plan)).write(out))
    with stoppable():
        try:
            RunQueue(plan.queue, at_once, config_dir, redraw, through).run()
        except KeyboardInterrupt as stop:
            print("stopped; the same command continues where this one stopped")
            return stop.exit_code if isinstance(stop, Stopped) else 130
    _show(replace(plan), out)
    failed = [run for run in plan.queue if run.code]
    for run in failed:
        print(f"error: {run.name}: {run.trouble()}", file=sys.stderr)
    if failed:
        print(
            f"error: {len(failed)} of {len(plan.queue)} runs failed; the same command tries them again", file=sys.stderr
        )
    return 1 if failed else 0


def _problems_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return error.problems
    return []


def _show(result: SetResult, out: Path) -> None:
    page = SetPage(result)
    print(page.text())
    print("\nwritten: " + ", ".join(map(str, page.write(out))))


def _head(plan: SetResult, missing: Sequence[SetRun]) -> str:
    def counted(runs: Sequence[SetRun]) -> str:
        kinds = (("train", "training"), ("eval", "evaluation"))
        counts = [(sum(run.command == command for run in runs), word) for command, word in kinds]
        texts = [f"{count} {word}{'s' if count != 1 else ''}" for count, word in counts if count]
        return " and ".join(texts) or "none"

    source = plan.spec.source
    where = f" (arXiv {source.arxiv}, {source.at})" if source else ""
    at = f" at scale {plan.scale}" if plan.scale else ""
    return f"set {plan.name}{where}{at}: {counted(plan.queue)}; missing: {counted(missing)}"


def _plan_text(plan: SetResult, through: str) -> str:
    missing = [run for run in plan.queue if run.state() != "finished"]
    parts = [_head(plan, missing)]
    if plan.scale not in ("", "mini"):
        parts.append(cost_text(plan.spec, missing))
    alike: dict[tuple[str, str, str], list[SetRun]] = {}
    for run in plan.queue:
        alike.setdefault((run.command, run.row, run.column), []).append(run)
    for (command, row, column), runs in alike.items():
        seeds = " ".join(f"{run.seed}{'' if run.state() == 'new' else f' ({run.state()})'}" for run in runs)
        where = f" on {column}" if column else ""
        parts.append(f"{command} {row}{where}, seeds {seeds}:\n  {through}{runs[0].typed()}")
    return "\n\n".join(parts)


# --- all sets


def _listing(request: SetRequest) -> str:
    rows = [["set", "paper", "rows x cells", "seeds", "done at paper scale", "done at mini scale", "shows"]]
    for name in set_names(request.folders):
        spec = read_set(name, request.folders, request.config_dir)
        scales = scales_of(spec)
        # A set without scales runs on what its words name.
        done = [_done(name, scale) if scale in scales else "-" for scale in ("paper", "mini")]
        done = done if scales != [""] else ["-", _done(name, "")]
        paper = f"{spec.source.arxiv} {spec.source.at}" if spec.source else ""
        size = f"{sum(row.shown for row in spec.rows.values())} x {len(spec.cells)}"
        rows.append([name, paper, size, str(len(spec.seeds)), *done, spec.shows])
    return align(rows) + "\n\nmmrl table NAME scale=mini runs one here; do=plan says what it will cost"


def _done(name: str, scale: str) -> str:
    """How many cells of a set had all their seeds when its page was last written."""
    try:
        page = json.loads((TOP / name / scale / "set.json").read_text(encoding="utf-8"))
        return f"{page['cells_done']} / {page['cells']}"
    except (OSError, ValueError, TypeError, LookupError):
        return ""
