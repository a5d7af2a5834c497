"""Curves of a run and of a set, as SVG that follows light and dark themes (and PNG).

All figures are drawn in one palette and one matplotlib style. An SVG from matplotlib knows one theme only, so `themed`
replaces its colours by the CSS variables that `THEME_CSS` defines: once for a page, or inside an SVG that serves alone.
matplotlib (Agg) is imported when the first figure is drawn.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from mmrl.report.stats import WINDOW, History, learning, series, trailing_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

PAGE, INK, FAINT = "#fffffe", "#1c2431", "#c9d0d8"
COLORS = {
    "#0072b2": "#56b4f5",
    "#d55e00": "#ff8d4d",
    "#00875f": "#3fd0a4",
    "#b0529a": "#e79bd2",
    "#a87b00": "#e6b422",
    "#3d9bd6": "#a5d8ff",
    "#5b6675": "#b5bcc6",
    "#8c2d2d": "#e88a80",
}
"""Light -> dark; after M. Okabe and K. Ito's palette, whose hues stay apart for colour-blind readers."""
DARK = {PAGE: "#14181d", INK: "#e4e8ed", FAINT: "#3d4651", **COLORS}
Dash: TypeAlias = Literal["-", "--", ":", "-."]
LINES, MARKERS = tuple(COLORS), ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
VARIABLES = {color: f"--c{place}" for place, color in enumerate(DARK)}
_LIGHT_VALUES = "".join(f"{name}:{color};" for color, name in VARIABLES.items())
_DARK_VALUES = "".join(f"{name}:{DARK[color]};" for color, name in VARIABLES.items())
THEME_CSS = f".theme{{{_LIGHT_VALUES}}}@media (prefers-color-scheme:dark){{.theme{{{_DARK_VALUES}}}}}"
"""The variables, for a page or an SVG of class `theme`."""

STYLE: dict[RcKeyType, object] = {
    "text.parse_math": False,
    # Text stays text, and the same figure gives the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "mmrl",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.formatter.useoffset": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "grid.alpha": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
}
SIZE = (5.2, 2.9)
"""Inches; shown at the width of its column."""
POINTS = 300
"""Points drawn per line; longer runs are thinned by averaging."""


class Band(NamedTuple):
    """A curve over seeds."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


Points: TypeAlias = Sequence[tuple[int, float, float | None, float | None]]
"""(step, value, low, high)."""
LineStyle: TypeAlias = tuple[str, str, Dash]
"""Colour, marker, dash."""


# --- one run


def reward_curve(history: History) -> str:
    """Training reward per step (of a supervised stage the loss), and its trailing mean; empty without values."""
    name, steps, values = learning(history)
    if not len(values):
        return ""
    with _axes(f"training {name}") as (axes, result):
        # Below one window the mean would only repeat the points, which then are all that is seen.
        faint = 0.35 if len(values) > WINDOW else 1
        axes.plot(
            *_thin(steps, values), color=LINES[0], alpha=faint, linewidth=1, marker=_point(values), label="per step"
        )
        if len(values) > WINDOW:
            mean = trailing_mean(values, WINDOW)
            axes.plot(*_thin(steps, mean), color=LINES[0], linewidth=2, label=f"mean of {WINDOW} steps")
            _legend(axes)
    return result[0]


def evaluation_curve(curves: Mapping[str, Points], split: str) -> str:
    """Evaluation metrics over steps, the first one with its interval as a band; empty without values."""
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    with _axes(f"score on {split}") as (axes, result):
        layers = _layers([np.array([value for _, value, _, _ in points]) for points in curves.values()])
        for color, marker, layer, (name, points) in zip(LINES, MARKERS, layers, curves.items(), strict=False):
            axes.plot(
                *zip(*(point[:2] for point in points), strict=True),
                color=color,
                marker=marker,
                label=_label(name),
                **layer,
            )
            bounded = [(step, low, high) for step, _, low, high in points if low is not None and high is not None]
            if color == LINES[0] and bounded:
                at, lows, highs = zip(*bounded, strict=True)
                axes.fill_between(at, lows, highs, color=color, alpha=0.18, linewidth=0)
        _legend(axes)
    return result[0]


def lines_over_steps(history: History, keys: Mapping[str, str], label: str) -> str:
    """One line per metric (trailing means), for comparing modules or monitors; empty without values.

    Args:
        keys: name of the line -> metric key.
        label: what is drawn, for screen readers (others read the caption).
    """
    curves = {name: series(history, key) for name, key in keys.items()}
    curves = {name: (steps, values) for name, (steps, values) in curves.items() if len(values)}
    if not curves:
        return ""
    drawn = {name: _thin(steps, trailing_mean(values, WINDOW)) for name, (steps, values) in curves.items()}
    with _axes("", label) as (axes, result):
        layers = _layers([means for _, means in drawn.values()])
        for index, (name, means) in enumerate(drawn.items()):
            color, dash = LINES[index % len(LINES)], DASHES[index // len(LINES) % len(DASHES)]
            axes.plot(*means, color=color, linestyle=dash, marker=_point(means[1]), label=_label(name), **layers[index])
        if len(curves) > 1:
            _legend(axes)
    return result[0]


def _point(values: np.ndarray) -> str:
    """The marker of a curve: a line of one point would not be seen."""
    return "o" if len(values) == 1 else ""


def _layers(curves: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """How curves are drawn so that none hides another: the first lies on top, and one below it that agrees is wider."""
    span = max((float(np.ptp(np.concatenate(curves))), 1e-12))
    layers = []
    for place, own in enumerate(curves):
        alike = [other for other in curves[:place] if len(other) == len(own) and abs(other - own).max() < 0.02 * span]
        layers.append(
            {"linewidth": 1.6 + 2.4 * len(alike), "markersize": 5 + 3 * len(alike), "zorder": 3 - 0.01 * place}
        )
    return layers


def _legend(axes: Axes) -> None:
    """A legend above the axes, where it covers no curve."""
    handles, labels = axes.get_legend_handles_labels()
    # As many to a row as fit: a letter takes about a hundredth of the width, and each entry a handle and a gap.
    widest = max(map(len, labels)) + 7
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(
        handles, labels, loc="outside upper left", ncols=max(1, min(len(labels), 62 // widest)), handlelength=1.4
    )


@contextmanager
def _axes(ylabel: str, title: str | None = None) -> Iterator[tuple[Axes, list[str]]]:
    """Axes over steps to draw on, and a list that holds the finished SVG afterwards."""
    import matplotlib

    # A Figure of its own: pyplot's global state would leak figures and pick a display backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set(xlabel="step", ylabel=ylabel)
        whole_steps(axes)
        result: list[str] = []
        yield axes, result
        widen(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        result.append(themed(buffer.getvalue(), title or f"{ylabel} by step"))


def whole_steps(axes: Axes) -> None:
    """Mark whole numbers on the axis of steps."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def widen(axes: Axes) -> None:
    """Widen a vertical range so small that rounding would look like a change, and a horizontal one below a step."""
    low, high = axes.get_ylim()
    least = 0.02 * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)
    first, last = axes.get_xlim()
    if last - first < 1:
        axes.set_xlim(first - 0.5, last + 0.5)


