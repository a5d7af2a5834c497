"""The run directory: one folder per run, owned by one process at a time, continued after a kill.

Part of `report`; used by `run` and the commands that read runs. Layout:

    config.yaml        resolved config            metrics.jsonl   one JSON object per step (two where it was evaluated
    environment.json   versions, machine, git                     apart from training), keys as in docs/metrics.md
    journal/           every rollout and its      eval/           one line per item and evaluation
                       credit, a file per step    checkpoints/    the trainer's
    summary.json       before, after, verdict     report.html     for people
    run.lock           held while a process writes here
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import yaml

from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.system.files import (
    JsonObject,
    append_jsonl,
    atomic_write,
    dumps,
    is_locked,
    plain,
    read_jsonl,
    remove_leftovers,
    repair_jsonl,
    take_lock,
)

LOCK = "run.lock"
FOLDERS = ("journal", "eval", "checkpoints")
NOT_COMPARED = ("time/", "rate/", "memory/", "endpoint/")
"""Metric families that a clock or the machine decides; all others are bit-equal on the same inputs."""

Value = TypeVar("Value")
_STEP = re.compile(r"step-(\d+)")


def comparable(metrics: Mapping[str, Value]) -> dict[str, Value | str]:
    """`metrics` without times, rates and memory: what an interrupted and an uninterrupted run share bit for bit.

    NaN becomes the string "nan", so that two records compare with `==`.
    """
    return {
        key: "nan" if isinstance(value, float) and math.isnan(value) else value
        for key, value in metrics.items()
        if not key.startswith(NOT_COMPARED)
    }


def allocate(parent: Path, name: str) -> Path:
    """Make and return a new folder `parent/name`, or `name-2`, `name-3`… when others were faster.

    Raises:
        ConfigError: nothing can be made there.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # `mkdir` is the test itself: two processes can never get one folder.
        for number in range(1, 10_000):
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise ConfigError(f"run.dir: cannot make a folder below {parent}: {error.strerror or error}") from None
    raise ConfigError(f"run.dir: no free name like {parent / name}; set run.dir")


def step_of(path: Path) -> int | None:
    """The step in a file name like `step-000012.jsonl.gz`; None without one."""
    match = _STEP.search(path.name)
    return int(match.group(1)) if match else None


