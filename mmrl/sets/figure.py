"""Figure of a set: metrics of its training runs by step, over seeds.

Three diagrams for each column: the main metric, the reward and what its programs do; or those that a paper's table
names (`scripts/papers`).
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pandas

from mmrl.report.charts import (
    DASHES,
    LINES,
    MARKERS,
    PAGE,
    STYLE,
    Line,
    bare_svg,
    standalone,
    whole_steps,
    with_values,
)
from mmrl.report.stats import WINDOW, History, series, splits_in, trailing_mean
from mmrl.sets.cells import BEHAVIOUR, SetResult, behaviour_in
from mmrl.system.files import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 3
LABEL = 30
"""Letters of a line beside an axis; more do not fit its height."""


def beside(label: str) -> str:
    """Break a label into lines that fit beside an axis; the name of a metric after slashes."""
    words = (word.replace("/", "/\u200b ") if len(word) > LABEL else word for word in label.split(" "))
    return fill(" ".join(words), LABEL).replace("/\u200b ", "/").replace("\u200b", "")


class Diagram(NamedTuple):
    """Diagram of a figure: a metric of training by step, a line for each row."""

    metric: Sequence[str]
    """Of metrics.jsonl, or eval/METRIC: of evaluations during training; the first that is there is meant."""
    label: str
    """Of its axis."""


class RowCurve(NamedTuple):
    """Curve of a row in a diagram, over the steps that all its seeds have."""

    row: str
    seeds: int
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class SetFigure:
    """Diagrams of the started runs."""

    result: SetResult
    diagrams: Sequence[Diagram] = ()
    """Empty: the main metric, the reward and what programs do."""
    band: Literal["std", "range"] = "range"
    """Around the mean over seeds: a deviation, or all seeds."""

    def histories(self, row: str, column: str) -> dict[int, History]:
        """Return seed -> the steps of its run and of those that it starts from."""
        by_seed: dict[int, History] = {}
        for run in self.result.runs.get((row, column), ()):
            read = [self.result.overview(link.path) for link in run.chain]
            if read[-1] is not None:
                by_seed[run.seed] = _join_histories([overview.history for overview in read if overview is not None])
        return by_seed

    @cached_property
    def panels(self) -> list[tuple[str, Diagram, list[RowCurve]]]:
        """Title, diagram and lines of each panel; columns that share all their training runs are one."""
        rows = self.result.rows
        columns: dict[tuple[Path | None, ...], str] = {}
        for column in self.result.columns:
            runs = [run for row in rows for run in self.result.runs.get((row, column), ())]
            columns.setdefault(tuple(run.trained for run in runs), column)
        panels = []
        for column in columns.values():
            for diagram in self.diagrams or self._default(column):
                lines = [line for row in rows if (line := self._line(row, column, diagram)) is not None]
                panels.append((column if len(columns) > 1 else "", diagram, lines))
        return panels

    def _default(self, column: str) -> list[Diagram]:
        """Return the default diagrams: the main metric, the reward and what programs do."""
        started = [scored for runs in self.result.started_in(column).values() for scored in runs]
        if not started:
            return []
        metric = started[0].metric
        diagrams = {f"eval/{metric}": f"{metric} on {started[0].overview.split}", "reward/mean": "training reward"}
        acts = [
            behaviour.training
            for behaviour in BEHAVIOUR
            if behaviour.training and any(behaviour_in(scored.before, behaviour) is not None for scored in started)
        ]
        modules = next((scored.overview.modules for scored in started if scored.overview.modules), ())
        if acts:
            diagrams[acts[0]] = acts[0]
        elif modules:
            diagrams[f"module/{modules[0]}/format_rate"] = f"{modules[0]}: parsed (share)"
        return [Diagram((metric,), label) for metric, label in diagrams.items()]

    def _line(self, row: str, column: str, diagram: Diagram) -> RowCurve | None:
        by_seed = {seed: self._curve(history, diagram) for seed, history in self.histories(row, column).items()}
        # The mean would jump at a step from which fewer seeds are left.
        curves = pandas.DataFrame({seed: curve for seed, curve in by_seed.items() if curve}).T.dropna(axis=1)
        if curves.empty:
            return None
        mean, low, high = curves.mean(), curves.min(), curves.max()
        if self.band == "std":
            spread = curves.std().fillna(0.0)
            low, high = mean - spread, mean + spread
        return RowCurve(row, len(curves), *map(np.asarray, (curves.columns, mean, low, high)))

    def _curve(self, history: History, diagram: Diagram) -> dict[int, float]:
        """Return step -> value of the first of the diagram's metrics that the run has."""
        for metric in diagram.metric:
            on_split = metric.removeprefix("eval/")
            keys = [f"eval/{split}/{on_split}" for split in splits_in(history)] if on_split != metric else [metric]
            for key in keys:
                steps, values = series(history, key)
                if len(steps):
                    values = values if on_split != metric else trailing_mean(values, WINDOW)
                    return dict(zip(steps.tolist(), values.tolist(), strict=True))
        return {}

    @property
    def caption(self) -> str:
        """Meaning of lines, bands and numbers."""
        band = "from the lowest to the highest seed" if self.band == "range" else "one standard deviation"
        lines = f"Mean over seeds, whose number follows each name; bands: {band}."
        made = f" Not with the set's own settings: {self.settings}." if self.settings else ""
        return f"{lines} Training curves are means of {WINDOW} steps.{made}"

    @property
    def settings(self) -> str:
        """Typed settings, where runs of the set are others for them; empty where none is."""
        others = any(run.other for runs in self.result.runs.values() for run in runs)
        return shlex.join(self.result.settings) if others else ""

    @cached_property
    def files(self) -> dict[str, str | bytes]:
        """`figure.svg`, `.png` and the drawn numbers, `.csv`; none before there is anything to draw."""
        points = [
            (title, diagram.label, line.row, *point, line.seeds, self.settings)
            for title, diagram, lines in self.panels
            for line in lines
            for point in zip(line.steps, line.mean, line.low, line.high, strict=True)
        ]
        if not points:
            return {}
        head = ["column", "diagram", "row", "step", "mean", "low", "high", "seeds", "settings"]
        numbers = pandas.DataFrame(points, columns=head).to_csv(index=False, float_format="%.6g")
        svg, png, _ = self._drawn
        return {"figure.svg": standalone(svg), "figure.png": png, "figure.csv": numbers}

    @property
    def with_values(self) -> str:
        """The figure for a page whose script shows the means under the pointer."""
        return standalone(self._drawn[2])

    @cached_property
    def _drawn(self) -> tuple[str, bytes, str]:
        """The figure as `<svg>` and as PNG, and as `<svg>` with its values."""
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        across = min(ACROSS, len(self.panels))
        size = 4.4 * across, 3.1 * (down := -(-len(self.panels) // across))
        with matplotlib.rc_context(STYLE):
            canvas = Canvas(figsize=size, layout="constrained", facecolor=PAGE)
            FigureCanvasAgg(canvas)
            for index, (title, diagram, lines) in enumerate(self.panels):
                axes = canvas.add_subplot(down, across, index + 1)
                axes.set(ylabel=beside(diagram.label))
                if title:
                    axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
                if not lines:
                    axes.text(0.5, 0.5, "no data yet", ha="center", va="center", transform=axes.transAxes)
                    axes.set(xticks=[], yticks=[])
                else:
                    whole_steps(axes)
                for line in lines:
                    _draw_curve(axes, line, self.result.rows.index(line.row))
            # A single legend above all diagrams: a row has the same name and style in each.
            handles = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in canvas.axes]
            lines_of = {label: handle for pairs in handles for handle, label in pairs}
            canvas.legend(
                [*lines_of.values()], [*lines_of], loc="outside upper left", ncols=5, fontsize=9, handlelength=3
            )
            svg, png = io.StringIO(), io.BytesIO()
            canvas.savefig(png, format="png", dpi=130)
            canvas.savefig(svg, format="svg", facecolor="none", metadata={"Date": None})
        bare = bare_svg(svg.getvalue(), f"{self.result.name}: {self.caption}")
        diagrams: list[tuple[Axes, list[Line]]] = [
            (axes, [(line.row, line.steps, line.mean, None) for line in lines])
            for axes, (_, _, lines) in zip(canvas.axes, self.panels, strict=True)
            if lines
        ]
        return bare, png.getvalue(), with_values(bare, size, diagrams)


def _join_histories(histories: Sequence[History]) -> History:
    """Join the steps of runs that start from one another; at a seam, the last point of the earlier stays."""
    lines: dict[int, JsonObject] = {}
    for history in histories:
        done = max(lines, default=0)
        for record in history:
            step = done + int(record["step"])
            lines[step] = {**record, **lines.get(step, {}), "step": step}
    return list(lines.values())


def _draw_curve(axes: Axes, line: RowCurve, index: int) -> None:
    """Draw the mean and its band in the style of row number `index`, with about five markers."""
    color, number = LINES[index % len(LINES)], index % len(MARKERS)
    spacing = max(1, len(line.steps) // 5)
    axes.plot(
        line.steps,
        line.mean,
        label=f"{line.row} ({line.seeds})",
        color=color,
        linewidth=1.8,
        linestyle=DASHES[index // len(LINES) % len(DASHES)],
        marker=MARKERS[number],
        markersize=5,
        # Markers of different lines start at different places, so that they do not hide each other.
        markevery=(number % spacing, spacing),
    )
    axes.fill_between(line.steps, line.low, line.high, color=color, alpha=0.13, linewidth=0)
