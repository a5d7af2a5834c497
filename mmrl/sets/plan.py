"""The runs of a set: from its words to configs, to folders named by their digest, so that sets share runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.config import EvalCommandConfig, RootConfig, StageConfig
from mmrl.config.base import value_at
from mmrl.errors import ConfigError
from mmrl.sets.cells import SetResult
from mmrl.sets.queue import SetRun
from mmrl.sets.spec import MAIN, Command, SetSpec
from mmrl.sets.words import TRAINING_ALONE, is_below, words_of
from mmrl.system.conf import later_wins, options
from mmrl.tasks import TASKS

TOP = Path("outputs") / "sets"
RUNS = TOP / "runs"
OF_MACHINE = ("run", "hardware", "engine")
"""Sections that say where a run lies and what it runs on: the rest is what it is."""
Config = StageConfig | EvalCommandConfig
Compose = Callable[[Command, Sequence[str]], Config]
"""Overrides of a command to a validated config; raises `ConfigError`. Hydra is not known here."""


@dataclass(slots=True)
class Planner:
    """Makes the runs of a set; each config is composed once, and each run is there once.

    Args:
        typed: overrides of every run, as typed; an evaluation has those that it can take.
        folder: of the rows' runs, by their names; None: `RUNS`, by task, algorithm and digest.
    """

    spec: SetSpec
    scale: str
    compose: Compose
    typed: Sequence[str]
    folder: Path | None = None
    runs: dict[Path, SetRun] = field(default_factory=dict)
    composed: dict[tuple[str, ...], Config] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def plan(self, name: str, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int] | None) -> SetResult:
        """The runs of some rows on some columns.

        Args:
            seeds: None: each row's own.

        Raises:
            ConfigError: every problem of every config.
        """
        rows = [row for row in rows if self.spec.rows[row].shown]
        pairs = [(row, column) for row, column in self.spec.pairs if row in rows and column in columns]
        cells: dict[tuple[str, str], list[SetRun]] = {pair: [] for pair in pairs}
        metrics: dict[tuple[str, str], Mapping[str, str]] = {}
        # A row that needs fewer seeds than others (nothing of it is drawn) has its own, whatever was chosen.
        of_row = {row: tuple(self.spec.rows[row].seeds or seeds or self.spec.seeds) for row in rows}
        # Seed by seed, so that one seed of everything is there early.
        for seed in dict.fromkeys(seed for some in of_row.values() for seed in some):
            for row, column in pairs:
                if seed not in of_row[row]:
                    continue
                with self._problems_of(row, column):
                    run = self._evaluated(row, column, seed) if self.spec.scores else self._trained(row, column, seed)
                    cells[row, column].append(run)
                    named = self.spec.measured.items()
                    metrics[row, column] = {score: run.metric if m == MAIN else m for score, m in named}
        if self.problems:
            raise ConfigError(dict.fromkeys(self.problems))
        runs = list(self.runs.values())
        apart = {(run.row, run.seed, run.column) for run in runs if run.command == "train"}
        for run in runs:
            # Named by its column only where columns are trained apart.
            if run.command == "train" and sum(place[:2] == (run.row, run.seed) for place in apart) == 1:
                run.column = ""
        return SetResult(
            name=name,
            spec=self.spec,
            scale=self.scale,
            rows=rows,
            columns=columns,
            metrics=metrics,
            runs=cells,
            queue=runs,
        )

    @contextmanager
    def _problems_of(self, row: str, column: str) -> Iterator[None]:
        """Collects problems of a cell with its name."""
        try:
            yield
        except ConfigError as error:
            place = f"{row} on {column}" if len(self.spec.columns) > 1 else row
            self.problems += [f"{place}: {problem}" for problem in error.problems]

    def _evaluated(self, row: str, column: str, seed: int) -> SetRun:
        method = self.spec.rows[row]
        words = self._words(row, column, "eval")
        if method.policy:
            return self._run("eval", row, column, seed, words, self._config("eval", words, seed), None, {})
        trained = self._trained(row, column, seed)
        # The weights are the run's, whatever that started from.
        words = [word for word in words if not word.startswith("model.path=")]
        # The policy is not there yet: what the evaluation is but for it, and the digest of what it is made from.
        config = self._config("eval", [*words, "policy=tiny"], seed)
        config = config.model_copy(update={"policy": str(trained.path)})
        identity = {"of": trained.path.name, "checkpoint": method.checkpoint}
        run = self._run("eval", row, column, seed, words, config, trained, identity)
        run.checkpoint = method.checkpoint
        return run

    def _trained(self, row: str, column: str, seed: int) -> SetRun:
        words, start = self._words(row, column, "train"), self.spec.rows[row].from_
        if not start:
            return self._run("train", row, column, seed, words, self._config("train", words, seed), None, {})
        before = self._trained(start, column, seed)
        config = self._config("train", words, seed)
        models = [(one.model.name, one.model.path) for one in (config, before.config)]
        if models[0] != models[1]:
            (name, path), (first_name, first_path) = models
            raise ConfigError(
                f"model: got {name} ({path}), and {start}, from which it starts, is {first_name} ({first_path})"
            )
        # Its own model and task: `from=` alone would take those of the run before with all of their settings.
        for group, name in (("model", config.model.name), ("task", config.task.name)):
            if name in options(group) and not any(word.startswith(f"{group}=") for word in words):
                words = [f"{group}={name}", *words]
        return self._run("train", row, column, seed, words, config, before, {"of": before.path.name})

    def _words(self, row: str, column: str, command: Command) -> list[str]:
        typed = [word for word in self.typed if command == "train" or not is_below(word, TRAINING_ALONE)]
        return later_wins([*words_of(self.spec, row, column, self.scale, command), *typed])

    def _config(self, command: Command, words: Sequence[str], seed: int) -> Config:
        key = (command, *words)
        if key not in self.composed:
            self.composed[key] = self.compose(command, words)
        return self.composed[key].model_copy(update={"seed": seed})

    def _run(
        self,
        command: Command,
        row: str,
        column: str,
        seed: int,
        words: Sequence[str],
        config: Config,
        after: SetRun | None,
        identity: Mapping[str, object],
    ) -> SetRun:
        algo = str(value_at(config, "algo.name") or "eval")
        path = RUNS / config.task.name / algo / f"s{seed}-{digest(config, identity)}"
        if self.folder is not None:
            path = self.folder / row
        if path not in self.runs:
            self.runs[path] = SetRun(
                command=command,
                row=row,
                column=column,
                seed=seed,
                words=[*words, f"seed={seed}"],
                config=config,
                path=path,
                metric=main_metrics().get(config.task.name, "reward"),
                after=after,
            )
        return self.runs[path]


def main_metrics() -> dict[str, str]:
    """Task -> its main metric, of tasks whose class says it."""
    return {name: str(task.main_metric) for name, task in TASKS.items() if hasattr(task, "main_metric")}


def digest(config: RootConfig, identity: Mapping[str, object]) -> str:
    """Of what a run is, wherever it lies and whatever it runs on."""
    content = {key: value for key, value in config.model_dump(mode="json").items() if key not in OF_MACHINE}
    if identity:
        # How the weights before it were made stands for their place, and for what is read from there.
        content = {key: value for key, value in content.items() if key != "policy"}
        content["model"] = {key: value for key, value in content["model"].items() if key != "path"}
    text = json.dumps({**content, **identity}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
