"""Runs as child processes, some at a time: what is missing is started, what is unfinished resumed, what is done stays.

A child is `mmrl train …` or `mmrl eval …` with a run directory that depends on the run alone, so the same command
continues a set that was killed. Children end when this process ends.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, Self

from mmrl.config import EvalCommandConfig, StageConfig
from mmrl.config.base import value_at
from mmrl.errors import ConfigError, MmrlError
from mmrl.models.policy import complete_checkpoints
from mmrl.report.rundir import RunDir, holds_only_leftovers, is_run
from mmrl.report.stats import duration, number
from mmrl.sets.spec import Command
from mmrl.system.child_process import end_with_parent
from mmrl.system.files import read_jsonl

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
"""Seconds that a run of a set killed just now has to let go of its directory."""
COLLAPSED = 0.5
"""Share of the best evaluation below which training has collapsed, if it never returns."""
State = Literal["new", "unfinished", "finished"]


@dataclass(kw_only=True)
class Run:
    """A run of a set: where it lies, and what it comes from."""

    seed: int
    path: Path
    command: Command = "train"
    after: Self | None = None
    """The run whose policy it starts from or evaluates."""

    @property
    def chain(self) -> list[Self]:
        """The runs that it comes from, the first one first, and itself."""
        return [*(self.after.chain if self.after is not None else ()), self]

    @property
    def trained(self) -> Path | None:
        """The training run whose policy it is about; None for a policy that its set does not train."""
        return next((run.path for run in reversed(self.chain) if run.command == "train"), None)

    def typed(self) -> str:
        """The command that makes it, for a shell; empty for a run that is only looked at."""
        return ""

    def trouble(self) -> str:
        """Why it failed; empty where it did not."""
        return ""


@dataclass(kw_only=True)
class SetRun(Run):
    """A run that a set starts: what it is, and how far it has come."""

    row: str
    column: str
    """Empty where one training serves all columns."""
    words: Sequence[str]
    """Its overrides, without policy= and from=, whose runs may not be there yet."""
    config: StageConfig | EvalCommandConfig
    metric: str
    """The task's main one."""
    checkpoint: str = "last"
    """Which one of `after` is evaluated."""
    code: int | None = None
    """Exit code of its process; 0 for a run that was finished before, None where it did not run."""
    reason: str = ""
    """Why it was not started, where something else is the cause."""
    started: float = 0.0
    reported: float = 0.0
    """When a line of it was last printed."""

    @property
    def name(self) -> str:
        """What progress lines call it."""
        return f"{self.command} {self.row}{f' on {self.column}' if self.column else ''}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """What the run's process printed."""
        return self.path.with_name(f"{self.path.name}.log")

    def all_words(self) -> list[str]:
        """Its overrides, once the run before it has ended.

        Raises:
            ConfigError: no checkpoint of that run is what the row's rule names.
        """
        if self.after is None:
            return [*self.words]
        if self.command == "train":
            return [*self.words, f"from={self.after.path}"]
        chosen = self.after.path
        if self.checkpoint == "before_collapse":
            chosen = before_collapse(chosen, self.after.metric)
        return [*self.words, f"policy={chosen}"]

    def typed(self) -> str:
        """The command that makes it, for a shell; or why its row's rule names no checkpoint yet."""
        try:
            return " ".join([f"mmrl {self.command}", *map(shlex.quote, [*self.all_words(), f"run.dir={self.path}"])])
        except MmrlError as error:
            return str(error)

    def state(self) -> State:
        """How far its run directory is, whose name is a digest of its settings, so a run there has these.

        Raises:
            ConfigError: it holds something else than a run.
        """
        return state_of(self.path, f"a run of {self.row}")

    @property
    def done(self) -> int:
        """Steps done; of an evaluation items."""
        if self.command == "eval":
            return sum(len(read_jsonl(path)) for path in (self.path / "eval").glob("step-*.jsonl"))
        return max((int(record["step"]) for record in read_jsonl(self.path / "metrics.jsonl")), default=0)

    def line(self) -> str:
        """How far it is."""
        # How many trials an optimiser of prompts makes shows only as it goes.
        total = value_at(self.config, "train.steps" if self.command == "train" else "eval.items")
        of = f" of {total}" if isinstance(total, int) else ""
        unit = "step" if self.command == "train" else "item"
        return f"{self.name}: {unit} {self.done}{of}  {duration(time.monotonic() - self.started)}"

    def trouble(self) -> str:
        """The last error that a failed run printed."""
        if self.reason or not self.code:
            return self.reason
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        # Of a run that was killed there is no error line: then its last words are the best hint.
        errors = [line for line in lines if line.startswith("error: ")] or [line for line in lines if line.strip()]
        said = f", {errors[-1].strip()[:300]} (log: {self.log})" if errors else ""
        return f"exit code {self.code}{said}"


