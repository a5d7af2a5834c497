"""Runs of a comparison as child processes: what is missing is started, what is unfinished resumed, what is done kept.

Part of `cli`. A child is `mmrl train …` with a run directory that depends on the job alone, so the same command
continues a comparison that was killed. Children end when this process ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmrl.config import TrainCommandConfig, validate
from mmrl.errors import ConfigError
from mmrl.report.compare import flattened
from mmrl.report.rundir import FOLDERS, LOCK, RunDir
from mmrl.report.series import duration, number, short
from mmrl.system.files import read_jsonl

MMRL = [sys.executable, "-m", "mmrl"]
"""The command of a child, before its words."""
POLL_S = 0.5
LINE_S = 60.0
"""Seconds between two plain lines of a run."""
STOP_S = 120.0
"""Seconds that a stopped run has to end by itself."""
LOCK_S = 30.0
"""Seconds that a run of a comparison killed just now has to let go of its directory."""
_SET_DEATH_SIGNAL = 1

State = Literal["new", "unfinished", "finished"]


@dataclass(slots=True)
class Job:
    """One run of a comparison."""

    task: str
    algo: str
    seed: int
    overrides: list[str]
    config: TrainCommandConfig
    path: Path
    metric: str
    code: int | None = None
    """Exit code of its process; 0 for a run that was finished before, None where it did not run."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    said: tuple[int, float] = field(default=(-1, 0.0))
    read: tuple[int, tuple[int, float | None]] = field(default=(-1, (0, None)))
    """Size of the metrics file when it was read last, and what it said: steps done, last evaluation."""

    @property
    def name(self) -> str:
        """What progress lines call it."""
        return f"{self.task} {self.algo} seed {self.seed}"

    @property
    def log(self) -> Path:
        """What the run's process printed."""
        return self.path.with_name(f"{self.path.name}.log")

    def state(self) -> State:
        """What is in the run directory; leftovers of a start that was killed at once are removed.

        Raises:
            ConfigError: it holds something else than this run.
        """
        if not self.path.exists():
            return "new"
        if (self.path / "config.yaml").is_file() and (self.path / "journal").is_dir():
            _refuse_another(self.path, self.config)
            return "finished" if RunDir.read(self.path).summary else "unfinished"
        if self.path.is_dir() and _barren(self.path):
            shutil.rmtree(self.path)
            return "new"
        raise ConfigError(f"name: {self.path} holds no run of a comparison, nothing was touched; take another name=")

    def progress(self) -> tuple[int, int, float | None]:
        """Steps done, steps in all, last evaluation of the main metric."""
        path = self.path / "metrics.jsonl"
        size = path.stat().st_size if path.is_file() else 0
        if size != self.read[0]:
            done, value = 0, None
            key = f"eval/{self.config.eval.split}/{self.metric}"
            for record in read_jsonl(path):
                done = max(done, int(record.get("step", 0)))
                value = number(record.get(key)) if key in record else value
            self.read = (size, (done, value))
        done, value = self.read[1]
        return done, self.config.train.steps, value

    def line(self) -> str:
        """How far it is."""
        done, total, value = self.progress()
        score = f"  {self.metric} {short(value)}" if value is not None else ""
        return f"{self.name}: step {done} of {total}{score}  {duration(time.monotonic() - self.started)}"

    def trouble(self) -> str:
        """The last thing that a failed run said."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        errors = [line for line in lines if line.startswith("error: ")] or [line for line in lines if line.strip()]
        return f"exit code {self.code}{f', {errors[-1].strip()[:300]}' if errors else ''} (log: {self.log})"


class Launcher:
    """Runs jobs, `at_once` of them at a time.

    Args:
        jobs: in the order in which they start.
        at_once: processes; each has one thread where there are several.
        config_dir: `--config-dir` of the command.
        say: prints a line that stays.
        show: replaces the live lines of what is running now; None where there is no terminal.
        on_done: called after each run that ended well.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        at_once: int,
        config_dir: str | None,
        say: Callable[[str], None],
        show: Callable[[Sequence[str]], None] | None = None,
        on_done: Callable[[], None] = lambda: None,
    ):
        self.jobs, self.at_once, self.config_dir = jobs, at_once, config_dir
        self.say, self.show, self.on_done = say, show, on_done
        self.running: list[Job] = []

    def run(self) -> int:
        """Run all. Returns how many failed.

        Raises:
            KeyboardInterrupt: passed on once the children have ended.
        """
        waiting = list(self.jobs)
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.at_once:
                    self._start(waiting.pop(0))
                self._tell()
                time.sleep(POLL_S if self.running else 0)
                for job in [job for job in self.running if job.process and job.process.poll() is not None]:
                    self._end(job)
        except BaseException:
            self._stop()
            raise
        return sum(job.code != 0 for job in self.jobs)

    def _start(self, job: Job) -> None:
        try:
            state = job.state()
            if state == "unfinished":
                _wait_for_lock(job.path)
        except ConfigError as error:
            job.code = error.exit_code
            self.say(f"{self._count()} {job.name}: failed: {error}")
            return
        if state == "finished":
            job.code = 0
            self.say(f"{self._count()} {job.name}: finished before, kept")
            return
        command = [*MMRL, "train"]
        if state == "unfinished":
            command += [f"resume={job.path}"]
        else:
            command += ["--config-dir", self.config_dir] if self.config_dir else []
            command += [*job.overrides, f"run.dir={job.path}", "run.progress=false"]
        job.path.parent.mkdir(parents=True, exist_ok=True)
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self.at_once > 1 else {}
        with open(job.log, "ab") as log:
            job.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops each run in turn
                preexec_fn=_end_with_parent,
            )
        job.started = time.monotonic()
        job.said = (job.progress()[0], job.started)
        self.running.append(job)
        verb = f"continues from step {job.said[0]}" if state == "unfinished" else "starts"
        self.say(f"{self._count()} {job.name}: {verb}")

    def _end(self, job: Job) -> None:
        assert job.process is not None
        self.running.remove(job)
        job.code = job.process.returncode
        if job.code == 0:
            self.say(f"{self._count()} {job.line()}  done")
            self.on_done()
        else:
            self.say(f"{self._count()} {job.name}: failed: {job.trouble()}")

    def _tell(self) -> None:
        """Live lines in a terminal; elsewhere a line per run and minute, if it got on."""
        if self.show is not None:
            self.show([f"{job.line()}" for job in self.running])
            return
        now = time.monotonic()
        for job in self.running:
            if now - job.said[1] >= LINE_S and (done := job.progress()[0]) != job.said[0]:
                job.said = (done, now)
                self.say(f"{self._count()} {job.line()}")

    def _count(self) -> str:
        return f"[{sum(job.code is not None for job in self.jobs)}/{len(self.jobs)}]"

    def _stop(self) -> None:
        """End the children: they save what they have and can be resumed."""
        for job in self.running:
            if job.process is not None:
                job.process.terminate()
        for job in self.running:
            if job.process is not None:
                try:
                    job.process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    job.process.kill()
                    job.process.wait()


