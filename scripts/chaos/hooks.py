"""Code inside a disturbed run: counts and times the phases of mmrl, and strikes with one fault.

Nothing of mmrl knows of this: functions are wrapped here, in the process that is to be disturbed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.chaos.disk import Disk

PHASES: dict[str, tuple[str, ...]] = {
    "create": ("mmrl.store.rundir:RunDir.create",),
    "open": ("mmrl.store.rundir:RunDir.open", "mmrl.store.rundir:RunDir.truncate_after"),
    "build": ("mmrl.run.kinds:build_stage",),
    "collect": ("mmrl.stages.collect:RolloutSampler.collect",),
    "rollout": ("mmrl.rollout.sample:sample",),
    "credit": ("mmrl.stages.rl:RlStage.credit",),
    "update": ("mmrl.trainer.trl_trainer:MmrlTrainer.training_step",),
    "sync": ("mmrl.stages.rl:RlStage.sync",),
    "checkpoint": ("mmrl.trainer.checkpoint:save",),
    "commit": ("mmrl.trainer.checkpoint:commit",),
    "prune": ("mmrl.trainer.checkpoint:prune",),
    "journal": ("mmrl.store.journal:write_step",),
    "metrics": ("mmrl.store.rundir:RunDir.append_metrics",),
    "evaluation": ("mmrl.stages.evaluate:evaluate",),
    "finish": ("mmrl.report.console:finish",),
    "summary": ("mmrl.store.rundir:RunDir.write_summary",),
    "report": ("mmrl.report.html:write_report",),
    "index passages": ("mmrl.retrieval.store:write_passages",),
    "index build": ("mmrl.retrieval.bm25:write_index",),
    "index finish": ("mmrl.retrieval.index_folder:_finish",),
    "file": tuple(f"os:{name}" for name in ("replace", "rename", "fsync", "write", "mkdir", "unlink", "rmdir")),
}
"""Phase -> its functions."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and where it strikes.

    Attributes:
        what: a signal's name, or `full` or `readonly`, of a disk.
        phase: of `PHASES`; empty: `delay` seconds after the start, whatever the run is doing.
        call: number of the call of the phase's functions, from 1.
        when: `before`, `inside` (after `delay` seconds) or `after` the call.
        room: bytes that a full disk has left.
        rank: of the process that it strikes; None: the one that was started.
    """

    what: str
    phase: str = ""
    call: int = 0
    when: str = ""
    delay: float = 0.0
    room: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        if not self.phase:
            return f"{self.what} after {self.delay:.2f} s"
        where = f"{self.when} call {self.call} of {self.phase}" + (f" +{self.delay:.3f} s" if self.delay else "")
        rank = "" if self.rank is None else f" (process {self.rank})"
        return f"{self.what} {where}{rank}" + (f", {self.room} bytes" if self.what == "full" else "")


class Hooks:
    """Counts the calls of every phase, and strikes.

    Args:
        fault: None: only counts.
        struck: file that is made when the fault strikes.
        disk: that the run lies on, for faults of disks.
    """

    def __init__(self, fault: Fault | None, struck: Path, disk: Disk | None):
        self.fault, self.struck, self.disk = fault, struck, disk
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def install(self) -> None:
        """Wrap the functions of all phases."""
        for phase, targets in PHASES.items():
            counter = itertools.count(1)
            for target in targets:
                _replace(target, functools.partial(self._wrapped, phase, counter))
        if self.fault is not None and not self.fault.phase:
            self._strike_later()

    def _wrapped(self, phase: str, counter: Iterator[int], function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                with self._call(phase, next(counter)):
                    return await function(*args, **kwargs)

            return call_async

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._call(phase, next(counter)):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def _call(self, phase: str, number: int) -> Iterator[None]:
        """Strike before, inside or after a call of a phase, and time it."""
        fault, started = self.fault, time.perf_counter()
        here = fault is not None and (fault.phase, fault.call, fault.rank) == (phase, number, _rank())
        when = fault.when if here and fault is not None else ""
        if when == "inside":
            self._strike_later()
        elif when == "before":
            self._strike()
        yield
        self.seconds[phase].append(time.perf_counter() - started)
        if when == "after":
            self._strike()

    def _strike_later(self) -> None:
        assert self.fault is not None
        timer = threading.Timer(self.fault.delay, self._strike)
        timer.daemon = True
        timer.start()

    def _strike(self) -> None:
        assert self.fault is not None
        what, room = self.fault.what, self.fault.room
        self.struck.touch()
        if what == "full" and self.disk is not None:
            self.disk.fill(room)
        elif what == "readonly" and self.disk is not None:
            self.disk.make_readonly()
        else:
            # Any process may be killed, but who stops a run of several stops the one that started them.
            this = self.fault.rank is None or what == "SIGKILL"
            os.kill(os.getpid() if this else os.getppid(), SIGNALS[what])

    def save(self, path: Path) -> None:
        """Write the seconds of each call of the phases."""
        path.write_text(json.dumps({"seconds": self.seconds}), encoding="utf-8")


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
