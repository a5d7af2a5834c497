"""Runs of a set: from its words to configs, and to folders named by their digest, so that sets share runs."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmrl.config import EvalRunConfig, RootConfig, StageConfig, WeightRunConfig
from mmrl.config.base import value_at
from mmrl.errors import ConfigError, gathered, refuse
from mmrl.sets.cells import SetResult
from mmrl.sets.queue import PlannedRun
from mmrl.sets.settings import PLACES
from mmrl.sets.spec import Command, SetSpec
from mmrl.sets.words import is_below, words_of
from mmrl.system.conf import options
from mmrl.tasks import TASKS

TOP = Path("outputs") / "sets"
RUNS = TOP / "runs"
MACHINE_SECTIONS = ("run", "hardware", "engine")
"""Sections that say where a run lies and what it runs on: the rest is what it is."""
Config = StageConfig | EvalRunConfig
Compose = Callable[[Command, Sequence[str], str | None], Config]
"""Overrides of a command and a folder of configs -> a validated config, or `ConfigError`. Hydra is not known here."""


@dataclass(slots=True)
class Planner:
    """Planner of a set's runs; each config is composed once, and each run exists once.

    Args:
        overrides: overrides of every run; an evaluation has those that it can take.
        typed: those of them that are no part of the set: what they change is marked on its page.
        config_dir: a folder of configs that the words need.
    """

    spec: SetSpec
    compose: Compose
    overrides: Sequence[str]
    typed: Sequence[str] = ()
    config_dir: str | None = None
    runs: dict[Path, PlannedRun] = field(default_factory=dict)
    composed: dict[tuple[str, ...], Config] = field(default_factory=dict)
    result: Callable[..., SetResult] = SetResult

    def plan(self, name: str, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int]) -> SetResult:
        """Plan the runs of some rows on some columns.

        Args:
            seeds: none: each row's own.

        Raises:
            ConfigError: every problem of every config.
        """
        spec, (cells, problems) = self.spec, self._planned(rows, columns, seeds)
        refuse(dict.fromkeys(problems))
        if changes := [word for word in self.typed if not is_below(word, PLACES)]:
            own = replace(self, overrides=[word for word in self.overrides if word not in changes], runs={})
            # A run that cannot be planned without them is not the set's own either.
            own._planned(rows, columns, seeds)
            for run in self.runs.values():
                run.other = run.path not in own.runs
        queue = list(self.runs.values())
        trained = Counter((run.row, run.seed) for run in queue if run.command == "train")
        for run in queue:
            # The column is part of the name only if each column has a training of its own.
            if run.command == "train" and trained[run.row, run.seed] == 1:
                run.column = ""
        return self.result(name=name, spec=spec, rows=rows, columns=columns, runs=cells, queue=queue)

    def _planned(
        self, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int]
    ) -> tuple[dict[tuple[str, str], list[PlannedRun]], list[str]]:
        """Return the runs of each cell, and every problem of their configs."""
        spec = self.spec
        pairs = [(row, column) for row, column in spec.pairs if row in rows and column in columns]
        cells: dict[tuple[str, str], list[PlannedRun]] = {pair: [] for pair in pairs}
        problems: list[str] = []
        found: dict[tuple[str, str], list[str]] = {}
        # A row may declare fewer seeds (nothing in it is random); `seed=` does not change these.
        seeds_of_row = {row: tuple(spec.rows[row].seeds or seeds or spec.seeds) for row in rows}
        # Seed by seed, so that early on every cell has one seed.
        for seed in dict.fromkeys(seed for row_seeds in seeds_of_row.values() for seed in row_seeds):
            for row, column in pairs:
                if seed not in seeds_of_row[row]:
                    continue
                cell_problems = found[row, column] = list[str]()
                with gathered(cell_problems):
                    cells[row, column].append(self.cell_run(row, column, seed))
                cell_name = f"{row} on {column}" if len(spec.columns) > 1 else row
                # Those of the row that it starts from are that row's.
                known = found.get((spec.rows[row].from_, column), ())
                problems += [f"{cell_name}: {problem}" for problem in cell_problems if problem not in known]
        return cells, problems

    def cell_run(self, row: str, column: str, seed: int) -> PlannedRun:
        """Plan the run whose scores a cell has."""
        return self.training(row, column, seed)

    def training(self, row: str, column: str, seed: int) -> PlannedRun:
        """Plan the training of a row, with those that it starts from."""
        method, after = self.spec.rows[row], None
        words = self.words(row, column)
        identity: dict[str, object] = {}
        config = self.config(words, seed)
        if method.from_:
            after = self.training(method.from_, column, seed)
            identity = {"of": after.path.name}
            if isinstance(after.config, WeightRunConfig) and (
                after.config.model.modules is not None or value_at(after.config, "algo.frozen_serving")
            ):
                apart = "trains weights for each module apart (model.modules, algo.frozen_serving)"
                raise ConfigError(f"{method.from_}: {apart}, from which no run can start; make it the last step")
            model, model_before = (
                " ".join(filter(None, [run.model.name, f"({run.model.path})", run.model.revision]))
                for run in (config, after.config)
            )
            if model != model_before:
                raise ConfigError(f"model: got {model}, and {method.from_}, from which it starts, is {model_before}")
            if value_at(config, "task.prompts") and any(
                value_at(link.config, "task.prompts") or not isinstance(link.config, WeightRunConfig)
                for link in after.chain
            ):
                if value_at(config, "task.prompts") != value_at(after.config, "task.prompts"):
                    raise ConfigError(f"task.prompts: has no effect, since it starts with those of {method.from_}")
                words = [word for word in words if not is_below(word, ("task.prompts",))]
            # Model and task are named: `from=` alone would take over those of the run before, with all their settings.
            for group, name in (("model", config.model.name), ("task", config.task.name)):
                if name in options(group) and not any(word.startswith(f"{group}=") for word in words):
                    words = [f"{group}={name}", *words]
        run = PlannedRun(row=row, column=column, seed=seed, words=words, config=config, path=Path(), after=after)
        return self.placed(run, identity)

    def words(self, row: str, column: str) -> list[str]:
        """Return the overrides of a row's training."""
        return words_of(self.spec, row, column, self.overrides)

    def placed(self, run: PlannedRun, identity: Mapping[str, object]) -> PlannedRun:
        """Give a run its folder, unless the set has it already: then return that one."""
        task, algo = run.config.task.name, str(value_at(run.config, "algo.name") or "eval")
        path = RUNS / task / algo / f"s{run.seed}-{settings_digest(run.config, identity)}"
        if path not in self.runs:
            words = [*run.words, f"seed={run.seed}"]
            self.runs[path] = replace(run, path=path, words=words, metric=main_metrics().get(task, "reward"))
        return self.runs[path]

    def config(self, words: Sequence[str], seed: int, command: Command = "train") -> Config:
        """Return the config of a run; of runs that differ in the seed alone it is composed once."""
        key = (command, *words)
        if key not in self.composed:
            self.composed[key] = self.compose(command, words, self.config_dir)
        return self.composed[key].model_copy(update={"seed": seed})


def main_metrics() -> dict[str, str]:
    """Return task -> main metric, for tasks whose class names it."""
    return {name: str(task.main_metric) for name, task in TASKS.items() if hasattr(task, "main_metric")}


def settings_digest(config: RootConfig, identity: Mapping[str, object]) -> str:
    """Return the digest of a run's settings, whatever its folder and machine."""
    settings = config.model_dump(mode="json")
    content = {key: value for key, value in settings.items() if key not in MACHINE_SECTIONS}
    # Which model answers is no matter of the machine.
    content |= {key: settings["engine"][key] for key in ("endpoint", "endpoints") if settings["engine"].get(key)}
    if identity:
        # The digest of the run before identifies its weights, in place of their path.
        content = {key: value for key, value in content.items() if key != "policy"}
        content["model"] = {key: value for key, value in content["model"].items() if key != "path"}
    text = json.dumps({**content, **identity}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
