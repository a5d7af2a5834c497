"""Times and metrics of the step under way, and where the record of a finished step goes.

Part of `stages`: every stage adds to it, `evaluate` writes the record of the evaluation before training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import psutil

from mmrl.credit.entries import Entry
from mmrl.errors import OWN_CODE
from mmrl.records import Example, Forest
from mmrl.report.advice import ADVICE, FAILURES
from mmrl.report.html import try_report
from mmrl.report.overview import Overview
from mmrl.report.progress import Progress
from mmrl.report.trackers import Trackers
from mmrl.stages.step_metrics import shown_calls
from mmrl.store.journal import JournalWriter
from mmrl.store.rundir import RunDir
from mmrl.system.processes import ALONE, Processes
from mmrl.system.replies import one_line
from mmrl.system.stop import Stop


def memory() -> dict[str, float]:
    """`memory/*`: what this process holds on the host; where there is a GPU, the most that was held of its device since
    the last call: by this process, and by others as far as they hold it now (a vLLM in a process of its own).
    """
    metrics = {"memory/rss_mb": psutil.Process().memory_info().rss / 1e6}
    torch = sys.modules.get("torch")  # where nothing has loaded it nothing is on a device
    if torch is None or not torch.cuda.is_available():
        return metrics
    free, total = torch.cuda.mem_get_info()
    peak = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return metrics | {"memory/device_mb": peak / 1e6, "memory/device_share": peak / total}


@dataclass(slots=True, kw_only=True)
class StepLog:
    """Log of a run's steps; every process keeps the times, the main one writes."""

    rundir: RunDir
    progress: Progress
    trackers: Trackers
    processes: Processes = ALONE
    times: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the step; the names are those of `time/*` (docs/metrics.md)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics from sampling and credit."""
    started: float = 0.0
    """Clock at the step's beginning."""
    prefetched: bool = False
    """True if steps are sampled while the one before trains, so that sampling costs them the wait for it alone."""

    _noted: set[str] = field(default_factory=set)
    """Kinds of failure that `note_own_code` has printed."""
    _page: tuple[float, float] = (0.0, 0.0)
    """When the report was last written, and the seconds that it took."""
    stop: Stop = field(default_factory=Stop)
    """The request that this process end."""

    def obey_stop(self) -> None:
        """Raise `Stopped` if any process is to end. A collective, between two steps: all stop at one point."""
        if any(self.processes.gather(self.stop.requested)):
            self.stop.end()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample a step inside, which may be given up: the weights are still those of the step before."""
        self.obey_stop()
        # Of several processes, one that gave up would leave the others waiting: they look before the next step.
        with self.stop.at_once() if self.processes.world == 1 else nullcontext():
            yield

    def begin(self) -> None:
        """Start a step."""
        self.started = time.perf_counter()
        # These are in every record, also where nothing of the kind happened; `wait`, `sync` and `credit` are not.
        self.times = dict.fromkeys(("generate", "retrieve", "rollout", "annotate", "tokenize"), 0.0)
        self.metrics = {}

    def add(self, part: str, seconds: float) -> None:
        """Add to the time of a part."""
        self.times[part] = self.times.get(part, 0.0) + seconds

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time inside to a part; nothing where it raises."""
        started = time.perf_counter()
        yield
        self.add(part, time.perf_counter() - started)

    def keep(
        self, journal: JournalWriter, forest: Forest, entries: Sequence[Entry], examples: Sequence[Example]
    ) -> None:
        """Begin to journal the rollouts of the step under way, and send some of its calls to the trackers."""
        if not self.processes.main:
            return
        self.rundir.note_examples("train", examples)
        journal.write(self.rundir, forest, entries)
        if self.trackers.calls:
            self.trackers.log_calls(forest.step, shown_calls(forest, entries, self.trackers.calls))

    def note_own_code(self, where: str, failures: Sequence[tuple[str, str]], rollouts: int) -> None:
        """Print the first failure of each kind in the code of the program or its reward, with file and line.

        Args:
            failures: kind and message of each failure of a batch of `rollouts`.
        """
        for kind in sorted(OWN_CODE - self._noted):
            if messages := [message for name, message in failures if name == kind]:
                self._noted.add(kind)
                advice = ADVICE[FAILURES[kind]].text(len(messages) / rollouts, subject=one_line(messages[0]))
                self.progress.note(f"{where}: {advice}")

    def record(self, update: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step after its last optimizer step; `update` is the trainer's part of them."""
        # `time/overhead` is what no part accounts for, so a slow part that nobody measures shows up.
        spent = time.perf_counter() - self.started
        update_s = update.get("time/update", 0.0)
        parts = ("wait", "annotate") if self.prefetched else ("generate", "retrieve", "annotate", "tokenize")
        accounted = update_s + sum(self.times[part] for part in parts) + self.times.get("sync", 0.0)
        metrics = self.metrics | {name: value for name, value in update.items() if name != "time/update"}
        metrics |= {f"time/{name}": seconds for name, seconds in self.times.items()}
        return metrics | {
            "time/update": update_s,
            "time/step": spent,
            "time/overhead": spent - accounted,
            "rate/tokens_per_s": self.metrics.get("rollouts/tokens", 0.0) / spent,
            **memory(),
        }

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the record of a step; step 0 is the evaluation before training."""
        # Every process computes the record, one writes it.
        if not self.processes.main:
            return
        # The file first: it is the record, and a tracker may fail or wait for its server.
        self.rundir.append_metrics(step, metrics)
        self.trackers.log(step, metrics)
        if step:
            self.progress.step(step, metrics)

    def draw_page(self) -> None:
        """Write the report while the run goes on, unless drawing it would take more than about a tenth of the time."""
        ended, seconds = self._page
        started = time.perf_counter()
        if not self.processes.main or started - ended < 10 * seconds:
            return
        self.progress.status("writing the report")
        # What goes wrong here is said at the end, where the page is written again.
        try_report(Overview.from_run(self.rundir))
        self._page = time.perf_counter(), time.perf_counter() - started
