"""The tables of a comparison, as plain cells: an algorithm's line, a run's line, algorithm against algorithm.

Part of `report`; `compare_write` turns them into text, Markdown and HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from mmrl.report.compare import LEAST_GAIN, LEAST_ITEMS, SEEDS, Behaviour, Group, Line, Panel
from mmrl.report.series import duration
from mmrl.report.tables import Difference

Rows = list[list[str]]

LEARNS = (
    f'"Learns": on at least {LEAST_ITEMS} items, all of {SEEDS} or more seeds gain {LEAST_GAIN:g} or more between the '
    "evaluation before training and the one after it, and each seed's paired bootstrap 95 % interval excludes 0."
)


def summary_rows(panel: Panel) -> Rows:
    """One row per algorithm: means over seeds, the range of the differences, behaviour before and after."""
    behaviours = panel.behaviours
    head = ["algorithm", "seeds", "before", "after", "difference", "lowest to highest seed", "learns", "time per run"]
    rows = [[*head, *(of.label for of in behaviours)]]
    for group in panel.groups:
        found = [difference for _, difference in group.measured]
        rows.append(
            [
                group.label,
                _seeds(group),
                _mean([one.before for one in found], ".3f") if found else _start(group.lines),
                _mean([one.after for one in found], ".3f"),
                _mean([one.difference for one in found], "+.3f"),
                _range([one.difference for one in found]),
                group.verdict,
                duration(fmean(line.seconds for line in group.drawn)),
                *(_behaviour(group.drawn, of) for of in behaviours),
            ]
        )
    return rows


def seed_rows(panel: Panel) -> Rows:
    """One row per run: paired difference with its interval."""
    head = ["algorithm", "seed", "items", "before", "after", "difference", "95 % interval", "time", "state"]
    rows = [head]
    for group in panel.groups:
        for line in group.lines:
            found = line.difference
            numbers = [f"{found.n}", f"{found.before:.3f}", f"{found.after:.3f}"] if found else _unmeasured(line)
            more = [f"{found.difference:+.3f}", interval(found)] if found else ["-", "-"]
            rows.append([group.label, str(line.seed), *numbers, *more, duration(line.seconds), state(line)])
    return rows


def against_rows(panel: Panel) -> Rows:
    """After training, each algorithm minus each other one; empty where nothing is finished.

    A star marks an interval that excludes 0.
    """
    groups = [group for group in panel.groups if any(line.evaluated for line in group.finished)]
    if len(groups) < 2:
        return []
    rows = [["minus", *(group.label for group in groups)]]
    for first in groups:
        cells = []
        for second in groups:
            found = panel.against(first, second) if first is not second else None
            cells.append(f"{found.difference:+.3f}{'*' if found.certain else ''}" if found else "")
        rows.append([first.label, *cells])
    return rows


def pair_rows(panel: Panel) -> Rows:
    """After training, one row per pair of algorithms: the better minus the other, with its interval."""
    rows = [["pair", "items", "difference", "95 % interval"]]
    for first, second in combinations(panel.groups, 2):
        found = panel.against(first, second)
        if found is not None and found.difference < 0:
            first, second = second, first
            found = panel.against(first, second)
        if found is not None:
            pair = f"{first.label} - {second.label}"
            rows.append([pair, str(found.n), f"{found.difference:+.3f}", interval(found)])
    return rows if len(rows) > 1 else []


def interval(found: Difference) -> str:
    """`[-0.010, +0.020]`."""
    return f"[{found.low:+.3f}, {found.high:+.3f}]"


def state(line: Line) -> str:
    """`done`, or how far it came."""
    total = line.seen.total
    return "done" if line.finished else f"{line.seen.state}, step {line.seen.done}{f' of {total}' if total else ''}"


def _unmeasured(line: Line) -> list[str]:
    items = line.evaluated.get(0, ())
    values = [item["metrics"][line.metric] for item in items if line.metric in item["metrics"]]
    return [str(len(values)), f"{fmean(values):.3f}", "-"] if values else ["-", "-", "-"]


def _start(lines: Sequence[Line]) -> str:
    values = [float(cells[1]) for line in lines if (cells := _unmeasured(line))[1] != "-"]
    return _mean(values, ".3f")


def _seeds(group: Group) -> str:
    done, total = len(group.finished), len(group.lines)
    return f"{total}" if done == total else f"{done} of {total} done"


def _mean(values: Sequence[float], form: str) -> str:
    return format(fmean(values), form) if values else "-"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):+.3f} to {max(values):+.3f}" if len(values) > 1 else "-"


def _behaviour(lines: Sequence[Line], of: Behaviour) -> str:
    before = [value for line in lines if (value := line.behaviour(of, min(line.evaluated, default=0))) is not None]
    after = [value for line in lines if (value := line.behaviour(of, line.last_step)) is not None]
    if not before:
        return "-"
    return f"{fmean(before):.2f} → {fmean(after):.2f}"
