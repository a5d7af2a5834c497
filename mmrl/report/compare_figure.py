"""The figure of a comparison: one row of panels per task, one line and band per algorithm, as SVG and PNG.

Part of `report`. The SVG carries its own colours for light and dark, so it serves alone (as a picture in a document)
and inside a page. Lines are told apart by colour and by marker, so that no one needs to see colours.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmrl.report.compare import Comparison, Group, Line, Panel
from mmrl.report.plots import settings_of, stripped
from mmrl.report.series import series, trailing_mean

WINDOW = 5
"""Steps that a training curve is averaged over, backwards."""
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
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DARK = {PAGE: "#14181d", INK: "#e4e8ed", FAINT: "#3d4651", **COLORS}


class Band(NamedTuple):
    """A curve over seeds."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def figure(comparison: Comparison) -> tuple[str, bytes]:
    """The figure as SVG (light and dark) and as PNG (light)."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    styles = _styles(comparison)
    panels = comparison.panels
    with matplotlib.rc_context(settings_of(INK, FAINT)):
        canvas = Figure(figsize=(12.6, 3.3 * len(panels) + 0.25), layout="constrained", facecolor=PAGE)
        FigureCanvasAgg(canvas)
        grid = canvas.add_gridspec(len(panels), 4, width_ratios=(1, 1, 1, 0.74))
        for row, panel in enumerate(panels):
            axes = [canvas.add_subplot(grid[row, column]) for column in range(4)]
            _row(panel, axes, styles, last=row == len(panels) - 1)
        svg, png = io.StringIO(), io.BytesIO()
        canvas.savefig(png, format="png", dpi=130)
        canvas.savefig(svg, format="svg", metadata={"Date": None})
    return _with_colors(stripped(svg.getvalue(), f"{comparison.name}: scores, rewards and behaviour over steps")), (
        png.getvalue()
    )


def evaluation_band(group: Group, metric: str) -> Band | None:
    """Mean over seeds of an evaluation metric, lowest to highest; the items' interval where there is one seed."""
    found = [_evaluations(line, metric) for line in group.drawn]
    found = [one for one in found if one]
    if len(found) == 1:
        steps = sorted(found[0])
        value, low, high = (np.array([found[0][step][place] for step in steps]) for place in range(3))
        return Band(np.array(steps), value, low, high)
    return _band([{step: values[0] for step, values in one.items()} for one in found])


def training_band(group: Group, key: str) -> Band | None:
    """Trailing mean of a training metric, mean over seeds, lowest to highest."""
    found = []
    for line in group.drawn:
        steps, values = series(line.seen.training, key)
        if len(steps):
            found.append(dict(zip(steps.tolist(), trailing_mean(values, WINDOW).tolist(), strict=True)))
    return _band(found)


