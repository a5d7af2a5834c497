"""The figure of a set: metrics of its training runs by step, over seeds, or means over the first steps.

`conf/set/NAME.yaml` says what is drawn (`Figure`). A set without scores has three diagrams for each column by default:
the main metric, the reward and what its programs do.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import MmrlError
from mmrl.report.charts import (
    DASHES,
    LINES,
    MARKERS,
    PAGE,
    STYLE,
    WINDOW,
    Band,
    LineStyle,
    draw_band,
    themed,
    whole_steps,
)
from mmrl.report.rundir import RunDir
from mmrl.report.stats import History, series, splits_in, trailing_mean
from mmrl.report.tables import Rows
from mmrl.sets.cells import BEHAVIOUR, SetResult, on_common_steps
from mmrl.sets.spec import Diagram, Figure
from mmrl.system.files import JsonObject

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

ACROSS = 3
"""Diagrams side by side."""
LABEL = 30
"""Letters of a line beside an axis; more do not fit its height."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One row in one diagram."""

    row: str
    band: Band
    """Over the steps that all its seeds have."""
    seeds: tuple[int, ...]
    least: float
    most: float
    """Of the mean before `scaled` moved it to 0..1."""
    plain: np.ndarray | None = None
    """The mean before `smooth`; None without."""

    @property
    def label(self) -> str:
        """Its name, how many seeds, and what `scaled` took away."""
        return f"{self.row} ({len(self.seeds)})"


def default_figure(result: SetResult) -> Figure | None:
    """The figure of a set that says none: of one without scores, for each column, its metric, reward and behaviour."""
    if result.spec.figure is not None or result.spec.scores:
        return result.spec.figure
    diagrams = []
    for column in result.columns:
        rows = result.rows_of(column)
        begun = [scored for row in rows for scored in result.begun(row, column)]
        if not begun:
            continue
        metric = result.metric(rows[0], column)
        shown = [of for of in BEHAVIOUR if of.training and any(s.behaviour(of, s.before) is not None for s in begun)]
        modules = next((scored.overview.modules for scored in begun if scored.overview.modules), ())
        diagrams.append(Diagram(metric=f"eval/{metric}", label=f"{metric} on {begun[0].overview.split}", column=column))
        diagrams.append(Diagram(metric="reward/mean", label="training reward", column=column))
        if shown:
            diagrams.append(Diagram(metric=shown[0].training, label=shown[0].axis, column=column))
        elif modules:
            label = f"{modules[0]}: parsed (share)"
            diagrams.append(Diagram(metric=f"module/{modules[0]}/format_rate", label=label, column=column))
    return Figure(diagrams=tuple(diagrams), band="range", window=WINDOW) if diagrams else None


