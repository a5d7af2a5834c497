"""Runs as child processes, some at a time: what is missing is started, what is unfinished resumed, what is done stays.

A child is `mmrl train …` with a run directory that depends on the run alone, so the same command continues a comparison
that was killed. Children end when this process ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import ValidationError

from mmrl.config import (
    EvalCommandConfig,
    RootConfig,
    SftCommandConfig,
    StageConfig,
    StagedCommandConfig,
    TrainCommandConfig,
)
from mmrl.config.base import FETCHED, Section, of_stage
from mmrl.config.validate import as_tuples, explain
from mmrl.errors import ConfigError, DataError
from mmrl.report.rundir import FOLDERS, LOCK, RunDir
from mmrl.report.stats import duration, number, short
from mmrl.run.settle import config_changes
from mmrl.system.child_process import end_with_parent
from mmrl.system.files import read_jsonl, read_yaml

MMRL = [sys.executable, "-m", "mmrl"]
"""The command of a child, before its words."""
POLL_S = 0.5
LINE_S = 60.0
"""Seconds between two plain lines of a run."""
STOP_S = 120.0
"""Seconds that a stopped run has to end by itself."""
SHARED_S = 10.0
"""Seconds until a shared file system shows what another machine wrote."""
LOCK_S = 30.0
"""Seconds that a run of a comparison killed just now has to let go of its directory."""

State = Literal["new", "unfinished", "finished"]
SectionT = TypeVar("SectionT", bound=Section)


def state_of(path: Path, config: RootConfig, key: str) -> State:
    """What a run directory holds of the run of `config`; leftovers of a start that was killed at once are removed.

    Args:
        path: the directory, which need not exist.
        config: of the run that is to be there in the end.
        key: what the user would set to have another directory, for messages.

    Raises:
        ConfigError: it holds something else than this run.
    """
    if not path.exists():
        return "new"
    # Both, as `RunDir.read` wants them: config.yaml alone may be a user's own file.
    if (path / "config.yaml").is_file() and (path / "journal").is_dir():
        _refuse_other_settings(path, config, key)
        return "finished" if RunDir.read(path).finished else "unfinished"
    if path.is_symlink():
        raise ConfigError(f"{key}: {path} is a link, nothing was touched; take another {key}=, or remove the link")
    if path.is_dir() and holds_only_leftovers(path):
        shutil.rmtree(path)
        return "new"
    raise ConfigError(f"{key}: {path} holds no run of a comparison, nothing was touched; take another {key}=")


@dataclass(slots=True)
class QueuedRun:
    """One run of a queue: what it is, and how far it has come."""

    key: ClassVar[str] = "name"
    """What the user sets to have other folders, for messages."""
    task: str
    algo: str
    seed: int
    overrides: Sequence[str]
    config: StageConfig | StagedCommandConfig | EvalCommandConfig
    path: Path
    metric: str
    command: str = "train"
    """What of mmrl runs it: train or eval."""
    after: QueuedRun | None = None
    """The run whose policy it starts from."""
    code: int | None = None
    """Exit code of its process; 0 for a run that was finished before, None where it did not run."""
    started: float = 0.0
    reported: tuple[int, float] = field(default=(-1, 0.0))
    """Steps done when a line was last printed, and when that was."""
    reason: str = ""
    """Why it was not started, where something else is the cause."""
    cached: tuple[int, tuple[int, float | None]] = field(default=(-1, (0, None)))
    """Size of the metrics file when it was last read, and what it held: steps done, last evaluation."""

    @property
    def name(self) -> str:
        """What progress lines call it."""
        return f"{self.task} {self.algo} seed {self.seed}"

    @property
    def unit(self) -> str:
        """What its progress counts."""
        return "step" if self.command == "train" else "item"

    @property
    def log(self) -> Path:
        """What the run's process printed."""
        return self.path.with_name(f"{self.path.name}.log")

    def words(self) -> Sequence[str]:
        """Its overrides, once the run before it has ended."""
        return self.overrides

    def state(self) -> State:
        """What is in its run directory.

        Raises:
            ConfigError: something else than this run.
        """
        return state_of(self.path, self.config, self.key)

    def progress(self) -> tuple[int, int, float | None]:
        """Steps done, steps in all, last evaluation of the main metric."""
        path = self.path / "metrics.jsonl"
        size = path.stat().st_size if path.is_file() else 0
        # The file is read again only when it has grown: the terminal's lines are redrawn twice a second.
        if size != self.cached[0]:
            done, value = 0, None
            key = f"eval/{self.config.eval.split}/{self.metric}"
            for record in read_jsonl(path):
                done = max(done, int(record.get("step", 0)))
                value = number(record.get(key)) if key in record else value
            self.cached = (size, (done, value))
        done, value = self.cached[1]
        config = self.config
        # How many trials an optimiser of prompts makes shows only as it goes.
        return done, config.train.steps if isinstance(config, TrainCommandConfig | SftCommandConfig) else 0, value

    def line(self) -> str:
        """How far it is."""
        done, total, value = self.progress()
        score = f"  {self.metric} {short(value)}" if value is not None else ""
        of = f" of {total}" if total else ""
        return f"{self.name}: {self.unit} {done}{of}{score}  {duration(time.monotonic() - self.started)}"

    def trouble(self) -> str:
        """The last error that a failed run printed."""
        if self.reason:
            return self.reason
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        # Of a run that was killed there is no error line: then its last words are the best hint.
        errors = [line for line in lines if line.startswith("error: ")] or [line for line in lines if line.strip()]
        return f"exit code {self.code}{f', {errors[-1].strip()[:300]}' if errors else ''} (log: {self.log})"


