"""A paper's case study: one question as a trained program answered it early in training and after it.

From what training keeps of its evaluations (`eval/step-….jsonl` of a run), so nothing runs for it.
"""

from __future__ import annotations

from mmrl.report.tables import Rows
from mmrl.report.text import clean
from mmrl.report.trees import abridged
from scripts.papers.values import TableResult


def case_study(result: TableResult) -> tuple[str, Rows] | None:
    """Return a title, and scores and predictions at two steps, of the item whose last score rises the most.

    Of the first run whose training has two evaluations after `case` steps; None while there is none.
    """
    if (early := result.spec.case) is None:
        return None
    trained = [result.overview(run.trained) for runs in result.runs.values() for run in runs]
    for run in filter(None, trained):
        evaluated = run.items.get(run.split, {})
        steps = sorted(step for step in evaluated if step >= early)
        if len(steps) < 2:
            continue
        ends = steps[0], steps[-1]
        metrics = {name: metric for name, metric in result.spec.scores.items() if name not in result.spec.counts}
        *_, main = metrics.values()
        before, after = ({item["id"]: item for item in evaluated[step]} for step in ends)
        rise = {item: after[item]["metrics"][main] - before[item]["metrics"][main] for item in before if item in after}
        item = max(rise, key=rise.__getitem__)
        lines = before[item], after[item]
        rows = [["", *(f"after {step} steps" for step in ends)]]
        rows += [[name, *(f"{line['metrics'][metric]:.3f}" for line in lines)] for name, metric in metrics.items()]
        predictions = [(line["predictions"] or [{}])[0] or {} for line in lines]
        # The answer last, as programs make it.
        names = sorted({name for fields in predictions for name in fields}, key=lambda name: (name == "answer", name))
        rows += [[name, *(abridged(clean(fields.get(name) or "nothing")) for fields in predictions)] for name in names]
        return f"One question, early and late: {item} of {run.run.path}", rows
    return None
