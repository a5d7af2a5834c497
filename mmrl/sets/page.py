"""Page of a set: tables, in the terminal and as Markdown, HTML, CSV, LaTeX and JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import pandas

from mmrl.errors import ConfigError, without_codes
from mmrl.report.html import rendered
from mmrl.report.stats import duration, fixed, short, signed
from mmrl.report.tables import Rows, interval, markdown
from mmrl.report.text import align, filled
from mmrl.sets.cells import (
    BEHAVIOUR,
    LEAST_GAIN,
    LEAST_ITEMS,
    LEAST_SEEDS,
    Interval,
    RunResult,
    SetResult,
    Value,
    behaviour_in,
    values_of,
)
from mmrl.sets.figure import SetFigure
from mmrl.sets.settings import difference_rows
from mmrl.system.files import JsonObject, atomic_write, dumps

ValueT = TypeVar("ValueT", bound=Value)
WIDTH = 120
"""Columns of paragraphs in a terminal."""
OURS = "set.json"
"""File that a page's folder has first of all."""
MARK = " *"
"""Beside what was made with other settings than the set's."""
AGAINST = (
    "After training, the better row minus the other: mean over items and over the seeds that both finished, with the "
    "paired bootstrap 95 % interval over items (it does not cover how other seeds would have come out)."
)
LEARNS = (
    f'"Learns": on at least {LEAST_ITEMS} items, all of {LEAST_SEEDS} or more seeds gain {LEAST_GAIN:g} or more '
    "between the evaluation before training and the one after it, and each seed's paired bootstrap 95 % interval "
    "excludes 0."
)
COSTS = (
    "Training, seconds and USD with its evaluations, mean over seeds; of a row that starts from another with what that "
    "has cost."
)
DIFFERENCES = (
    "Besides the algorithm and the keys that it alone has, without seeds, machine and where a run lies; of each row "
    "its first run."
)


@dataclass(frozen=True, slots=True)
class Part:
    """A table of the page."""

    title: str
    rows: Rows
    note: str = ""
    folded: bool = False
    """True: collapsed in a browser, left out in the terminal."""
    words: bool = False
    """True: cells are texts, which a terminal breaks into lines."""


# --- scores


def grid(rows: Sequence[str], values: Sequence[ValueT], format_value: Callable[[ValueT], str]) -> Rows:
    """Return a line per row, with a column per cell."""
    by_row = {row: [value for value in values if value.row == row] for row in rows}
    head = ["", *(value.label for value in next(iter(by_row.values()), []))]
    return [head, *([row, *map(format_value, of_row)] for row, of_row in by_row.items())]


def number(result: SetResult, value: float | None, std: float | None = None) -> str:
    """Return a value with its deviation; empty for None."""
    return " ± ".join(fixed(part, result.decimals) for part in (value, std) if part is not None)


def after_training(result: SetResult, value: Value) -> str:
    """Return the mean after training with its deviation, how many seeds it lacks, and its mark."""
    seeds = f" ({len(value.seeds)} of {value.wanted})" if 0 < len(value.seeds) < value.wanted else ""
    return number(result, value.mean, value.std) + seeds + (MARK if value.other and value.seeds else "")


def cell_facts(result: SetResult, value: Value) -> list[str]:
    """Return what a value rests on: seeds, interval, items, and settings that are not the set's."""
    between = f"[{', '.join(number(result, end) for end in value.interval)}]" if value.interval else ""
    seeds, settings = f"{len(value.seeds)} of {value.wanted}", shlex.join(result.settings) if value.other else ""
    return [seeds, between, str(value.items or ""), settings]


def ends(interval: Interval | None) -> str:
    """Format an interval of differences; a dash for None."""
    return f"[{signed(interval[0])}, {signed(interval[1])}]" if interval else "-"


# --- training: before and after