@dataclass(frozen=True)
class SetFigure:
    """What is drawn, from the runs that are there."""

    result: SetResult
    figure: Figure

    @cached_property
    def read(self) -> tuple[Mapping[Path, History], list[str]]:
        """Training run -> its steps, of those that have begun; and which cannot be read."""
        found: dict[Path, History] = {}
        damaged = []
        every = [run for runs in self.result.runs.values() for run in runs if run.trained is not None]
        for path in dict.fromkeys(path for run in every for path in (*run.chain, run.trained) if path is not None):
            if (path / "metrics.jsonl").is_file():
                try:
                    found[path] = RunDir.read(path).history()
                except MmrlError as error:
                    damaged.append(f"Not drawn: {error}.")
        return found, damaged

    def histories(self, row: str, column: str) -> dict[int, History]:
        """Seed -> the steps of its training run; of a set without scores, of all runs that it comes from in turn."""
        runs, (read, _) = self.result.runs.get((row, column), ()), self.read
        known: dict[int, History] = {}
        for run in runs:
            if run.trained is not None and run.trained in read:
                chain = () if self.scored else run.chain
                known[run.seed] = _in_turn([read[path] for path in chain or (run.trained,) if path in read])
        return known

    @cached_property
    def panels(self) -> list[tuple[str, Diagram, list[Drawn]]]:
        """(title, diagram, its lines); columns that share all their training runs are one."""
        of_column = {
            column: tuple(run.trained for row in self.result.rows for run in self.result.runs.get((row, column), ()))
            for column in self.result.columns
        }
        trained: dict[str, tuple[Path | None, ...]] = {}
        for column, runs in of_column.items():
            if runs not in trained.values():
                trained[column] = runs
        made = []
        for column in trained:
            for diagram in self.figure.diagrams:
                if not diagram.column or of_column.get(diagram.column) == trained[column]:
                    title = column if len(trained) > 1 else ""
                    lines = [self._line(row, column, diagram) for row in self.result.rows]
                    made.append((title, diagram, [line for line in lines if line is not None]))
        return made

    def _line(self, row: str, column: str, diagram: Diagram) -> Drawn | None:
        found = {}
        for seed, history in self.histories(row, column).items():
            # The papers' figures begin at the first step of training.
            steps, values = _points([record for record in history if record["step"] or not self.scored], diagram)
            if not diagram.metrics[0].startswith("eval/"):
                values = trailing_mean(values, self.figure.window)
            if len(steps):
                found[seed] = dict(zip(steps.tolist(), values.tolist(), strict=True))
        steps, values = on_common_steps([*found.values()])
        if not len(steps):
            return None
        if self.figure.kind == "bars":
            values = values[:, : self.figure.first].mean(axis=1, keepdims=True)
            steps = steps[: self.figure.first][-1:]
        plain = values.mean(axis=0) if self.figure.smooth else None
        values = _smoothed(values, self.figure.smooth)
        mean = values.mean(axis=0)
        least, most = float(mean.min()), float(mean.max())
        if self.figure.scaled:
            values = (values - least) / ((most - least) or 1.0)
            mean = values.mean(axis=0)
        if self.figure.band == "range":
            low, high = values.min(axis=0), values.max(axis=0)
        else:
            spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
            low, high = mean - spread, mean + spread
        return Drawn(row, Band(steps, mean, low, high), tuple(sorted(found)), least, most, plain)

    @property
    def scored(self) -> bool:
        """Whether the set's scores are evaluations of their own."""
        return bool(self.result.spec.scores)

    @property
    def empty(self) -> bool:
        """Whether no run has anything to draw yet."""
        return not any(lines for _, _, lines in self.panels)

    @property
    def caption(self) -> str:
        """What the lines, bands and numbers are."""
        band = "from the lowest to the highest seed" if self.figure.band == "range" else "one standard deviation"
        if self.figure.kind == "bars":
            means = (
                f"Means over the first {self.figure.first} steps; whiskers: {band} over seeds, whose number follows."
            )
            return " ".join([means, *self.read[1]])
        parts = [f"Mean over seeds, whose number follows each name; bands: {band}."]
        if self.figure.window > 1:
            parts.append(f"Training curves are means of {self.figure.window} steps.")
        if self.figure.smooth:
            parts.append(
                f"Lines: moving averages that keep {self.figure.smooth:g} of the value before; dotted: the mean itself."
            )
        if self.figure.scaled:
            parts.append("Each line runs from its least to its greatest value, which the legend has.")
        return " ".join([*parts, *self.read[1]])

    def files(self) -> dict[str, str | bytes]:
        """`figure.svg`, `.png` and the drawn numbers, `.csv`; none before there is anything to draw."""
        if self.empty:
            return {}
        svg, png = self._rendered()
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.numbers())
        return {"figure.svg": svg, "figure.png": png, "figure.csv": out.getvalue()}

    def numbers(self) -> Rows:
        """One line per point."""
        rows = [["column", "diagram", "row", "step", "mean", "low", "high", "seeds"]]
        for title, diagram, lines in self.panels:
            for line in lines:
                for step, *values in zip(*line.band, strict=True):
                    numbers = [f"{value:.6g}" for value in values]
                    rows.append([title, diagram.label, line.row, str(int(step)), *numbers, str(len(line.seeds))])
        return rows

    def _legend(self, canvas: Canvas) -> None:
        """One above all diagrams, of lines by their rows, where they are called the same in each."""
        if self.figure.kind == "bars" or self.figure.scaled:
            return
        handles: dict[str, Artist] = {}
        for axes in canvas.axes:
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        canvas.legend([*handles.values()], [*handles], loc="outside upper left", ncols=5, fontsize=9, handlelength=3)

    def _rendered(self) -> tuple[str, bytes]:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        across = min(ACROSS, len(self.panels))
        down = -(-len(self.panels) // across)
        style = {row: _style(place) for place, row in enumerate(self.result.rows)}
        with matplotlib.rc_context(STYLE):
            canvas = Canvas(figsize=(4.4 * across, 3.1 * down), layout="constrained", facecolor=PAGE)
            FigureCanvasAgg(canvas)
            for place, (title, diagram, lines) in enumerate(self.panels):
                axes = canvas.add_subplot(down, across, place + 1)
                axes.set(ylabel=fill(diagram.label, LABEL))
                if title:
                    axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
                draw = _draw_bars if self.figure.kind == "bars" else _draw_curves
                draw(axes, lines, style, self.figure.scaled)
            self._legend(canvas)
            svg, png = io.StringIO(), io.BytesIO()
            canvas.savefig(png, format="png", dpi=130)
            canvas.savefig(svg, format="svg", metadata={"Date": None})
        return themed(svg.getvalue(), f"{self.result.name}: {self.caption}", standalone=True), png.getvalue()


def _in_turn(histories: Sequence[History]) -> History:
    """The steps of runs that start from one another, counted on; where one begins, the end of the one before stays."""
    lines: dict[int, JsonObject] = {}
    for history in histories:
        done = max(lines, default=0)
        for record in history:
            step = done + int(record["step"])
            lines[step] = {**record, **lines.get(step, {}), "step": step}
    return list(lines.values())


def _points(history: History, diagram: Diagram) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the first of its metrics that the run has."""
    for metric in diagram.metrics:
        keys = [metric]
        if metric.startswith("eval/"):
            keys = [f"eval/{split}/{metric.removeprefix('eval/')}" for split in splits_in(history)]
        for key in keys:
            steps, values = series(history, key)
            if len(steps):
                return steps, values
    return series([], "")


def _smoothed(values: np.ndarray, keep: float) -> np.ndarray:
    """Exponential moving average along the steps, (seeds, steps), that starts at the first value."""
    out = values.copy()
    for step in range(1, values.shape[1]):
        out[:, step] = keep * out[:, step - 1] + (1 - keep) * values[:, step]
    return out


def _style(place: int) -> LineStyle:
    return LINES[place % len(LINES)], MARKERS[place % len(MARKERS)], DASHES[place // len(LINES) % len(DASHES)]


def _draw_curves(axes: Axes, lines: Sequence[Drawn], style: Mapping[str, LineStyle], scaled: bool) -> None:
    axes.set(xlabel="step")
    whole_steps(axes)
    if not lines:
        _nothing(axes)
        return
    for line in lines:
        if line.plain is not None:
            axes.plot(line.band.steps, line.plain, color=style[line.row][0], linestyle=":", linewidth=1, alpha=0.6)
        draw_band(axes, line.band, style[line.row])
        axes.lines[-1].set_label(f"{line.label} {line.least:.2g}–{line.most:.2g}" if scaled else line.label)
    if scaled:  # each diagram has numbers of its own; below it, where no curve is hidden
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8)


def _draw_bars(axes: Axes, lines: Sequence[Drawn], style: Mapping[str, LineStyle], scaled: bool) -> None:
    axes.set_axisbelow(True)
    if not lines:
        _nothing(axes)
        return
    for place, line in enumerate(lines):
        mean, low, high = (float(values[0]) for values in line.band[1:])
        axes.bar(place, mean, color=style[line.row][0], yerr=[[mean - low], [high - mean]], ecolor="#5b6675", capsize=3)
        axes.annotate(
            f"{mean:,.0f}" if mean >= 1000 else f"{mean:.3g}", (place, high), ha="center", va="bottom", fontsize=9
        )
    axes.set_xticks(range(len(lines)), [line.label for line in lines], fontsize=8, rotation=20, ha="right")
    axes.margins(y=0.15)


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data yet", ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])
