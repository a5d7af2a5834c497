"""Several evaluations side by side: one column each (`mmrl eval -m task=hotpotqa,2wiki,musique policy=RUN`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.report.tables import align


def column_names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """A short name per job: the overrides in which it differs from others, a task by its bare name.

    A file or a row (`task.data.dev=DIR/nq.jsonl`, `experiment=mhgpo/columns/2wiki`) is its last part, where that tells
    the jobs apart: a table whose headings are paths is too wide to read.
    """
    shared = set(jobs[0]).intersection(*jobs[1:]) if jobs else set()
    differing = [
        [override.lstrip("+").removeprefix("task=") for override in job if override not in shared] for job in jobs
    ]
    brief = [" ".join(_last_part(override) for override in own) or "all" for own in differing]
    if len(set(brief)) == len(jobs):
        return brief
    return [" ".join(own) or "all" for own in differing]


def _last_part(override: str) -> str:
    _, equals, value = override.partition("=")
    return value.rstrip("/").rpartition("/")[2] if equals and "/" in value and not set(value) & set("[{") else override


LABELS = ("partial corpus", "corpus coverage", "judge")
"""Facts of an evaluation without which its numbers say too much."""


def columns_text(summaries: Mapping[str, Mapping[str, Any]]) -> str:
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
    return f"{metrics[name]:.4f} [{metrics[f'{name}_low']:.3f}, {metrics[f'{name}_high']:.3f}]"
