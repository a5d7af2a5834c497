"""`mmrl table`: a table of a paper, planned, run, checked against the paper's text, and shown.

Every run lies in a folder named by the digest of its config, so tables share runs, and the same command continues what
was stopped.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mmrl.config.paper_tables import SCALES, Cell, TableSpec
from mmrl.errors import ConfigError, MmrlError, Stopped, unknown
from mmrl.report.paper_pages import table_text, write_table
from mmrl.report.paper_table import PaperTable
from mmrl.report.text import align
from mmrl.run.check import check_all
from mmrl.run.compare import output
from mmrl.run.queue import RunQueue, whole_numbers
from mmrl.run.table_cost import cost_text
from mmrl.run.table_runs import (
    Compose,
    Planned,
    Runs,
    TableRun,
    read_table,
    table_names,
)
from mmrl.system.conf import conf_dir, user_dirs
from mmrl.system.files import atomic_write
from mmrl.system.stop import stoppable

TOP = Path("outputs") / "tables"
DONE = "done.json"
KEYS = ("rows", "columns", "seed", "scale", "jobs", "through", "do", "out", "papers")
"""Keys of the command itself; all others are overrides of its runs."""
DO = ("run", "plan", "check", "show")


@dataclass(frozen=True, slots=True)
class TableRequest:
    """The words after `mmrl table`."""

    names: Sequence[str]
    given: Mapping[str, str]
    """The command's own keys, as typed."""
    overrides: Sequence[str]
    """Of every run, as typed."""
    config_dir: str | None

    @property
    def folders(self) -> list[Path]:
        """Of configs, first wins."""
        return [*user_dirs(self.config_dir), conf_dir()]


def table_command(request: TableRequest, compose: Compose) -> int:
    """`mmrl table`. Returns the exit code.

    Raises:
        ConfigError: every problem of the words, the files or the runs' configs; nothing has started.
    """
    given = request.given
    do = given.get("do", "run")
    problems = [] if do in DO else [unknown("do", do, DO)]
    problems += [f"table: got {len(request.names)} names, expected one"] * (len(request.names) > 1)
    if "papers" in given and do != "check":
        problems.append("papers: has no effect without do=check")
    if "through" in given and do not in ("run", "plan"):
        problems.append(f"through: has no effect with do={do}")
    if problems:
        raise ConfigError(problems)
    if do == "check":
        return _check(request, compose)
    if not request.names:
        if given or request.overrides:
            raise ConfigError("table: which one? `mmrl table` lists them")
        print(_listing(request))
        return 0
    planned = _planned(request, compose)
    if do == "plan":
        print(_plan_text(planned, f"{given['through']} " if "through" in given else ""))
        return 0
    whole = not {"rows", "columns", "seed"} & set(given)
    # A part of a table must not take the place of the whole one's page.
    folder = TOP / planned.name / planned.scale
    out = Path(given["out"]) if "out" in given else folder if whole else folder / "selected"
    if do == "show":
        _show(planned, out)
        return 0
    return _run(planned, int(given.get("jobs", "1")), shlex.split(given.get("through", "")), request.config_dir, out)


# --- what runs


def _planned(request: TableRequest, compose: Compose) -> Planned:
    """The runs of the rows, columns and seeds that were chosen."""
    (name,) = request.names
    given = request.given
    spec, base = read_table(name, request.folders)
    scale = given.get("scale", "paper")
    if scale not in SCALES:
        raise ConfigError(unknown("scale", scale, SCALES))
    if scale not in base.scales:
        raise ConfigError(f"scale: got {scale}, and table {name} has settings for {', '.join(base.scales)} alone")
    problems: list[str] = []
    rows = _chosen("rows", given.get("rows"), list(spec.rows), problems)
    columns = _chosen("columns", given.get("columns"), list(spec.columns), problems)
    texts = [text.strip() for text in given.get("seed", "").strip("[]").split(",")]
    seeds = whole_numbers(texts, "seed", 0, problems) if "seed" in given else None
    (at_once,) = whole_numbers([given.get("jobs", "1")], "jobs", 1, problems)
    problems += _through_problems(given.get("through"))
    if problems:
        raise ConfigError(problems)
    # Side by side on this machine; a scheduler gives each run what it asks for.
    single = ["hardware.threads=1"] if at_once > 1 and "through" not in given else []
    plan = Runs(spec, base, scale, compose, [*single, *request.overrides])
    return plan.made(name, rows, columns, seeds)