def _training_parts(result: SetResult, column: str) -> list[Part]:
    """Return the tables of a column's started rows: learning, each pair, each seed, cost."""
    if not (runs_by_row := result.started_in(column)):
        return []
    parts = [learning_part(result, column)]
    title, prefix = parts[0].title, f"{column}: " if column else ""
    evaluated_rows = [row for row, runs in runs_by_row.items() if any(run.finished and len(run.after) for run in runs)]
    # Unfinished runs would be compared at different steps.
    if len(pairs := _pair_rows(result, column, evaluated_rows)) > 1:
        parts.append(Part(f"{title}, every pair", pairs, AGAINST))
    if len(runs_by_row) > 1:
        settings = difference_rows({row: runs[0].overview for row, runs in runs_by_row.items()})
        note = DIFFERENCES if len(settings) > 1 else f"{DIFFERENCES} Here there are none."
        # Runs that a set has planned differ in what its words say.
        parts.append(Part(f"{prefix}settings in which the rows differ", settings, note, folded=bool(result.queue)))
    several_seeds = any(len(result.runs[row, column]) > 1 for row in runs_by_row)
    parts.append(Part(f"{title}, every seed", _seed_rows(runs_by_row), folded=several_seeds))
    parts.append(Part(f"{prefix}cost of a run" if prefix else "Cost of a run", _cost_rows(runs_by_row), COSTS))
    return parts


def learning_part(result: SetResult, column: str) -> Part:
    """Return the table that shows how much the started rows of a column learned."""
    runs_by_row = result.started_in(column)
    first = next(iter(runs_by_row.values()))[0]
    metrics = ", ".join(dict.fromkeys(run.metric for runs in runs_by_row.values() for run in runs))
    title = f"{f'{column}: ' if column else ''}{metrics} on {first.overview.split}"
    return Part(title, _summary_rows(result, column, runs_by_row), LEARNS)


def _summary_rows(result: SetResult, column: str, runs_by_row: Mapping[str, Sequence[RunResult]]) -> Rows:
    """Return a line per row: means over seeds, the range of the differences, behaviour before and after."""
    all_runs = [run for runs in runs_by_row.values() for run in runs]
    listed = [b for b in BEHAVIOUR if any(behaviour_in(run.latest, b) is not None for run in all_runs)]
    # The verdict first: a narrow screen shows the first columns, and the others by scrolling.
    head = ["row", "learns", "seeds", "before", "after", "difference", "lowest to highest seed", "time per run"]
    table = [[*head, *(behaviour.label for behaviour in listed)]]
    for row, runs in runs_by_row.items():
        finished_runs = [run for run in runs if run.finished]
        counted, seed_count = finished_runs or runs, len(result.runs[row, column])
        gains = [run.gain for run in counted if run.gain is not None]
        starts = [fmean(values) for run in runs if len(values := values_of(run.before, run.metric))]
        between = [gain.difference for gain in gains]
        line = [
            row + (MARK if result.made_otherwise(row, column) else ""),
            _learns(runs, seed_count),
            f"{seed_count}" if len(finished_runs) == seed_count else f"{len(finished_runs)} of {seed_count} done",
            _mean([gain.before for gain in gains] or starts),
            _mean([gain.after for gain in gains]),
            _mean(between, signed),
            f"{signed(min(between))} to {signed(max(between))}" if len(between) > 1 else "-",
            duration(fmean(run.costs["seconds"] for run in counted)),
        ]
        for behaviour in listed:
            before = [value for run in counted if (value := behaviour_in(run.before, behaviour)) is not None]
            latest = [value for run in counted if (value := behaviour_in(run.latest, behaviour)) is not None]
            line.append(f"{fmean(before):.2f} → {fmean(latest):.2f}" if before and latest else "-")
        table.append(line)
    return table


def _mean(values: Sequence[float], format_value: Callable[[float], str] = fixed) -> str:
    return format_value(fmean(values)) if values else "-"