class RunQueue:
    """Runs child processes, `at_once` of them at a time.

    Args:
        runs: in the order in which they start.
        at_once: processes; each has one thread where there are several on this machine.
        config_dir: `--config-dir` of the command.
        on_done: called after each run that ended well.
        through: a command that starts a child somewhere else and ends with it (`srun --gpus-per-node=8`), before its
            words; its machine is then not this one.
        attached: what the children print goes to the terminal, with their live displays, and not into logs.
    """

    def __init__(
        self,
        runs: Sequence[SetRun],
        at_once: int,
        config_dir: str | None,
        on_done: Callable[[], None] = lambda: None,
        through: Sequence[str] = (),
        attached: bool = False,
    ):
        self.runs, self.at_once, self.config_dir = runs, at_once, config_dir
        self.on_done, self.through, self.attached = on_done, through, attached
        self.running: list[tuple[SetRun, subprocess.Popen[bytes]]] = []

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

    def _start(self, run: SetRun) -> None:
        if run.after is not None and run.after.code != 0:
            run.code, run.reason = 1, f"{run.after.name} failed"
            self._say(f"{run.name}: left out: {run.reason}")
            return
        try:
            state = run.state()
            if state == "unfinished":
                _wait_for_lock(run)
            words = run.all_words()
        except ConfigError as error:
            run.code, run.reason = error.exit_code, str(error)
            self._say(f"{run.name}: failed: {error}")
            return
        if state == "finished":
            run.code = 0
            self._say(f"{run.name}: finished before, kept")
            return
        # A process each: a run that dies of memory or a signal takes neither the queue nor the others along.
        command = [*self.through, *MMRL, run.command]
        if state == "unfinished":
            command += [f"resume={run.path}"]
        else:
            command += ["--config-dir", self.config_dir] if self.config_dir else []
            # A live display would fill the log with its redrawn lines; an evaluation has none.
            quiet = ["run.progress=false"] if run.command == "train" and not self.attached else []
            command += [*words, f"run.dir={run.path}", *quiet]
        run.path.parent.mkdir(parents=True, exist_ok=True)
        # Runs side by side would otherwise each take all CPUs and wait for one another.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self.at_once > 1 and not self.through else {}
        # Appended to: the log of a run that was continued tells its whole story.
        with nullcontext() if self.attached else open(run.log, "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log and subprocess.STDOUT,
                env={**os.environ, **threads},
                start_new_session=True,  # Ctrl-C reaches this process alone, which then stops each run in turn
                preexec_fn=end_with_parent,
            )
        run.started = run.reported = time.monotonic()
        self.running.append((run, process))
        verb = f"continues after {run.done}" if state == "unfinished" else "starts"
        self._say(f"{run.name}: {verb}")

    def _end(self, run: SetRun, code: int) -> None:
        if code == 0 and self.through and not _is_there(run):
            run.reason = f"through: {self.through[0]} has ended, and the run has not; it must stay until then"
            code = 1
        run.code = code
        if code == 0:
            self._say(f"{run.line()}  done")
            self.on_done()
        else:
            self._say(f"{run.name}: failed: {run.trouble()}")

    def _report(self) -> None:
        """A line per run and minute; what prints to the terminal itself needs none."""
        for run, _ in self.running:
            if not self.attached and time.monotonic() - run.reported >= LINE_S:
                run.reported = time.monotonic()
                self._say(run.line())

    def _say(self, text: str) -> None:
        print(f"[{sum(run.code is not None for run in self.runs)}/{len(self.runs)}] {text}", flush=True)

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


def state_of(path: Path, what: str) -> State:
    """How far the run in a folder is; leftovers of a start that was killed at once are removed.

    Args:
        what: is expected there, for messages.

    Raises:
        ConfigError: it holds something else, which is not touched.
    """
    if not path.exists():
        return "new"
    if is_run(path):
        run = RunDir.read(path)
        # An evaluation without scores is continued: what failed from outside runs again.
        return "finished" if run.finished and ("policy" not in run.config or has_scores(run)) else "unfinished"
    if path.is_dir() and not path.is_symlink() and holds_only_leftovers(path):
        shutil.rmtree(path)
        return "new"
    raise ConfigError(f"{path}: expected {what}, got something else, which was not touched; move it away")


def has_scores(evaluation: RunDir) -> bool:
    """Whether an evaluation that has ended has scores: none where too many of its rollouts failed from outside."""
    return any(name.endswith("_low") for name in evaluation.summary.get("metrics", {}))


def before_collapse(run: Path, metric: str) -> Path:
    """The last checkpoint of a run before its evaluations collapse; the newest one where they do not.

    Training has collapsed where the main metric falls below half of its best and stays there to the end.

    Raises:
        ConfigError: the run has no checkpoint from before.
    """
    directory = RunDir.read(run)
    key = f"eval/{directory.config['eval']['split']}/{metric}"
    points = [(int(r["step"]), value) for r in directory.history() if (value := number(r.get(key))) is not None]
    best = list(accumulate((value for _, value in points), max))
    collapsed = [
        step
        for place, (step, _) in enumerate(points)
        if all(value < COLLAPSED * best[place] for _, value in points[place:])
    ]
    collapse = min(collapsed, default=math.inf)
    latest = max((step for step, _ in points if step < collapse), default=0) if collapsed else math.inf
    there = complete_checkpoints(run / "checkpoints")
    fitting = [path for path in there if int(path.name.rpartition("-")[2]) <= latest]
    if not fitting:
        raise ConfigError(f"{run}: no checkpoint from before its collapse at step {collapse} is left (train.keep)")
    return fitting[-1]


def _is_there(run: SetRun) -> bool:
    """Whether a run has finished, as a machine that shares its folder sees it a little later."""
    until = time.monotonic() + SHARED_S
    while (state := run.state()) != "finished" and time.monotonic() < until:
        time.sleep(POLL_S)
    return state == "finished"


def _ready(waiting: Sequence[SetRun]) -> SetRun | None:
    """The first run that need not wait for another one."""
    return next((run for run in waiting if run.after is None or run.after.code is not None), None)


def _wait_for_lock(run: SetRun) -> None:
    # A run whose set was killed gets SIGTERM from the system and still writes its last checkpoint.
    until = time.monotonic() + LOCK_S
    while RunDir(run.path).in_use:
        if time.monotonic() > until:
            raise ConfigError(f"{run.path}: another process has this run; try again once it has ended")
        time.sleep(POLL_S)
