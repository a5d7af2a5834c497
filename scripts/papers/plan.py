"""Runs of a table: a training of each row, evaluated on each column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mmrl.config.base import path_override
from mmrl.errors import ConfigError, MmrlError
from mmrl.report.stats import series
from mmrl.sets.plan import Planner
from mmrl.sets.queue import PlannedRun
from mmrl.store.policy import complete_checkpoints
from mmrl.store.rundir import RunDir
from scripts.papers.spec import Table, table_words
from scripts.papers.values import TableResult

COLLAPSED = 0.5
"""Share of the best evaluation below which training has collapsed, if it never returns."""


@dataclass(kw_only=True)
class Evaluation(PlannedRun):
    """An evaluation of a policy: of the run `after`, or the one that its words name."""

    checkpoint: str
    """Checkpoint of `after` that is evaluated: the row's rule."""

    def all_words(self) -> list[str]:
        """Return all overrides of the run, once the run before it has ended.

        Raises:
            ConfigError: no checkpoint of that run is what the row's rule names.
        """
        words = [*self.words, path_override("run.dir", self.path)]
        if self.after is None:
            return words
        policy = self.after.path
        if self.checkpoint == "before_collapse":
            policy = before_collapse(policy, self.after.metric)
        return [*words, path_override("policy", policy)]

    def command_line(self) -> str:
        """Return the shell command of the run; or why its row's rule names no checkpoint yet."""
        try:
            return super().command_line()
        except MmrlError as error:
            return str(error)


@dataclass(slots=True, kw_only=True)
class TablePlanner(Planner):
    """Planner of a table's runs at one scale."""

    spec: Table
    scale: str

    def __post_init__(self) -> None:
        self.result = partial(TableResult, scale=self.scale)

    def cell_run(self, row: str, column: str, seed: int) -> PlannedRun:
        """Plan the evaluation of a row on a column, with the trainings that it needs."""
        method, after = self.spec.rows[row], None
        words = table_words(self.spec, row, column, self.scale, "eval", self.overrides)
        identity: dict[str, object] = {}
        if method.policy:
            config = self.config(words, seed, "eval")
        else:
            after = self.training(row, column, seed)
            # The weights come from the run, not from the model that it started from.
            words = [word for word in words if not word.startswith("model.path=")]
            # The policy does not exist yet: a placeholder validates, and the training's digest identifies it.
            config = self.config([*words, "policy=tiny"], seed, "eval")
            config = config.model_copy(update={"policy": str(after.path)})
            identity = {"of": after.path.name, "checkpoint": method.checkpoint}
        run = Evaluation(
            command="eval",
            row=row,
            column=column,
            seed=seed,
            words=words,
            config=config,
            path=Path(),
            after=after,  # type: ignore[arg-type]  # a training, and `Self` asks for an evaluation
            checkpoint=method.checkpoint,
        )
        return self.placed(run, identity)

    def words(self, row: str, column: str) -> list[str]:
        """Return the overrides of a row's training."""
        return table_words(self.spec, row, column, self.scale, "train", self.overrides)


def before_collapse(run: Path, metric: str) -> Path:
    """Return the last checkpoint of a run before its evaluations collapse; the newest one where they do not.

    Training has collapsed where the main metric falls below half of its best and stays there to the end.

    Raises:
        ConfigError: the run has no checkpoint from before.
    """
    directory = RunDir.read(run)
    steps, scores = series(directory.history(), f"eval/{directory.config['eval']['split']}/{metric}")
    standing = np.flatnonzero(scores >= COLLAPSED * np.maximum.accumulate(scores))
    collapsed = len(standing) > 0 and standing[-1] < len(steps) - 1
    latest = steps[standing[-1]] if collapsed else math.inf
    checkpoints = complete_checkpoints(run / "checkpoints")
    fitting = [path for path in checkpoints if int(path.name.rpartition("-")[2]) <= latest]
    if not fitting:
        raise ConfigError(f"{run}: no checkpoint is left from before its collapse after step {latest} (train.keep)")
    return fitting[-1]
