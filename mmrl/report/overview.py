"""Overview of a run directory, for `mmrl show`, the summary and the HTML report; and the runs below a folder.

Part of `report`; reads only, also while the run is going on.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from mmrl.config.base import SHIPPED, value_at
from mmrl.errors import CheckpointError, DataError, MmrlError, refuse
from mmrl.report.alarms import Alarm, alarms
from mmrl.report.stats import (
    FIRST,
    WINDOW,
    Difference,
    History,
    compare_items,
    learning,
    modules_in,
    number,
    short,
    splits_in,
    trailing_mean,
)
from mmrl.report.tables import Rows, with_interval
from mmrl.report.trials import trial_alarms
from mmrl.store.rundir import RunDir, is_run, step_of
from mmrl.system.files import JsonObject, read_jsonl
from mmrl.system.objects import display_name

Item: TypeAlias = JsonObject
"""A line of `eval/*.jsonl`: `id`, `metrics` and more."""


@contextmanager
def damage_named(path: Path | str) -> Iterator[None]:
    """Report in one line, with its place, that a run at `path` cannot be shown.

    The files' own readers name file and line. This is for what only shows when values meet: a number that is too large
    to draw, a name in one file that another one lacks. Faults of mmrl's own look the same from here, so both are named.

    Raises:
        CheckpointError: instead of an error of Python's.
    """
    try:
        yield
    except MmrlError:
        raise
    # Templates and drawings raise errors of their own too.
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"{path}: cannot be shown ({type(error).__name__}: {str(error)[:200]}; {Path(where.filename).name} line "
            f"{where.lineno}): its files do not fit together, or this is a fault of mmrl: please report it"
        ) from error


def _items_of(run: RunDir) -> dict[str, dict[int, Sequence[Item]]]:
    """Split -> step -> results of its items.

    Raises:
        DataError: a line that is no result.
    """
    items: dict[str, dict[int, Sequence[Item]]] = {}
    # Names are `step-000012-<split>.jsonl`, and a split may hold hyphens.
    for path in sorted((run.path / "eval").glob("step-*-*.jsonl")):
        if (step := step_of(path)) is not None:
            read = items.setdefault(path.stem.split("-", 2)[2], {})[step] = read_jsonl(path)
            for line, item in enumerate(read, 1):
                metrics = item.get("metrics")
                numbers = isinstance(metrics, dict) and all(isinstance(n, int | float) for n in metrics.values())
                if not (numbers and isinstance(item.get("id"), str)):
                    raise DataError(f"{path}:{line}: expected an item with id (text) and metrics (numbers by name)")
    return items


@dataclass(frozen=True)
class Overview:
    """Config, environment, summary, metrics and evaluations of a run, read once."""

    run: RunDir
    config: JsonObject
    environment: JsonObject
    summary: JsonObject
    history: History
    items: Mapping[str, Mapping[int, Sequence[Item]]] = field(default_factory=dict)
    """Split -> step -> per-item results."""

    @classmethod
    def from_run(cls, run: RunDir) -> Overview:
        """Read everything but the journals.

        Raises:
            DataError: a metrics or evaluation file is damaged.
        """
        return cls(run, run.config, run.environment, run.summary, run.history(), _items_of(run))

    def get(self, path: str, default: object = None) -> Any:
        """Return a config value by the path that the user would type; `default` where there is none."""
        value = value_at(self.config, path)
        return default if value is None else value

    @property
    def evaluates(self) -> bool:
        """True for an evaluation (`mmrl eval`), which trains nothing."""
        return "policy" in self.config

    @property
    def name(self) -> str:
        """`run.name`, else `<algo>-<task>-s<seed>` (of an evaluation `eval-<task>-s<seed>`)."""
        name = self.get("run.name")
        return name or f"{self.get('algo.name', 'eval')}-{self.get('task.name', '?')}-s{self.get('seed', 0)}"

    @property
    def description(self) -> str:
        """Algorithm, task and model in a few words; of an evaluation policy, task and split."""
        if self.evaluates:
            return f"{self.get('policy')} on {self.get('task.name', '?')}, {self.split}"
        algo, task, model = (self.get(f"{section}.name", "?") for section in ("algo", "task", "model"))
        # `hf` stands for any model, whose folder or hub id tells which
        if model == "hf":
            model = str(self.get("model.path")).rstrip("/").rpartition("/")[2]
        return f"{algo} on {task} with {model}"

    @property
    def state(self) -> str:
        """State of the run: `finished`, `running`, or the command that continues it."""
        if self.summary:  # the process that writes the report of a finished run still holds the lock
            return "finished"
        # The lock is looked at each time: a state that was cached would be wrong a moment later.
        if self.run.in_use:
            return "running"
        return f"stopped; continue with: {self.run.resume_command(evaluates=self.evaluates)}"

    @property
    def split(self) -> str:
        """The split that the run evaluates on."""
        return str(self.get("split" if self.evaluates else "eval.split", "dev"))

    @property
    def training(self) -> list[JsonObject]:
        """Records of the steps that were trained."""
        return [record for record in self.history if record["step"] > 0]

    @property
    def done(self) -> int:
        """Number of finished steps."""
        return max((record["step"] for record in self.history), default=0)

    @property
    def total(self) -> int | None:
        """Number of steps of the whole run."""
        total: int | None = self.get("train.steps")
        return total

    @property
    def window(self) -> int:
        """Steps that each mean of reward (or loss) is over; 0 where there are no more, and single values are shown."""
        return WINDOW if len(learning(self.training)[2]) > WINDOW else 0

    @property
    def curve(self) -> dict[str, float]:
        """Values of the drawn curve of reward (or loss): the first, the last and the best; {} before a step."""
        name, _, values = learning(self.training)
        if not len(values):
            return {}
        means = trailing_mean(values, self.window or 1)
        return {"first": means[0], "last": means[-1], "best": (max if name == "reward" else min)(means)}

    @cached_property
    def alarms(self) -> list[Alarm]:
        """Alarms of the run."""
        raised = [*alarms(self.training), *trial_alarms(self.run.path)]
        return sorted(raised, key=lambda alarm: (alarm.step, alarm.name, alarm.key))

    @property
    def no_alarm(self) -> str:
        """Sentence for a run without alarms."""
        steps = len(self.training)
        few = f"; most look at means over {WINDOW} steps, and this run has {steps}" if steps < WINDOW else ""
        return f"No alarm rang{few}."

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules with metrics."""
        return modules_in(self.training)

    @property
    def recorded_metric(self) -> str:
        """The task's main metric as the run wrote it down; empty of a run of an earlier version before its end."""
        return str(self.summary.get("main_metric") or self.environment.get("main_metric") or "")

    @property
    def main_metric(self) -> str | None:
        """The evaluation metric shown first."""
        preferred = (self.recorded_metric, "em", "accuracy", "f1", "reward")
        names = self.metric_names(self.split)
        return next((str(name) for name in preferred if name in names), names[0] if names else None)

    def metric_names(self, split: str) -> list[str]:
        """Return the evaluation metrics with an interval; those of answers first."""
        prefix = f"eval/{split}/"
        keys = dict.fromkeys(key for record in self.history for key in record if key.startswith(prefix))
        # A metric with a lower bound has an interval: the others are counts and times.
        names = [key.removeprefix(prefix) for key in keys]
        measured = [name for name in names if f"{name}_low" in names]
        return sorted(measured, key=lambda name: (name not in FIRST, name == "reward"))

    @property
    def evaluations(self) -> dict[str, Rows]:
        """Split, the run's own first -> a row per evaluation with its first metrics and their intervals."""
        tables: dict[str, Rows] = {}
        for split in sorted(splits_in(self.history), key=lambda split: (split != self.split, split)):
            names = sorted(self.metric_names(split), key=lambda name: name != self.main_metric)[:4]
            keys = [f"eval/{split}/{name}" for name in names]
            evaluated = [record for record in self.history if any(number(record.get(key)) is not None for key in keys)]
            if evaluated:
                tables[split] = [["step", *names, "items"]]
            for record in evaluated:
                values = [with_interval(record, key) for key in keys]
                tables[split].append([str(record["step"]), *values, short(record.get(f"eval/{split}/n"))])
        return tables

    @cached_property
    def differences(self) -> dict[str, Difference]:
        """Differences of the last evaluation to the first by metric, on common items; empty before a second one."""
        # The first and the last evaluation: before and after training.
        steps = sorted(self.items.get(self.split, {}))
        return self.compared(steps[0], steps[-1]) if len(steps) > 1 else {}

    def compared(self, before: int, after: int) -> dict[str, Difference]:
        """Compare by metric the evaluation after step `after` with that after step `before`, as `eval.*` says."""
        evaluated, resamples = self.items[self.split], int(self.get("eval.bootstrap", 1000))
        return compare_items(evaluated[before], evaluated[after], int(self.get("seed", 0)), resamples, self.main_metric)

    @property
    def stated_data(self) -> str:
        """Data in the task's own words: one that makes its data without a source says so."""
        return str((self.summary.get("facts") or {}).get("data", "mini world"))

    @cached_property
    def kind(self) -> list[str]:
        """Description of the run's data and model, in sentences."""
        sentences = []
        sources = self.get("task.data", {}) or {}
        splits = (*(() if self.evaluates else ("train",)), str(self.split))
        # The sentence that must not be missing: invented data, no public score.
        mini = [split for split in splits if sources.get(split) in ("mini", "generated")]
        if mini and "mini world" not in self.stated_data:
            sentences.append(f"Data: {self.stated_data}.")
        elif mini:
            sentences.append(
                "Data: the embedded mini world, an invented world made by a seeded generator. Its scores say whether "
                "training works; they are not scores on the public data set of the same name. "
                "Real data: task.data.train=… task.data.dev=… (a file or a hub id)."
            )
        else:
            sentences.append(
                f"Data: {', '.join(f'{split} {display_name(str(sources.get(split)))}' for split in splits)}."
            )
        model = self.get("policy" if self.evaluates else "model.path")
        if model in SHIPPED:
            sentences.append(
                f"Model: the shipped tiny model ({model}), trained on the mini world only; on real "
                "text it scores near zero. A real model: model=hf model.path=… (a folder or hub id)."
            )
        else:
            sentences.append(f"Model: {model}.")
        return sentences


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run directories at `paths`, or below those that are none.

    Raises:
        ConfigError: a path that is missing or has no training run; all at once.
    """
    by_path: dict[Path, Path] = {}
    problems = []
    for path in paths:
        # The logs of a set lie beside its runs, where a pattern in the shell finds both: of each run its log, too.
        if path.suffix == ".log" and is_run(path.with_suffix("")):
            path = path.with_suffix("")
        if not path.is_dir():
            problems.append(f"runs: {path}: {'is a file' if path.exists() else 'no such folder'}")
            continue
        below = sorted(file.parent for file in path.rglob("config.yaml") if is_run(file.parent))
        # Only training runs have an algorithm in their config.
        training = [run for run in below if "algo" in RunDir.read(run).config]
        if not training:
            other = f" (only {len(below)} of `mmrl eval`)" if below else ""
            problems.append(f"runs: {path}: no training run in it or below it{other}")
        by_path |= {run.resolve(): run for run in training}
    refuse(problems)
    return list(by_path.values())