def _learns(runs: Sequence[RunResult], seed_count: int) -> str:
    """Return `yes`, `no` or `undecided`, with what it rests on."""
    decided = [run.learned for run in runs if run.learned is not None]
    # One seed below the threshold decides: all seeds have to learn.
    counted = f"{sum(decided)} of {len(decided)} seeds"
    if not all(decided):
        return f"no ({counted})"
    if len(decided) >= LEAST_SEEDS and len(decided) == seed_count:
        return f"yes ({counted})"
    # Undecided from here on; the reason named is the largest gap.
    items = min((run.gain.n for run in runs if run.finished and run.gain is not None), default=LEAST_ITEMS)
    if items < LEAST_ITEMS:
        return f"undecided ({items} items, {LEAST_ITEMS} are needed)"
    if all(run.latest.empty for run in runs):
        return "undecided (no evaluation)"
    return f"undecided ({len(decided)} of {max(LEAST_SEEDS, seed_count)} seeds)"


def _cost_rows(runs_by_row: Mapping[str, Sequence[RunResult]]) -> Rows:
    """Return a line per row: the mean cost of its runs so far."""
    means = pandas.DataFrame([pandas.DataFrame([run.costs for run in runs]).mean() for runs in runs_by_row.values()])
    means = means.loc[:, means.any()]
    written = {"seconds": duration, "USD": "{:.2f}".format}
    rows = [["row", *("time" if name == "seconds" else str(name) for name in means)]]
    for row, costs in zip(runs_by_row, means.to_dict("records"), strict=True):
        rows.append([row, *(written.get(str(name), short)(cost) if cost else "0" for name, cost in costs.items())])
    return rows


def _seed_rows(runs_by_row: Mapping[str, Sequence[RunResult]]) -> Rows:
    """Return a line per run: paired difference with its interval."""
    table = [["row", "seed", "items", "before", "after", "difference", "95 % interval", "time", "state"]]
    for row, run in ((row, run) for row, runs in runs_by_row.items() for run in runs):
        gain, start, overview = run.gain, values_of(run.before, run.metric), run.overview
        numbers = [str(len(start)), fixed(fmean(start)), "-", "-", "-"] if len(start) else ["-"] * 5
        if gain is not None:
            scores = [fixed(gain.before), fixed(gain.after), signed(gain.difference)]
            numbers = [str(gain.n), *scores, interval(gain)]
        total = f" of {overview.total}" if overview.total else ""
        state = "done" if run.finished else f"{overview.state}, step {overview.done}{total}"
        table.append([row, str(run.seed), *numbers, duration(run.costs["seconds"]), state])
    return table


def _pair_rows(result: SetResult, column: str, rows: Sequence[str]) -> Rows:
    """Return a line per pair: the better minus the other, with its interval."""
    table = [["pair", "items", "difference", "95 % interval"]]
    for first, second in combinations(rows, 2):
        if (difference := result.against(first, second, column)) is None:
            continue
        between = (difference.low, difference.high)
        if difference.difference < 0:
            first, second, between = second, first, (-difference.high, -difference.low)
        table.append([f"{first} - {second}", str(difference.n), signed(abs(difference.difference)), ends(between)])
    return table


# --- writers


