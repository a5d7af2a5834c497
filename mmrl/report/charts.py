"""Curves of a run and of a set, as SVG that follows light and dark themes (and PNG).

All figures are drawn in one palette and one matplotlib style, on transparent ground; in the dark a stylesheet inverts
their lightness and keeps their hues. matplotlib (Agg) is imported when the first figure is drawn.
"""

from __future__ import annotations

import html
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from mmrl.report.stats import ROUNDING, WINDOW, History, learning, series, trailing_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

PAGE, INK, FAINT = "#ffffff", "#1c2431", "#c9d0d8"
LINES = ("#0072b2", "#d55e00", "#00875f", "#b0529a", "#a87b00", "#3d9bd6", "#5b6675", "#8c2d2d")
"""After M. Okabe and K. Ito's palette, whose hues stay apart for colour-blind readers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
Dash: TypeAlias = Literal["-", "--", ":", "-."]
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
DARK_CSS = "@media (prefers-color-scheme:dark){svg{filter:invert(1) hue-rotate(180deg)}}"
"""For a page with figures, or inside an SVG that serves alone."""

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
    "figure.facecolor": "none",
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
THIN = 0.5
"""Opacity of the values of single steps, below their mean; lower, and the dark theme swallows them."""
POINTS = 300
"""Points drawn per line; longer runs are thinned by averaging."""


# --- one run


def reward_curve(history: History) -> str:
    """Draw training reward per step (of a supervised stage the loss) and its trailing mean; empty without values."""
    name, steps, values = learning(history)
    if not len(values):
        return ""
    with drawing() as (axes, svg):
        lines = _draw(axes, {f"training {name}": (steps, values)}, window=WINDOW)
        _by_step(axes, f"training {name}")
        return svg(f"training {name} by step", lines)


def evaluation_curve(history: History, split: str, names: Sequence[str]) -> str:
    """Draw evaluation metrics over steps, the first one with its interval as a band; empty without values."""
    curves = {name: points for name in names if len((points := series(history, f"eval/{split}/{name}"))[0])}
    if not curves:
        return ""
    with drawing() as (axes, svg):
        first = f"eval/{split}/{next(iter(curves))}"
        low, high = (dict(zip(*series(history, f"{first}_{end}"), strict=True)) for end in ("low", "high"))
        steps = [step for step in low if step in high]
        lows, highs = ([end[step] for step in steps] for end in (low, high))
        axes.fill_between(steps, lows, highs, color=LINES[0], alpha=0.18, linewidth=0)
        lines = _draw(axes, curves, MARKERS)
        _by_step(axes, f"score on {split}")
        return svg(f"score on {split} by step", lines)


def lines_over_steps(history: History, keys: Mapping[str, str], label: str) -> str:
    """Draw a line per metric and its trailing mean, for comparing modules or monitors; empty without values.

    Args:
        keys: name of the line -> metric key.
        label: what is drawn, for screen readers (others read the caption).
    """
    curves = {name: series(history, key) for name, key in keys.items()}
    curves = {name: curve for name, curve in curves.items() if len(curve[1])}
    if not curves:
        return ""
    with drawing() as (axes, svg):
        lines = _draw(axes, curves, window=WINDOW)
        _by_step(axes, "")
        return svg(label, lines)


Line: TypeAlias = tuple[str, np.ndarray, np.ndarray, np.ndarray | None]
"""Name, steps, values and their trailing means, as far as they are drawn: what a page shows under the pointer."""


def _draw(
    axes: Axes, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], markers: Sequence[str] = (), window: int = 0
) -> list[Line]:
    """Draw steps and values of each curve so that none hides another, and a legend of several.

    Args:
        window: steps of trailing means, which are then drawn over the thin values; 0: none. Fewer steps have no mean.
    """
    drawn: list[Line] = []
    for index, (name, (steps, values)) in enumerate(curves.items()):
        averaged = 0 < window < len(values)
        means = trailing_mean(values, window) if averaged else values
        (at, thinned), (_, means) = _thin(steps, values), _thin(steps, means)
        drawn.append((name, at, thinned, means if averaged else None))
        if averaged:
            axes.plot(at, thinned, color=LINES[index % len(LINES)], alpha=THIN, linewidth=0.9, zorder=2)
    _draw_bold(axes, {name: (at, values if means is None else means) for name, at, values, means in drawn}, markers)
    return drawn


def _draw_bold(axes: Axes, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], markers: Sequence[str]) -> None:
    span = max(float(np.ptp(np.concatenate([values for _, values in curves.values()]))), 1e-12)
    lines: list[np.ndarray] = []
    for index, (name, (steps, values)) in enumerate(curves.items()):
        # The first lies on top, and one below it that agrees with it is wider.
        alike = sum(len(other) == len(values) and abs(other - values).max() < 0.02 * span for other in lines)
        lines.append(values)
        axes.plot(
            steps,
            values,
            color=LINES[index % len(LINES)],
            linestyle="-" if markers else DASHES[index // len(LINES) % len(DASHES)],
            # A line of a single point would be invisible.
            marker=markers[index] if markers else "o" if len(values) == 1 else "",
            # matplotlib leaves labels that start with an underscore out of the legend.
            label=f"\u200a{name}" if name.startswith("_") else name,
            linewidth=1.6 + 2.4 * alike,
            markersize=5 + 3 * alike,
            zorder=3 - 0.01 * index,
        )
    if markers or len(curves) > 1:
        legend(axes)


def legend(axes: Axes) -> None:
    """Add a legend above the axes, where it covers no curve."""
    handles, labels = axes.get_legend_handles_labels()
    # As many to a row as fit: a letter takes about a hundredth of the width, and each entry a handle and a gap.
    widest = max(map(len, labels)) + 7
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(
        handles, labels, loc="outside upper left", ncols=max(1, min(len(labels), 62 // widest)), handlelength=1.4
    )


def _by_step(axes: Axes, label: str) -> None:
    """Label the axes, and widen a vertical range so small that rounding would look like a change, and a single step."""
    axes.set(ylabel=label)
    whole_steps(axes)
    low, high = axes.get_ylim()
    least = max(0.02 * max(abs(low), abs(high)), 10 * ROUNDING)
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)
    first, last = axes.get_xlim()
    if last - first < 1:
        axes.set_xlim(first - 0.5, last + 0.5)


def whole_steps(axes: Axes) -> None:
    """Mark whole numbers on the axis of steps."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(values) <= POINTS:
        return steps, values
    # Means of stretches keep the area under a curve, which picking every n-th point would not.
    parts = np.array_split(np.arange(len(values)), POINTS)
    return np.array([steps[part[-1]] for part in parts]), np.array([values[part].mean() for part in parts])


