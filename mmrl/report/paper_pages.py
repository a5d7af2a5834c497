"""A paper's table as rows of cells, and the writers of its pages: text, Markdown, CSV, LaTeX, JSON, HTML."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from mmrl.config.paper_tables import Cell
from mmrl.report.html import rendered
from mmrl.report.paper_figure import PaperFigure
from mmrl.report.paper_table import PaperTable, Value
from mmrl.report.tables import Rows, markdown
from mmrl.report.text import align, filled
from mmrl.system.files import atomic_write

WIDTH = 120
"""Columns of paragraphs in a terminal."""


def grid(table: PaperTable, cell: Callable[[Value], str]) -> Rows:
    """One line per row, one column per place."""
    by_row = {row: [value for value in table.values if value.row == row] for row in table.rows}
    head = ["", *(value.label for value in next(iter(by_row.values()), []))]
    return [head, *([row, *map(cell, values)] for row, values in by_row.items())]


def ours(table: PaperTable) -> Rows:
    """Mean ± std; blank where not run."""

    def cell(value: Value) -> str:
        mean, std = (table.number(number) for number in (value.mean, value.std))
        seeds = f" ({len(value.seeds)} of {value.wanted})" if value.seeds and len(value.seeds) < value.wanted else ""
        return f"{mean} ± {std}{seeds}" if std else f"{mean}{seeds}"

    return grid(table, cell)


def reported(table: PaperTable) -> Rows:
    """The paper's values; empty where it prints none."""
    if not any(value.paper is not None for value in table.values):
        return []

    def cell(value: Value) -> str:
        mean, std = (table.number(number) for number in (value.paper, value.paper_std))
        return f"{mean} ± {std}" if std else mean

    return grid(table, cell)


CELL_HEAD = [
    "row",
    "place",
    "ours",
    "std",
    "seeds",
    "95 % interval",
    "items",
    "paper",
    "difference",
    "agrees",
    "command",
]


def cell_rows(table: PaperTable) -> Rows:
    """One line per cell."""
    rows = [CELL_HEAD]
    for value in table.values:
        mean, std, paper = (table.number(number) for number in (value.mean, value.std, value.paper))
        difference = f"{value.difference:+.{table.spec.source.decimals}f}" if value.difference is not None else ""
        agrees = "" if value.agrees is None else "yes" if value.agrees else "no"
        between = value.interval and f"[{', '.join(table.number(end) for end in value.interval)}]"
        if table.scale != "paper":
            difference = ""
        seeds = f"{len(value.seeds)} of {value.wanted}"
        more = [seeds, between or "", str(value.items or ""), paper, difference, agrees, value.command]
        rows.append([value.row, value.label, mean, std, *more])
    return rows


def claim_rows(table: PaperTable) -> Rows:
    """One line per claim; empty without."""
    if not table.verdicts:
        return []
    rows = [["claim", "on", "verdict", "difference", "95 % interval", "items"]]
    for one in table.verdicts:
        whole = len(table.columns) == len(table.spec.columns)
        on = ", ".join(one.claim.cells) or ("all cells" if whole else "the cells shown")
        numbers = (
            [f"{one.difference:+.3f}", f"[{one.interval[0]:+.3f}, {one.interval[1]:+.3f}]", str(one.items)]
            if one.difference is not None and one.interval is not None
            else ["", "", ""]
        )
        rows.append([f"{one.claim.more} > {one.claim.than}", on, one.verdict, *numbers])
    return rows


CLAIMS = (
    "Claims of the paper: mean difference of shares (1 is 100 %), paired on items over the seeds of both rows; held "
    "where the 95 % bootstrap interval over items lies above 0, not held where below, else undecided. It does not "
    "cover how other seeds would have come out."
)


# --- writers


def table_text(table: PaperTable) -> str:
    """For the terminal."""
    parts = [
        "\n".join(filled(f"{name}: {text}", WIDTH) for name, text in table.head.items()),
        f"ours\n{align([[*row, ''] for row in ours(table)])}",
    ]
    if paper := reported(table):
        parts.append(f"the paper\n{align([[*row, ''] for row in paper])}")
    if claims := claim_rows(table):
        parts += [align(claims), filled(CLAIMS, WIDTH)]
    if (case := table.case) is not None:
        parts.append(f"one question early and late: {case.item} of {case.run}")
        parts += ["\n".join(filled(line, WIDTH) for line in case.asked.splitlines())] * bool(case.asked)
        parts.append(
            "\n".join(filled(f"{name or 'when'}: {before}  ->  {after}", WIDTH) for name, before, after in case.rows)
        )
    return "\n\n".join([*parts, *(filled(note, WIDTH) for note in table.notes)])


