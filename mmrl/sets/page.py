"""Page of a set: tables, in the terminal and as Markdown, HTML, CSV, LaTeX and JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pandas

from mmrl.errors import without_codes
from mmrl.report.html import rendered
from mmrl.report.stats import duration, fixed, short, signed
from mmrl.report.tables import Rows, interval, markdown
from mmrl.report.text import align, filled
from mmrl.sets.case import case_study
from mmrl.sets.cells import (
    BEHAVIOUR,
    LEAST_GAIN,
    LEAST_ITEMS,
    LEAST_SEEDS,
    Interval,
    Scored,
    SetResult,
    Value,
    behaviour_in,
    values_of,
)
from mmrl.sets.figure import SetFigure
from mmrl.sets.settings import difference_rows
from mmrl.sets.spec import Figure
from mmrl.system.files import atomic_write, dumps

WIDTH = 120
"""Columns of paragraphs in a terminal."""
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
CLAIMS = (
    "Claims: mean difference of shares (1 is 100 %), paired on items over the seeds of both rows. Held where both the "
    f"95 % bootstrap interval over items and the 95 % t interval over the means of {LEAST_SEEDS} or more seeds lie "
    "above 0, not held where both lie below, else undecided."
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


# --- scores


def _grid(result: SetResult, format_value: Callable[[SetResult, Value], str]) -> Rows:
    """Return a line per row, with a column per cell."""
    by_row = {row: [value for value in result.values if value.row == row] for row in result.rows}
    head = ["", *(value.label for value in next(iter(by_row.values()), []))]
    return [head, *([row, *(format_value(result, value) for value in values)] for row, values in by_row.items())]


def _number(result: SetResult, value: float | None, std: float | None = None) -> str:
    """Return a value as the paper prints it, with its deviation; empty for None."""
    decimals = result.spec.source.decimals if result.spec.source else 3
    return " ± ".join(fixed(number, decimals) for number in (value, std) if number is not None)


def _ours(result: SetResult, value: Value) -> str:
    seeds = f" ({len(value.seeds)} of {value.wanted})" if 0 < len(value.seeds) < value.wanted else ""
    return _number(result, value.mean, value.std) + seeds + (MARK if value.other and value.seeds else "")


def _command_of(result: SetResult, value: Value) -> str:
    """Return the command that makes a cell, with the seeds and settings as typed."""
    if result.command[1:2] != ["table"]:
        return shlex.join(result.command)
    column = f" columns='{value.column}'" if value.column is not None and len(result.spec.columns) > 1 else ""
    typed = [word for word in result.command[3:] if not word.startswith(("rows=", "columns=", "scale="))]
    command = f"mmrl table {result.name} rows='{value.row}'{column} scale={result.scale}"
    return " ".join([command, *([shlex.join(typed)] if typed else [])])


def _cell_rows(result: SetResult) -> Rows:
    """Return a line per cell."""
    numbers = ["ours", "std", "seeds", "95 % interval", "items", "paper", "difference"]
    rows = [["row", "place", *numbers, "agrees", "settings", "command"]]
    for value in result.values:
        mean, std, paper = (_number(result, number) for number in (value.mean, value.std, value.paper))
        difference = agrees = ""
        if result.scale == "paper" and not value.other and value.mean is not None and value.paper is not None:
            difference = f"{value.mean - value.paper:+.{len(paper.partition('.')[2])}f}"
        if value.agrees is not None:
            agrees = "yes" if value.agrees else "no"
        between = f"[{', '.join(_number(result, end) for end in value.interval)}]" if value.interval else ""
        seeds = f"{len(value.seeds)} of {value.wanted}"
        settings = shlex.join(result.settings) if value.other else ""
        columns = [seeds, between, str(value.items or ""), paper, difference, agrees, settings]
        columns.append(_command_of(result, value))
        rows.append([value.row, value.label, mean, std, *columns])
    return rows


def _claim_rows(result: SetResult) -> Rows:
    """Return a line per claim."""
    rows = [["claim", "on", "verdict", "difference", "95 % over items", "95 % over seeds", "seeds", "items"]]
    all_cells = "all cells" if len(result.columns) == len(result.spec.columns) else "the cells shown"
    for judged in result.verdicts:
        claim, verdict, numbers = judged.claim, judged.verdict, [""] * 5
        if judged.rests_on:
            verdict += f"; rests on {', '.join(judged.rests_on)}"
        if any(result.made_otherwise(row, column) for row in (claim.more, claim.than) for column in result.columns):
            verdict += MARK
        if judged.difference is not None:
            intervals = [_interval(judged.interval), _interval(judged.over_seeds)]
            numbers = [signed(judged.difference), *intervals, str(judged.seeds), str(judged.items)]
        rows.append([f"{claim.more} > {claim.than}", ", ".join(claim.cells) or all_cells, verdict, *numbers])
    return rows


def _interval(ends: Interval | None) -> str:
    return f"[{signed(ends[0])}, {signed(ends[1])}]" if ends else "-"


# --- training: before and after


def _training_parts(result: SetResult, column: str) -> list[Part]:
    """Return the tables of a column's started rows: learning, each pair, each seed, cost."""
    if not (runs_by_row := result.started_in(column)):
        return []
    parts = [learning_part(result, column)]
    title, prefix = parts[0].title, f"{column}: " if column else ""
    evaluated_rows = [row for row, runs in runs_by_row.items() if any(run.finished and len(run.after) for run in runs)]
    # Unfinished runs would be compared at different steps.
    if len(evaluated_rows) > 1:
        parts.append(Part(f"{title}, every pair", _pair_rows(result, column, evaluated_rows), AGAINST))
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
    title = f"{f'{column}: ' if column else ''}{first.metric} on {first.overview.split}"
    return Part(title, _summary_rows(result, column, runs_by_row), LEARNS)


