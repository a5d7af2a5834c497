"""Takes the audits of `scripts/audit_table.sh` into the docs: `python -m scripts.audit_table OUT`.

Writes docs/tables/audit.md, a table for each program, and three figures beside it: fidelity, alignment, and alignment
beside what each algorithm reached in docs/comparison.md at equal calls.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mmrl.audit.numbers import spearman
from mmrl.report.charts import FAINT, INK, LINES, STYLE, bare_svg, standalone

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = ("hotpotqa", "search_agent", "papillon", "planner_worker")
STATES = {"start": "untrained", "after": "after 20 steps of grpo"}
Audit = Mapping[str, Any]


def reached(program: str) -> dict[str, list[tuple[str, float]]]:
    """Section of docs/comparison.md -> what each row reached on a program; sections differ in their steps."""
    found: dict[str, list[tuple[str, float]]] = {}
    column, heading = 0, ""
    for line in (DOCS / "comparison.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            column, heading = 0, line.removeprefix("## ") if line.startswith("## ") else heading
        elif any(f"`{program}`, " in cell for cell in cells):
            column = next(number for number, cell in enumerate(cells) if f"`{program}`, " in cell)
        elif column and (name := re.fullmatch(r"`(\w+)`", cells[0])) and (value := re.match(r"0\.\d+", cells[column])):
            found.setdefault(heading, []).append((name[1], float(value[0])))
    return found


def aligned(audit: Audit, name: str) -> Mapping[str, float] | None:
    """Alignment of a row at the largest budget."""
    budgets = audit["rows"][name]["alignment"]
    cosine: Mapping[str, float] | None = budgets[max(budgets, key=int)]["cosine"]
    return cosine


def cell(measured: Mapping[str, float] | None) -> str:
    """A number with its interval."""
    if measured is None:
        return "not measurable"
    value = measured.get("value", measured.get("mean"))
    if value is None:
        return ""
    interval = f" [{measured['low']:.2f}, {measured['high']:.2f}]" if measured.get("low") is not None else ""
    return f"{value:.2f}{interval}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "" if value is None else f"{value:.0%}"


def table(audit: Audit) -> list[str]:
    """Lines of one audit."""
    budgets = audit["settings"]["budgets"]
    head = ["row", "fidelity", "right sign", "signal", "zero", "none"]
    head += [f"alignment {budget}" for budget in budgets] + ["calls", "critic explains"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in audit["rows"].items():
        cosines = [row["alignment"][str(budget)]["cosine"] for budget in budgets]
        signs = [row[key]["value"] for key in ("right_sign", "signal")]
        cells = [f"`{name}`", cell(row["fidelity"]["all"]), *map(share, signs)]
        cells += [share(row["zero"]), share(row["not_credited"]), *map(cell, cosines), f"{row['calls']:.0f}"]
        cells.append(share(row["explained_variance"]))
        lines.append(f"| {' | '.join(cells)} |")
    ceiling = cell(audit["ceiling"]["all"])
    modules = ", ".join(f"{name} {cell(m['influence'])}" for name, m in audit["modules"].items())
    clear = f"{audit['clear_share']:.0%} of {len(audit['decisions'])} decisions are clear"
    return [*lines, "", f"Ceiling of fidelity {ceiling}; {clear}; influence: {modules}."]


def panels(audits: Mapping[tuple[str, str], Audit], draw: Any, label: str, title: str) -> str:
    """Draw a panel for each program, a line for each row, both states."""
    programs = [program for program in PROGRAMS if (program, "start") in audits]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * len(programs), 4.6), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        for number, program in enumerate(programs):
            axes: Axes = figure.add_subplot(1, len(programs), number + 1)
            rows = list(audits[program, "start"]["rows"])
            for at, state in enumerate(STATES):
                if audit := audits.get((program, state)):
                    draw(axes, audit, rows, at)
            axes.axvline(0, color=FAINT, linewidth=1)
            axes.set_yticks(range(len(rows)), rows)
            axes.set(ylim=(len(rows) - 0.4, -0.6), title=program, xlabel=label)
            axes.grid(False)
        handles = [
            matplotlib.lines.Line2D([], [], marker="o", linestyle="", color=LINES[n]) for n in range(len(STATES))
        ]
        figure.legend(handles, list(STATES.values()), loc="outside lower center", ncols=2, frameon=False)
        return written(canvas, title)


def dots(axes: Axes, audit: Audit, rows: Sequence[str], at: int, value: Any) -> None:
    """Draw a row's number and interval, those of the second state a little below."""
    for place, name in enumerate(rows):
        if name in audit["rows"] and (measured := value(audit, name)) is not None:
            middle = measured.get("value", measured.get("mean"))
            if middle is not None:
                y = place + 0.14 * (2 * at - 1)
                axes.plot([measured["low"], measured["high"]], [y, y], color=LINES[at], linewidth=1.5)
                axes.plot(middle, y, "o", color=LINES[at], markersize=5)


