"""The run directory: one folder per run, owned by one process at a time, continued after a kill.

Written by `run`, read by all that shows, continues or starts from a run. Layout:

    config.yaml        resolved config            metrics.jsonl   one JSON object per step (two where it was evaluated
    environment.json   versions, machine, git,                    apart from training), keys as in docs/metrics.md
                       digests of files it reads,
                       a copy of the config
    journal/           every rollout and its      eval/           one line per item and evaluation
                       credit, a file per step    checkpoints/    the trainer's
    summary.json       before, after, verdict     report.html     for people
    examples.jsonl     readable fields of examples
    run.lock           held while a process writes here
    segments.jsonl     a line per `train.steps=+N` beside `resume=`; absent otherwise
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import yaml

from mmrl.errors import CheckpointError, ConfigError, DataError, storage_error
from mmrl.records import Example
from mmrl.store.machine import describe_environment
from mmrl.store.policy import chain_problem
from mmrl.system.files import (
    JsonObject,
    append_jsonl,
    atomic_write,
    dumps,
    is_locked,
    plain,
    read_jsonl,
    read_yaml,
    remove_leftovers,
    repair_jsonl,
    take_lock,
)
from mmrl.system.objects import is_registered

LOCK, SEGMENTS, EXAMPLES = "run.lock", "segments.jsonl", "examples.jsonl"
LONGEST_TEXT = 600
"""Characters that are kept of a text of an example."""
FOLDERS = ("journal", "eval", "checkpoints")
_STEP = re.compile(r"step-(\d+)")


def step_of(path: Path) -> int | None:
    """Return the step in a file name like `step-000012.jsonl.gz`; None without one."""
    match = _STEP.search(path.name)
    return int(match.group(1)) if match else None


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the readable fields of an example: texts, numbers and lists of them, without the name of a corpus."""
    texts = {}
    for name, value in values.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if name != "corpus" and parts and all(isinstance(part, str | int | float) for part in parts):
            text = "; ".join(map(str, parts))
            over = len(text) - LONGEST_TEXT
            texts[name] = f"{text[:LONGEST_TEXT]} […{over} characters…]" if over > 0 else text
    return texts


def example_line(split: str, example: Example) -> JsonObject:
    """Return the line of an example in `examples.jsonl`."""
    return {"split": split, "id": example.id, "asked": _texts(example.inputs), "gold": _texts(example.metadata)}


def is_run(path: Path) -> bool:
    """True for a folder that holds a run; config.yaml alone may be a user's file."""
    return (path / "config.yaml").is_file() and (path / "journal").is_dir()