class RunQueue:
    """Runs child processes, `at_once` of them at a time.

    Args:
        runs: in the order in which they start.
        at_once: processes; each has one thread where there are several on this machine.
        config_dir: `--config-dir` of the command.
        say: prints a line that stays.
        show: replaces the live lines of what is running now; None where there is no terminal.
        on_done: called after each run that ended well.
        through: a command that starts a child somewhere else and ends with it (`srun --gpus-per-node=8`), before its
            words; its machine is then not this one.
    """

    def __init__(
        self,
        runs: Sequence[QueuedRun],
        at_once: int,
        config_dir: str | None,
        say: Callable[[str], None],
        show: Callable[[Sequence[str]], None] | None = None,
        on_done: Callable[[], None] = lambda: None,
        through: Sequence[str] = (),
    ):
        self.runs, self.at_once, self.config_dir = runs, at_once, config_dir
        self.say, self.show, self.on_done = say, show, on_done
        self.through = through
        self.running: list[tuple[QueuedRun, subprocess.Popen[bytes]]] = []

    def run(self) -> int:
        """Run all. Returns how many failed.

        Raises:
            KeyboardInterrupt: passed on once the children have ended.
        """
        waiting = list(self.runs)
        try:
            while waiting or self.running:
                while len(self.running) < self.at_once and (run := _ready(waiting)) is not None:
                    waiting.remove(run)
                    self._start(run)
                self._report()
                time.sleep(POLL_S if self.running else 0)
                for run, process in [(run, process) for run, process in self.running if process.poll() is not None]:
                    self.running.remove((run, process))
                    self._end(run, process.returncode)
        except BaseException:
            self._stop()
            raise
        return sum(run.code != 0 for run in self.runs)

    def _start(self, run: QueuedRun) -> None:
        if run.after is not None and run.after.code != 0:
            run.code, run.reason = 1, f"it starts from {run.after.name}, which failed"
            self.say(f"{self._count()} {run.name}: left out: {run.reason}")
            return
        try:
            state = run.state()
            if state == "unfinished":
                _wait_for_lock(run)
        except ConfigError as error:
            run.code, run.reason = error.exit_code, str(error)
            self.say(f"{self._count()} {run.name}: failed: {error}")
            return
        if state == "finished":
            run.code = 0
            self.say(f"{self._count()} {run.name}: finished before, kept")
            return
        # A process each: a run that dies of memory or a signal takes neither the queue nor the others along.
        command = [*self.through, *MMRL, run.command]
        if state == "unfinished":
            command += [f"resume={run.path}"]
        else:
            command += ["--config-dir", self.config_dir] if self.config_dir else []
            # A live display would fill the log with its redrawn lines; an evaluation has none.
            quiet = ["run.progress=false"] if run.command == "train" else []
            command += [*run.words(), f"run.dir={run.path}", *quiet]
        run.path.parent.mkdir(parents=True, exist_ok=True)
        # Runs side by side would otherwise each take all CPUs and wait for one another.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self.at_once > 1 and not self.through else {}
        # Appended to: the log of a run that was continued tells its whole story.
        with open(run.log, "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops each run in turn
                preexec_fn=end_with_parent,
            )
        run.started = time.monotonic()
        # A run that is continued starts with the steps it has, so that no line claims they were just done.
        run.reported = (run.progress()[0], run.started)
        self.running.append((run, process))
        verb = f"continues from {run.unit} {run.reported[0]}" if state == "unfinished" else "starts"
        self.say(f"{self._count()} {run.name}: {verb}")

    def _end(self, run: QueuedRun, code: int) -> None:
        if code == 0 and self.through and not _is_there(run):
            run.reason = f"through: {self.through[0]} has ended, and the run has not; it must stay until then"
            code = 1
        run.code = code
        if code == 0:
            self.say(f"{self._count()} {run.line()}  done")
            self.on_done()
        else:
            self.say(f"{self._count()} {run.name}: failed: {run.trouble()}")

    def _report(self) -> None:
        """Live lines in a terminal; elsewhere a line per run and minute, if it got on."""
        if self.show is not None:
            self.show([run.line() for run, _ in self.running])
            return
        now = time.monotonic()
        for run, _ in self.running:
            if now - run.reported[1] >= LINE_S and (done := run.progress()[0]) != run.reported[0]:
                run.reported = (done, now)
                self.say(f"{self._count()} {run.line()}")

    def _count(self) -> str:
        return f"[{sum(run.code is not None for run in self.runs)}/{len(self.runs)}]"

    def _stop(self) -> None:
        """End the children: they save what they have and can be resumed."""
        # All are terminated first and waited for afterwards, so that they save side by side.
        for _, process in self.running:
            process.terminate()
        for _, process in self.running:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_there(run: QueuedRun) -> bool:
    """Whether a run has finished, as a machine that shares its folder sees it a little later."""
    until = time.monotonic() + SHARED_S
    while (state := run.state()) != "finished" and time.monotonic() < until:
        time.sleep(POLL_S)
    return state == "finished"


