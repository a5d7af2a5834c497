"""A paper's case study: one question as a trained program answered it early in training and after it.

From what training keeps of its evaluations (`eval/step-….jsonl` of a run), so nothing runs for it.
"""

from __future__ import annotations

from mmrl.report.overview import Overview
from mmrl.report.tables import Rows
from mmrl.sets.cells import SetResult
from mmrl.sets.spec import Case, SetSpec
from mmrl.system.files import JsonObject


def case_study(result: SetResult) -> tuple[str, Rows, str] | None:
    """Return a title, scores and predictions at two steps, and the item's texts where the run has kept them.

    Of the first run whose training has two evaluations; None while there is none, or where the set has no case. The
    item is `case.item`, or the first one whose last score rises the most.
    """
    if (case := result.spec.case) is None:
        return None
    runs = [run.trained for runs in result.runs.values() for run in runs]
    trained = [run for path in runs if path is not None and isinstance(run := result.overviews.get(path), Overview)]
    studies = (_of_run(result.spec, case, run) for run in trained)
    return next(filter(None, studies), None)


def _of_run(spec: SetSpec, case: Case, run: Overview) -> tuple[str, Rows, str] | None:
    evaluated = {step: items for step, items in run.items.get(run.split, {}).items() if step >= case.early}
    if len(evaluated) < 2:
        return None
    steps = (min(evaluated), max(evaluated))
    before, after = ({str(item["id"]): item for item in evaluated[step]} for step in steps)
    items = [item for item in before if item in after and (not case.item or item == case.item)]
    if not items:
        return None
    metrics = {name: metric for name, metric in spec.scores.items() if name not in spec.counts}
    main = list(metrics.values())[-1]
    selected = max(items, key=lambda item: _score(after[item], main) - _score(before[item], main))
    lines = before[selected], after[selected]
    rows = [["", *(f"after {step} steps" for step in steps)]]
    rows += [[name, *(f"{_score(line, metric):.3f}" for line in lines)] for name, metric in metrics.items()]
    first, last = ((line["predictions"] or [{}])[0] or {} for line in lines)
    # The answer last, as programs make it.
    names = sorted(dict.fromkeys([*first, *last]), key=lambda name: name == "answer")
    rows += [[name, _text(first.get(name)), _text(last.get(name))] for name in names]
    texts = [line["asked"] for (_, item), line in run.run.examples.items() if item == selected]
    inputs = "; ".join(f"{name}: {text}" for name, text in texts[0].items()) if texts else ""
    return f"One question, early and late: {selected} of {run.run.path}", rows, inputs


def _score(line: JsonObject, metric: str) -> float:
    return float(line["metrics"].get(metric, 0.0))


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(map(_text, value)) or "nothing"
    # A table cell holds a single line.
    return "nothing" if value is None else " ".join(str(value).split())
