"""Results of sets made of runs that a test has laid out."""

from mmrl.sets.cells import SetResult
from mmrl.sets.spec import SetSpec


def set_result(runs, scale="", **spec):
    """A set with scores whose cells are the keys of `runs`, (row, column) -> a run per seed."""
    rows, columns = ([*dict.fromkeys(place[end] for place in runs)] for end in (0, 1))
    names = {"rows": {row: {} for row in rows}, "columns": {column: {} for column in columns}}
    made = SetSpec.model_validate({"shows": "x", "scores": {"EM": "em"}} | names | spec)
    return SetResult(name="x", spec=made, scale=scale, rows=rows, columns=columns, runs=runs)