def fidelity(axes: Axes, audit: Audit, rows: Sequence[str], at: int) -> None:
    """Draw fidelity, and its ceiling as a dashed line."""
    dots(axes, audit, rows, at, lambda audit, name: audit["rows"][name]["fidelity"]["all"])
    if (ceiling := audit["ceiling"]["all"]["value"]) is not None:
        axes.axvline(ceiling, color=LINES[at], linestyle="--", linewidth=1)


def alignment(axes: Axes, audit: Audit, rows: Sequence[str], at: int) -> None:
    """Draw the alignment at the largest budget."""
    dots(axes, audit, rows, at, aligned)


def foretold(audits: Mapping[tuple[str, str], Audit]) -> tuple[str, list[str]]:
    """Draw alignment of the untrained policy over what was reached; returns a line of Markdown for each table too."""
    pairs, lines = [], []
    for program in PROGRAMS:
        for name, rows in reached(program).items() if (program, "start") in audits else ():
            audit = audits[program, "start"]
            known = [(row, value) for row, value in rows if row in audit["rows"] and aligned(audit, row) is not None]
            xs = [float((aligned(audit, row) or {})["mean"]) for row, _ in known]
            pairs.append((program, name, known, xs))
            rank = spearman(xs, [value for _, value in known])
            said = "" if rank is None else f"{rank:.2f}"
            lines.append(f"| {program} | {name} | {len(known)} | {said} |")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(pairs), 3.4), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        for number, (program, name, known, xs) in enumerate(pairs):
            axes: Axes = figure.add_subplot(1, len(pairs), number + 1)
            for place, (x, (row, value)) in enumerate(sorted(zip(xs, known, strict=True))):
                axes.plot(x, value, "o", color=LINES[0], markersize=5)
                # In turn above and below: neighbours may lie on each other.
                offset = (3, 3 if place % 2 else -9)
                axes.annotate(row, (x, value), xytext=offset, textcoords="offset points", fontsize=7, color=INK)
            axes.margins(x=0.25, y=0.15)
            axes.set(title=f"{program}\n{name}", xlabel="alignment, untrained", ylabel="reached after training")
        return written(canvas, "Alignment of the untrained policy and what each algorithm reached"), lines


def written(canvas: FigureCanvasSVG, title: str) -> str:
    """An SVG file."""
    buffer = io.StringIO()
    canvas.print_svg(buffer, metadata={"Date": None})
    return standalone(bare_svg(buffer.getvalue(), title))


def main(arguments: list[str]) -> int:
    """Write the page and its figures."""
    folder = Path(arguments[0])
    audits = {
        (program, state): json.loads(path.read_text(encoding="utf-8"))
        for program in PROGRAMS
        for state in STATES
        if (path := folder / f"{program}-{state}" / "audit.json").is_file()
    }
    picture, ranks = foretold(audits)
    figures = {
        "audit-fidelity": panels(audits, fidelity, "fidelity", "Fidelity of each credit on each program"),
        "audit-alignment": panels(audits, alignment, "alignment", "Alignment of each step on each program"),
        "audit-foretold": picture,
    }
    for name, svg in figures.items():
        (DOCS / "tables" / "figures" / f"{name}.svg").write_text(svg, encoding="utf-8")
    lines = [
        "# The audit of every credit",
        "",
        "By `bash scripts/audit_table.sh`; what it shows: [results](../audit-results.md).",
        "",
        *("![Fidelity](figures/audit-fidelity.svg)", "", "![Alignment](figures/audit-alignment.svg)", ""),
        *("![Alignment and what was reached](figures/audit-foretold.svg)", ""),
        *("| program | part of [comparison](../comparison.md) | rows | rank correlation |", "|---|---|---|---|"),
        *(*ranks, ""),
    ]
    for (program, state), audit in audits.items():
        keys = audit["settings"]
        said = [f"{key}={keys[key]}" for key in ("examples", "decisions", "continuations", "batches", "reference")]
        said.append(f"budgets={','.join(map(str, keys['budgets']))}")
        lines += [f"## {program}, {STATES[state]}", "", f"With {' '.join(said)}.", "", *table(audit), ""]
    (DOCS / "tables" / "audit.md").write_text("\n".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