class RunDir:
    """An open run directory. Make one with `create` (new run), `open` (resume, holds the lock) or `read`."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, object], command: Sequence[str]) -> RunDir:
        """Start a run in a new or empty folder, and hold its lock until `close` or the process's end.

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
            for folder in FOLDERS:
                (run.path / folder).mkdir()
            atomic_write(run.path / "environment.json", dumps(describe_environment(command), indent=1) + "\n")
            atomic_write(run.path / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
        except OSError as error:
            run.close()
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
        repair_jsonl(run.metrics_path)
        if command:
            facts = run.environment
            # Every start is recorded: the machine may differ from the first one's.
            facts.setdefault("resumed", []).append(describe_environment(command))
            atomic_write(run.path / "environment.json", dumps(facts, indent=1) + "\n")
        return run

    @classmethod
    def read(cls, path: Path | str) -> RunDir:
        """Look at a run, without lock, also while it is running.

        Raises:
            CheckpointError: not a run; names a run below `path` when there is one.
        """
        path = Path(path)
        if not path.is_dir():
            kind = "is a file, expected a run directory" if path.exists() else "no such run directory"
            raise CheckpointError(f"{path}: {kind}")
        if not (path / "config.yaml").is_file() or not (path / "journal").is_dir():
            raise CheckpointError(f"{path}: not a run directory (no config.yaml and journal/ in it){_run_below(path)}")
        return cls(path)

    # --- what is in it

    @property
    def metrics_path(self) -> Path:
        """`metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the trainer's checkpoints."""
        return self.path / "checkpoints"

    @property
    def report_path(self) -> Path:
        """`report.html`."""
        return self.path / "report.html"

    def journal_path(self, step: int, evaluation: str | None = None) -> Path:
        """Journal file of a training step, or of the evaluation on split `evaluation` after that step."""
        return self.path / "journal" / f"step-{step:06d}{f'-eval-{evaluation}' if evaluation else ''}.jsonl.gz"

    def eval_path(self, step: int, split: str) -> Path:
        """Per-item results of the evaluation on `split` after `step` (0: before training)."""
        return self.path / "eval" / f"step-{step:06d}-{split}.jsonl"

    @property
    def config(self) -> JsonObject:
        """The resolved config."""
        try:
            loaded = yaml.safe_load((self.path / "config.yaml").read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{self.path / 'config.yaml'}: cannot be read: {reason}") from None
        return loaded if isinstance(loaded, dict) else {}

    @property
    def environment(self) -> JsonObject:
        """Machine, versions, git state; empty when missing."""
        return _read_object(self.path / "environment.json")

    @property
    def summary(self) -> JsonObject:
        """What the finished run wrote; empty while it runs."""
        return _read_object(self.path / "summary.json")

    def history(self) -> list[JsonObject]:
        """One mapping per step, in order (`step` is one of its keys); lines of the same step are merged."""
        # A step has two lines where it was evaluated apart from training.
        merged: dict[int, JsonObject] = {}
        for number, record in enumerate(read_jsonl(self.metrics_path), start=1):
            if not isinstance(record.get("step"), int):
                raise DataError(f"{self.metrics_path}:{number}: got no integer 'step', expected one in each line")
            merged.setdefault(record["step"], {}).update(record)
        return [merged[step] for step in sorted(merged)]

    def journal_steps(self, evaluation: str | None = None) -> list[int]:
        """Steps that have a journal, in order."""
        files = (self.path / "journal").glob("step-*.jsonl.gz")
        steps = sorted({step for file in files if (step := step_of(file)) is not None})
        return [step for step in steps if self.journal_path(step, evaluation).is_file()]

    # --- writing

    def append_metrics(self, step: int, metrics: Mapping[str, object]) -> None:
        """Write the metrics of one step (0: before training)."""
        append_jsonl(self.metrics_path, [{"step": step, **metrics}])

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write `summary.json`."""
        atomic_write(self.path / "summary.json", dumps(summary, indent=1) + "\n")

    def truncate_after(self, step: int) -> None:
        """Forget metrics, journals and evaluations later than `step`: they will be computed again, bit-equal."""
        records = [record for record in read_jsonl(self.metrics_path) if record.get("step", 0) <= step]
        # Written anew and renamed: a kill in between leaves the old file whole.
        atomic_write(self.metrics_path, "".join(dumps(record) + "\n" for record in records))
        for folder in ("journal", "eval"):
            for file in (self.path / folder).iterdir():
                at = step_of(file)
                if at is not None and at > step:
                    file.unlink()

    # --- the lock

    def _take_lock(self) -> None:
        try:
            self._lock = take_lock(self.path / LOCK)
        except BlockingIOError as error:
            raise CheckpointError(f"{self.path}: in use by pid {error}") from None

    @property
    def in_use(self) -> bool:
        """Whether a process is writing here now."""
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
        above = next(folder for folder in path.absolute().parents if folder.exists())
        if not above.is_dir():
            raise ConfigError(f"run.dir: {path} lies below {above}, which is a file; expected a new or empty folder")
        return
    if not path.is_dir():
        raise ConfigError(f"run.dir: {path} is a file, expected a new or empty folder")
    # A lock file alone is left by a start that failed before it wrote anything.
    if any(entry.name != LOCK for entry in path.iterdir()):
        hint = f"; to continue it: mmrl train resume={path}" if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"run.dir: {path} exists and is not empty, nothing was overwritten{hint}")


def _run_below(path: Path) -> str:
    """The newest run at most three levels below, as a hint."""
    runs: list[tuple[float, Path]] = []
    for depth in ("*", "*/*", "*/*/*"):
        for config in path.glob(f"{depth}/config.yaml"):
            if (config.parent / "journal").is_dir():
                runs.append((config.stat().st_mtime, config.parent))
    return f"; the newest run below it is {max(runs)[1]}" if runs else ""


def _read_object(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# --- environment.json

PACKAGES = (
    "mmrl",
    "torch",
    "transformers",
    "trl",
    "vllm",
    "peft",
    "accelerate",
    "datasets",
    "numpy",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "dspy",
    "bm25s",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def describe_environment(command: Sequence[str], cwd: Path | None = None) -> JsonObject:
    """Everything that a reader needs to know to run it again, besides the config.

    Args:
        command: the command line as typed.
        cwd: the user's folder, whose git state is recorded; None: the current one.
    """
    # Only if it is loaded anyway: importing it would cost seconds.
    torch = sys.modules.get("torch")
    return {
        "command": list(command),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
        | ({"torch": torch.get_num_threads()} if torch is not None and hasattr(torch, "get_num_threads") else {}),
        "versions": _versions(),
        "cwd": str(cwd or Path.cwd()),
        "git": git_state(cwd or Path.cwd()),
    }


def git_state(folder: Path) -> JsonObject | None:
    """`{"commit", "dirty"}` of the repository around `folder`; None without git or outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            # Without optional locks: reading the state must not disturb a git command of the user.
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        # An optional package that is not installed.
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