@dataclass(frozen=True)
class SetPage:
    """Tables and figure of a set, each built once, and their writers."""

    result: SetResult

    @cached_property
    def parts(self) -> list[Part]:
        """Tables below the head; a note that several tables share stands below the first."""
        parts = [part for column in self.result.columns for part in _training_parts(self.result, column)]
        notes = [part.note for part in parts]
        return [replace(part, note="" if part.note in notes[:index] else part.note) for index, part in enumerate(parts)]

    @property
    def cells(self) -> Rows:
        """A line per cell."""
        result, rows = self.result, [["row", "column", "after", "std", "seeds", "95 % interval", "items", "settings"]]
        for value in result.values:
            mean, std = number(result, value.mean), number(result, value.std)
            rows.append([value.row, value.label, mean, std, *cell_facts(result, value)])
        return rows

    @cached_property
    def figure(self) -> SetFigure | None:
        """Curves; None without data."""
        figure = SetFigure(self.result)
        return figure if figure.files else None

    def text(self) -> str:
        """Render the page for the terminal."""
        texts = ["\n".join(filled(f"{name}: {text}", WIDTH) for name, text in self.result.head.items())]
        for part in self.parts:
            if not part.folded:
                # `align` sets a last column of words to the left; the empty cell keeps numbers to the right.
                rows = part.rows if part.words else [[*row, ""] for row in part.rows]
                table = align(rows, width=WIDTH if part.words else None, words=part.words)
                texts.append("\n".join([part.title, table, *([filled(part.note, WIDTH)] if part.note else [])]))
        return without_codes("\n\n".join([*texts, *(filled(note, WIDTH) for note in self.result.notes)]))

    def markdown(self) -> str:
        """Render the page as Markdown, for a document beside the figure."""
        texts = [f"# {self.result.name}", "\n".join(f"- {name}: {text}" for name, text in self.result.head.items())]
        if self.figure is not None:
            texts += [f"![{self.figure.caption}](figure.png)", self.figure.caption]
        for part in self.parts:
            if part.folded:
                texts.append(f"<details><summary>{part.title}</summary>\n\n{markdown(part.rows)}\n\n</details>")
            else:
                texts += [f"## {part.title}", markdown(part.rows), *([part.note] if part.note else [])]
        if self.result.notes:
            texts += ["## Notes", "\n".join(f"- {note}" for note in self.result.notes)]
        return "\n\n".join(texts) + "\n"

    @property
    def content(self) -> JsonObject:
        """The whole page, for JSON."""
        result = self.result
        return {
            "version": 3,
            "set": result.name,
            "head": result.head,
            "command": shlex.join(result.command),
            "settings": list(result.settings),
            "cells_done": result.done,
            "cells": result.total,
            "values": [asdict(value) for value in result.values],
            "notes": result.notes,
            "runs": [
                {"row": row, "column": column, "seed": run.seed, "run": run.path, "command": run.command_line()}
                for (row, column), runs in result.runs.items()
                for run in runs
            ],
        }

    def html(self) -> bytes:
        """Render the page as HTML."""
        runs = [run for cell_runs in self.result.runs.values() for run in cell_runs]
        lines = [": ".join(filter(None, [str(run.path), run.command_line()])) for run in runs]
        return rendered("set.html", ["charts.js"] if self.figure else [], title=self.result.name, page=self, runs=lines)

    def write(self, folder: Path) -> list[Path]:
        """Write `set.html`, `.md`, `.json`, `.csv`, `.tex` and a figure's files; returns their paths."""
        names, *cells = self.cells
        places, *ours = grid(self.result.rows, self.result.values, partial(after_training, self.result))
        latex = pandas.DataFrame(ours, columns=places).to_latex(index=False, escape=True)
        head = "".join(f"% {name}: {text}\n" for name, text in self.result.head.items())
        files: dict[str, str | bytes] = {
            OURS: dumps(self.content, indent=1) + "\n",
            "set.html": self.html(),
            "set.md": self.markdown(),
            "set.csv": pandas.DataFrame(cells, columns=names).to_csv(index=False),
            "set.tex": head + latex,
            **(self.figure.files if self.figure else {}),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            atomic_write(folder / name, data)
        return [folder / name for name in files]


def refuse_foreign(folder: Path) -> None:
    """Raise `ConfigError` for a folder with files of a page's names that no page has written."""
    names = ("set.html", "set.md", "set.csv", "set.tex", "figure.svg", "figure.png")
    files = [path for name in names if (path := folder / name).exists()]
    if files and not (folder / OURS).is_file():
        raise ConfigError(f"out: {files[0]} is no page's, and one would overwrite it; name another folder, or move it")


def redraw(page: Callable[[], SetPage], folder: Path) -> None:
    """Write a page while runs go on; print a failure to write it instead of ending them."""
    try:
        page().write(folder)
    except Exception as error:
        print(f"page not written ({type(error).__name__}: {error})", file=sys.stderr)
