"""Page of a table: ours and the paper's values, claims, a case study, and the figure."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from functools import cached_property, partial

from mmrl.report.stats import History, signed
from mmrl.report.tables import Rows
from mmrl.sets.cells import LEAST_SEEDS
from mmrl.sets.figure import Diagram, SetFigure
from mmrl.sets.page import MARK, Part, SetPage, after_training, cell_facts, ends, grid, number
from mmrl.system.files import JsonObject
from scripts.papers.case import case_study
from scripts.papers.values import TableResult, TableValue

COMMAND = ("python", "-m", "scripts.papers")
CLAIMS = (
    "Claims: mean difference of shares (1 is 100 %), paired on items over the seeds of both rows. Held where both the "
    f"95 % bootstrap interval over items and the 95 % t interval over the means of {LEAST_SEEDS} or more seeds lie "
    "above 0, not held where both lie below, else undecided."
)


@dataclass(frozen=True)
class TablePage(SetPage):
    """Tables and figure of a paper's table, each built once, and their writers."""

    result: TableResult

    @cached_property
    def parts(self) -> list[Part]:
        """Tables below the head."""
        result = self.result
        parts = [Part("Ours", grid(result.rows, result.values, partial(after_training, result)))]
        if any(value.paper is not None for value in result.values):
            printed = grid(result.rows, result.values, lambda value: number(result, value.paper, value.paper_std))
            parts.append(Part("The paper", printed))
        if result.verdicts:
            parts.append(Part("Claims", _claim_rows(result), CLAIMS))
        if (case := case_study(result)) is not None:
            parts.append(Part(*case, words=True))
        return [*parts, Part("Every cell", self.cells, folded=True)]

    @property
    def cells(self) -> Rows:
        """A line per cell."""
        result = self.result
        numbers = ["ours", "std", "seeds", "95 % interval", "items", "paper", "difference"]
        rows = [["row", "place", *numbers, "agrees", "settings", "command"]]
        for value in result.values:
            mean, std, paper = (number(result, part) for part in (value.mean, value.std, value.paper))
            difference = ""
            if result.scale == "paper" and not value.other and value.mean is not None and value.paper is not None:
                difference = f"{value.mean - value.paper:+.{len(paper.partition('.')[2])}f}"
            agrees = "" if value.agrees is None else "yes" if value.agrees else "no"
            *facts, settings = cell_facts(result, value)
            command = _command_of(result, value)
            rows.append([value.row, value.label, mean, std, *facts, paper, difference, agrees, settings, command])
        return rows

    @cached_property
    def figure(self) -> SetFigure | None:
        """Curves of a figure; None without data."""
        if (declared := self.result.spec.figure) is None:
            return None
        diagrams = [Diagram(one.metric, one.label) for one in declared.diagrams]
        figure = TableFigure(self.result, diagrams, declared.band)
        return figure if figure.files else None

    @property
    def content(self) -> JsonObject:
        """The whole page, for JSON."""
        claims = [
            {**judged.claim.model_dump(), **{key: value for key, value in asdict(judged).items() if key != "claim"}}
            for judged in self.result.verdicts
        ]
        return {**super().content, "claims": claims}


@dataclass(frozen=True)
class TableFigure(SetFigure):
    """Diagrams of the trainings of a table's policies, from their first step on."""

    def histories(self, row: str, column: str) -> dict[int, History]:
        """Return seed -> the steps of the training run of the policy, without those that it starts from."""
        return {
            run.seed: [record for record in overview.history if record["step"]]
            for run in self.result.runs.get((row, column), ())
            if (overview := self.result.overview(run.trained)) is not None
        }


def _command_of(result: TableResult, value: TableValue) -> str:
    """Return the command that makes a cell, with the seeds and settings as typed."""
    column = f" columns='{value.column}'" if value.column is not None and len(result.spec.columns) > 1 else ""
    command = f"{shlex.join([*COMMAND, result.name])} rows='{value.row}'{column} scale={result.scale}"
    typed = [
        word for word in result.command[len(COMMAND) + 1 :] if not word.startswith(("rows=", "columns=", "scale="))
    ]
    return " ".join([command, *([shlex.join(typed)] if typed else [])])


def _claim_rows(result: TableResult) -> Rows:
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
            intervals = [ends(judged.interval), ends(judged.over_seeds)]
            numbers = [signed(judged.difference), *intervals, str(judged.seeds), str(judged.items)]
        rows.append([f"{claim.more} > {claim.than}", ", ".join(claim.cells) or all_cells, verdict, *numbers])
    return rows