class RunDir:
    """An open run directory. Make one with `create` (new run), `open` (resume, holds the lock) or `read`."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics_path, self.report_path = path / "metrics.jsonl", path / "report.html"
        self.checkpoints = path / "checkpoints"
        self._noted: set[int] | None = None
        self._lock: int | None = None

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: Mapping[str, object],
        command: Sequence[str],
        inputs: Mapping[str, str] = MappingProxyType({}),
    ) -> RunDir:
        """Start a run in a new or empty folder, and hold its lock until `close` or the process's end.

        Args:
            inputs: digests of the files that it reads (`run.inputs`).

        Raises:
            ConfigError: the folder holds something (nothing is touched), or cannot be made.
            CheckpointError: another process is starting a run there.
        """
        run = cls(Path(path))
        refuse_full(run.path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
            refuse_full(run.path)
            for name in FOLDERS:
                (run.path / name).mkdir()
            text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
            # As it will be read back: YAML has no way of writing some characters that JSON has.
            facts = {**describe_environment(command), "inputs": dict(inputs), "config": yaml.safe_load(text)}
            atomic_write(run.path / "environment.json", dumps(facts, indent=1) + "\n")
            atomic_write(run.path / "config.yaml", text)
        except OSError as error:
            # Half a run would keep the same command from starting it.
            run.close()
            for folder in (run.path / name for name in FOLDERS):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
            (run.path / "environment.json").unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise storage_error(error, run.path) or error from None
            raise ConfigError(f"run.dir: cannot write to {run.path}: {error.strerror or error}") from None
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path | str, command: Sequence[str] = ()) -> RunDir:
        """Continue a run: takes the lock, clears what a kill left half-written, notes the new start.

        Raises:
            CheckpointError: not a run, or in use by another process.
        """
        run = cls.read(path)
        run._take_lock()
        for folder in (run.path, *(run.path / name for name in FOLDERS)):
            folder.mkdir(exist_ok=True)
            remove_leftovers(folder)
        # Append-only files may end in half a line, which would join with the next.
        for file in (run.metrics_path, run.path / SEGMENTS, run.path / EXAMPLES):
            repair_jsonl(file)
        if command:
            facts = run.environment
            # Written by hand, or damaged.
            unread = not facts and (run.path / "environment.json").exists()
            if unread or not isinstance(resumed := facts.setdefault("resumed", []), list):
                raise CheckpointError(f"{run.path}/environment.json: is no JSON object; restore it, or delete it")
            # Every start is recorded: the machine may differ from the first one's.
            resumed.append(describe_environment(command))
            atomic_write(run.path / "environment.json", dumps(facts, indent=1) + "\n")
        return run

    @classmethod
    def read(cls, path: Path | str) -> RunDir:
        """Open a run directory without the lock, also while it is running.

        Raises:
            CheckpointError: not a run; names a run below `path` when there is one.
        """
        path = Path(path)
        if not path.is_dir():
            kind = "is a file, expected a run directory" if path.exists() else "no such run directory"
            raise CheckpointError(f"{path}: {kind}")
        if not is_run(path):
            below = [folder for depth in ("*", "*/*", "*/*/*") for folder in path.glob(depth) if is_run(folder)]
            newest = max(below, key=lambda run: (run / "config.yaml").stat().st_mtime, default=None)
            hint = f"; the newest run below it is {newest}" if newest else ""
            problem = chain_problem(path) or f"not a run directory, which has config.yaml and journal/{hint}"
            raise CheckpointError(f"{path}: {problem}")
        return cls(path)

    def note_main_metric(self, name: str) -> None:
        """Write the task's main metric into `environment.json`: the run is read before its summary is there."""
        atomic_write(self.path / "environment.json", dumps({**self.environment, "main_metric": name}, indent=1) + "\n")

    def note_resumed(self, step: int) -> None:
        """Write into `environment.json` after which step the newest start goes on, if it continues a run."""
        facts = self.environment
        if resumed := facts.get("resumed"):
            resumed[-1]["step"] = step
            atomic_write(self.path / "environment.json", dumps(facts, indent=1) + "\n")

    # --- its examples

    def note_examples(self, split: str, examples: Iterable[Example]) -> None:
        """Append new examples to `examples.jsonl`: the inputs, and what the reward goes by."""
        if self._noted is None:
            try:
                self._noted = {hash(dumps(line)) for line in self.examples.values()}
            except DataError:  # damaged: what is missing is written again
                (self.path / EXAMPLES).unlink()
                self._noted = set()
        lines: list[JsonObject] = []
        for example in examples:
            line = example_line(split, example)
            if (content := hash(dumps(line))) not in self._noted:
                self._noted.add(content)
                lines.append(line)
        if lines:
            append_jsonl(self.path / EXAMPLES, lines)

    @property
    def examples(self) -> dict[tuple[str, str], JsonObject]:
        """Texts of the examples trained on or evaluated: (split, id) -> `asked` and `gold`, by name."""
        return {(str(line["split"]), str(line["id"])): line for line in read_jsonl(self.path / EXAMPLES)}

    # --- what is in it

    def journal_path(self, step: int, evaluation: str | None = None) -> Path:
        """Return the journal file of a training step, or of the evaluation on split `evaluation` after that step."""
        return self.path / "journal" / f"step-{step:06d}{f'-eval-{evaluation}' if evaluation else ''}.jsonl.gz"

    def eval_path(self, step: int, split: str) -> Path:
        """Return the per-item results of the evaluation on `split` after `step` (0: before training)."""
        return self.path / "eval" / f"step-{step:06d}-{split}.jsonl"

    @property
    def typed(self) -> str:
        """The path as a shell reads it."""
        return shlex.quote(str(self.path))

    def resume_command(self, *, evaluates: bool = False) -> str:
        """Return what continues the run: a command, or from Python where its program was an object there."""
        task = self._stored_config().get("task", {})
        if any(isinstance(value, str) and is_registered(value) for value in task.values()):
            return f"MMRL(…).compile(…, resume={str(self.path)!r}) in Python"
        return f"mmrl {'eval' if evaluates else 'train'} resume={self.typed}"

    @property
    def config(self) -> JsonObject:
        """The resolved config; for an extended run with the steps of its last segment."""
        config = self._stored_config()
        if (segments := self.segments) and isinstance(config.get("train"), dict):
            config["train"]["steps"] = segments[-1]["steps"]
        return config

    def _stored_config(self) -> JsonObject:
        """Return the mapping in `config.yaml`."""
        path = self.path / "config.yaml"
        try:
            loaded = read_yaml(path)
        except DataError as error:
            raise CheckpointError(str(error)) from None
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path}: holds no settings, expected those that the run was started with")
        # Pages and comparisons sort runs by them.
        names = {
            section: values["name"]
            for section, values in loaded.items()
            if isinstance(values, dict) and "name" in values
        }
        if wrong := [section for section, name in names.items() if not isinstance(name, str | None)]:
            raise CheckpointError(f"{path}: {wrong[0]}.name is no text; restore it")
        return loaded

    @property
    def segments(self) -> list[JsonObject]:
        """The run's extensions, in order: `steps` (all, from then on), `done` (before it), `summary` (the one then).

        Raises:
            DataError: a damaged file.
        """
        return read_jsonl(self.path / SEGMENTS)

    @property
    def planned_steps(self) -> set[object]:
        """Every `train.steps` that the run has had: a checkpoint was made with one of them."""
        train = self._stored_config().get("train")
        first = train.get("steps") if isinstance(train, dict) else None
        return {first, *(segment["steps"] for segment in self.segments)}

    @property
    def environment(self) -> JsonObject:
        """Machine, versions, git state, the config at the start, and the task's main metric; empty when missing."""
        return read_object(self.path / "environment.json")

    @property
    def summary(self) -> JsonObject:
        """Content of `summary.json`, written at the end; empty while it runs."""
        return read_object(self.path / "summary.json")

    @property
    def finished(self) -> bool:
        """True once the summary and, of a training run, the report are written."""
        summary = self.summary
        if (segments := self.segments) and summary.get("steps") != segments[-1]["steps"]:
            return False  # the summary is that of the segment before
        return bool(summary) and (self.report_path.is_file() or "algo" not in self._stored_config())

    def history(self) -> list[JsonObject]:
        """Metrics as a mapping per step, in order (`step` is one of its keys); lines of the same step are merged."""
        # A step has two lines where it was evaluated apart from training.
        merged: dict[int, JsonObject] = {}
        for step, record in self._metrics_lines():
            merged.setdefault(step, {}).update(record)
        return [merged[step] for step in sorted(merged)]

    def _metrics_lines(self) -> Iterator[tuple[int, JsonObject]]:
        for number, record in enumerate(read_jsonl(self.metrics_path), start=1):
            if not isinstance(step := record.get("step"), int):
                raise DataError(f"{self.metrics_path}:{number}: got no integer 'step', expected one in each line")
            yield step, record

    def journal_steps(self, evaluation: str | None = None) -> list[int]:
        """Return the steps that have a journal, in order."""
        files = (self.path / "journal").glob("step-*.jsonl.gz")
        steps = sorted({step for file in files if (step := step_of(file)) is not None})
        return [step for step in steps if self.journal_path(step, evaluation).is_file()]

    # --- writing

    def append_metrics(self, step: int, metrics: Mapping[str, object]) -> None:
        """Write the metrics of one step (0: before training)."""
        append_jsonl(self.metrics_path, [{"step": step, **metrics}])

    def add_segment(self, steps: int, done: int, command: Sequence[str]) -> None:
        """Record that the run goes on to `steps`, of which `done` are done."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        segment = {"steps": steps, "done": done, "started": started, "command": list(command), "summary": self.summary}
        append_jsonl(self.path / SEGMENTS, [segment])

    def drop_segment(self) -> None:
        """Forget the last extension, which was refused."""
        lines = [dumps(segment) + "\n" for segment in self.segments[:-1]]
        if lines:
            atomic_write(self.path / SEGMENTS, "".join(lines))
        else:
            (self.path / SEGMENTS).unlink()

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write `summary.json`."""
        atomic_write(self.path / "summary.json", dumps(summary, indent=1) + "\n")

    def truncate_after(self, step: int) -> None:
        """Delete metrics, journals and evaluations later than `step`: they will be computed again, bit-equal."""
        records = [record for line_step, record in self._metrics_lines() if line_step <= step]
        # Written anew and renamed: a kill in between leaves the old file whole.
        atomic_write(self.metrics_path, "".join(dumps(line) + "\n" for line in records))
        for folder in ("journal", "eval"):
            for file in (self.path / folder).iterdir():
                if (step_of(file) or 0) > step:
                    file.unlink()

    def forget_training(self) -> None:
        """Delete everything that a run without a checkpoint has written but the evaluation before training."""
        self.metrics_path.unlink(missing_ok=True)  # the metrics of that one are computed again from its items
        self.truncate_after(0)

    # --- the lock

    def _take_lock(self) -> None:
        try:
            self._lock = take_lock(self.path / LOCK)
        except BlockingIOError as error:
            raise CheckpointError(f"{self.path}: in use by pid {error}") from None
        except IsADirectoryError:
            raise CheckpointError(f"{self.path / LOCK}: is a folder, expected a file; move it away") from None

    @property
    def in_use(self) -> bool:
        """True while a process writes to the folder."""
        return is_locked(self.path / LOCK)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_full(path: Path) -> None:
    """Raises `ConfigError` unless `path` is free for a new run."""
    if not path.exists():
        # The nearest folder that exists decides whether a new one can be made.
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        if not nearest.is_dir():
            raise ConfigError(f"run.dir: {path} lies below {nearest}, which is a file; expected a new or empty folder")
        return
    if not path.is_dir():
        raise ConfigError(f"run.dir: {path} is a file, expected a new or empty folder")
    # A lock file alone is left by a start that failed before it wrote anything.
    if any(entry.name != LOCK for entry in path.iterdir()):
        problem = f"run.dir: {path} exists and is not empty, nothing was overwritten"
        if is_run(path):
            run = RunDir(path)
            problem += f"; to continue it: mmrl {'eval' if 'policy' in run.config else 'train'} resume={run.typed}"
        raise ConfigError(problem)


def read_object(path: Path) -> JsonObject:
    """Return the JSON object in a file; empty where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def holds_only_leftovers(path: Path) -> bool:
    """True where only files are left that a run makes before its config."""
    # What `RunDir.create` makes, in its order; config.yaml comes last and makes it a run.
    for entry in path.iterdir():
        if entry.name in FOLDERS and entry.is_dir() and not any(entry.iterdir()):
            continue
        if entry.name in (LOCK, "environment.json") or (entry.name.startswith(".") and entry.suffix == ".tmp"):
            continue
        return False
    return not RunDir(path).in_use
