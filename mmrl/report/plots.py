"""Curves as inline SVG whose colours follow the page (light or dark).

Part of `report`; matplotlib (Agg) is imported when the first figure is drawn. Figures are drawn in placeholder colours
that `_themed` replaces by the page's CSS variables, because an SVG from matplotlib knows one theme only.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmrl.report.series import History, series, trailing_mean

INK, FAINT = "#010203", "#010204"
LINES = ("#010205", "#010206", "#010207", "#010208", "#010209", "#01020a")
THEME = {INK: "var(--ink)", FAINT: "var(--faint)", **{color: f"var(--line{n})" for n, color in enumerate(LINES)}}
SIZE = (5.2, 2.9)
"""Inches; shown at the width of its column."""
POINTS = 300
"""Points drawn per line; longer runs are thinned by averaging."""

Band = Sequence[tuple[int, float, float | None, float | None]]


def reward_curve(history: History, window: int = 5) -> str:
    """Training reward per step, and its trailing mean; empty without values."""
    steps, values = series(history, "reward/mean")
    if not len(values):
        return ""
    with _axes("step", "training reward") as (axes, result):
        axes.plot(*_thin(steps, values), color=LINES[0], alpha=0.35, linewidth=1, label="per step")
        if len(values) > window:
            mean = trailing_mean(values, window)
            axes.plot(*_thin(steps, mean), color=LINES[0], linewidth=2, label=f"mean of {window} steps")
            _legend(axes)
    return result[0]


def evaluation_curve(curves: Mapping[str, Band], split: str) -> str:
    """Evaluation metrics over steps, the first one with its interval as a band; empty without values."""
    shown = {name: points for name, points in curves.items() if points}
    if not shown:
        return ""
    with _axes("step", f"score on {split}") as (axes, result):
        for color, (name, points) in zip(LINES, shown.items(), strict=False):
            steps = [point[0] for point in points]
            axes.plot(steps, [point[1] for point in points], color=color, marker="o", markersize=4, label=_label(name))
            if color == LINES[0]:
                sure = [(step, low, high) for step, _, low, high in points if low is not None and high is not None]
                if sure:
                    at, low, high = zip(*sure, strict=True)
                    axes.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)
        _legend(axes)
    return result[0]


def lines_over_steps(history: History, keys: Mapping[str, str], label: str, window: int = 5) -> str:
    """One line per metric (trailing means), for comparing modules or monitors; empty without values.

    Args:
        keys: name of the line -> metric key.
        label: what is drawn, for readers who hear the page (the caption says it to the others).
    """
    found = {name: series(history, key) for name, key in keys.items()}
    found = {name: (steps, values) for name, (steps, values) in found.items() if len(values)}
    if not found:
        return ""
    with _axes("step", "", label) as (axes, result):
        for index, (name, (steps, values)) in enumerate(found.items()):
            style = ("-", "--", ":")[index // len(LINES) % 3]
            mean = trailing_mean(values, window)
            axes.plot(*_thin(steps, mean), color=LINES[index % len(LINES)], linestyle=style, label=_label(name))
        if len(found) > 1:
            _legend(axes)
    return result[0]


def settings_of(ink: str, faint: str) -> dict[Any, Any]:
    """matplotlib's settings for figures that become SVG: text stays text, and the same figure gives the same bytes."""
    return {
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "mmrl",
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.edgecolor": faint,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "text.color": ink,
        "grid.color": faint,
    }


@contextmanager
def _axes(xlabel: str, ylabel: str, title: str | None = None) -> Iterator[tuple[Any, list[str]]]:
    """Axes to draw on, and a list that holds the finished SVG afterwards."""
    import matplotlib

    # A Figure of its own: pyplot's global state would leak figures and pick a display backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(settings_of(INK, FAINT)):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="y", linewidth=0.6, alpha=0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.ticklabel_format(axis="y", useOffset=False)
        result: list[str] = []
        yield axes, result
        _calm(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        result.append(_themed(buffer.getvalue(), title or f"{ylabel} by {xlabel}"))


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=10, loc="best", handlelength=1.4)


def _calm(axes: Any) -> None:
    """Widen a vertical range that would blow rounding up to look like news."""
    low, high = axes.get_ylim()
    least = 0.02 * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)


def _label(name: str) -> str:
    # matplotlib leaves labels that start with an underscore out of the legend.
    return f"\u200a{name}" if name.startswith("_") else name


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(values) <= POINTS:
        return steps, values
    parts = np.array_split(np.arange(len(values)), POINTS)
    return np.array([steps[part[-1]] for part in parts]), np.array([values[part].mean() for part in parts])


def _themed(svg: str, title: str) -> str:
    """The bare `<svg>` element with the page's colours and fonts."""
    svg = stripped(svg, title)
    for placeholder, variable in THEME.items():
        svg = svg.replace(placeholder, variable)
    return svg


def stripped(svg: str, title: str) -> str:
    """The bare, scalable `<svg>` element of matplotlib's output, in the fonts around it, with a name for readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # Ids of groups repeat from figure to figure; only those that something refers to are kept.
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found.group(0) if found.group(1) in used else "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]+" height="[^"]+"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
    return re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", svg)
