"""Results of sets made of runs that a test has laid out."""

from mmrl.sets.cells import SetResult
from mmrl.sets.spec import SetSpec
from scripts.papers.spec import Table
from scripts.papers.values import TableResult

SOURCE = {"arxiv": "0000.00000", "at": "Table 1", "decimals": 3}


def set_result(runs):
    """A set whose cells are the keys of `runs`, (row, column) -> a run per seed."""
    rows, columns, spec = parts_of(runs)
    return SetResult(name="x", spec=SetSpec.model_validate(spec), rows=rows, columns=columns, runs=runs)


def table_result(runs, scale="paper", **more):
    """A table likewise."""
    rows, columns, spec = parts_of(runs)
    table = Table.model_validate(spec | {"scores": {"EM": "em"}, "source": SOURCE} | more)
    return TableResult(name="x", spec=table, scale=scale, rows=rows, columns=columns, runs=runs)


def parts_of(runs):
    rows, columns = ([*dict.fromkeys(place[end] for place in runs)] for end in (0, 1))
    spec = {"shows": "x", "rows": {row: {} for row in rows}, "columns": {column: {} for column in columns}}
    return rows, columns, spec