def _ready(waiting: Sequence[QueuedRun]) -> QueuedRun | None:
    """The first run that need not wait for another one."""
    return next((run for run in waiting if run.after is None or run.after.code is not None), None)


def differences(stored: Mapping[str, object], requested: RootConfig) -> list[str]:
    """Settings in which a run directory's config is another than the one requested, as `path=there (requested: here)`.

    Where it lies and what depends on the machine do not count.

    Raises:
        ConfigError: the stored config is none that this version understands.
    """
    return [
        f"{path}={there} (requested: {here})"
        for path, (there, here) in config_changes(stored, requested.model_dump(mode="json")).items()
        if not of_stage(path).startswith("hardware.")
        and not (of_stage(path) == "engine.name" and here == "auto")
        and not (of_stage(path) == "model.path" and FETCHED.get(str(there)) == here)
    ]


def _refuse_other_settings(path: Path, config: RootConfig, key: str) -> None:
    try:
        different = differences(RunDir.read(path).config, config)
    except ConfigError as error:
        raise ConfigError(f"{key}: {path}: its config.yaml: {problem}" for problem in error.problems) from None
    if different:
        raise ConfigError(
            f"{key}: {path} holds a run with other settings: {', '.join(different)}; "
            f"take another {key}=, or move that folder away"
        )


def holds_only_leftovers(path: Path) -> bool:
    """Whether only what a run makes before its config is there."""
    # What `RunDir.create` makes, in its order; config.yaml comes last and makes it a run.
    for entry in path.iterdir():
        if entry.name in FOLDERS and entry.is_dir() and not any(entry.iterdir()):
            continue
        if entry.name in (LOCK, "environment.json") or (entry.name.startswith(".") and entry.suffix == ".tmp"):
            continue
        return False
    return not RunDir(path).in_use


def _wait_for_lock(run: QueuedRun) -> None:
    # A run whose comparison was killed gets SIGTERM from the system and still writes its last checkpoint.
    until = time.monotonic() + LOCK_S
    while RunDir(run.path).in_use:
        if time.monotonic() > until:
            raise ConfigError(f"{run.key}: {run.path}: another process has this run; try again once it has ended")
        time.sleep(POLL_S)


def read_as(schema: type[SectionT], path: Path, called: str) -> SectionT:
    """A YAML file that says which runs there are.

    Args:
        called: the word of the command line that names it.

    Raises:
        ConfigError: every problem in it, with the file's name.
    """
    try:
        raw = read_yaml(path)
    except DataError as error:
        raise ConfigError(f"{called}: {error}") from None
    if not isinstance(raw, dict):
        fields = ", ".join(schema.model_fields)
        raise ConfigError(f"{called}: {path}: got {type(raw).__name__}, expected a mapping with {fields}")
    try:
        return schema.model_validate(as_tuples(raw))
    except ValidationError as error:
        raise ConfigError(f"{called}: {path}: {problem}" for problem in explain(schema, error)) from None


def whole_numbers(texts: Sequence[str], key: str, least: int, problems: list[str]) -> tuple[int, ...]:
    """The numbers of a word; a problem, and `least`, for each that is none."""
    fine = [bool(re.fullmatch(r"\d{1,9}", text)) and int(text) >= least for text in texts]
    problems += [
        f"{key}: got '{text}', expected a whole number from {least}"
        for text, is_fine in zip(texts, fine, strict=True)
        if not is_fine
    ]
    return tuple(int(text) if is_fine else least for text, is_fine in zip(texts, fine, strict=True))
