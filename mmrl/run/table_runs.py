"""The runs that a paper's table needs: from its files to words, to configs, to folders named by their digest."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from mmrl.config import EvalCommandConfig, RootConfig, StageConfig, StagedCommandConfig, TrainCommandConfig
from mmrl.config.paper_tables import TRAINING_ALONE, Base, Command, TableSpec
from mmrl.errors import ConfigError, unknown
from mmrl.models.policy import complete_checkpoints
from mmrl.report.paper_table import PaperTable, SeedRun, has_scores
from mmrl.report.rundir import RunDir
from mmrl.report.stats import number
from mmrl.run.compare import main_metrics
from mmrl.run.queue import QueuedRun, SectionT, State, read_as, state_of
from mmrl.system.conf import later_wins
from mmrl.system.files import JsonObject, read_jsonl

RUNS = Path("outputs") / "tables" / "runs"
COLLAPSED = 0.5
"""Share of the best evaluation below which training has collapsed, if it never returns."""
OF_MACHINE = ("run", "hardware", "engine")
"""Sections that say where a run lies and what it runs on: the rest is what it is."""
Config = StageConfig | StagedCommandConfig | EvalCommandConfig
Compose = Callable[[Command, Sequence[str]], Config]
"""Overrides of a command to a validated config; raises `ConfigError`."""


def words_of(
    spec: TableSpec, base: Base, row: str, column: str, scale: str, command: Command, stage: int = 0
) -> list[str]:
    """The overrides of one run of a cell, each key once; later layers win: base, algorithm, table, column, row.

    Args:
        stage: which run of a row of several (`stages`); 0: the first.
    """
    method, place = spec.rows[row], spec.columns[column]
    own = [*method.at(scale, command), *(word for more in method.stages[:stage] for word in more.at(scale, command))]
    shared, placed = [*base.at(scale, command), *spec.all.at(scale, command)], place.at(scale, command)
    # An evaluation has no algorithm.
    algos = [word.partition("=")[2] for word in [*shared, *placed, *own] if word.startswith("algo=")]
    algo = algos[-1] if algos else ""
    # Before the row: what a row says for itself holds, whatever its algorithm.
    around = [*shared, *base.of_algo(algo, scale, command), *placed, *place.of_algo(algo, scale, command)]
    words = [word for word in around if not is_below(word, method.without)]
    words += own
    if command == "eval":
        words = [word for word in words if not is_below(word, TRAINING_ALONE)]
    return later_wins(words)


def is_below(word: str, keys: Sequence[str]) -> bool:
    """Whether an override sets one of some keys or sections, or something in one."""
    return any(f"{word.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.") for key in keys)


def read_table(name: str, folders: Sequence[Path]) -> tuple[TableSpec, Base]:
    """A table and its base.

    Args:
        folders: of configs, first wins.

    Raises:
        ConfigError: there is none of this name, or every problem of the two files.
    """
    spec = _read(name, "table", folders, TableSpec)
    base = _read(spec.base, "table/base", folders, Base)
    if stray := [algo for algo in base.algos if not any(_has_algo(folder, algo) for folder in folders)]:
        raise ConfigError(f"base {spec.base}: algos: got {algo}, which is no choice of algo=" for algo in stray)
    return spec, base


def table_names(folders: Sequence[Path]) -> list[str]:
    """All tables, figure 10 after figure 9."""
    names = {path.stem for folder in folders for path in (folder / "table").glob("*.yaml")}
    return sorted(
        names, key=lambda name: [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )


def _has_algo(folder: Path, algo: str) -> bool:
    return (folder / "algo" / f"{algo}.yaml").is_file()


def _read(name: str, group: str, folders: Sequence[Path], schema: type[SectionT]) -> SectionT:
    paths = [folder / group / f"{name}.yaml" for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        names = sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})
        raise ConfigError(unknown(group, name, names))
    return read_as(schema, path, group)


@dataclass(slots=True)
class TableRun(QueuedRun):
    """One run of a table."""

    key: ClassVar[str] = "table"
    row: str = ""
    column: str = ""
    checkpoint: str = "last"

    @property
    def name(self) -> str:
        """What progress lines call it."""
        return f"{self.command} {self.row}{f' on {self.column}' if self.column else ''}, seed {self.seed}"

    @property
    def first(self) -> QueuedRun:
        """The one that all before it started from."""
        run: QueuedRun = self
        while run.after is not None:
            run = run.after
        return run

    def words(self) -> Sequence[str]:
        """Its overrides; an evaluation's policy is the checkpoint that the row's rule names."""
        if self.checkpoint == "last" or self.after is None or self.command == "train":
            return self.overrides
        chosen = before_collapse(self.after.path, self.after.metric)
        return [f"policy={chosen}" if word.startswith("policy=") else word for word in self.overrides]

    def state(self) -> State:
        """What is in its run directory; its name is a digest of its settings, so a run there has these."""
        if (self.path / "config.yaml").is_file() and (self.path / "journal").is_dir():
            directory = RunDir.read(self.path)
            # An evaluation without scores is continued: what failed from outside runs again.
            done = directory.finished and (self.command == "train" or has_scores(directory))
            return "finished" if done else "unfinished"
        return state_of(self.path, self.config, self.key)

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
            place: [
                SeedRun(
                    run.seed,
                    run.path,
                    run.typed(),
                    run.trouble() if run.code else "",
                    run.after.path if run.after is not None else None,
                )
                for run in listed
            ]
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


@dataclass(slots=True)
class Runs:
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
        """The runs of some rows on some columns.

        Args:
            seeds: None: each row's own.

        Raises:
            ConfigError: every problem of every config.
        """
        evaluations: dict[tuple[str, str], list[TableRun]] = {(row, column): [] for row in rows for column in columns}
        metrics: dict[tuple[str, str], Mapping[str, str]] = {}
        # A row that needs fewer seeds than others (nothing of it is drawn) has its own, whatever was chosen.
        of_row = {row: self.spec.rows[row].seeds or seeds or self.spec.seeds for row in rows}
        # Seed by seed, so that one seed of everything is there early.
        for seed in dict.fromkeys(seed for own in of_row.values() for seed in own):
            for row, column in evaluations:
                if seed not in of_row[row]:
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

    @contextmanager
    def _named(self, row: str, column: str) -> Iterator[None]:
        """Collects problems of a cell with its name."""
        try:
            yield
        except ConfigError as error:
            place = f"{row} on {column}" if len(self.spec.columns) > 1 else row
            self.problems += [f"{place}: {problem}" for problem in error.problems]

    def _evaluation(self, row: str, column: str, seed: int) -> TableRun:
        method = self.spec.rows[row]
        last = len(method.stages)
        words = self._words(row, column, "eval", last)
        if any(word.startswith("policy=") for word in words):
            config = self._config("eval", words, seed)
            return self._run("eval", row, column, seed, words, config, None, {})
        trained = self._training(row, column, seed, last)
        # Its weights are the run's, whatever that started from.
        words = [*(word for word in words if not word.startswith("model.path=")), f"policy={trained.path}"]
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
        # What is typed is for all runs that can take it.
        typed = [word for word in self.typed if command == "train" or not is_below(word, TRAINING_ALONE)]
        return later_wins([*words_of(self.spec, self.base, row, column, self.scale, command, stage), *typed])

    def _config(self, command: Command, words: Sequence[str], seed: int) -> Config:
        key = (command, *words)
        if key not in self.composed:
            self.composed[key] = self.compose(command, words)
        return with_seed(self.composed[key], seed)

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
        path = RUNS / config.task.name / algo / f"s{seed}-{digest(config, identity)}"
        if path not in self.runs:
            metric = main_metrics().get(config.task.name, "reward")
            self.runs[path] = TableRun(
                config.task.name, algo, seed, [*words, f"seed={seed}"], config, path, metric, command, after
            )
            self.runs[path].row, self.runs[path].column = row, column
        return self.runs[path]


def with_seed(config: Config, seed: int) -> Config:
    """The same with another seed, in all of its stages."""
    if isinstance(config, StagedCommandConfig):
        stages = tuple(stage.model_copy(update={"seed": seed}) for stage in config.stages)
        return config.model_copy(update={"seed": seed, "stages": stages})
    return config.model_copy(update={"seed": seed})


def digest(config: RootConfig, identity: Mapping[str, object]) -> str:
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
