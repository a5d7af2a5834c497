"""The papers' tables: `python -m scripts.papers NAME`; without a name, what there is.

    python -m scripts.papers mhgpo-table1 scale=mini seed=0

    rows=A,B columns=C,D seed=0  some of them, by name (also in lower case: mhgpo-rr); all where left out
    scale=paper|mini|real        the papers' models and data; the mini world with the tiny models; a small real model
    any other key                as in `mmrl compare set=NAME`

Runs what is missing of a table, and shows it beside the printed values. A table of one's own is a file
conf/set/NAME.yaml of the current folder (or of --config-dir).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from pydantic import Field

from mmrl import cli
from mmrl.cli import configs, overrides
from mmrl.errors import ConfigError
from mmrl.report.tables import Rows
from mmrl.report.text import align
from mmrl.sets.command import RunKeys, SetRequest, run_set
from mmrl.sets.plan import TOP
from mmrl.sets.words import set_names
from scripts.papers.page import COMMAND, TablePage
from scripts.papers.plan import TablePlanner
from scripts.papers.spec import SETS, read_table


class TableKeys(RunKeys):
    """Keys of the command; all others are overrides of the runs."""

    scale: str | None = Field(None, description="null: the table's first")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code, as `mmrl` does."""
    return cli.main(argv, _dispatch)


def _dispatch(words: Sequence[str]) -> int:
    if {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    program = shlex.join(COMMAND)
    single = f"{program}, which takes lists as they are: seed=0,1"
    line = overrides.read_line(words, command_keys=tuple(TableKeys.model_fields), names=True, single=single)
    problems: list[str] = []
    keys = line.section(TableKeys, problems)
    if len(line.names) > 1:
        raise ConfigError(f"table: got {len(line.names)} names, expected one")
    if not line.names:
        if keys.model_fields_set or line.words:
            raise ConfigError(f"table: which one? `{program}` lists them")
        print(f"{align(_listing())}\n\n{program} NAME scale=mini runs one here; do=plan says what it will cost")
        return 0
    (name,) = line.names
    table = read_table(name, line.config_dir)
    scale = keys.scale or table.scales[0]
    if scale not in table.scales:
        raise ConfigError(f"scale: got {scale}, and {name} has words for {', '.join(table.scales)} alone")
    planner = TablePlanner(
        spec=table,
        scale=scale,
        compose=configs.set_config,
        overrides=line.words,
        typed=line.words,
        config_dir=line.config_dir,
    )
    request = SetRequest(line.names, keys, line.words, line.config_dir, COMMAND, problems)
    return run_set(request, name, planner, keys.seed, TOP / name / scale, TablePage)


def _listing() -> Rows:
    rows = [["table", "paper", "rows x cells", "seeds", "shows"]]
    for name in set_names([SETS]):
        table = read_table(name)
        size = f"{sum(row.shown for row in table.rows.values())} x {len(table.cells)}"
        paper = f"{table.source.arxiv} {table.source.at}"
        rows.append([name, paper, size, str(len(table.seeds)), table.shows])
    return rows


if __name__ == "__main__":
    sys.exit(main())
