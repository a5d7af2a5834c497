"""`mmrl compare`: runs side by side; from run directories, or from a plan whose missing runs it starts itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mmrl.cli.commands import import_config_plugins
from mmrl.cli.compose import CommandLine, composed, expand, parse_arguments, take
from mmrl.cli.launch import Job, Launcher
from mmrl.config import TrainCommandConfig, validate
from mmrl.config.compare import ComparePart, ComparePlan, read_plan
from mmrl.config.groups import conf_dir, options, user_dirs
from mmrl.errors import ConfigError, unknown
from mmrl.report.compare import Comparison, compare, find_runs
from mmrl.report.compare_write import as_text, check_docs, write, write_docs
from mmrl.report.rundir import allocate

TOP = Path("outputs") / "compare"
OWN = ("plan", "algo", "task", "seed", "name", "jobs", "runs", "out", "docs")
"""Keys of the command itself; all others are overrides of its runs."""


def compare_command(arguments: Sequence[str]) -> int:
    """`mmrl compare RUN_DIR …` or `mmrl compare [plan=NAME] [algo=a,b] [task=T] [seed=0,1] [jobs=N] [key=value …]`."""
    positional = [a for a in arguments if "=" not in a and not a.startswith(("-", "~"))]
    rest = [a for a in arguments if a not in positional]
    if "--config-dir" in rest and positional:  # its value stands alone
        at = list(arguments).index("--config-dir")
        folder = arguments[at + 1] if at + 1 < len(arguments) else ""
        positional.remove(folder)
        rest.insert(rest.index("--config-dir") + 1, folder)
    line = parse_arguments(rest)
    given = {key: value for key in OWN if (value := take(line.overrides, key)) is not None}
    if line.multirun or line.flags:
        flags = [*(["-m"] if line.multirun else []), *line.flags]
        raise ConfigError(f"{' '.join(flags)}: not for mmrl compare, which takes lists as they are: algo=a,b seed=0,1")
    if positional or "runs" in given:
        return _look(positional, given, line)
    return _run(given, line)


def _look(positional: Sequence[str], given: Mapping[str, str], line: CommandLine) -> int:
    """Compare runs that are there."""
    stray = [key for key in given if key not in ("runs", "name", "out", "docs")]
    stray += [override.partition("=")[0] for override in line.overrides]
    problems = [f"{key}: has no effect on runs that are there; leave it or the run directories out" for key in stray]
    named = _listed(given.get("runs", ""))
    problems += ["runs: got an empty list, expected run directories"] if not (positional or named) else []
    problems += _name_problems(given)
    if problems:
        raise ConfigError(problems)
    paths = [Path(path) for path in dict.fromkeys([*positional, *named])]
    runs = find_runs(paths)
    whole = len(paths) == 1 and runs[0].resolve() != paths[0].resolve()
    name = given.get("name") or (paths[0].resolve().name if whole else "runs")
    if "docs" in given:
        check_docs(Path(given["docs"]), name)
    out = Path(given["out"]) if "out" in given else paths[0] if whole else _new_folder()
    _show(compare(runs, name, main_metrics()), out, given)
    return 0


def _run(given: Mapping[str, str], line: CommandLine) -> int:
    """Start and resume runs, then compare them."""
    from mmrl.run.check import check_all
    from mmrl.run.stopping import stoppable

    problems: list[str] = []
    plan = _plan(given, line, problems)
    at_once = _whole(given.get("jobs", "1"), "jobs", 1, problems)
    name = given.get("name") or given.get("plan") or "default"
    problems += _name_problems({"name": name})
    problems += [
        f"{override.partition('=')[0]}: a comparison gives each run its own directory; leave it out, or set name="
        for override in line.overrides
        if override.lstrip("+").partition("=")[0] in ("run.dir", "resume")
    ]
    if "docs" in given:
        try:
            check_docs(Path(given["docs"]), name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    jobs = _jobs(plan, line, TOP / name, at_once)
    first = {(job.task, job.algo): job.config for job in reversed(jobs)}
    check_all(list(first.values()))
    for job in jobs:
        try:
            job.state()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    out = Path(given["out"]) if "out" in given else TOP / name
    print(
        f"comparison {name}: {len(jobs)} run{'s' if len(jobs) != 1 else ''} below {TOP / name}, {at_once} at once",
        flush=True,
    )

    def seen(notes: Sequence[str] = ()) -> Comparison:
        found = compare(find_runs([TOP / name]), name, main_metrics())
        return replace(found, notes=(*found.notes, *notes))

    def update() -> None:
        try:
            write(seen(), out)
        except Exception as error:  # a drawing problem must not stop the runs; the end shows it
            print(f"comparison not drawn ({type(error).__name__}: {error})", file=sys.stderr)

    with stoppable(), _lines() as (say, show):
        try:
            failed = Launcher(jobs, at_once, line.config_dir, say, show, update).run()
        except KeyboardInterrupt:
            say("stopped; the same command continues where this one stopped")
            return 130
    notes = [f"{job.name}: failed: {job.trouble()}" for job in jobs if job.code != 0]
    if not any((job.path / "config.yaml").is_file() for job in jobs):
        print("\n".join(f"error: {note}" for note in notes), file=sys.stderr)
        return 1
    _show(seen(notes), out, given)
    if failed:
        print(f"error: {failed} of {len(jobs)} runs failed; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def _show(comparison: Comparison, out: Path, given: Mapping[str, str]) -> None:
    """Print, write, and fill the document."""
    print(as_text(comparison))
    files = write(comparison, out)
    if "docs" in given:
        files += write_docs(comparison, Path(given["docs"]))
    print("\nwritten: " + ", ".join(map(str, files)))


def _plan(given: Mapping[str, str], line: CommandLine, problems: list[str]) -> ComparePlan:
    """The plan's file or one made from `algo=`, `task=` and `seed=`; with a file, these choose from it."""
    algos, tasks = _listed(given.get("algo", "")), _listed(given.get("task", ""))
    seeds = tuple(_whole(seed, "seed", 0, problems) for seed in _listed(given.get("seed", "")))
    for key, chosen in (("algo", algos), ("task", tasks)):
        problems += [unknown(key, one, options(key, line.config_dir)) for one in chosen if one not in _known(key, line)]
        problems += [f"{key}: got an empty list, expected one or more names"] if key in given and not chosen else []
    if "plan" not in given:
        if "algo" not in given:
            problems.append(
                "algo: missing, expected algorithms to compare (algo=a,b), a plan (plan=mini), or run directories"
            )
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        part = ComparePart(task=tasks or ("hotpotqa",), algo=algos)
        return ComparePlan(parts=(part,), seed=seeds or (0, 1, 2))
    plan = read_plan(_plan_file(given["plan"], line))
    has = {
        "algo": {algo for part in plan.parts for algo in part.algo},
        "task": {task for part in plan.parts for task in part.task},
    }
    for key, chosen in (("algo", algos), ("task", tasks)):
        problems += [
            unknown(f"{key} (of plan {given['plan']})", one, has[key]) for one in chosen if one not in has[key]
        ]
    parts = []
    for part in plan.parts:
        kept = {
            "algo": tuple(one for one in part.algo if not algos or one in algos),
            "task": tuple(one for one in part.task if not tasks or one in tasks),
        }
        if all(kept.values()):
            parts.append(part.model_copy(update=kept))
    if not parts and not problems:
        problems.append(f"algo, task: plan {given['plan']} runs none of these algorithms on these tasks")
    return plan.model_copy(update={"parts": tuple(parts), **({"seed": seeds} if seeds else {})})