def _band(found: Sequence[Mapping[int, float]]) -> Band | None:
    """Over the steps that every seed has: a mean over fewer seeds from some step on would jump there."""
    if not found:
        return None
    steps = sorted(set.intersection(*(set(one) for one in found)))
    if not steps:
        return None
    values = np.array([[one[step] for step in steps] for one in found])
    return Band(np.array(steps), values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _evaluations(line: Line, metric: str) -> dict[int, tuple[float, float, float]]:
    points = line.seen.evaluations(line.seen.split, metric)
    return {
        step: (value, value if low is None else low, value if high is None else high)
        for step, value, low, high in points
    }


def _row(panel: Panel, axes: Sequence[Any], styles: Mapping[str, tuple[str, str, str]], last: bool) -> None:
    """Score, reward, behaviour, legend."""
    drawn = next((of for of in panel.behaviours if of.training), None)
    key, label = (drawn.training, drawn.axis) if drawn is not None else _format_key(panel)
    _axis(axes[0], f"{panel.metric} on {panel.split}", last)
    _axis(axes[1], "training reward", last)
    _axis(axes[2], label, last)
    axes[0].set_title(panel.task, loc="left", fontweight="bold", fontsize=12)
    for group in panel.groups:
        style = styles[group.label]
        _draw(axes[0], evaluation_band(group, panel.metric), style, every=1)
        _draw(axes[1], training_band(group, "reward/mean"), style)
        if key is not None:
            _draw(axes[2], training_band(group, key), style)
    for axis in axes[:3]:
        if not axis.lines:
            axis.text(0.5, 0.5, "no data yet", ha="center", va="center", transform=axis.transAxes)
            axis.set(xticks=[], yticks=[])
    axes[3].axis("off")
    axes[3].legend(
        handles=[_handle(group, styles[group.label]) for group in panel.groups],
        loc="upper left",
        bbox_to_anchor=(-0.05, 1.02),
        frameon=False,
        fontsize=10,
        handlelength=2.2,
        labelspacing=0.55,
    )


def _handle(group: Group, style: tuple[str, str, str]) -> Any:
    from matplotlib.lines import Line2D

    color, marker, dash = style
    look: Any = {"color": color, "marker": marker, "linestyle": dash, "markersize": 5, "linewidth": 1.8}
    verdict = group.verdict.partition(" (")[0]
    words = {"yes": "learns", "no": "does not learn"}.get(verdict, verdict)
    name = group.label if len(group.label) <= 30 else f"{group.label[:29]}…"
    return Line2D([], [], label=f"{name}: {words}", **look)


def _axis(axis: Any, label: str, last: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_ylabel(label)
    if last:
        axis.set_xlabel("step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, axis="y", linewidth=0.6, alpha=0.6)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axis.set_facecolor("none")


def _draw(axis: Any, band: Band | None, style: tuple[str, str, str], every: int | None = None) -> None:
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


def _format_key(panel: Panel) -> tuple[str | None, str]:
    """What is drawn of a task without a behaviour of its own: the first module's share of parsed completions."""
    for line in panel.lines:
        if line.seen.modules:
            return f"module/{line.seen.modules[0]}/format_rate", f"{line.seen.modules[0]}: parsed (share)"
    return None, "behaviour"


def _styles(comparison: Comparison) -> dict[str, tuple[str, str, str]]:
    """Label -> colour, marker, dash: one of its own in every panel, and the same in all of them where that can be."""
    taken: dict[str, int] = {}
    for label in dict.fromkeys(group.label for panel in comparison.panels for group in panel.groups):
        beside = {
            taken[other]
            for panel in comparison.panels
            for other in _labels(panel.groups)
            if label in _labels(panel.groups) and other in taken
        }
        taken[label] = next(place for place in range(len(taken) + 1) if place not in beside)
    colors, dashes = list(COLORS), ("-", "--", ":", "-.")
    return {
        label: (
            colors[place % len(colors)],
            MARKERS[place % len(MARKERS)],
            dashes[place // len(colors) % len(dashes)],
        )
        for label, place in taken.items()
    }


def _labels(groups: Iterable[Group]) -> list[str]:
    return [group.label for group in groups]


def _with_colors(svg: str) -> str:
    """Colours as variables, set for light and dark in the SVG itself."""
    names = {color: f"--c{place}" for place, color in enumerate(DARK)}
    for color, name in names.items():
        svg = svg.replace(color, f"var({name})")
    light = "".join(f"{name}:{color};" for color, name in names.items())
    dark = "".join(f"{names[color]}:{other};" for color, other in DARK.items())
    own = f".mmrl{{font-family:system-ui,sans-serif;{light}}}"
    style = f"<style>{own}@media (prefers-color-scheme:dark){{.mmrl{{{dark}}}}}</style>"
    start = svg.index(">", svg.index("<svg")) + 1
    head = svg[:start].replace("<svg", '<svg class="mmrl"', 1)
    return head + style + svg[start:]


def caption(comparison: Comparison) -> str:
    """What the figure shows, in words."""
    seeds = sorted({line.seed for line in comparison.lines})
    drawn = sorted({of.axis for panel in comparison.panels for of in panel.behaviours[:1] if of.axis})
    behaviour = f"; right: {' / '.join(drawn)} in training" if drawn else ""
    several = "mean over seeds, band from the lowest to the highest seed"
    single = "one seed, band of the evaluation: 95 % interval over items"
    return (
        f"Left: the task's metric on held-out items; middle: training reward (its scale follows the algorithm's "
        f"reward set){behaviour}. Training curves are means of {WINDOW} steps. Seeds "
        f"{', '.join(map(str, seeds))}: {several if len(seeds) > 1 else single}."
    )
