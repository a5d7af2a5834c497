"""Progress of a run while it trains: a live display in a terminal, plain lines elsewhere.

Part of `report`; fed with the metrics of each step. Writes to standard error, so that standard output holds results
only. A display must never end a run: whatever goes wrong in here switches the display off, once, with one sentence.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from mmrl.errors import MODEL_CAUSED, without_codes
from mmrl.report.alarms import Alarm, alarms
from mmrl.report.stats import (
    History,
    Metrics,
    counted,
    duration,
    failed_text,
    failure_shares,
    learning,
    number,
    short,
    sparkline,
    splits_in,
)
from mmrl.report.tables import Rows, with_interval
from mmrl.report.text import align
from mmrl.secrets import hide
from mmrl.system.files import JsonObject

Arguments = ParamSpec("Arguments")


HISTORY = 400
"""Steps up to which alarms are looked for after each one; after n times as many at every n-th, since they look at all
steps and their cost should not grow with the run."""
PLAIN_LINES = 30
"""About this many plain lines for a whole run..."""
PLAIN_SECONDS = 60.0
"""... and one at least this often."""


def _harmless(
    method: Callable[Concatenate[Progress, Arguments], None],
) -> Callable[Concatenate[Progress, Arguments], None]:
    @functools.wraps(method)
    def guarded(progress: Progress, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if progress.off:
            return
        try:
            method(progress, *args, **kwargs)
        except Exception as error:  # a display must not end a run
            progress.switch_off(error)

    return cast("Callable[Concatenate[Progress, Arguments], None]", guarded)


class AboveDisplay:
    """A text stream in the place of standard output or error while the display draws.

    Its lines go above the display; an unfinished one, such as the bar of a download, is the display's status. All else
    is the stream's own, so that what asks for its encoding gets the terminal's, which rich's own stand-in hides.

    Args:
        stream: the one that it stands for.
        show: prints a line.
    """

    def __init__(self, stream: TextIO, show: Callable[[Text], None]):
        self.stream = stream
        self.unfinished = ""
        self._show = show
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Take the text; of what a bar has drawn on one line, the last state counts."""
        with self._lock:
            *lines, rest = (self.unfinished + text).split("\n")
            self.unfinished = _last_state(rest)
        for line in map(_last_state, lines):
            if line.strip():
                # hidden here: where a long line breaks, a secret would be none
                self._show(Text.from_ansi(hide(line)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Nothing: a line is shown when it is finished."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


class Progress:
    """Progress of one run, as a context manager.

    Args:
        total: number of training steps.
        title: name of the run.
        live: whether to draw (`run.progress`); None: in a terminal alone, True: into a pipe too, False: plain lines
            everywhere.
        main_metric: metric shown first (`task.main_metric`).
        first_step: steps done before (a resumed run).
        history: their records, and that of the evaluation before training.
        console: where to draw; None: standard error.
    """

    def __init__(
        self,
        *,
        total: int,
        title: str = "",
        live: bool | None = None,
        main_metric: str = "em",
        first_step: int = 0,
        history: History = (),
        console: Console | None = None,
    ):
        self.off = False
        self._main = main_metric
        # run.progress=true draws into a pipe too: there is a terminal behind some of them (ssh, tee, a notebook).
        forced = True if live else None
        self._console = console or Console(file=sys.stderr, highlight=False, force_terminal=forced)
        if self._console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
            # rich draws in a notebook by its widgets alone, and warns at each refresh where there are none
            self._console = Console(file=sys.stderr, highlight=False, force_jupyter=False, force_terminal=False)
        self._ascii = not (self._console.encoding or "").lower().startswith("utf")
        self._history: list[JsonObject] = []
        self._evaluations: dict[str, list[tuple[int, Metrics]]] = {}
        # An endless period: evaluations between steps are part of the pace, however long they take.
        self._bars = Bars(console=self._console, auto_refresh=False, speed_estimate_period=math.inf)
        self._bars.add_task(self._safe(title), total=total, completed=first_step, pace="")
        self._task = self._bars.tasks[0]
        # A first sample, so that one step is enough for a pace.
        self._bars.advance(self._task.id, 0)
        self._last_line = (first_step, time.monotonic())
        self._status: tuple[Callable[[], str], float] | None = None
        """Text of the work under way, and when it began."""
        self._alarms: list[Alarm] = []
        self._announced: set[tuple[str, str]] = set()
        for record in history:
            if record["step"]:
                self._history.append(record)
            for split in splits_in([record]):
                self._keep_evaluation(record["step"], split, record)
        self._resumed = first_step
        self._streams: list[AboveDisplay] = []
        self._live: Live | None = None
        # last: rich draws it once right away
        if live is not False and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._safe_render,
                refresh_per_second=1,
                # by `AboveDisplay`
                redirect_stdout=False,
                redirect_stderr=False,
            )

    # --- what the run calls

    def __enter__(self) -> Progress:
        self._start()
        return self

    @_harmless
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._status = (lambda: "stopped", math.inf) if kind is not None else None
        # The last state stays on the screen when the display ends.
        self._draw()
        self._end()

    @_harmless
    def step(self, step: int, metrics: Metrics) -> None:
        """Record that step number `step` is done; `metrics` as logged."""
        self._bars.update(self._task.id, completed=step)
        self._bars.update(self._task.id, pace=self._pace())
        self._history.append({**metrics, "step": step})
        # Before drawing, so that the display shows the alarms of this very step.
        if len(self._history) % max(1, len(self._history) // HISTORY) == 0:
            self._alarms = [alarm for alarm in alarms(self._history) if alarm.until is None]
        self._status = None
        self._draw()
        for alarm in self._alarms:
            # An alarm is printed when it begins, or first seen by a resumed run; the display shows it while it is on.
            if (alarm.name, alarm.key) not in self._announced:
                self._announced.add((alarm.name, alarm.key))
                when = f"from step {alarm.step}" if alarm.step <= self._resumed else f"at step {step}"
                self._print_line(f"alarm {alarm.name} {when} ({alarm.key}): {alarm.message}", style="yellow")
        # A log file gets a bounded number of lines, however long the run is.
        if self._live is None and self._line_is_due(step):
            # An optimiser of prompts may not know how many trials it will make.
            done = f"step {step}/{total:.0f}" if (total := self._task.total) else f"step {step}"
            self._print_line("  ".join([done, *self._numbers(), self._pace()]))

    @_harmless
    def evaluation(self, step: int, split: str, metrics: Metrics) -> None:
        """Record an evaluation after `step` steps; keys with or without the prefix `eval/<split>/`."""
        if step <= self._task.completed <= self._resumed:  # the one before training is no part of a step
            self._bars.reset(self._task.id, completed=int(self._task.completed))
            self._bars.advance(self._task.id, 0)
        metrics = self._keep_evaluation(step, split, metrics)
        self._status = None
        self._draw()
        if self._live is None:
            text = "  ".join(f"{key} {with_interval(metrics, key)}" for key in self._metric_names(metrics))
            count = number(metrics.get("n"))
            items = "" if count is None else f"  n {count:.0f}"
            shares = {key.removeprefix("failed/"): number(metrics[key]) for key in metrics if key.startswith("failed/")}
            failed = failed_text({kind: share for kind, share in shares.items() if share})
            zero = [kind for kind in shares if kind not in MODEL_CAUSED]
            failed += f", {', '.join(zero)} counted as 0" if zero else ""
            self._print_line("  ".join(filter(None, [f"evaluation on {split} at step {step}: {text}{items}", failed])))

    @_harmless
    def status(self, text: str | Callable[[], str]) -> None:
        """Show the work under way, with its time; in the live display only.

        Args:
            text: such as "updating"; a function is called at each refresh, from another thread.
        """
        self._status = (text if callable(text) else lambda: text), time.monotonic()
        self._draw()

    @_harmless
    def note(self, text: str) -> None:
        """Print a line that stays above the display."""
        self._print_line(text)

    # --- drawing

    @_harmless
    def _start(self) -> None:
        if self._live is not None:
            self._live.start()
            out, err = (AboveDisplay(stream, self._show) for stream in (sys.stdout, sys.stderr))
            sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
            self._streams = [out, err]
        elif self._task.description:
            self._print_line(f"{self._task.description}: {counted(self._task.remaining or 0, 'step')} to go")

    def _end(self) -> None:
        """End the display and give standard output and error back; what is unfinished on them is printed."""
        if self._live is None:
            return
        streams, self._streams = self._streams, []
        for name, stream in zip(("stdout", "stderr"), streams, strict=False):
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
        try:
            self._live.stop()
        finally:
            for stream in streams:
                if stream.unfinished.strip():
                    stream.stream.write(f"{stream.unfinished}\n")

    def switch_off(self, error: Exception) -> None:
        """End the display for good; the run continues."""
        self.off = True
        with suppress(Exception):
            self._end()
        with suppress(Exception):  # standard error itself may be gone
            print(f"progress display switched off: {type(error).__name__}: {error}", file=sys.stderr)

    def _print_line(self, text: str, style: str = "") -> None:
        self._show(Text(self._safe(text), style=style))

    @_harmless
    def _show(self, text: Text) -> None:
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _keep_evaluation(self, step: int, split: str, metrics: Metrics) -> Metrics:
        metrics = {key.removeprefix(f"eval/{split}/"): value for key, value in metrics.items()}
        self._evaluations.setdefault(split, []).append((step, metrics))
        return metrics

    def _draw(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _safe_render(self) -> RenderableType:
        # Called from rich's own thread, where an exception would surface as a traceback on the screen.
        try:
            return self.render(self._console.width)
        except Exception as error:
            return Text(f"(display: {type(error).__name__}: {error})")

    def render(self, width: int) -> RenderableType:
        """Render the whole display for a terminal of `width` columns."""
        columns = {
            80: TextColumn("{task.description}", style="bold", markup=False),
            1: TextColumn("step {task.completed}/{task.total}", style="bold"),
            2: BarColumn(None, table_column=Column(max_width=40)),
            3: TaskProgressColumn(),
            60: TextColumn("{task.fields[pace]}"),
        }
        self._bars.columns = tuple(column for least, column in columns.items() if width >= least)
        rows: list[RenderableType] = [self._bars]
        if curves := self._curves(min(max(width - 52, 6), 40)):
            rows.append(self._dim(align(curves, indent="")))
        if self._history:
            rows.append(self._dim(" · ".join(self._numbers())))
        rows += [Text(self._safe(f"! {alarm.name}  {alarm.key}: {alarm.message}"), "yellow") for alarm in self._alarms]
        return Group(*rows, *map(self._dim, self._under_way()))

    def _under_way(self) -> list[str]:
        """Return the work under way, and bars that others draw."""
        rows = []
        if self._status is not None:
            text, since = self._status
            seconds = time.monotonic() - since
            rows.append(f"{text()}  {duration(seconds)}" if seconds >= 1 else text())
        return [*rows, *(line for stream in self._streams if (line := Text.from_ansi(stream.unfinished).plain.strip()))]

    def _curves(self, room: int) -> Rows:
        """Return rows of reward and evaluations: name, newest value, curve of at most `room` characters or notes."""
        rows = []
        name, _, curve = learning(self._history)
        if len(curve):
            note = f"best {short(curve.max())}" if name == "reward" else ""
            rows.append([name, short(curve[-1]), f"{sparkline(list(curve), room, ascii_only=self._ascii)}  {note}"])
        for split, evaluations in self._evaluations.items():
            (_, first), (step, newest) = evaluations[0], evaluations[-1]
            for key in self._metric_names(newest):
                value, _, interval = with_interval(newest, key).partition(" ")
                start = f"from {short(first.get(key))}" if len(evaluations) > 1 else ""
                rows.append([f"{split} {key}", value, "  ".join(filter(None, [interval, start, f"at step {step}"]))])
        return rows

    def _dim(self, text: str) -> Text:
        return Text(self._safe(text), style="dim", no_wrap=True, overflow="ellipsis")

    # --- words

    def _metric_names(self, metrics: Metrics) -> list[str]:
        """Return the main metric first, then the others that are worth a line."""
        # Tasks differ in their metrics; three lines per split are as many as can be read at a glance.
        offered = [
            key for key in (self._main, "em", "f1", "accuracy", "reward") if number(metrics.get(key)) is not None
        ]
        return list(dict.fromkeys(offered))[:3]

    def _line_is_due(self, step: int) -> bool:
        total, (before, printed_at), now = self._task.total or 0, self._last_line, time.monotonic()
        due = step - before >= max(1, total // PLAIN_LINES) or step >= total or step == self._resumed + 1
        if due or now - printed_at >= PLAIN_SECONDS:
            self._last_line = (step, now)
            return True
        return False

    def _numbers(self) -> list[str]:
        """Return the newest step in a few numbers."""
        last = self._history[-1]
        reward = last.get("reward/mean", last.get("prompts/score"))
        accuracy = number(last.get("train/token_accuracy"))
        parts = [] if reward is None else [f"reward {short(reward)}"]
        if reward is None and accuracy is not None:
            parts = [f"loss {short(last.get('train/loss'))}", f"token accuracy {accuracy:.0%}"]
        metrics = [key for key in dict.fromkeys((self._main, "f1")) if number(last.get(f"task/{key}")) is not None]
        parts += [f"{key} {short(last[f'task/{key}'])}" for key in metrics]
        if number(last.get("rate/tokens_per_s")) is not None:
            parts.append(f"{short(last['rate/tokens_per_s'])} tokens/s")
        return [*parts, *filter(None, [failed_text(failure_shares(last))])]

    def _pace(self) -> str:
        """Return the seconds per step with evaluations, and the time left at that pace; empty before the first step."""
        if not (speed := self._task.speed):
            return ""
        remaining = "done" if self._task.finished else f"{duration(self._task.time_remaining or 0)} left"
        return f"{duration(1 / speed)}/step  {remaining}"

    def _safe(self, text: str) -> str:
        """Reduce `text` to the terminal's encoding, without codes that a terminal would obey and without secrets."""
        # Whole: a line break would hide a secret from `hide`.
        text = without_codes(hide(text))
        return text.encode("ascii", "replace").decode() if self._ascii else text