def _plan_file(name: str, line: CommandLine) -> Path:
    folders = [folder / "compare" for folder in (*user_dirs(line.config_dir), conf_dir())]
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    if name not in names:
        raise ConfigError(unknown("plan", name, names))
    return next(folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file())


def _jobs(plan: ComparePlan, line: CommandLine, top: Path, at_once: int) -> list[Job]:
    """Seed by seed, so that one seed of everything is there early.

    Raises:
        ConfigError: the problems of all runs together.
    """
    problems: list[str] = []
    jobs: dict[Path, Job] = {}
    metrics = main_metrics()
    single = ["hardware.threads=1"] if at_once > 1 else []
    for seed in plan.seed:
        for part in plan.parts:
            for task in part.task:
                for algo in part.algo:
                    own = [*plan.settings, *part.settings, *plan.algo.get(algo, ()), *single, *line.overrides]
                    wanted = [f"task={task}", f"algo={algo}", f"seed={seed}", *own]
                    config = _config(wanted, line.config_dir, problems)
                    path = top / task / algo / f"s{seed}"
                    if config is not None and path not in jobs:
                        jobs[path] = Job(
                            task, algo, seed, wanted, config, path, metrics.get(config.task.name, "reward")
                        )
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return list(jobs.values())


def _config(overrides: Sequence[str], config_dir: str | None, problems: list[str]) -> TrainCommandConfig | None:
    before = len(problems)
    try:
        (expanded,) = expand(CommandLine(overrides=list(overrides), config_dir=config_dir), problems)
        if len(problems) == before:
            raw = composed("train", expanded, config_dir)
            import_config_plugins(raw)
            return validate(TrainCommandConfig, raw)
    except ConfigError as error:
        problems += error.problems
    return None


def main_metrics() -> dict[str, str]:
    """Task -> its main metric, of tasks whose class says it."""
    from mmrl.tasks import TASKS

    return {name: str(task.main_metric) for name, task in TASKS.items() if hasattr(task, "main_metric")}


def _known(key: str, line: CommandLine) -> list[str]:
    return options(key, line.config_dir)


def _listed(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.strip("[]").split(",") if part.strip()))


def _whole(value: str, key: str, least: int, problems: list[str]) -> int:
    if not re.fullmatch(r"\d+", value) or int(value) < least:
        problems.append(f"{key}: got '{value}', expected a whole number from {least}")
        return least
    return int(value)


def _name_problems(given: Mapping[str, str]) -> list[str]:
    name = given.get("name", "x")
    fine = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
    return [] if fine else [f"name: got '{name}', expected letters, digits, '.', '_' or '-'"]


def _new_folder() -> Path:
    return allocate(TOP, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")


@contextmanager
def _lines() -> Iterator[tuple[Callable[[str], None], Callable[[Sequence[str]], None] | None]]:
    """How to say a line that stays, and how to show lines that are replaced (None without a terminal)."""
    if not sys.stdout.isatty():
        yield lambda text: print(text, flush=True), None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console: Any = Console(highlight=False)
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        yield (
            lambda text: console.print(Text(text)),
            lambda lines: live.update(Text("\n".join(lines))),
        )
