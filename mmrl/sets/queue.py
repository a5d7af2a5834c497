"""Runs as child processes, some at a time: missing runs start, unfinished ones resume, finished ones stay.

A child is `mmrl train …` or `mmrl eval …` with a run directory that depends on the run alone, so the same command
continues a set that was killed. Children end when this process ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal, Self

from mmrl.config import EvalRunConfig, StageConfig, schema_of, validate_stored
from mmrl.config.base import path_override, value_at
from mmrl.errors import CheckpointError, ConfigError, MmrlError
from mmrl.report.stats import duration
from mmrl.run.before import before_differences
from mmrl.run.inputs import changed_inputs
from mmrl.run.settle import settle
from mmrl.run.start import require_start
from mmrl.sets.spec import Command
from mmrl.store.machine import changed_code
from mmrl.store.policy import newest_checkpoint
from mmrl.store.rundir import RunDir, holds_only_leftovers, is_run
from mmrl.system.child_process import end_with_parent

MMRL = [sys.executable, "-m", "mmrl"]
POLL_S = 0.5
STOP_S = 120.0
"""Seconds that a stopped run has to end by itself."""
SHARED_S = 10.0
"""Seconds until a shared file system shows what another machine wrote."""
LOCK_S = 30.0
"""Seconds that a run of a set killed just now has to let go of its directory."""
State = Literal["new", "unfinished", "finished"]


@dataclass(kw_only=True)
class CellRun:
    """A run of a set: its folder, and the run that it starts from."""

    seed: int
    path: Path
    command: Command = "train"
    after: Self | None = None
    """The run whose policy it starts from or evaluates."""
    metric: str = ""
    other: bool = False
    """True: its settings are not those of its set."""

    @property
    def chain(self) -> list[Self]:
        """Runs that it starts from, the first one first, and itself."""
        return [*(self.after.chain if self.after is not None else ()), self]

    @property
    def trained(self) -> Path | None:
        """Training run of the policy; None for a policy that its set does not train."""
        return next((run.path for run in reversed(self.chain) if run.command == "train"), None)

    def command_line(self) -> str:
        """Return the shell command of the run; empty for a run that is only compared."""
        return ""

    def failure(self) -> str:
        """Return the reason of the run's failure; empty where it did not fail."""
        return ""


@dataclass(kw_only=True)
class PlannedRun(CellRun):
    """A run that a set starts: its settings and its state."""

    row: str
    column: str
    """Empty where one training serves all columns."""
    words: Sequence[str]
    """Overrides of the run, without policy= and from=, whose runs may not exist yet."""
    config: StageConfig | EvalRunConfig
    code: int | None = None
    """Exit code of its process; 0 for a run that was finished before, None where it did not run."""
    reason: str = ""
    """Reason why the run was not started; empty if it was."""
    log_start: int = 0
    """Bytes of its log that earlier starts have written."""

    @property
    def name(self) -> str:
        """Command, row, column and seed, for messages."""
        return f"{self.command} {self.row}{f' on {self.column}' if self.column else ''}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """File with the output of the run's process."""
        return self.path.with_name(f"{self.path.name}.log")

    def all_words(self) -> list[str]:
        """Return all overrides of the run, once the run before it has ended."""
        words = [*self.words, path_override("run.dir", self.path)]
        return words if self.after is None else [*words, f"from={self.after.path}"]

    def command_line(self) -> str:
        """Return the shell command of the run."""
        return shlex.join(["mmrl", self.command, *self.all_words()])

    def failure(self) -> str:
        """Return the last error that a failed run printed."""
        if self.reason or not self.code:
            return self.reason
        # Of its last start: an earlier one may have failed for another reason.
        content = self.log.read_bytes()[self.log_start :] if self.log.is_file() else b""
        lines = content.decode(errors="replace").splitlines()
        # A killed run prints no error line; its last line is then the best hint.
        errors = [line for line in lines if line.startswith("error: ")] or [line for line in lines if line.strip()]
        message = f", {errors[-1].strip()[:300]} (log: {self.log})" if errors else ""
        return f"exit code {self.code}{message}"