def _label(name: str) -> str:
    # matplotlib leaves labels that start with an underscore out of the legend.
    return f"\u200a{name}" if name.startswith("_") else name


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(values) <= POINTS:
        return steps, values
    # Means of stretches keep the area under a curve, which picking every n-th point would not.
    parts = np.array_split(np.arange(len(values)), POINTS)
    return np.array([steps[part[-1]] for part in parts]), np.array([values[part].mean() for part in parts])


def themed(svg: str, title: str, standalone: bool = False) -> str:
    """The bare, scalable `<svg>` element of matplotlib's output in the fonts and colours around it.

    Args:
        title: its name for screen readers.
        standalone: True: it defines its own colours and font.
    """
    # Without XML head: the element stands inside an HTML page.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # Ids of groups repeat from figure to figure; only those that something refers to stay.
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    # Size by the view box alone, so that it fills its column.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]+" height="[^"]+"', r"\1", svg, count=1)
    # The family comes from the page; matplotlib's may not be installed there.
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", svg)
    svg = re.sub(
        r"#[0-9a-f]{6}\b", lambda match: f"var({VARIABLES[match[0]]})" if match[0] in VARIABLES else match[0], svg
    )
    attributes = f'role="img" aria-label="{html.escape(title)}"'
    if not standalone:
        return svg.replace("<svg", f"<svg {attributes}", 1)
    head, _, rest = svg.replace("<svg", f'<svg class="theme" {attributes}', 1).partition(">")
    return f"{head}><style>.theme{{font-family:system-ui,sans-serif;}}{THEME_CSS}</style>{rest}"


# --- curves over seeds


def draw_band(axis: Axes, band: Band | None, style: LineStyle, every: int | None = None) -> None:
    """A curve over seeds and its band, with a marker at each `every`th step; nothing without a band."""
    if band is None:
        return
    color, marker, dash = style
    every = every or max(1, len(band.steps) // 5)
    # Markers of different lines start at different places, so that they do not hide each other.
    start = MARKERS.index(marker) % every
    axis.plot(
        band.steps,
        band.mean,
        color=color,
        linewidth=1.8,
        linestyle=dash,
        marker=marker,
        markersize=5,
        markevery=(start, every),
    )
    axis.fill_between(band.steps, band.low, band.high, color=color, alpha=0.13, linewidth=0)
