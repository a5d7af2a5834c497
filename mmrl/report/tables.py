"""Tables as rows of cells, and the writers of such rows: text, Markdown (HTML is a template's job).

The first row is the head. Terminal tables stay plain text, not rich's, so that what is copied or piped is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mmrl.report.stats import Difference, Metrics, fixed, modules_in, number, short, signed
from mmrl.report.text import align

Rows: TypeAlias = list[list[str]]


def interval(difference: Difference) -> str:
    """Format an interval: `[-0.010, +0.020]`."""
    return f"[{signed(difference.low)}, {signed(difference.high)}]"


def with_interval(metrics: Mapping[str, object], name: str) -> str:
    """Format a metric with its 95 % interval, where it has one: `0.412 [0.380, 0.445]`."""
    low, high = number(metrics.get(f"{name}_low")), number(metrics.get(f"{name}_high"))
    return short(metrics.get(name)) + ("" if low is None or high is None else f" [{short(low)}, {short(high)}]")


def before_after_rows(differences: Mapping[str, Difference]) -> Rows:
    """Return a row per metric: before, after, and their difference with its interval."""
    rows = [["", "before", "after", "difference", "95 % interval", ""]]
    for name, change in differences.items():
        numbers = (fixed(change.before), fixed(change.after), signed(change.difference))
        rows.append([name, *numbers, interval(change), change.verdict])
    return rows


def before_after_table(differences: Mapping[str, Difference], split: str, width: int | None = None) -> str:
    """Return the table at the end of a run, as plain text of at most `width` columns."""
    if not differences:
        return f"no items of the {split} split were evaluated both before and after"
    items = sorted({change.n for change in differences.values()})
    counted = f"{items[0]}" if len(items) == 1 else f"{items[0]}–{items[-1]}"
    return f"{split} ({counted} items)\n{align(before_after_rows(differences), width=width)}"


def module_rows(history: Sequence[Metrics], facts: Sequence[str]) -> Rows:
    """Return a row per module with its facts at the first and the last step, `0.441→0.776`; one number if equal."""
    ends_of = (history[0], history[-1])
    rows = [["module", *facts, ""]]
    for name in modules_in(ends_of):
        ends = [[short(record.get(f"module/{name}/{fact}")) for record in ends_of] for fact in facts]
        rows.append([name, *(new if old == new else f"{old}→{new}" for old, new in ends), ""])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    lines.insert(1, f"|{'---|' * len(rows[0])}")
    return "\n".join(lines)


def facts_table(facts: Mapping[str, object], indent: str = "  ") -> str:
    """Return the names and values, one per line."""
    rows = [[name, short(value) if isinstance(value, float) else str(value)] for name, value in facts.items()]
    return align(rows, indent) if rows else ""
