"""The case study of a paper's figure: which question, from which evaluations, and pages that have or lack one."""

import json
from dataclasses import replace

import pytest

from mmrl.sets.queue import CellRun
from mmrl.store.rundir import RunDir
from scripts.papers.case import case_study
from tests.helpers.sets import table_result


def line(item, f1, **prediction):
    return json.dumps({"id": item, "metrics": {"em": float(f1 == 1), "f1": f1}, "predictions": [prediction or None]})


@pytest.fixture
def table(tmp_path):
    """A run with evaluations after 0, 5, 10 and 15 steps, of three questions."""
    by_step = {0: (0.0, 0.0, 0.0), 5: (0.5, 0.2, 0.2), 10: (0.0, 0.0, 0.0), 15: (0.6, 0.8, 0.8)}
    with RunDir.create(tmp_path / "trained", {"eval": {"split": "dev"}}, ["mmrl"]) as run:
        for step, of_items in by_step.items():
            lines = [
                line(f"q{n}", score, answer=f"a{step}", queries=["x", f"y\n{step}"], kept=None)
                for n, score in enumerate(of_items)
            ]
            run.eval_path(step, "dev").write_text("\n".join(lines) + "\n")
    evaluation = CellRun(seed=0, path=tmp_path / "gone", command="eval", after=CellRun(seed=0, path=run.path))
    scores = {"EM": "em", "F1": "f1", "# Docs": "docs"}
    return table_result({("FoF", ""): [evaluation]}, scores=scores, counts=("# Docs",))


def case_of(table, case):
    return case_study(replace(table, spec=table.spec.model_copy(update={"case": case})))


def test_the_first_question_that_rises_the_most_is_shown_at_both_ends(table):
    title, rows = case_of(table, 5)
    assert "early and late: q1 of" in title
    assert rows == [
        ["", "after 5 steps", "after 15 steps"],
        ["EM", "0.000", "0.000"],
        ["F1", "0.200", "0.800"],
        ["kept", "nothing", "nothing"],
        ["queries", "x; y ⏎ 5", "x; y ⏎ 15"],
        ["answer", "a5", "a15"],
    ]
    assert case_of(table, 6)[1][0] == ["", "after 10 steps", "after 15 steps"], "the next evaluation there is"


def test_without_two_evaluations_there_is_none(table):
    assert case_of(table, 15) is None and case_of(table, 16) is None
    table.runs["FoF", ""] = [CellRun(seed=0, path=table.runs["FoF", ""][0].path, command="eval")]  # an untrained row
    assert case_of(table, 5) is None
    assert case_of(table, None) is None
