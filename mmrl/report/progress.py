"""What a person sees while a run trains: a live display in a terminal, plain lines elsewhere.

Part of `report`; fed with the metrics of each step. Writes to standard error, so that standard output holds results
only. A display must never end a run: whatever goes wrong in here switches the display off, once, with one sentence.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mmrl.config import RootConfig, TrainCommandConfig
from mmrl.errors import MODEL_CAUSED
from mmrl.report.alarms import Alarm, current
from mmrl.report.stats import Metrics, duration, module_facts, modules_in, number, series, short, sparkline
from mmrl.system.files import JsonObject

Arguments = ParamSpec("Arguments")


def run_name(config: RootConfig) -> str:
    """What a run is called in reports: `run.name`, else `<algo>-<task>-s<seed>`."""
    if config.run.name:
        return config.run.name
    kind = config.algo.name if isinstance(config, TrainCommandConfig) else "eval"
    return f"{kind}-{config.task.name}-s{config.seed}"


FAILED = "rollouts/failed/"
# A display's cost must not grow with the run: both limits bound what a step looks at.
HISTORY = 400
"""Steps kept for sparklines."""
ALARM_FIRST, ALARM_LAST = 20, 100
"""Steps that the display's alarms look at, from the start and the end of the run; reports look at all."""
FIRST_FACTS = ("reward", "penalty", "format_rate", "entropy", "length")
PLAIN_LINES = 30
"""About this many plain lines for a whole run..."""
PLAIN_SECONDS = 60.0
"""... and one at least this often."""
SHARED_FACTS = frozenset(
    {"calls", "reward", "penalty", "format_rate", "length", "entropy", "surprise", "kl", "clip_share", "attempts"}
    | {"finish_length_share"}
)
"""Facts of a module that every program has; others are the task's behaviour metrics."""


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

    return guarded


