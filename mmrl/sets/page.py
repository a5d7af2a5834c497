"""The page of a set: parts that are tables, in the terminal, as Markdown, HTML, CSV, LaTeX and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from mmrl.errors import ConfigError
from mmrl.report.html import BEGIN, END, rendered
from mmrl.report.stats import Difference, duration
from mmrl.report.tables import Rows, interval, markdown
from mmrl.report.text import align, filled
from mmrl.sets.case import CaseStudy, case_study
from mmrl.sets.cells import (
    BEHAVIOUR,
    LEAST_GAIN,
    LEAST_ITEMS,
    LEAST_SEEDS,
    Behaviour,
    Scored,
    SetResult,
    Value,
)
from mmrl.sets.figure import SetFigure, default_figure
from mmrl.sets.spec import Cell
from mmrl.system.files import atomic_write

WIDTH = 120
"""Columns of paragraphs in a terminal."""
AGAINST = (
    "After training, row minus column: mean over items and over the seeds that both finished; * where the paired "
    "bootstrap 95 % interval over items excludes 0 (it does not cover how other seeds would have come out)."
)
LEARNS = (
    f'"Learns": on at least {LEAST_ITEMS} items, all of {LEAST_SEEDS} or more seeds gain {LEAST_GAIN:g} or more '
    "between the evaluation before training and the one after it, and each seed's paired bootstrap 95 % interval "
    "excludes 0."
)
CLAIMS = (
    "Claims: mean difference of shares (1 is 100 %), paired on items over the seeds of both rows. Held where both the "
    f"95 % bootstrap interval over items and the 95 % t interval over the means of {LEAST_SEEDS} or more seeds lie "
    "above 0, not held where both lie below, else undecided."
)


@dataclass(frozen=True, slots=True)
class Part:
    """One table of the page."""

    title: str
    rows: Rows
    note: str = ""
    folded: bool = False
    """Shown at a click in a browser, and not in the terminal."""
    wrapped: bool = False
    """Its cells are sentences."""


def parts_of(result: SetResult) -> list[Part]:
    """Everything below the head, but for the figure."""
    own = not result.spec.scores
    parts = [] if own else [Part("Ours", _grid(result, _ours(result)))]
    if any(value.paper is not None for value in result.values):
        parts.append(Part("The paper", _grid(result, _reported(result))))
    if result.verdicts:
        parts.append(Part("Claims", _claim_rows(result), CLAIMS))
    for column in result.columns if own else ():
        if rows := [row for row in result.rows_of(column) if result.begun(row, column)]:
            parts += _training_parts(result, column, rows)
    if (case := case_of(result)) is not None:
        parts.append(
            Part(f"One question, early and late: {case.item} of {case.run}", case.rows, case.asked, wrapped=True)
        )
    if len({*result.models.values()}) > 1:
        parts.append(Part("The model that plays each row", _model_rows(result), folded=result.scale != "mini"))
    if not own:
        parts.append(Part("Every cell", _cell_rows(result), folded=True))
    return parts


def case_of(result: SetResult) -> CaseStudy | None:
    """One question early and late, where the set shows one."""
    return case_study(result.spec, (run for runs in result.runs.values() for run in runs))


# --- scores


def _grid(result: SetResult, cell: Callable[[Value], str]) -> Rows:
    """One line per row, one column per place."""
    by_row = {row: [value for value in result.values if value.row == row] for row in result.rows}
    head = ["", *(value.label for value in next(iter(by_row.values()), []))]
    return [head, *([row, *map(cell, values)] for row, values in by_row.items())]


def _number(result: SetResult, value: float | None) -> str:
    """As the paper prints it; empty for None."""
    decimals = result.spec.source.decimals if result.spec.source else 3
    return "" if value is None else f"{value:.{decimals}f}"


def _ours(result: SetResult) -> Callable[[Value], str]:
    """Mean ± std; blank where not run."""

    def cell(value: Value) -> str:
        mean, std = (_number(result, number) for number in (value.mean, value.std))
        seeds = f" ({len(value.seeds)} of {value.wanted})" if value.seeds and len(value.seeds) < value.wanted else ""
        return f"{mean} ± {std}{seeds}" if std else f"{mean}{seeds}"

    return cell


def _reported(result: SetResult) -> Callable[[Value], str]:
    """The paper's values; empty where it prints none."""

    def cell(value: Value) -> str:
        mean, std = (_number(result, number) for number in (value.paper, value.paper_std))
        return f"{mean} ± {std}" if std else mean

    return cell