def by_cell(runs: Sequence[PlannedRun]) -> dict[tuple[Command, str, str], list[PlannedRun]]:
    """Group runs by (command, row, column): they differ in their seed alone."""
    cells: dict[tuple[Command, str, str], list[PlannedRun]] = {}
    for run in runs:
        cells.setdefault((run.command, run.row, run.column), []).append(run)
    return cells


def day_of(folders: Iterable[Path]) -> str:
    """Return the day that chat templates write in runs of a set: that of the first that has begun, or today."""
    began = [RunDir.read(folder).config for folder in folders if (folder / "config.yaml").is_file()]
    days = [str(day) for config in began if (day := value_at(config, "model.date"))]
    return min(days, default=date.today().isoformat())


@dataclass
class RunQueue:
    """Queue of child processes, `at_once` of them at a time."""

    runs: Sequence[PlannedRun]
    at_once: int
    """Processes; each has one thread where there are several on this machine."""
    config_dir: str | None
    on_done: Callable[[], None]
    """Called after each run that ended well."""
    launcher: Sequence[str] = ()
    """A command that starts a child somewhere else and ends with it (`srun --gpus-per-node=8`), before its words; its
    machine is then not this one."""
    running: list[tuple[PlannedRun, subprocess.Popen[bytes], float]] = field(default_factory=list)
    """Runs under way with their processes and the time of their start."""

    def run(self) -> None:
        """Run all.

        Raises:
            KeyboardInterrupt: passed on once the children have ended.
        """
        waiting = list(self.runs)
        try:
            while waiting or self.running:
                ready = [run for run in waiting if run.after is None or run.after.code is not None]
                if ready and len(self.running) < self.at_once:
                    waiting.remove(ready[0])
                    self._start(ready[0])
                    continue
                time.sleep(POLL_S)
                for child in [child for child in self.running if child[1].poll() is not None]:
                    self.running.remove(child)
                    self._end(*child)
        except BaseException:
            self._stop()
            raise

    def _start(self, run: PlannedRun) -> None:
        try:
            if run.after is not None and run.after.code != 0:
                raise ConfigError(f"{run.after.name} failed")
            state = run_state(run.path)
            if state == "finished" and run.after is not None:
                _require_start(run.path, run.after.path)
            # A run whose set was killed gets SIGTERM from the system and still writes its last checkpoint.
            if state == "unfinished" and not _within(LOCK_S, lambda: not RunDir(run.path).in_use):
                raise ConfigError(f"{run.path}: another process has this run; try again once it has ended")
            words = run.all_words()
        except ConfigError as error:
            run.code, run.reason = error.exit_code, str(error)
            self._say(f"{run.name}: left out: {error}")
            return
        if state == "finished":
            run.code = 0
            self._say(f"{run.name}: finished before, kept{though_changed(run.path)}")
            return
        # A process each: a run that dies of memory or a signal takes neither the queue nor the others along.
        command = [*self.launcher, *MMRL, run.command]
        if state == "unfinished":
            command.append(f"resume={run.path}")
        else:
            # An evaluation asks on the day of its policy.
            if run.config.model.date is None and (run.command == "train" or run.after is None):
                of_its_set = run.chain if run.after is not None else self.runs
                words.append(f"model.date={day_of(one.path for one in of_its_set)}")
            if (before := self._evaluated(run, words)) is not None:
                words.append(path_override("run.before", before))
            command += [*(("--config-dir", self.config_dir) if self.config_dir else ()), *words]
        run.path.parent.mkdir(parents=True, exist_ok=True)
        # Runs side by side would otherwise each take all CPUs and wait for one another.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self.at_once > 1 and not self.launcher else {}
        # Appended, so that the log of a continued run has its earlier output too.
        with open(run.log, "ab") as log:
            run.log_start = log.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops each run in turn
                preexec_fn=end_with_parent,
            )
        self.running.append((run, process, time.monotonic()))
        self._say(f"{run.name}: {'continues' if state == 'unfinished' else 'starts'} (log: {run.log})")

    def _evaluated(self, run: PlannedRun, words: Sequence[str]) -> Path | None:
        """Return a run of the set whose evaluation before training is this one's too; None: there is none yet."""
        config = run.config
        if not isinstance(config, StageConfig) or run.after is not None or config.run.before is not None:
            return None
        others = [
            other.path
            for other in self.runs
            if other is not run and RunDir(other.path).eval_path(0, config.eval.split).exists()
        ]
        if not others:
            return None
        days = [word.partition("=")[2] for word in words if word.startswith("model.date=")]
        if days:
            config = config.model_copy(update={"model": config.model.model_copy(update={"date": days[-1]})})
        settled = settle(config, planned=True).config
        for path in others:
            with suppress(MmrlError):  # it is damaged, which is its own matter
                if not before_differences(settled, path):
                    return path
        return None

    def _end(self, run: PlannedRun, process: subprocess.Popen[bytes], started: float) -> None:
        run.code = process.returncode
        if run.code == 0 and self.launcher and not _within(SHARED_S, lambda: run_state(run.path) == "finished"):
            run.code = 1
            run.reason = f"through: {self.launcher[0]} has ended, and the run has not; it must stay until then"
        if run.code == 0:
            self._say(f"{run.name}: done in {duration(time.monotonic() - started)}")
            self.on_done()
        else:
            self._say(f"{run.name}: failed: {run.failure()}")

    def _say(self, text: str) -> None:
        print(f"[{sum(run.code is not None for run in self.runs)}/{len(self.runs)}] {text}", flush=True)

    def _stop(self) -> None:
        """End the children: they save what they have and can be resumed."""
        # All are terminated first and waited for afterwards, so that they save side by side.
        for _, process, _ in self.running:
            process.terminate()
        for _, process, _ in self.running:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def though_changed(path: Path) -> str:
    """Return, for the line that keeps a finished run, which of its code and files are others now; empty: none."""
    facts = RunDir.read(path).environment
    changed = ", ".join([*changed_code(facts), *changed_inputs(facts)])
    return f", though {changed} has changed since; delete {path} to run it again" if changed else ""