# --- SVG


@contextmanager
def drawing(size: tuple[float, float] = SIZE) -> Iterator[tuple[Axes, Callable[..., str]]]:
    """Open axes to draw on, with a function that then gives the SVG.

    It takes a name for screen readers, and the lines whose values the page's script shows under the pointer.
    """
    import matplotlib

    # A Figure of its own: pyplot's global state would leak figures and pick a display backend.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        canvas = FigureCanvasSVG(figure)

        axes = figure.add_subplot()

        def svg(title: str, lines: Sequence[Line] = ()) -> str:
            buffer = io.StringIO()
            with warnings.catch_warnings():
                # Text stays text, in the fonts of whoever opens the page.
                warnings.filterwarnings("ignore", "Glyph .* missing")
                # Not by `savefig`, which draws everything once more, for the layout alone.
                canvas.print_svg(buffer, metadata={"Date": None})
            found = bare_svg(buffer.getvalue(), title)
            return with_values(found, size, [(axes, lines)]) if lines else found

        yield axes, svg


def with_values(svg: str, size: tuple[float, float], diagrams: Sequence[tuple[Axes, Sequence[Line]]]) -> str:
    """Give a drawn `<svg>` the values of its diagrams, which the page's script shows under the pointer.

    Args:
        size: of the drawing, in inches.
    """
    values = html.escape(json.dumps([_hover(axes, size, lines) for axes, lines in diagrams], separators=(",", ":")))
    return svg.replace("<svg", f'<svg data-hover="{values}"', 1)


def _hover(axes: Axes, size: tuple[float, float], lines: Sequence[Line]) -> dict[str, object]:
    """Return where a diagram lies in the SVG, the first and last step of its axis, and the values of each line."""

    def rounded(values: np.ndarray | None) -> list[float] | None:
        return None if values is None else [float(f"{value:.4g}") for value in values]

    place, (width, height) = axes.get_position(), (72 * size[0], 72 * size[1])
    across, down = [place.x0 * width, place.x1 * width], [(1 - place.y1) * height, (1 - place.y0) * height]
    shown = [[name, steps.tolist(), rounded(values), rounded(means)] for name, steps, values, means in lines]
    return {"axis": [*across, *map(float, axes.get_xlim())], "rows": down, "lines": shown}


def bare_svg(svg: str, title: str) -> str:
    """Return the scalable `<svg>` element of matplotlib's output, in the font around it.

    Args:
        title: its name for screen readers.
    """
    # Without XML head: the element stands inside an HTML page.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # Ids of groups repeat from figure to figure; only those that something refers to stay.
    referenced = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in referenced else "", svg)
    # Size by the view box alone, so that it fills its column.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]+" height="[^"]+"', r"\1", svg, count=1)
    # The family comes from the page; matplotlib's may not be installed there.
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


def standalone(svg: str) -> str:
    """Make the output of `bare_svg` a file of its own, with a font and for both themes."""
    head, _, rest = svg.partition(">")
    return f"{head}><style>svg{{font-family:system-ui,sans-serif}}{DARK_CSS}</style>{rest}"
