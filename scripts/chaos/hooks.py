"""Inside a disturbed run: the phases of mmrl, counted and timed, and the one fault that is armed.

Nothing of mmrl knows of this: functions are wrapped here, in the process that is to be disturbed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES: dict[str, tuple[str, ...]] = {
    "create": ("mmrl.report.rundir:RunDir.create",),
    "open": ("mmrl.report.rundir:RunDir.open", "mmrl.report.rundir:RunDir.truncate_after"),
    "build": ("mmrl.run.build:build_stage",),
    "collect": ("mmrl.stages.collect:Collector.collect",),
    "rollout": ("mmrl.rollout.sample:sample",),
    "credit": ("mmrl.stages.weights:WeightStage.credit",),
    "update": ("mmrl.trainer.trl_trainer:MmrlTrainer.training_step",),
    "sync": ("mmrl.stages.weights:WeightStage.sync",),
    "checkpoint": ("mmrl.trainer.checkpoint:save",),
    "commit": ("mmrl.trainer.checkpoint:commit",),
    "prune": ("mmrl.trainer.checkpoint:prune",),
    "journal": ("mmrl.report.journal:write_step",),
    "metrics": ("mmrl.report.rundir:RunDir.append_metrics",),
    "evaluation": ("mmrl.stages.evaluate:evaluate",),
    "finish": ("mmrl.report.console:finish",),
    "summary": ("mmrl.report.rundir:RunDir.write_summary",),
    "report": ("mmrl.report.html:write_report",),
    "index passages": ("mmrl.retrieval.store:write_passages",),
    "index build": ("mmrl.retrieval.bm25:write_index",),
    "index finish": ("mmrl.retrieval.index_folder:_finish",),
    "file": tuple(f"os:{name}" for name in ("replace", "rename", "fsync", "write", "mkdir", "unlink", "rmdir")),
}
"""Phase -> the functions that it consists of."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and where it strikes.

    Attributes:
        what: a signal's name, `full` or `readonly` (of a disk), or `limit` (no file may grow past `room` bytes).
        phase: of `PHASES`.
        call: which call of the phase's functions, from 1.
        when: `before`, `inside` (after `delay` seconds, from outside) or `after` the call.
        room: bytes that a full disk has left, or the limit.
        rank: of the process that it strikes; None: the one that was started.
    """

    what: str
    phase: str
    call: int
    when: str
    delay: float = 0.0
    room: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        where = f"{self.when} call {self.call} of {self.phase}" + (f" +{self.delay:.3f} s" if self.delay else "")
        rank = "" if self.rank is None else f" (process {self.rank})"
        return f"{self.what} {where}{rank}" + (f", {self.room} bytes" if self.what in ("full", "limit") else "")


class Hooks:
    """Counts the calls of every phase, and strikes.

    Args:
        fault: None: only counts.
        events: descriptor that the watcher of this process reads: `ready` once its phases are watched; a line
            `PID DELAY` asks for the fault later, `disk` at once.
        replies: descriptor on which the watcher says that the disk is as asked.
    """

    def __init__(self, fault: Fault | None, events: int, replies: int):
        self.fault, self.events, self.replies = fault, events, replies
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._write, self._kill = os.write, os.kill  # not the wrapped ones

    def install(self) -> None:
        """Wrap the functions of all phases."""
        for phase, targets in PHASES.items():
            counter = itertools.count(1)
            for target in targets:
                _replace(target, functools.partial(self._wrapped, phase, counter))
        self._write(self.events, b"ready\n")

    def _wrapped(self, phase: str, counter: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                when, started = self._enter(phase, counter), time.perf_counter()
                result = await function(*args, **kwargs)
                self._leave(phase, when, started)
                return result

            return call_async

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            when, started = self._enter(phase, counter), time.perf_counter()
            result = function(*args, **kwargs)
            self._leave(phase, when, started)
            return result

        return call

    def _enter(self, phase: str, counter: Any) -> str | None:
        fault, number = self.fault, next(counter)
        if fault is None or phase != fault.phase or number != fault.call or _rank() != fault.rank:
            return None
        if fault.when == "inside":
            self._write(self.events, f"{_struck(fault)} {fault.delay}\n".encode())
        elif fault.when == "before":
            self._strike(fault)
        return fault.when

    def _leave(self, phase: str, when: str | None, started: float) -> None:
        self.seconds[phase].append(time.perf_counter() - started)
        if when == "after" and self.fault is not None:
            self._strike(self.fault)

    def _strike(self, fault: Fault) -> None:
        if fault.what in SIGNALS:
            self._write(self.events, b"struck\n")
            self._kill(_struck(fault), SIGNALS[fault.what])
        elif fault.what == "limit":
            self._write(self.events, b"struck\n")
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.room, resource.RLIM_INFINITY))
        else:
            self._write(self.events, b"disk\n")
            os.read(self.replies, 1)

    def save(self, path: Path) -> None:
        """Write how often and how long each phase was called, and what has been imported."""
        modules = [name for name in sys.modules if not name.startswith("__")]
        path.write_text(json.dumps({"seconds": self.seconds, "modules": modules}), encoding="utf-8")


def _struck(fault: Fault) -> int:
    """The process that is struck: any may be killed, but who stops a run of several stops the one that started them."""
    return os.getpid() if fault.rank is None or fault.what == "SIGKILL" else os.getppid()


def _rank() -> int | None:
    rank = os.environ.get("RANK")
    return None if rank is None else int(rank)


def _replace(target: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module_name, _, path = target.partition(":")
    module = importlib.import_module(module_name)
    *outer, name = path.split(".")
    owner: Any = module
    for part in outer:
        owner = getattr(owner, part, None)
    found = vars(owner).get(name) if owner is not None else None
    if found is None:
        raise SystemExit(f"chaos: mmrl has no {target}; mend PHASES in scripts/chaos/hooks.py")
    if isinstance(found, classmethod):
        setattr(owner, name, classmethod(wrap(found.__func__)))
        return
    wrapped = wrap(found)
    setattr(owner, name, wrapped)
    if owner is module and module_name != "os":
        for other in [m for key, m in list(sys.modules.items()) if key.startswith("mmrl") and m is not None]:
            for key, value in list(vars(other).items()):
                if value is found:  # imported by name
                    setattr(other, key, wrapped)