def _require_start(path: Path, before: Path) -> None:
    """Refuse a finished run whose start has another policy now: its numbers are of one that is gone.

    Raises:
        ConfigError: with what to do.
    """
    stored = RunDir.read(path).config
    # Without checkpoints, as where they were deleted for their size, there is nothing to tell by.
    if not stored.get("start") or newest_checkpoint(before) is None:
        return
    config = validate_stored(schema_of(stored), stored)
    assert isinstance(config, StageConfig)
    try:
        require_start(config, path)
    except CheckpointError as error:
        raise ConfigError(f"{str(error).partition('; restore')[0]}; delete {path} to run it again") from None


def _within(seconds: float, check: Callable[[], bool]) -> bool:
    """Wait until a check holds; False where it does not in time."""
    deadline = time.monotonic() + seconds
    while not (holds := check()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return holds


def run_state(path: Path) -> State:
    """Return the state of the run in a folder; remove the leftovers of a start that was killed at once.

    The name of a set's run directory is a digest of its settings, so a run there has these.

    Raises:
        ConfigError: it holds something else, which is not touched.
    """
    if not path.exists():
        return "new"
    if is_run(path):
        run = RunDir.read(path)
        # An evaluation without scores is continued: rollouts that failed from outside run again.
        return "finished" if run.finished and ("policy" not in run.config or has_scores(run)) else "unfinished"
    if path.is_dir() and not path.is_symlink() and holds_only_leftovers(path):
        shutil.rmtree(path)
        return "new"
    raise ConfigError(f"{path}: expected a run, got something else, which was not touched; move it away")


def has_scores(evaluation: RunDir) -> bool:
    """Check that an evaluation ended with scores: False where too many of its rollouts failed from outside."""
    return any(name.endswith("_low") for name in evaluation.summary.get("metrics", {}))