def table_markdown(table: PaperTable, caption: str = "") -> str:
    """A page; with a caption the figure beside it is on it."""
    parts = [f"# {table.name}", "\n".join(f"- {name}: {text}" for name, text in table.head.items())]
    parts += [f"![{caption}](figure.png)", caption] if caption else []
    parts += ["## Ours", markdown(ours(table))]
    if paper := reported(table):
        parts += ["## The paper", markdown(paper)]
    if claims := claim_rows(table):
        parts += ["## Claims", markdown(claims), CLAIMS]
    if (case := table.case) is not None:
        parts += ["## One question, early and late", f"`{case.item}` of `{case.run}`"]
        parts += ["\n".join(f"> {line}" for line in case.asked.splitlines())] * bool(case.asked)
        parts.append(markdown(case.rows))
    parts += ["## Every cell", markdown(cell_rows(table))]
    if table.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in table.notes)]
    return "\n\n".join(parts) + "\n"


def table_csv(table: PaperTable) -> str:
    """One line per cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(cell_rows(table))
    return out.getvalue()


def table_latex(table: PaperTable) -> str:
    """A tabular of ours over the paper's values in grey."""
    body, paper = ours(table), reported(table)
    lines = [f"% {name}: {text}" for name, text in table.head.items()]
    lines += [f"\\begin{{tabular}}{{l{'r' * (len(body[0]) - 1)}}}", "\\hline", _latex_row(body[0]), "\\hline"]
    for number, row in enumerate(body[1:], 1):
        lines.append(_latex_row(row))
        if paper:
            lines.append(_latex_row(["\\quad paper", *paper[number][1:]], raw=True))
    return "\n".join([*lines, "\\hline", "\\end{tabular}", ""])


def _latex_row(cells: Sequence[str], raw: bool = False) -> str:
    escaped = cells if raw else ["".join(f"\\{c}" if c in "#$%&_{}" else c for c in cell) for cell in cells]
    return " & ".join(cell.replace("±", "$\\pm$") for cell in escaped) + " \\\\"


def table_json(table: PaperTable) -> str:
    """Everything, for machines."""
    content = {
        "version": 1,
        "table": table.name,
        "head": table.head,
        "cells_done": table.done,
        "cells": table.total,
        "values": [
            {
                "row": value.row,
                "column": value.place.column if isinstance(value.place, Cell) else None,
                "score": value.place.score if isinstance(value.place, Cell) else None,
                "mean_of_cells": None if isinstance(value.place, Cell) else value.place,
                "seeds": {str(seed): number for seed, number in value.seeds.items()},
                "mean": value.mean,
                "std": value.std,
                "interval": value.interval,
                "items": value.items,
                "paper": value.paper,
                "paper_std": value.paper_std,
                "agrees": value.agrees,
                "command": value.command,
            }
            for value in table.values
        ],
        "claims": [
            {
                "more": one.claim.more,
                "than": one.claim.than,
                "cells": one.claim.cells,
                "verdict": one.verdict,
                "difference": one.difference,
                "interval": one.interval,
                "items": one.items,
            }
            for one in table.verdicts
        ],
        "case": asdict(case) | {"run": str(case.run)} if (case := table.case) is not None else None,
        "notes": table.notes,
        "runs": [
            {"row": row, "column": column, "seed": run.seed, "run": str(run.path), "command": run.command}
            for (row, column), runs in table.runs.items()
            for run in runs
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def write_table(table: PaperTable, folder: Path) -> list[Path]:
    """Write `table.md`, `.csv`, `.tex`, `.json` and `.html`, and a figure's files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = PaperFigure(table, table.spec.figure) if table.spec.figure is not None else None
    drawn = figure.files() if figure is not None else {}
    caption = figure.caption if figure is not None else ""
    page = rendered(
        "paper_table.html",
        title=table.name,
        head=table.head,
        ours=ours(table),
        paper=reported(table),
        figure=drawn.get("figure.svg", ""),
        caption=caption,
        claims=claim_rows(table),
        judged=CLAIMS,
        case=table.case,
        cells=cell_rows(table),
        notes=table.notes,
        runs=[f"{run.path}: {run.command}" for runs in table.runs.values() for run in runs],
    )
    files: dict[str, str | bytes] = {
        "table.md": table_markdown(table, caption if drawn else ""),
        "table.csv": table_csv(table),
        "table.tex": table_latex(table),
        "table.json": table_json(table),
        "table.html": page,
        **drawn,
    }
    for name, data in files.items():
        atomic_write(folder / name, data)
    return [folder / name for name in files]
