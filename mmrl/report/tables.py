"""Every table as rows of cells, and the writers of such rows: text, Markdown (HTML is a template's job).

The first row is the head. Terminal tables stay plain text, not rich's, so that what is copied or piped is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import TypeAlias

from mmrl.report.compare import LEAST_GAIN, LEAST_ITEMS, SEEDS, Behaviour, Comparison, Line, Panel, SeedGroup
from mmrl.report.stats import Difference, duration, fixed, short, signed
from mmrl.report.text import align
from mmrl.system.files import JsonObject

Rows: TypeAlias = list[list[str]]


AGAINST = (
    "After training, row minus column: mean over items and over the seeds that both finished; * where the paired "
    "bootstrap 95 % interval over items excludes 0 (it does not cover how other seeds would have come out)."
)
LEARNS = (
    f'"Learns": on at least {LEAST_ITEMS} items, all of {SEEDS} or more seeds gain {LEAST_GAIN:g} or more between the '
    "evaluation before training and the one after it, and each seed's paired bootstrap 95 % interval excludes 0."
)


def summary_rows(panel: Panel) -> Rows:
    """One row per algorithm: means over seeds, the range of the differences, behaviour before and after."""
    behaviours = panel.behaviours
    # The verdict first: a narrow screen shows the first columns, and the others by scrolling.
    head = ["algorithm", "learns", "seeds", "before", "after", "difference", "lowest to highest seed", "time per run"]
    rows = [[*head, *(of.label for of in behaviours)]]
    for group in panel.groups:
        differences = [difference for _, difference in group.measured]
        rows.append(
            [
                group.label,
                group.verdict,
                _seeds(group),
                _mean([one.before for one in differences]) if differences else _start(group.lines),
                _mean([one.after for one in differences]),
                _mean([one.difference for one in differences], signed),
                _range([one.difference for one in differences]),
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
            difference = line.difference
            numbers = (
                [f"{difference.n}", fixed(difference.before), fixed(difference.after)]
                if difference
                else _unmeasured(line)
            )
            more = [signed(difference.difference), interval(difference)] if difference else ["-", "-"]
            rows.append([group.label, str(line.seed), *numbers, *more, duration(line.seconds), state(line)])
    return rows


def against_rows(panel: Panel) -> Rows:
    """After training, each algorithm minus each other one; empty where nothing is finished.

    A star marks an interval that excludes 0.
    """
    # Unfinished runs would be compared at different steps.
    groups = [group for group in panel.groups if any(line.evaluated for line in group.finished)]
    if len(groups) < 2:
        return []
    rows = [["minus", *(group.label for group in groups)]]
    for first in groups:
        cells = []
        for second in groups:
            difference = panel.against(first, second) if first is not second else None
            cells.append(f"{signed(difference.difference)}{'*' if difference.certain else ''}" if difference else "")
        rows.append([first.label, *cells])
    return rows


def pair_rows(panel: Panel) -> Rows:
    """After training, one row per pair of algorithms: the better minus the other, with its interval."""
    rows = [["pair", "items", "difference", "95 % interval"]]
    for first, second in combinations(panel.groups, 2):
        difference = panel.against(first, second)
        if difference is not None and difference.difference < 0:
            # The better one first; computed again, since the interval turns round too.
            first, second = second, first
            difference = panel.against(first, second)
        if difference is not None:
            pair = f"{first.label} - {second.label}"
            rows.append([pair, str(difference.n), signed(difference.difference), interval(difference)])
    return rows if len(rows) > 1 else []


def interval(difference: Difference) -> str:
    """`[-0.010, +0.020]`."""
    return f"[{signed(difference.low)}, {signed(difference.high)}]"


def state(line: Line) -> str:
    """`done`, or how far it came."""
    total = line.seen.total
    return "done" if line.finished else f"{line.seen.state}, step {line.seen.done}{f' of {total}' if total else ''}"


def _unmeasured(line: Line) -> list[str]:
    items = line.evaluated.get(0, ())
    values = [item["metrics"][line.metric] for item in items if line.metric in item["metrics"]]
    return [str(len(values)), fixed(fmean(values)), "-"] if values else ["-", "-", "-"]


def _start(lines: Sequence[Line]) -> str:
    values = [float(cells[1]) for line in lines if (cells := _unmeasured(line))[1] != "-"]
    return _mean(values)


def _seeds(group: SeedGroup) -> str:
    done, total = len(group.finished), len(group.lines)
    return f"{total}" if done == total else f"{done} of {total} done"


def _mean(values: Sequence[float], form: Callable[[float], str] = fixed) -> str:
    return form(fmean(values)) if values else "-"


def _range(values: Sequence[float]) -> str:
    return f"{signed(min(values))} to {signed(max(values))}" if len(values) > 1 else "-"


def _behaviour(lines: Sequence[Line], of: Behaviour) -> str:
    # The first evaluation is before training, or the first one that there is.
    before = [value for line in lines if (value := line.behaviour(of, min(line.evaluated, default=0))) is not None]
    after = [value for line in lines if (value := line.behaviour(of, line.last_step)) is not None]
    if not before:
        return "-"
    return f"{fmean(before):.2f} → {fmean(after):.2f}"


def before_after_table(differences: Mapping[str, Difference], split: str, width: int | None = None) -> str:
    """The table at the end of a run, as plain text of at most `width` columns."""
    if not differences:
        return f"no items of the {split} split were evaluated both before and after"
    rows = [["", "before", "after", "difference", "95 % interval", ""]]
    for name, change in differences.items():
        numbers = (fixed(change.before), fixed(change.after), signed(change.difference))
        rows.append([name, *numbers, interval(change), change.verdict])
    items = sorted({change.n for change in differences.values()})
    counted = f"{items[0]}" if len(items) == 1 else f"{items[0]}–{items[-1]}"
    return f"{split} ({counted} items)\n{align(rows, width=width)}"


def comparison_text(comparison: Comparison) -> str:
    """All tables of a comparison, for the terminal."""
    parts = []
    for panel in comparison.panels:
        parts += [f"{heading(panel)}\n{align(summary_rows(panel))}", align(seed_rows(panel))]
        if rows := against_rows(panel):
            # `align` sets a last column of words to the left; these are numbers.
            parts += [f"{AGAINST}\n{align([[*row, ''] for row in rows])}", align(pair_rows(panel))]
    return "\n\n".join(part for part in [*parts, LEARNS, *comparison.notes] if part)


def comparison_markdown(comparison: Comparison) -> str:
    """The same for a document."""
    parts = []
    for panel in comparison.panels:
        parts += [f"### {heading(panel)}", markdown(summary_rows(panel))]
        if rows := against_rows(panel):
            parts += [AGAINST, markdown(rows), _details("every pair", pair_rows(panel))]
        parts.append(_details("every seed", seed_rows(panel)))
    return "\n\n".join(part for part in [*parts, LEARNS, *comparison.notes] if part)


def _details(summary: str, rows: Rows) -> str:
    return f"<details><summary>{summary}</summary>\n\n{markdown(rows)}\n\n</details>" if rows else ""


def heading(panel: Panel) -> str:
    """Task, split and metric."""
    return f"{panel.task}, {panel.metric} on {panel.split}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    lines.insert(1, f"|{'---|' * len(rows[0])}")
    return "\n".join(lines)


def facts_table(facts: Mapping[str, object], indent: str = "  ") -> str:
    """Names and values, one per line."""
    if not facts:
        return ""
    width = max(len(name) for name in facts)
    values = {
        name: short(value) if isinstance(value, float) and not isinstance(value, bool) else str(value)
        for name, value in facts.items()
    }
    return "\n".join(f"{indent}{name.ljust(width)}  {value}" for name, value in values.items())


def column_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """A short name per job: the overrides in which it differs from others, a task by its bare name.

    A file or a row (`task.data.dev=DIR/nq.jsonl`, `experiment=mhgpo/columns/2wiki`) is its last part, where that tells
    the jobs apart: a table whose headings are paths is too wide to read.
    """
    # What all jobs have in common says nothing of a column.
    shared = set(jobs[0]).intersection(*jobs[1:]) if jobs else set()
    differing = [
        [override.lstrip("+").removeprefix("task=") for override in job if override not in shared] for job in jobs
    ]
    brief = [" ".join(_last_part(override) for override in different) or "all" for different in differing]
    # Short names only where they are still different from each other.
    if len(set(brief)) == len(jobs):
        return brief
    return [" ".join(different) or "all" for different in differing]


def _last_part(override: str) -> str:
    _, equals, value = override.partition("=")
    return value.rstrip("/").rpartition("/")[2] if equals and "/" in value and not set(value) & set("[{") else override


LABELS = ("partial corpus", "corpus coverage", "judge")
"""Facts of an evaluation without which its numbers say too much."""


def columns_text(summaries: Mapping[str, JsonObject]) -> str:
    """A table: a row per metric with its 95 % interval, then items and failures, then what the numbers are over.

    Args:
        summaries: column name -> `summary.json` of an evaluation: `metrics`, and `facts` of its task.
    """
    columns: dict[str, Mapping[str, float]] = {name: summary["metrics"] for name, summary in summaries.items()}
    names = dict.fromkeys(
        name for metrics in columns.values() for name in metrics if f"{name}_low" in metrics and name != "n"
    )
    rows = [["", *columns]]
    rows += [[name, *(_cell(metrics, name) for metrics in columns.values())] for name in names]
    rows.append(["items", *(f"{metrics.get('n', 0):.0f}" for metrics in columns.values())])
    rows.append(
        ["failed from outside", *(f"{metrics.get('failed_share', 0):.1%}" for metrics in columns.values())],
    )
    # Where data are partial or a judge is a rule, the numbers need that beside them.
    notes = [
        f"{name}: {label}: {summary['facts'][label]}"
        for name, summary in summaries.items()
        for label in LABELS
        if label in summary.get("facts", {})
    ]
    return "\n".join([align(rows), *notes])


def _cell(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return "-"
    return f"{fixed(metrics[name], 4)} [{fixed(metrics[f'{name}_low'])}, {fixed(metrics[f'{name}_high'])}]"