def _summary_rows(result: SetResult, column: str, runs_by_row: Mapping[str, Sequence[Scored]]) -> Rows:
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


def _learns(runs: Sequence[Scored], seed_count: int) -> str:
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


def _cost_rows(runs_by_row: Mapping[str, Sequence[Scored]]) -> Rows:
    """Return a line per row: the mean cost of its runs so far."""
    means = pandas.DataFrame([pandas.DataFrame([run.costs for run in runs]).mean() for runs in runs_by_row.values()])
    means = means.loc[:, means.any()]
    written = {"seconds": duration, "USD": "{:.2f}".format}
    rows = [["row", *("time" if name == "seconds" else str(name) for name in means)]]
    for row, costs in zip(runs_by_row, means.to_dict("records"), strict=True):
        rows.append([row, *(written.get(str(name), short)(cost) if cost else "0" for name, cost in costs.items())])
    return rows


def _seed_rows(runs_by_row: Mapping[str, Sequence[Scored]]) -> Rows:
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
        ends = (difference.low, difference.high)
        if difference.difference < 0:
            first, second, ends = second, first, (-difference.high, -difference.low)
        table.append([f"{first} - {second}", str(difference.n), signed(abs(difference.difference)), _interval(ends)])
    return table


# --- writers


@dataclass(frozen=True)
class SetPage:
    """Tables and figure of a set, each built once, and their writers."""

    result: SetResult

    @cached_property
    def parts(self) -> list[Part]:
        """Tables below the head; a note that several tables share stands below the first."""
        result, parts = self.result, []
        if result.spec.scores:
            parts.append(Part("Ours", _grid(result, _ours)))
        if any(value.paper is not None for value in result.values):
            parts.append(
                Part("The paper", _grid(result, lambda _, value: _number(result, value.paper, value.paper_std)))
            )
        if result.verdicts:
            parts.append(Part("Claims", _claim_rows(result), CLAIMS))
        if not result.spec.scores:
            parts += [part for column in result.columns for part in _training_parts(result, column)]
        if (case := case_study(result)) is not None:
            parts.append(Part(*case, words=True))
        if result.spec.scores:
            parts.append(Part("Every cell", _cell_rows(result), folded=True))
        notes = [part.note for part in parts]
        return [replace(part, note="" if part.note in notes[:index] else part.note) for index, part in enumerate(parts)]

    @cached_property
    def figure(self) -> SetFigure | None:
        """Curves; None without data."""
        spec = self.result.spec
        declared = spec.figure or (Figure(band="range") if not spec.scores else None)
        figure = SetFigure(self.result, declared) if declared else None
        return figure if figure is not None and figure.files else None

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

    def json(self) -> str:
        """Return the whole page as JSON."""
        result = self.result
        content = {
            "version": 2,
            "set": result.name,
            "head": result.head,
            "command": shlex.join(result.command),
            "settings": list(result.settings),
            "cells_done": result.done,
            "cells": result.total,
            "values": [asdict(value) for value in result.values],
            "claims": [
                {**judged.claim.model_dump(), **{key: value for key, value in asdict(judged).items() if key != "claim"}}
                for judged in result.verdicts
            ],
            "notes": result.notes,
            "runs": [
                {"row": row, "column": column, "seed": run.seed, "run": run.path, "command": run.command_line()}
                for (row, column), runs in result.runs.items()
                for run in runs
            ],
        }
        return dumps(content, indent=1) + "\n"

    def html(self) -> bytes:
        """Render the page as HTML."""
        runs = [run for cell_runs in self.result.runs.values() for run in cell_runs]
        lines = [": ".join(filter(None, [str(run.path), run.command_line()])) for run in runs]
        return rendered("set.html", title=self.result.name, page=self, runs=lines)

    def _latex(self) -> str:
        places, *ours = _grid(self.result, _ours)
        table: str = pandas.DataFrame(ours, columns=places).to_latex(index=False, escape=True)
        head = "".join(f"% {name}: {text}\n" for name, text in self.result.head.items())
        return head + table

    def write(self, folder: Path) -> list[Path]:
        """Write `set.html`, `.md`, `.json`, `.csv`, `.tex` and a figure's files; returns their paths."""
        names, *cells = _cell_rows(self.result)
        files: dict[str, str | bytes] = {
            "set.html": self.html(),
            "set.md": self.markdown(),
            "set.json": self.json(),
            "set.csv": pandas.DataFrame(cells, columns=names).to_csv(index=False),
            "set.tex": self._latex(),
            **(self.figure.files if self.figure else {}),
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            atomic_write(folder / name, data)
        return [folder / name for name in files]


def redraw(page: Callable[[], SetPage], folder: Path) -> None:
    """Write a page while runs go on; print a failure to write it instead of ending them."""
    try:
        page().write(folder)
    except Exception as error:
        print(f"page not written ({type(error).__name__}: {error})", file=sys.stderr)
