"""The page of an audit: its table, and pictures of fidelity, alignment and every decision."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.audit.table import interval, modules_of, notes, number, rows_of
from mmrl.report.charts import FAINT, INK, LINES, MARKERS, drawing, legend
from mmrl.report.html import rendered
from mmrl.system.files import JsonObject


def page(result: JsonObject) -> bytes:
    """Render `audit.html`."""
    settings = result["settings"]
    rows, modules = rows_of(result), modules_of(result)
    figures = {
        "Fidelity: rank correlation of credit and truth (bar: 95 %; line: what perfect credit could reach)": fidelity(
            result
        ),
        "Alignment: cosine with the reference gradient, by calls (bar: 95 %)": alignment(result),
    }
    scatters = {
        f"{name}: credit over truth (fidelity {number(row['fidelity']['all']['value'])}, "
        f"{interval(row['fidelity']['all'])})": scatter(result, name)
        for name, row in result["rows"].items()
    }
    title = f"Audit of credit: {settings['task']}, {settings['model']}"
    facts = " · ".join(
        f"{key} {settings[key]}" for key in ("examples", "decisions", "continuations", "reference", "seed")
    )
    return rendered(
        "audit.html",
        title=title,
        facts=facts,
        figures=figures,
        scatters=scatters,
        rows=rows,
        modules=modules,
        notes=notes(result),
    )


def fidelity(result: JsonObject) -> str:
    """Draw a dot and its interval for each row, and the ceiling; empty where no fidelity is defined."""
    found = {name: row["fidelity"]["all"] for name, row in result["rows"].items()}
    found = {name: measured for name, measured in found.items() if measured["value"] is not None}
    if not found:
        return ""
    with drawing((5.2, 0.9 + 0.34 * len(found))) as (axes, svg):
        for place, measured in enumerate(found.values()):
            if measured["low"] is not None:
                axes.plot([measured["low"], measured["high"]], [place, place], color=LINES[0], linewidth=2)
            axes.plot(measured["value"], place, "o", color=LINES[0], markersize=7)
        axes.axvline(0, color=FAINT, linewidth=1)
        if (ceiling := result["ceiling"]["all"]["value"]) is not None:
            axes.axvline(ceiling, color=INK, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(found)), list(found))
        axes.set(ylim=(len(found) - 0.5, -0.5), xlabel="fidelity")
        axes.grid(False)
        return svg("fidelity by row")


def alignment(result: JsonObject) -> str:
    """Draw a line for each row over the budgets; empty where the reference is not measurable."""
    lines: dict[str, list[tuple[float, JsonObject]]] = {}
    for name, row in result["rows"].items():
        points = [(result["unit"] * int(budget), found["cosine"]) for budget, found in row["alignment"].items()]
        lines[name] = [(calls, found) for calls, found in points if found is not None]
    if not any(lines.values()):
        return ""
    with drawing() as (axes, svg):
        for index, (name, line) in enumerate(lines.items()):
            # Beside each other: at equal calls intervals would lie on one another.
            at = [calls * 1.03 ** (index - (len(lines) - 1) / 2) for calls, _ in line]
            means = [found["mean"] for _, found in line]
            errors = [0.0 if found["high"] is None else found["high"] - found["mean"] for _, found in line]
            color, marker = LINES[index % len(LINES)], MARKERS[index % len(MARKERS)]
            axes.errorbar(at, means, errors, color=color, marker=marker, label=name, linewidth=1.6, capsize=3)
        axes.axhline(0, color=FAINT, linewidth=1)
        axes.set_xscale("log")
        ticks = sorted({calls for line in lines.values() for calls, _ in line})
        axes.set_xticks(ticks, [f"{calls:,.0f}" for calls in ticks])
        axes.minorticks_off()
        axes.set(xlabel="generated calls", ylabel="cosine")
        legend(axes)
        return svg("alignment over generated calls")


def scatter(result: JsonObject, name: str) -> str:
    """Draw credit over D for every credited decision, by module."""
    modules: Sequence[str] = list(result["modules"])
    with drawing() as (axes, svg):
        for index, module in enumerate(modules):
            of_module = [one for one in result["decisions"] if one["module"] == module]
            points = [(one["difference"], one["rows"][name]["credit"]) for one in of_module]
            shown = [(difference, credit) for difference, credit in points if credit is not None]
            axes.plot(
                [difference for difference, _ in shown],
                [credit for _, credit in shown],
                MARKERS[index % len(MARKERS)],
                color=LINES[index % len(LINES)],
                alpha=0.6,
                markersize=5,
                label=f"{module} ({len(shown)} of {len(points)})",
            )
        axes.axhline(0, color=FAINT, linewidth=1)
        axes.axvline(0, color=FAINT, linewidth=1)
        axes.set(xlabel="truth D", ylabel="credit")
        legend(axes)
        return svg(f"credit of {name} over truth")
