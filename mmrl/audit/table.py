"""The table of an audit, in a terminal and on its page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmrl.audit.settings import BLOCKS
from mmrl.report.text import align
from mmrl.system.files import JsonObject

RELIABLE = 0.5
"""Share of D's variance that is to be truth, not noise."""


def table(result: JsonObject) -> str:
    """Return rows, modules and what stands below them, as text."""
    # A last column of numbers would stand to the left, as words do.
    parts = [align([[*line, ""] for line in rows]) for rows in (rows_of(result), modules_of(result))]
    return "\n\n".join([*parts, *notes(result)])


def rows_of(result: JsonObject) -> list[list[str]]:
    """Return a line for each row, under a head."""
    settings, ceiling = result["settings"], result["ceiling"]["all"]
    head = ["", "fidelity", "95 %", "within", "right sign", "signal", "zero", "none"]
    head += [f"alignment {budget}" for budget in settings["budgets"]]
    head += ["length", "calls", "scored"]
    lines = [head]
    for name, row in result["rows"].items():
        fidelity, aligned = row["fidelity"], row["alignment"]
        lines.append(
            [
                name,
                number(fidelity["all"]["value"]),
                interval(fidelity["all"]),
                number(fidelity["within"]["value"]),
                share(row["right_sign"]["value"]),
                share(row["signal"]["value"]),
                share(row["zero"]),
                share(row["not_credited"]),
                *(estimate(aligned[str(budget)]["cosine"]) for budget in settings["budgets"]),
                estimate(aligned[str(settings["budgets"][0])]["length"]),
                f"{row['calls']:,.0f}" + (f" + {row['critic']['calls']:,}" if row["critic"] else ""),
                f"{row['scored']:,.0f}",
            ]
        )
    blind = share(result["clear_share"])
    lines.append(
        ["ceiling, blind", number(ceiling["value"]), interval(ceiling), "", "", blind, *[""] * (len(head) - 6)]
    )
    return lines


def modules_of(result: JsonObject) -> list[list[str]]:
    """Return a line for each module: its influence, and the fidelity of each row on its decisions."""
    names = list(result["rows"])
    lines = [["module", "influence", "95 %", "decisions", "clear", "ceiling", *names]]
    for module, facts in result["modules"].items():
        lines.append(
            [
                module,
                number(facts["influence"]["value"]),
                interval(facts["influence"]),
                str(facts["decisions"]),
                str(facts["clear"]),
                number(result["ceiling"][module]["value"]),
                *(number(result["rows"][name]["fidelity"][module]["value"]) for name in names),
            ]
        )
    return lines


def notes(result: JsonObject) -> list[str]:
    """Return what the numbers alone do not say."""
    settings, reference = result["settings"], result["reference"]
    found = [
        f"truth: {settings['truth']}, mean {number(result['outcome'])}; a unit is {result['unit']:,.0f} calls; a row's "
        "calls and scored tokens are those of one batch of all examples"
    ]
    rollouts = reference["rollouts"]
    if reference["squared"] == reference["error"] == 0:
        found.append("alignment: not measurable, since outcomes of an example never differed; see mmrl doctor")
    elif not reference["measurable"]:
        # Within one error of 0 it is more than 16 times as many; see `alignment.Strength.needed`.
        more, needed = "about" if reference["needed"] else "more than", reference["needed"] or 16
        wanted = math.ceil(needed * rollouts / BLOCKS) * BLOCKS
        found.append(
            f"alignment: not measurable with reference={rollouts} rollouts; it would take {more} reference={wanted}"
        )
    if (ceiling := result["ceiling"]["all"]["value"]) is not None and ceiling**2 < RELIABLE:
        made = settings["continuations"]
        # Reliability R is kR / (1 + (k - 1)R) with k times the samples; the ceiling is its root.
        wanted = f"; it would take about continuations={math.ceil(made * (1 / ceiling**2 - 1))}" if ceiling else ""
        found.append(f"fidelity: D is mostly noise with continuations={made}{wanted}")
    for name, row in result["rows"].items():
        if row["failed"]:
            found.append(f"{name}: {row['failed']} rollouts of its batches failed from outside causes")
        if (explained := row["explained_variance"]) is not None:
            found.append(f"{name}: its critic explains {share(explained)} of the variance of the returns")
        if (fitted := row["critic"]) is not None:
            found.append(
                f"{name}: its critic was fitted here, on {fitted['calls']:,} calls, until it explained "
                f"{share(fitted['explained_variance'])} of what was held out"
            )
    found += [f"{count} {kind} failed from outside causes" for kind, count in result["failed"].items() if count]
    if result["dropped"]:
        found.append(f"{result['dropped']} decisions were dropped: what follows them failed from outside causes")
    return found


def number(value: float | None) -> str:
    """Return two decimals; a dash where it is not defined."""
    return "-" if value is None else f"{value:.2f}".replace("-0.00", "0.00")


def share(value: float | None) -> str:
    """Return percent."""
    return "-" if value is None else f"{value:.0%}"


def interval(measured: Mapping[str, Any]) -> str:
    """Return the 95 % interval of a measure."""
    return "-" if measured["low"] is None else f"{number(measured['low'])} to {number(measured['high'])}"


def estimate(found: Mapping[str, Any] | None) -> str:
    """Return a mean with half the width of its interval."""
    if found is None:
        return "-"
    return number(found["mean"]) + (f" ± {number(found['high'] - found['mean'])}" if found["high"] is not None else "")
