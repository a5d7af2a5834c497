"""`mmrl table`: a table of a paper, planned, run, checked against the paper's text, and shown.

Every run lies in a folder named by the digest of its config, so tables share runs, and the same command continues what
was stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.config import EvalCommandConfig, RootConfig, StageConfig, StagedCommandConfig, TrainCommandConfig
from mmrl.config.table import SCALES, TRAINING_ALONE, Base, Cell, Command, TableSpec, read_table, table_names, words_of
from mmrl.errors import ConfigError, MmrlError, Stopped, unknown
from mmrl.models.policy import complete_checkpoints
from mmrl.report.paper_table import PaperTable, SeedRun, table_text, write_table
from mmrl.report.rundir import RunDir
from mmrl.report.stats import number
from mmrl.report.text import align
from mmrl.run.check import check_all
from mmrl.run.compare import main_metrics, output
from mmrl.run.queue import QueuedRun, RunQueue, State, state_of
from mmrl.system.conf import conf_dir, later_wins, user_dirs
from mmrl.system.files import JsonObject, read_jsonl
from mmrl.system.stop import stoppable

TOP = Path("outputs") / "tables"
RUNS = TOP / "runs"
KEYS = ("rows", "columns", "seed", "scale", "jobs", "do", "out", "papers")
"""Keys of the command itself; all others are overrides of its runs."""
DO = ("run", "plan", "check", "show")
COLLAPSED = 0.5
"""Share of the best evaluation below which training has collapsed, if it never returns."""
OF_MACHINE = ("run", "hardware", "engine")
"""Sections that say where a run lies and what it runs on: the rest is what it is."""

Config = StageConfig | StagedCommandConfig | EvalCommandConfig
Compose = Callable[[Command, Sequence[str]], Config]
"""Overrides of a command to a validated config; raises `ConfigError`."""


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


@dataclass(slots=True)
class TableRun(QueuedRun):
    """One run of a table."""

    row: str = ""
    column: str = ""
    checkpoint: str = "last"

    @property
    def name(self) -> str:
        """What progress lines call it."""
        return f"{self.command} {self.row}{f' on {self.column}' if self.column else ''}, seed {self.seed}"

    def words(self) -> Sequence[str]:
        """Its overrides; an evaluation's policy is the checkpoint that the row's rule names."""
        if self.checkpoint == "last" or self.after is None or self.command == "train":
            return self.overrides
        chosen = before_collapse(self.after.path, self.after.metric)
        return [f"policy={chosen}" if word.startswith("policy=") else word for word in self.overrides]

    def state(self) -> State:
        """What is in its run directory; its name is a digest of its settings, so a run there has these."""
        if (self.path / "config.yaml").is_file() and (self.path / "journal").is_dir():
            return "finished" if RunDir.read(self.path).finished else "unfinished"
        return state_of(self.path, self.config, "table")

    def progress(self) -> tuple[int, int, float | None]:
        """Steps done and in all; of an evaluation items."""
        if isinstance(self.config, EvalCommandConfig):
            files = list((self.path / "eval").glob("step-*.jsonl"))
            return sum(len(read_jsonl(path)) for path in files), self.config.eval.items or 0, None
        return super(TableRun, self).progress()

    def typed(self) -> str:
        """The command that makes it, for a shell."""
        return " ".join([f"mmrl {self.command}", *map(shlex.quote, [*self.words(), f"run.dir={self.path}"])])


@dataclass(frozen=True, slots=True)
class Planned:
    """A table with its runs."""

    name: str
    spec: TableSpec
    scale: str
    rows: Sequence[str]
    columns: Sequence[str]
    runs: Sequence[TableRun]
    """In the order in which they start, each once."""
    evaluations: Mapping[tuple[str, str], Sequence[TableRun]]
    """(row, column) -> one per seed."""
    metrics: Mapping[tuple[str, str], Mapping[str, str]]

    def table(self) -> PaperTable:
        """As far as it has been run."""
        runs = {
            place: [SeedRun(run.seed, run.path, run.typed(), run.trouble() if run.code else "") for run in listed]
            for place, listed in self.evaluations.items()
        }
        return PaperTable(
            name=self.name,
            spec=self.spec,
            scale=self.scale,
            rows=self.rows,
            columns=self.columns,
            metrics=self.metrics,
            runs=runs,
        )


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
        print(_plan_text(planned))
        return 0
    out = Path(given["out"]) if "out" in given else TOP / planned.name / planned.scale
    if do == "show":
        _show(planned, out)
        return 0
    return _run(planned, _whole(given.get("jobs", "1"), "jobs", 1), request.config_dir, out)


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
    rows = _chosen("rows", given.get("rows"), list(spec.rows))
    columns = _chosen("columns", given.get("columns"), list(spec.columns))
    seeds = (
        tuple(_whole(text.strip(), "seed", 0) for text in given["seed"].strip("[]").split(","))
        if "seed" in given
        else None
    )
    single = ["hardware.threads=1"] if _whole(given.get("jobs", "1"), "jobs", 1) > 1 else []
    plan = _Runs(spec, base, scale, compose, [*single, *request.overrides])
    return plan.made(name, rows, columns, seeds)


@dataclass(slots=True)
class _Runs:
    """Makes the runs of a table; each config is composed once, and each run is there once."""

    spec: TableSpec
    base: Base
    scale: str
    compose: Compose
    typed: Sequence[str]
    runs: dict[Path, TableRun] = field(default_factory=dict)
    composed: dict[tuple[str, ...], Config] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def made(self, name: str, rows: Sequence[str], columns: Sequence[str], seeds: tuple[int, ...] | None) -> Planned:
        evaluations: dict[tuple[str, str], list[TableRun]] = {(row, column): [] for row in rows for column in columns}
        metrics: dict[tuple[str, str], Mapping[str, str]] = {}
        every = dict.fromkeys(seed for row in rows for seed in seeds or self.spec.seeds_of(row))
        # Seed by seed, so that one seed of everything is there early.
        for seed in every:
            for row, column in evaluations:
                # A row that is not trained needs no further seeds than the spec gives it.
                own = self.spec.seeds_of(row)
                if seed not in (own if seeds is None or self.spec.rows[row].seeds else seeds):
                    continue
                with self._named(row, column):
                    run = self._evaluation(row, column, seed)
                    evaluations[row, column].append(run)
                    main = main_metrics().get(run.config.task.name, "reward")
                    metrics[row, column] = {s: main if m == "main" else m for s, m in self.spec.scores.items()}
        if self.problems:
            raise ConfigError(dict.fromkeys(self.problems))
        runs = list(self.runs.values())
        apart = {(run.row, run.seed, run.column) for run in runs if run.command == "train"}
        for run in runs:
            # Named by its column only where columns are trained apart.
            if run.command == "train" and sum(place[:2] == (run.row, run.seed) for place in apart) == 1:
                run.column = ""
        return Planned(name, self.spec, self.scale, rows, columns, runs, evaluations, metrics)

    def _named(self, row: str, column: str) -> _Collected:
        return _Collected(self.problems, f"{row} on {column}" if len(self.spec.columns) > 1 else row)

    def _evaluation(self, row: str, column: str, seed: int) -> TableRun:
        method = self.spec.rows[row]
        last = len(method.stages)
        words = self._words(row, column, "eval", last)
        if any(word.startswith("policy=") for word in words):
            config = self._config("eval", words, seed)
            return self._run("eval", row, column, seed, words, config, None, {})
        trained = self._training(row, column, seed, last)
        words = [*words, f"policy={trained.path}"]
        # The policy is not there yet: what the evaluation is but for it, and the digest of what it is made from.
        config = self._config("eval", [*words[:-1], "policy=tiny"], seed)
        config = config.model_copy(update={"policy": str(trained.path)})
        identity = {"of": trained.path.name, "checkpoint": method.checkpoint}
        run = self._run("eval", row, column, seed, words, config, trained, identity)
        run.checkpoint = method.checkpoint
        return run

    def _training(self, row: str, column: str, seed: int, stage: int) -> TableRun:
        before = self._training(row, column, seed, stage - 1) if stage else None
        words = self._words(row, column, "train", stage)
        identity: dict[str, object] = {}
        if before is not None:
            assert isinstance(before.config, TrainCommandConfig)
            folder = before.path / "checkpoints" / f"checkpoint-{before.config.train.steps}"
            words = [word for word in words if not word.startswith("model.path=")]
            words.append(f"model.path={folder}")
            identity = {"of": before.path.name}
        config = self._config("train", words, seed)
        stages = f"stage {stage + 1}" if self.spec.rows[row].stages else column
        return self._run("train", row, stages, seed, words, config, before, identity)

    def _words(self, row: str, column: str, command: Command, stage: int) -> list[str]:
        typed = [
            word
            for word in self.typed
            if command == "train" or word.lstrip("+~").partition("=")[0].partition(".")[0] not in TRAINING_ALONE
        ]
        return later_wins([*words_of(self.spec, self.base, row, column, self.scale, command, stage), *typed])

    def _config(self, command: Command, words: Sequence[str], seed: int) -> Config:
        key = (command, *words)
        if key not in self.composed:
            self.composed[key] = self.compose(command, words)
        return _with_seed(self.composed[key], seed)

    def _run(
        self,
        command: Command,
        row: str,
        column: str,
        seed: int,
        words: Sequence[str],
        config: Config,
        after: TableRun | None,
        identity: Mapping[str, object],
    ) -> TableRun:
        algo = "eval" if isinstance(config, EvalCommandConfig) else config.algo.name
        path = RUNS / config.task.name / algo / f"s{seed}-{_digest(config, identity)}"
        if path not in self.runs:
            metric = main_metrics().get(config.task.name, "reward")
            self.runs[path] = TableRun(
                config.task.name, algo, seed, [*words, f"seed={seed}"], config, path, metric, command, after
            )
            self.runs[path].row, self.runs[path].column = row, column
        return self.runs[path]


@dataclass(slots=True)
class _Collected:
    """Problems of one cell, collected with its name."""

    problems: list[str]
    place: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.problems += [f"{self.place}: {problem}" for problem in error.problems]
        return True


def _with_seed(config: Config, seed: int) -> Config:
    if isinstance(config, StagedCommandConfig):
        stages = tuple(stage.model_copy(update={"seed": seed}) for stage in config.stages)
        return config.model_copy(update={"seed": seed, "stages": stages})
    return config.model_copy(update={"seed": seed})


def _digest(config: RootConfig, identity: Mapping[str, object]) -> str:
    """Of what a run is, wherever it lies and whatever it runs on."""
    content = _without_machine(config.model_dump(mode="json"))
    if identity:
        # How the weights before it were made stands for their place, and for what is read from there.
        content = {key: value for key, value in content.items() if key != "policy"}
        content["model"] = {key: value for key, value in content["model"].items() if key != "path"}
    text = json.dumps({**content, **identity}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_machine(dump: JsonObject) -> JsonObject:
    kept = {key: value for key, value in dump.items() if key not in OF_MACHINE}
    if "stages" in kept:
        kept["stages"] = [_without_machine(stage) for stage in kept["stages"]]
    return kept


def before_collapse(run: Path, metric: str) -> Path:
    """The last checkpoint of a run before its evaluations collapse; the newest one where they do not.

    Training has collapsed where the main metric falls below half of its best and stays there to the end.

    Raises:
        ConfigError: the run has no checkpoint from before.
    """
    directory = RunDir.read(run)
    key = f"eval/{directory.config['eval']['split']}/{metric}"
    points = [(int(r["step"]), value) for r in directory.history() if (value := number(r.get(key))) is not None]
    best, collapse = float("-inf"), None
    for place, (step, value) in enumerate(points):
        best = max(best, value)
        if all(later < COLLAPSED * best for _, later in points[place:]):
            collapse = step
            break
    before = [step for step, _ in points if collapse is None or step < collapse]
    there = complete_checkpoints(run / "checkpoints")
    fitting = [
        path for path in there if collapse is None or int(path.name.rpartition("-")[2]) <= max(before, default=0)
    ]
    if not fitting:
        raise ConfigError(f"{run}: no checkpoint from before its collapse at step {collapse} is left (train.keep)")
    return fitting[-1]


def _chosen(key: str, text: str | None, names: Sequence[str]) -> list[str]:
    """Names in a list, exact or in lower case without signs; all for None. In the table's order."""
    if text is None:
        return list(names)
    # A name may hold commas and parentheses of its own: the exact one first.
    parts = [text] if text in names else [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    by_slug = {_slug(name): name for name in names}
    problems = [unknown(key, part, names) for part in parts if part not in names and _slug(part) not in by_slug]
    if problems or not parts:
        raise ConfigError(problems or f"{key}: got an empty list, expected some of {', '.join(names)}")
    chosen = {part if part in names else by_slug[_slug(part)] for part in parts}
    return [name for name in names if name in chosen]


def _slug(name: str) -> str:
    # A sign in front tells "*Rewriter" from "-Rewriter".
    return name[:1].strip().lower() + "-".join(re.findall(r"[a-z0-9.]+", name[1:].lower()))


def _whole(text: str, key: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < least:
        raise ConfigError(f"{key}: got '{text}', expected a whole number from {least}")
    return int(text)


# --- running and showing


def _run(planned: Planned, at_once: int, config_dir: str | None, out: Path) -> int:
    states = {run.path: run.state() for run in planned.runs}
    missing = [run for run in planned.runs if states[run.path] != "finished"]
    print(_head(planned, missing), flush=True)
    if planned.scale != "mini" and missing:
        print(_cost_text(planned, missing), flush=True)
    # Of seeds of one row one; what starts from another run is checked when it starts.
    first = {(run.command, run.row, run.column): run.config for run in missing if run.after is None}
    check_all([config.in_folder(None) for config in first.values()])

    def redraw() -> None:
        try:
            write_table(planned.table(), out)
        # Hours of training must not end because a page could not be written; the end says so.
        except Exception as error:
            print(f"table not written ({type(error).__name__}: {error})", file=sys.stderr)

    with stoppable(), output() as (say, show):
        try:
            RunQueue(planned.runs, at_once, config_dir, say, show, redraw).run()
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
    files = write_table(table, out)
    print("\nwritten: " + ", ".join(map(str, files)))


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


def _plan_text(planned: Planned) -> str:
    missing = [run for run in planned.runs if run.state() != "finished"]
    parts = [_head(planned, missing)]
    if planned.scale != "mini":
        parts.append(_cost_text(planned, missing))
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
                f"{command} {row}{f' on {column}' if column else ''}, seeds {' '.join(seeds)}:\n  {run.typed()}"
            )
    return "\n\n".join([*parts, *lines])


def _cost_text(planned: Planned, missing: Sequence[TableRun]) -> str:
    """GPU-hours of the trainings that are missing, by row."""
    rows = [["row", "runs", "hours each", "GPU-hours"]]
    total, unknown_rows = 0.0, []
    trainings: dict[tuple[str, str], list[TableRun]] = {}
    for run in missing:
        if run.command == "train":
            trainings.setdefault((run.row, _digest(_with_seed(run.config, 0), {})), []).append(run)
    for (row, _), runs in trainings.items():
        try:
            hours, devices = gpu_hours(runs[0].config)
        except MmrlError as error:
            unknown_rows.append(f"{row}: {error}")
            continue
        total += len(runs) * hours * devices
        rows.append([row, str(len(runs)), f"{hours:.1f}", f"{len(runs) * hours * devices:,.0f}"])
    rows.append(["all", str(sum(map(len, trainings.values()))), "", f"{total:,.0f}"])
    evaluations = sum(run.command == "eval" for run in missing)
    if not trainings:
        return f"cost: {evaluations} evaluations, which mmrl plan does not count; nothing is trained"
    text = f"cost by mmrl plan, {evaluations} evaluations and stages that optimise prompts not counted:\n"
    return "\n".join([text + align([[*row, ""] for row in rows]), *(f"not planned: {each}" for each in unknown_rows)])


def gpu_hours(config: Config) -> tuple[float, int]:
    """Hours of a training run by `mmrl plan`, and the devices that it takes; of stages those that train weights.

    Raises:
        ConfigError: what `mmrl plan` refuses.
    """
    from mmrl.run.plan import PlanRequest, make_plan

    stages = config.stages if isinstance(config, StagedCommandConfig) else (config,)
    hours, devices = 0.0, 1
    for stage in stages:
        if isinstance(stage, TrainCommandConfig):
            plan = make_plan(stage, PlanRequest({}, 0, "h100"))
            hardware = stage.hardware
            hours += stage.train.steps * plan.step_seconds() / 3600
            devices = max(devices, hardware.processes * hardware.nodes + hardware.rollout_devices)
    return hours, devices


# --- all tables


def _listing(request: TableRequest) -> str:
    rows = [["table", "paper", "rows x cells", "seeds", "done at paper scale", "done at mini scale", "shows"]]
    for name in table_names(request.folders):
        spec, _ = read_table(name, request.folders)
        cells = len(spec.rows) * len(spec.cells)
        done = [f"{_done(name, scale)} / {cells}" for scale in ("paper", "mini")]
        size = f"{len(spec.rows)} x {len(spec.cells)}"
        rows.append([name, f"{spec.source.arxiv} {spec.source.at}", size, str(len(spec.seeds)), *done, spec.shows])
    return align(rows) + "\n\nmmrl table NAME scale=mini runs one here; do=plan says what it will cost"


def _done(name: str, scale: str) -> int:
    """Cells that the table on disk has, as it was last written."""
    try:
        content = json.loads((TOP / name / scale / "table.json").read_text(encoding="utf-8"))
        return int(content["cells_done"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


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
                _Runs(spec, base, scale, compose, request.overrides).made(
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