# Own bar and own time left instead of `rich.progress`: its bar ignores an output that cannot show blocks, and its pace
# forgets evaluations, which may take longer than many steps.
class Progress:
    """Progress of one run, as a context manager.

    Args:
        config: gives title and `run.progress` (false: plain lines also in a terminal).
        total: number of training steps.
        title: name of the run, where there is no config.
        main_metric: metric shown first (`task.main_metric`).
        first_step: steps done before (a resumed run).
        console: where to draw; None: standard error.
    """

    def __init__(
        self,
        config: RootConfig | None = None,
        *,
        total: int,
        title: str = "",
        main_metric: str = "em",
        first_step: int = 0,
        console: Console | None = None,
    ):
        self.off = False
        self._total = total
        self._title = title if config is None else run_name(config)
        self._main = main_metric
        self._done = first_step
        self._console = console or Console(file=sys.stderr, highlight=False)
        allowed = config is None or config.run.progress is not False
        self._is_live = allowed and self._console.is_terminal and not self._console.is_dumb_terminal
        self._ascii = not (self._console.encoding or "").lower().startswith("utf")
        self._history: deque[JsonObject] = deque(maxlen=HISTORY)
        self._evaluations: dict[str, list[tuple[int, Metrics]]] = {}
        # Twenty steps of pace: enough to smooth, few enough to follow a change.
        self._clock: deque[tuple[int, float]] = deque([(first_step, time.monotonic())], maxlen=21)
        self._last_line = (first_step, time.monotonic())
        self._status = ""
        self._live: Live | None = None
        self._first: list[JsonObject] = []
        self._alarms: list[Alarm] = []
        self._announced: set[tuple[str, str]] = set()

    # --- what the run calls

    def __enter__(self) -> Progress:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop(kind is not None)

    @_harmless
    def step(self, step: int, metrics: Metrics) -> None:
        """Step number `step` is done; `metrics` as logged."""
        self._done = step
        self._history.append({**metrics, "step": step})
        if len(self._first) < ALARM_FIRST:
            self._first.append(self._history[-1])
        # Before drawing, so that the display shows the alarms of this very step.
        self._alarms = current(self._for_alarms())
        self._clock.append((self._done, time.monotonic()))
        self._status = ""
        self._draw()
        for alarm in self._alarms:
            # An alarm is printed when it begins; the display keeps showing it while it is on.
            if (alarm.name, alarm.key) not in self._announced:
                self._announced.add((alarm.name, alarm.key))
                self._print_line(
                    f"alarm {alarm.name} at step {self._done} ({alarm.key}): {alarm.message}", style="yellow"
                )
        # A log file gets a bounded number of lines, however long the run is.
        if not self._is_live and self._line_is_due():
            self._print_line(self._line())

    @_harmless
    def evaluation(self, step: int, split: str, metrics: Metrics) -> None:
        """An evaluation after `step` steps is done; keys with or without the prefix `eval/<split>/`."""
        metrics = {key.removeprefix(f"eval/{split}/"): value for key, value in metrics.items()}
        self._evaluations.setdefault(split, []).append((step, metrics))
        self._status = ""
        self._draw()
        if not self._is_live:
            shown = "  ".join(f"{key} {_with_interval(metrics, key)}" for key in self._metric_names(metrics))
            count = number(metrics.get("n"))
            items = "" if count is None else f"  n {count:.0f}"
            failed = number(metrics.get("failed_share"))
            lost = f"  failed from outside {_percent(failed)}, each counted as 0" if failed else ""
            self._print_line(f"evaluation on {split} at step {step}: {shown}{items}{lost}")

    @_harmless
    def status(self, text: str) -> None:
        """What is being done now ("evaluating dev 40/200"); in the live display only."""
        self._status = text
        self._draw()

    @_harmless
    def note(self, text: str) -> None:
        """One line that stays."""
        self._print_line(text)

    # --- drawing

    @_harmless
    def _start(self) -> None:
        if self._is_live:
            self._live = Live(console=self._console, get_renderable=self._safe_render, refresh_per_second=1)
            self._live.start()
        elif self._title:
            self._print_line(f"{self._title}: {self._total - self._done} steps to go")

    @_harmless
    def _stop(self, failed: bool) -> None:
        if self._live is not None:
            self._status = "stopped" if failed else ""
            # The last state stays on the screen when the display ends.
            self._live.refresh()
            self._live.stop()
            self._live = None

    def switch_off(self, error: Exception) -> None:
        """End the display for good; the run goes on."""
        self.off = True
        live, self._live = self._live, None
        if live is not None:
            with suppress(Exception):
                live.stop()
        with suppress(Exception):  # standard error itself may be gone
            print(f"progress display switched off: {type(error).__name__}: {error}", file=sys.stderr)

    def _for_alarms(self) -> list[JsonObject]:
        """The first and the last steps: what alarms compare, at a cost that does not grow with the run."""
        last = list(self._history)[-ALARM_LAST:]
        return [record for record in self._first if record["step"] < last[0]["step"]] + last

    def _print_line(self, text: str, style: str = "") -> None:
        self._console.print(Text(self._plain(text), style=style), soft_wrap=not self._console.is_terminal)

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
        """The whole display for a terminal of `width` columns."""
        rows: list[RenderableType] = [self._bar(width)]
        rows += self._curves(width)
        if self._history:
            rows.append(self._speed())
            if modules_in([self._history[-1]]):
                rows.append(self._modules(width))
            for alarm in self._alarms:
                rows.append(Text(self._plain(f"! {alarm.name}  {alarm.key}: {alarm.message}"), style="yellow"))
        if self._status:
            rows.append(Text(self._plain(self._status), style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*rows)

    def _bar(self, width: int) -> Text:
        # A resumed run may have done more steps than a shorter config now asks for.
        share = min(max(self._done / self._total, 0.0), 1.0) if self._total else 1.0
        head = f"step {self._done}/{self._total} "
        tail = f" {share:4.0%}  {self._pace()}"
        length = max(min(width - len(head) - len(tail) - 1, 40), 0)
        full = round(share * length)
        marks = ("=", "-") if self._ascii else ("━", "─")
        text = Text(no_wrap=True, overflow="ellipsis")
        if self._title and len(head) + length + len(tail) + len(self._title) + 2 < width:
            text.append(self._plain(self._title) + "  ", style="bold")
        text.append(head, style="bold")
        text.append(marks[0] * full, style="green")
        text.append(marks[1] * (length - full), style="dim")
        text.append(tail)
        return text

    def _curves(self, width: int) -> list[RenderableType]:
        rows: list[tuple[str, str, str]] = []
        # 52 columns hold the longest name, number and note beside a curve.
        room = max(min(width - 52, 40), 6)
        _, rewards = series(list(self._history), "reward/mean")
        if len(rewards):
            spread = self._history[-1].get("credit/zero_variance_share")
            note = f"best {short(rewards.max())}" + ("" if spread is None else f"  equal groups {_percent(spread)}")
            rows.append(("reward", short(rewards[-1]), f"{self._spark(list(rewards), room)}  {note}"))
        # The newest evaluation as a number, the earlier ones as a curve before it.
        for split, seen in self._evaluations.items():
            for key in self._metric_names(seen[-1][1]):
                values = [float(value) for _, metrics in seen if (value := number(metrics.get(key))) is not None]
                rest = [_with_interval(seen[-1][1], key).partition(" ")[2]]
                if len(values) > 1:
                    rest = [self._spark(values, min(room, 16)), *rest, f"from {short(values[0])}"]
                rest.append(f"at step {seen[-1][0]}")
                rows.append((f"{split} {key}", short(values[-1]), "  ".join(part for part in rest if part)))
        left = max((len(name) for name, _, _ in rows), default=0)
        lines: list[RenderableType] = []
        for name, shown, rest_of_line in rows:
            text = Text(no_wrap=True, overflow="ellipsis")
            text.append(self._plain(name).ljust(left), style="bold").append(f" {shown:>6}  {rest_of_line}")
            lines.append(text)
        return lines

    def _speed(self) -> Text:
        last = self._history[-1]
        parts = []
        for key, unit in (("rate/tokens_per_s", "tokens/s"), ("rate/calls_per_s", "calls/s")):
            if number(last.get(key)) is not None:
                parts.append(f"{short(last[key])} {unit}")
        total = number(last.get("time/step"))
        if total:
            shares = [(name, number(last.get(f"time/{name}"))) for name in ("generate", "retrieve", "update")]
            parts += [f"{name} {value / total:.0%}" for name, value in shares if value is not None]
        memory = number(last.get("memory/rss_mb"))
        if memory is not None:
            parts.append(f"{memory / 1024:.1f} GB")
        failed = number(last.get("rollouts/failed_share"))
        if failed:
            parts.append(f"failed {_percent(failed)}")
        return Text(self._plain(" · ".join(parts)), style="dim", no_wrap=True, overflow="ellipsis")

    def _modules(self, width: int) -> Table:
        """One line per module with as many facts as fit, the most telling first."""
        last = self._history[-1]
        names = modules_in([last])
        present = module_facts(self._history)
        behaviour = [fact for fact in present if fact not in SHARED_FACTS]
        room = width - min(max(len("module"), *(len(name) for name in names)), width // 3)
        table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=False)
        table.add_column("module", no_wrap=True, overflow="ellipsis", max_width=max(width // 3, 8))
        shown = []
        # Columns are taken in order of importance while they fit; the others are left out.
        for fact in (*FIRST_FACTS, *behaviour, "kl", "clip_share"):
            label = fact.replace("_share", "").replace("_rate", "")
            room -= max(len(label), 7) + 2
            if fact in present and room >= 0:
                shown.append(fact)
                table.add_column(label, justify="right", no_wrap=True)
            elif fact not in present:
                room += max(len(label), 7) + 2
        for name in names:
            table.add_row(self._plain(name), *(short(last.get(f"module/{name}/{fact}")) for fact in shown))
        return table

    # --- words

    def _metric_names(self, metrics: Metrics) -> list[str]:
        """The main metric first, then the others that are worth a line."""
        # Tasks differ in their metrics; three lines per split are as many as can be read at a glance.
        offered = [
            key for key in (self._main, "em", "f1", "accuracy", "reward") if number(metrics.get(key)) is not None
        ]
        return list(dict.fromkeys(offered))[:3]

    def _line_is_due(self) -> bool:
        every = max(1, self._total // PLAIN_LINES)
        step, at = self._last_line
        now = time.monotonic()
        due = self._done - step >= every or self._done >= self._total or len(self._history) == 1
        if due or now - at >= PLAIN_SECONDS:
            self._last_line = (self._done, now)
            return True
        return False

    def _line(self) -> str:
        last = self._history[-1]
        parts = [f"step {self._done}/{self._total}", f"reward {short(last.get('reward/mean'))}"]
        for key in dict.fromkeys((self._main, "f1")):
            if number(last.get(f"task/{key}")) is not None:
                parts.append(f"{key} {short(last[f'task/{key}'])}")
        if number(last.get("rate/tokens_per_s")) is not None:
            parts.append(f"{short(last['rate/tokens_per_s'])} tokens/s")
        failed = number(last.get("rollouts/failed_share"))
        if failed:
            kinds = {key.removeprefix(FAILED): value for key, value in last.items() if key.startswith(FAILED)}
            counts = ", ".join(f"{kind} {value:.0f}" for kind, value in kinds.items() if kind not in MODEL_CAUSED)
            parts.append(f"failed from outside {_percent(failed)} ({counts})")
        return "  ".join([*parts, self._pace()])

    def _pace(self) -> str:
        """Seconds per step over the last steps, evaluations included, and the time left at that pace."""
        (first, since), (last, at) = self._clock[0], self._clock[-1]
        # No step is done since this process started: there is no pace yet.
        if last <= first:
            return ""
        pace = (at - since) / (last - first)
        left = (self._total - last) * pace
        return f"{duration(pace)}/step" + (f"  {duration(left)} left" if last < self._total else "  done")

    def _spark(self, values: list[float], width: int) -> str:
        return sparkline(values, width, ascii_only=self._ascii)

    def _plain(self, text: str) -> str:
        """`text` as the terminal's encoding can show it."""
        return text.encode("ascii", "replace").decode() if self._ascii else text


def _percent(value: object) -> str:
    share = number(value)
    return "-" if share is None else f"{share:.0%}"


def _with_interval(metrics: Metrics, key: str) -> str:
    low, high = number(metrics.get(f"{key}_low")), number(metrics.get(f"{key}_high"))
    interval = "" if low is None or high is None else f" [{short(low)}, {short(high)}]"
    return short(metrics.get(key)) + interval