def differences(stored: Mapping[str, Any], asked: TrainCommandConfig) -> list[str]:
    """Settings in which a run directory's config is another than the one asked for, as `path=there (asked: here)`.

    Where it is kept and what depends on the machine do not count.

    Raises:
        ConfigError: the stored config is none that this version understands.
    """
    from mmrl.run.check import as_tuples

    there = flattened(validate(TrainCommandConfig, as_tuples(stored)).model_dump(mode="json"))
    here = flattened(asked.model_dump(mode="json"))
    return [
        f"{path}={there.get(path, 'absent')} (asked: {here.get(path, 'absent')})"
        for path in dict.fromkeys([*here, *there])
        if there.get(path) != here.get(path)
        and not path.startswith(("run.", "hardware."))
        and not (path == "engine.name" and here.get(path) == "auto")
    ]


def _refuse_another(path: Path, config: TrainCommandConfig) -> None:
    try:
        found = differences(RunDir.read(path).config, config)
    except ConfigError as error:
        raise ConfigError(f"name: {path}: its config.yaml: {problem}" for problem in error.problems) from None
    if found:
        raise ConfigError(
            f"name: {path} holds a run with other settings: {', '.join(found)}; "
            "take another name=, or move that folder away"
        )


def _barren(path: Path) -> bool:
    """Whether only what a run makes before its config is there."""
    for entry in path.iterdir():
        if entry.name in FOLDERS and entry.is_dir() and not any(entry.iterdir()):
            continue
        if entry.name in (LOCK, "environment.json") or (entry.name.startswith(".") and entry.suffix == ".tmp"):
            continue
        return False
    return not RunDir(path).in_use


def _wait_for_lock(path: Path) -> None:
    until = time.monotonic() + LOCK_S
    while RunDir(path).in_use:
        if time.monotonic() > until:
            raise ConfigError(f"name: {path}: another process trains this run")
        time.sleep(POLL_S)


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, also by SIGKILL, so that no run goes on unseen (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