def _through_problems(command: str | None) -> list[str]:
    """Why runs cannot be started by `through=`."""
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [f"through: got {command!r}, which is no command line: {error}"]
    if not words or shutil.which(words[0]) is None:
        return [f"through: got {command!r}, expected a command that is here, such as 'srun --gpus-per-node=8'"]
    return []


def _chosen(key: str, text: str | None, names: Sequence[str], problems: list[str]) -> list[str]:
    """Names in a list, exact or in lower case without signs; all for None. In the table's order."""
    if text is None:
        return list(names)
    # A name may hold commas and parentheses of its own: the exact one first.
    parts = [text] if text in names else [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    by_slug = {_slug(name): name for name in names}
    problems += [unknown(key, part, names) for part in parts if part not in names and _slug(part) not in by_slug]
    if not parts:
        problems.append(f"{key}: got an empty list, expected some of {', '.join(names)}")
    chosen = {part if part in names else by_slug.get(_slug(part)) for part in parts}
    return [name for name in names if name in chosen]


def _slug(name: str) -> str:
    # A sign in front tells "*Rewriter" from "-Rewriter".
    return name[:1].strip().lower() + "-".join(re.findall(r"[a-z0-9.]+", name[1:].lower()))


# --- running and showing


def _run(planned: Planned, at_once: int, through: Sequence[str], config_dir: str | None, out: Path) -> int:
    states = {run.path: run.state() for run in planned.runs}
    missing = [run for run in planned.runs if states[run.path] != "finished"]
    print(_head(planned, missing), flush=True)
    if planned.scale != "mini" and missing:
        print(cost_text(planned, missing), flush=True)
    # Of seeds of one row one.
    first = {(run.command, run.row, run.column): run for run in missing}
    if through:
        from mmrl.run.plan import problems_elsewhere

        # The data and devices of another machine are checked there, when each run starts.
        if problems := [problem for run in first.values() for problem in problems_elsewhere(run.config)]:
            raise ConfigError(dict.fromkeys(problems))
    else:
        # What starts from another run is checked when it starts.
        check_all([run.config.in_folder(None) for run in first.values() if run.after is None])

    def redraw() -> None:
        try:
            _written(planned, planned.table(), out)
        # Hours of training must not end because a page could not be written; the end says so.
        except Exception as error:
            print(f"table not written ({type(error).__name__}: {error})", file=sys.stderr)

    with stoppable(), output() as (say, show):
        try:
            RunQueue(planned.runs, at_once, config_dir, say, show, redraw, through).run()
        except KeyboardInterrupt as stop:
            say("stopped; the same command continues where this one stopped")
            return stop.exit_code if isinstance(stop, Stopped) else 130
    _show(planned, out)
    failed = [run for run in planned.runs if run.code]
    for run in failed:
        print(f"error: {run.name}: {run.trouble()}", file=sys.stderr)
    if failed:
        print(
            f"error: {len(failed)} of {len(planned.runs)} runs failed; the same command tries them again",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _show(planned: Planned, out: Path) -> None:
    table = planned.table()
    print(table_text(table))
    print("\nwritten: " + ", ".join(map(str, _written(planned, table, out))))


def _written(planned: Planned, table: PaperTable, out: Path) -> list[Path]:
    """The table's pages, and what of it is there for the list of all tables."""
    files = write_table(table, out)
    record = TOP / planned.name / planned.scale / DONE
    done = {**_done(planned.name, planned.scale), **table.seeds_done}
    record.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(record, json.dumps(done, indent=1) + "\n")
    return files


def _head(planned: Planned, missing: Sequence[TableRun]) -> str:
    def counted(runs: Sequence[TableRun]) -> str:
        kinds = (("train", "training"), ("eval", "evaluation"))
        counts = [(sum(run.command == command for run in runs), word) for command, word in kinds]
        return " and ".join(f"{count} {word}{'s' if count != 1 else ''}" for count, word in counts)

    spec = planned.spec
    return (
        f"table {planned.name} (arXiv {spec.source.arxiv}, {spec.source.at}) at scale {planned.scale}: "
        f"{counted(planned.runs)}; missing: {counted(missing)}"
    )


def _plan_text(planned: Planned, through: str) -> str:
    missing = [run for run in planned.runs if run.state() != "finished"]
    parts = [_head(planned, missing)]
    if planned.scale != "mini":
        parts.append(cost_text(planned, missing))
    first: dict[tuple[str, str, str], TableRun] = {}
    for run in planned.runs:
        first.setdefault((run.command, run.row, run.column), run)
    lines = []
    for (command, row, column), run in first.items():
        seeds = [
            str(r.seed) + ("" if r.state() == "new" else f" ({r.state()})")
            for r in planned.runs
            if (r.command, r.row, r.column) == (command, row, column)
        ]
        with suppress(MmrlError):  # a run that is still to be made has no checkpoint to choose
            lines.append(
                f"{command} {row}{f' on {column}' if column else ''}, seeds {' '.join(seeds)}:\n"
                f"  {through}{run.typed()}"
            )
    return "\n\n".join([*parts, *lines])


# --- all tables


def _listing(request: TableRequest) -> str:
    rows = [["table", "paper", "rows x cells", "seeds", "done at paper scale", "done at mini scale", "shows"]]
    for name in table_names(request.folders):
        spec, _ = read_table(name, request.folders)
        cells = len(spec.rows) * len(spec.cells)
        done = [f"{_cells_done(spec, _done(name, scale))} / {cells}" for scale in ("paper", "mini")]
        size = f"{len(spec.rows)} x {len(spec.cells)}"
        rows.append([name, f"{spec.source.arxiv} {spec.source.at}", size, str(len(spec.seeds)), *done, spec.shows])
    return align(rows) + "\n\nmmrl table NAME scale=mini runs one here; do=plan says what it will cost"


def _cells_done(spec: TableSpec, done: Mapping[str, Sequence[int]]) -> int:
    """Cells that have all of the table's seeds."""
    places = [(row, column) for row in spec.rows for column in spec.columns]
    return len(spec.scores) * sum(
        set(spec.seeds_of(row)) <= set(done.get(f"{row} on {column}", ())) for row, column in places
    )


def _done(name: str, scale: str) -> dict[str, list[int]]:
    """`ROW on COLUMN` -> seeds that were there when the table was last looked at; empty where it never was."""
    try:
        content = json.loads((TOP / name / scale / DONE).read_text(encoding="utf-8"))
        return {str(place): [int(seed) for seed in seeds] for place, seeds in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


# --- check


def _check(request: TableRequest, compose: Compose) -> int:
    """Files, averages and claims (when they are read), every config, and the values in the papers' texts."""
    texts = _paper_lines(request.given.get("papers"))
    problems: list[str] = []
    for name in request.names or table_names(request.folders):
        try:
            spec, base = read_table(name, request.folders)
            counted = sum(len(spec.reported(row)) + len(spec.deviations(row)) for row in spec.rows)
            for scale in base.scales:
                Runs(spec, base, scale, compose, request.overrides).made(
                    name, list(spec.rows), list(spec.columns), (0,)
                )
        except ConfigError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
            continue
        absent = [] if texts is None else [row for row in spec.rows if not in_text(spec, row, texts)]
        problems += [f"{name}: rows.{row}.values: not so in the papers' texts" for row in absent]
        against = "no papers' texts given (papers=FOLDER)" if texts is None else f"{counted} numbers as in the text"
        print(f"{name}: configs at {', '.join(base.scales)}, averages and claims fit; {against}")
    if problems:
        raise ConfigError(problems)
    return 0


def _paper_lines(folder: str | None) -> list[list[float]] | None:
    """The numbers of every line of the texts in a folder; None without one."""
    if folder is None:
        return None
    files = sorted(Path(folder).glob("*.txt"))
    if not files:
        raise ConfigError(f"papers: no .txt file in '{folder}'")
    lines = (line for path in files for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [
        [float(text) for text in re.findall(r"(?<![\w.])\d+\.?\d*", re.sub(r"<[^>]*>", " ", line))] for line in lines
    ]


def in_text(spec: TableSpec, row: str, lines: Sequence[Sequence[float]]) -> bool:
    """Whether a row's numbers stand side by side in a line as printed; of scores printed apart, in one line each."""
    return all(
        any(_holds(line, numbers) for line in lines if len(line) >= len(numbers)) for numbers in _printed(spec, row)
    )


def _printed(spec: TableSpec, row: str) -> Iterator[list[float]]:
    values, deviations = spec.reported(row), spec.deviations(row)
    if not values:
        return
    blocks: list[list[Cell | str]] = [[*spec.cells, *spec.means]]
    if spec.order == "scores":
        blocks = [
            [
                *(cell for cell in spec.cells if cell.score == score),
                *(m for m, of in spec.means.items() if of == (score,)),
            ]
            for score in spec.scores
        ]
    for block in blocks:
        yield [n for place in block for n in (values[place], deviations.get(place)) if n is not None]


def _holds(line: Sequence[float], numbers: Sequence[float]) -> bool:
    length = len(numbers)
    return any(list(line[start : start + length]) == list(numbers) for start in range(len(line) - length + 1))