def _cell_rows(result: SetResult) -> Rows:
    """One line per cell."""
    head = [
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
    rows = [head]
    for value in result.values:
        mean, std, paper = (_number(result, number) for number in (value.mean, value.std, value.paper))
        compared = result.scale == "paper" and value.difference is not None
        difference = f"{value.difference:+.{len(paper.partition('.')[2])}f}" if compared else ""
        agrees = "" if value.agrees is None else "yes" if value.agrees else "no"
        between = f"[{', '.join(_number(result, end) for end in value.interval)}]" if value.interval else ""
        seeds = f"{len(value.seeds)} of {value.wanted}"
        of_column = isinstance(value.place, Cell) and len(result.spec.columns) > 1
        column = f" columns='{value.place.column}'" if isinstance(value.place, Cell) and of_column else ""
        command = f"mmrl table {result.name} rows='{value.row}'{column} scale={result.scale}"
        more = [seeds, between, str(value.items or ""), paper, difference, agrees, command]
        rows.append([value.row, value.label, mean, std, *more])
    return rows


def _claim_rows(result: SetResult) -> Rows:
    """One line per claim."""
    rows = [["claim", "on", "verdict", "difference", "95 % over items", "95 % over seeds", "seeds", "items"]]
    for one in result.verdicts:
        whole = len(result.columns) == len(result.spec.columns)
        on = ", ".join(one.claim.cells) or ("all cells" if whole else "the cells shown")
        verdict = one.verdict + (f"; rests on {', '.join(one.rests_on)}" if one.rests_on else "")
        numbers = ["", "", "", "", ""]
        if one.difference is not None and one.interval is not None:
            spans = [f"[{span[0]:+.3f}, {span[1]:+.3f}]" if span else "-" for span in (one.interval, one.over_seeds)]
            numbers = [f"{one.difference:+.3f}", *spans, str(one.seeds), str(one.items)]
        rows.append([f"{one.claim.more} > {one.claim.than}", on, verdict, *numbers])
    return rows


def _model_rows(result: SetResult) -> Rows:
    """The model of each row before training, and where columns differ of each."""
    rows = [["row", "model"]]
    for row in result.rows:
        played = {column: result.models[row, column] for column in result.columns if (row, column) in result.models}
        same = len({*played.values()}) == 1
        text = next(iter(played.values())) if same else "; ".join(f"{model} on {at}" for at, model in played.items())
        rows.append([row, text if played else ""])
    return rows


# --- training: before and after


def _training_parts(result: SetResult, column: str, rows: Sequence[str], pairs: bool = True) -> list[Part]:
    """The rows of a column that have begun: how they learned, and against each other."""
    metric = result.metric(rows[0], column)
    split = result.begun(rows[0], column)[0].overview.split
    title = f"{column}: {metric} on {split}" if column else f"{metric} on {split}"
    parts = [Part(title, _summary_rows(result, column, rows, metric), LEARNS)]
    done = [row for row in rows if any(scored.after for scored in result.finished(row, column).values())]
    # Unfinished runs would be compared at different steps.
    if pairs and len(done) > 1:
        differences = {pair: result.against(*pair, column) for pair in combinations(done, 2)}
        parts.append(Part(f"{title}, row minus column", _against_rows(done, differences), AGAINST))
        parts.append(Part(f"{title}, every pair", _pair_rows(differences), folded=True))
    parts.append(Part(f"{title}, every seed", _seed_rows(result, column, rows, metric), folded=True))
    return parts


def _summary_rows(result: SetResult, column: str, rows: Sequence[str], metric: str) -> Rows:
    """One line per row: means over seeds, the range of the differences, behaviour before and after."""
    begun = {row: result.begun(row, column) for row in rows}
    known = [scored for some in begun.values() for scored in some]
    behaviours = [of for of in BEHAVIOUR if any(s.behaviour(of, s.after or s.before) is not None for s in known)]
    # The verdict first: a narrow screen shows the first columns, and the others by scrolling.
    head = ["row", "learns", "seeds", "before", "after", "difference", "lowest to highest seed", "time per run"]
    table = [[*head, *(of.label for of in behaviours)]]
    for row, runs in begun.items():
        shown = [scored for scored in runs if scored.finished] or runs
        gains = [gain for scored in shown if (gain := scored.gain(metric)) is not None]
        starts = [fmean(values.values()) for scored in runs if (values := scored.values(scored.before, metric))]
        wanted, done = len(result.runs[row, column]), len(result.finished(row, column))
        between = [gain.difference for gain in gains]
        line = [
            row,
            _learns(result, row, column, metric),
            f"{wanted}" if done == wanted else f"{done} of {wanted} done",
            _mean([gain.before for gain in gains] or starts, ".3f"),
            _mean([gain.after for gain in gains], ".3f"),
            _mean(between, "+.3f"),
            f"{min(between):+.3f} to {max(between):+.3f}" if len(between) > 1 else "-",
            duration(fmean(scored.seconds for scored in shown)),
        ]
        table.append([*line, *(_behaviour(shown, of) for of in behaviours)])
    return table


def _learns(result: SetResult, row: str, column: str, metric: str) -> str:
    """`yes`, `no` or `undecided`, with what it rests on."""
    runs, wanted = result.begun(row, column), len(result.runs[row, column])
    decided = [learned for scored in runs if (learned := scored.learned(metric)) is not None]
    # One seed below the threshold decides: all seeds have to learn.
    yes, counted = sum(decided), f"{sum(decided)} of {len(decided)} seeds"
    if yes < len(decided):
        return f"no ({counted})"
    if len(decided) >= LEAST_SEEDS and len(decided) == wanted:
        return f"yes ({counted})"
    # From here on it is open; the reason is what is missing most.
    items = [gain.n for scored in runs if scored.finished and (gain := scored.gain(metric)) is not None]
    if items and min(items) < LEAST_ITEMS:
        return f"undecided ({min(items)} items, {LEAST_ITEMS} are needed)"
    if not any(scored.before or scored.after for scored in runs):
        return "undecided (no evaluation)"
    return f"undecided ({len(decided)} of {max(LEAST_SEEDS, wanted)} seeds)"


def _seed_rows(result: SetResult, column: str, rows: Sequence[str], metric: str) -> Rows:
    """One line per run: paired difference with its interval."""
    table = [["row", "seed", "items", "before", "after", "difference", "95 % interval", "time", "state", "run"]]
    for row in rows:
        for scored in result.begun(row, column):
            gain, start = scored.gain(metric), scored.values(scored.before, metric)
            numbers = [str(len(start)), _mean([*start.values()], ".3f"), "-", "-", "-"] if start else ["-"] * 5
            if gain is not None:
                numbers = [str(gain.n), f"{gain.before:.3f}", f"{gain.after:.3f}", f"{gain.difference:+.3f}"]
                numbers.append(interval(gain))
            one = scored.overview
            of = f" of {one.total}" if one.total else ""
            state = "done" if scored.finished else f"{one.state}, step {one.done}{of}"
            table.append([row, str(scored.seed), *numbers, duration(scored.seconds), state, str(one.run.path)])
    return table


def _against_rows(rows: Sequence[str], pairs: Mapping[tuple[str, str], Difference | None]) -> Rows:
    """After training, each row minus each other one; a star marks an interval that excludes 0."""

    def cell(first: str, second: str) -> str:
        known = pairs.get((first, second)) or pairs.get((second, first))
        if known is None:
            return ""
        sign = 1 if (first, second) in pairs else -1
        return f"{sign * known.difference:+.3f}{'*' if known.certain else ''}"

    return [["minus", *rows], *([first, *(cell(first, second) for second in rows)] for first in rows)]


def _pair_rows(pairs: Mapping[tuple[str, str], Difference | None]) -> Rows:
    """One line per pair: the better minus the other, with its interval."""
    table = [["pair", "items", "difference", "95 % interval"]]
    for (first, second), known in pairs.items():
        if known is None:
            continue
        low, high, difference = known.low, known.high, known.difference
        if difference < 0:
            first, second, low, high, difference = second, first, -high, -low, -difference
        table.append([f"{first} - {second}", str(known.n), f"{difference:+.3f}", f"[{low:+.3f}, {high:+.3f}]"])
    return table


def _mean(values: Sequence[float], form: str) -> str:
    return format(fmean(values), form) if values else "-"


def _behaviour(runs: Sequence[Scored], of: Behaviour) -> str:
    before, after = (
        [value for scored in runs if (value := scored.behaviour(of, items(scored))) is not None]
        for items in (lambda scored: scored.before, lambda scored: scored.after or scored.before)
    )
    return f"{fmean(before):.2f} → {fmean(after):.2f}" if before and after else "-"


# --- writers


def set_text(result: SetResult) -> str:
    """For the terminal."""
    texts = ["\n".join(filled(f"{name}: {text}", WIDTH) for name, text in result.head.items())]
    noted: set[str] = set()
    for part in parts_of(result):
        if part.folded:
            continue
        body = [part.title]
        if part.wrapped:
            body += [filled(line, WIDTH) for line in part.note.splitlines()]
            body += [filled(f"{name or 'when'}: {'  ->  '.join(cells)}", WIDTH) for name, *cells in part.rows]
        else:
            # A last column of words is set to the left; these are numbers.
            body.append(align([[*row, ""] for row in part.rows]))
            body += [] if part.note in noted or not part.note else [filled(part.note, WIDTH)]
            noted.add(part.note)
        texts.append("\n".join(body))
    return "\n\n".join([*texts, *(filled(note, WIDTH) for note in result.notes)])


def summary_text(result: SetResult) -> str:
    """How the rows of each column learned, without the differences of all pairs: a search has many runs."""
    texts = []
    for column in result.columns:
        rows = [row for row in result.rows_of(column) if result.begun(row, column)]
        part, *_ = _training_parts(result, column, rows, pairs=False)
        texts.append(f"{part.title}\n{align(part.rows)}")
    return "\n\n".join(texts)


def set_markdown(result: SetResult, figure: str = "", caption: str = "", level: int = 2) -> str:
    """For a document.

    Args:
        figure: file of the figure; empty: none.
        level: of headings.
    """
    texts = [f"![{caption}]({figure})", caption] if figure else []
    noted: set[str] = set()
    for part in parts_of(result):
        table = markdown(part.rows)
        if part.folded:
            texts.append(f"<details><summary>{part.title}</summary>\n\n{table}\n\n</details>")
            continue
        texts.append(f"{'#' * level} {part.title}")
        texts += ["\n".join(f"> {line}" for line in part.note.splitlines())] * bool(part.wrapped and part.note)
        texts.append(table)
        texts += [part.note] * bool(part.note and not part.wrapped and part.note not in noted)
        noted.add(part.note)
    if result.notes:
        texts += [f"{'#' * level} Notes", "\n".join(f"- {note}" for note in result.notes)]
    return "\n\n".join(texts)


def set_json(result: SetResult) -> str:
    """Everything, for machines."""
    case = case_of(result)
    content = {
        "version": 2,
        "set": result.name,
        "head": result.head,
        "cells_done": result.done,
        "cells": result.total,
        "values": [
            {
                **{key: item for key, item in asdict(value).items() if key not in ("place", "label")},
                "column": value.place.column if isinstance(value.place, Cell) else None,
                "score": value.place.score if isinstance(value.place, Cell) else None,
                "mean_of_cells": None if isinstance(value.place, Cell) else value.place,
                "mean": value.mean,
                "std": value.std,
            }
            for value in result.values
        ],
        "claims": [{**one.claim.model_dump(), **asdict(one), "claim": None} for one in result.verdicts],
        "models": [{"row": row, "column": column, "model": model} for (row, column), model in result.models.items()],
        "case": asdict(case) | {"run": str(case.run)} if case is not None else None,
        "notes": result.notes,
        "runs": [
            {"row": row, "column": column, "seed": run.seed, "run": str(run.path), "command": run.command}
            for (row, column), runs in result.runs.items()
            for run in runs
        ],
    }
    return json.dumps(content, indent=1, default=str) + "\n"


def _written(result: SetResult) -> Iterator[tuple[str, str | bytes]]:
    import pandas

    figure = default_figure(result)
    drawn = SetFigure(result, figure).files() if figure is not None else {}
    caption = SetFigure(result, figure).caption if figure is not None and drawn else ""
    head = "\n".join(f"- {name}: {text}" for name, text in result.head.items())
    parts = parts_of(result)
    page = rendered(
        "set.html",
        title=result.name,
        head=result.head,
        figure=drawn.get("figure.svg", ""),
        caption=caption,
        parts=parts,
        notes=result.notes,
        runs=[f"{run.path}: {run.command}".removesuffix(": ") for runs in result.runs.values() for run in runs],
    )
    body = set_markdown(result, "figure.png" if drawn else "", caption)
    yield "set.html", page
    yield "set.md", f"# {result.name}\n\n{head}\n\n{body}\n"
    yield "set.json", set_json(result)
    rows = _cell_rows(result)
    yield "set.csv", pandas.DataFrame(rows[1:], columns=rows[0]).to_csv(index=False)
    ours = _grid(result, _ours(result))
    yield "set.tex", pandas.DataFrame(ours[1:], columns=ours[0]).to_latex(index=False, escape=True)
    yield from drawn.items()


def write_set(result: SetResult, folder: Path) -> list[Path]:
    """Write `set.html`, `.md`, `.json`, `.csv`, `.tex` and a figure's files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, data in _written(result):
        atomic_write(folder / name, data)
        paths.append(folder / name)
    return paths


def write_docs(result: SetResult, page: Path) -> list[Path]:
    """Fill the generated part of a Markdown page, and write the figure beside it; returns what was written.

    Raises:
        ConfigError: no such page, or it has no such part.
    """
    check_docs(page, result.name)
    figure = default_figure(result)
    drawn = SetFigure(result, figure).files() if figure is not None else {}
    caption = SetFigure(result, figure).caption if figure is not None and drawn else ""
    folder, name, paths = page.parent / "figures", f"set-{result.name}", []
    folder.mkdir(exist_ok=True)
    for kind in ("svg", "png") if drawn else ():
        paths.append(folder / f"{name}.{kind}")
        atomic_write(paths[-1], drawn[f"figure.{kind}"])
    begin = BEGIN.format(result.name)
    head, _, rest = page.read_text(encoding="utf-8").partition(begin)
    body = set_markdown(result, f"figures/{name}.svg" if drawn else "", caption, level=3)
    atomic_write(page, f"{head}{begin}\n{body}\n{END}{rest.partition(END)[2]}")
    return [page, *paths]


def check_docs(page: Path, name: str) -> None:
    """Raises `ConfigError` unless `page` has the part that the set `name` fills."""
    begin = BEGIN.format(name)
    if not page.is_file():
        raise ConfigError(f"docs: {page}: no such file, expected a Markdown page with the line {begin}")
    _, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    if not mark or END not in rest:
        raise ConfigError(f"docs: {page}: no generated part for this name, expected the lines {begin} and {END}")
