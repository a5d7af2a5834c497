"""Figures of tables: which runs of a policy, and from which step on."""

from mmrl.sets.queue import CellRun
from scripts.papers.page import TablePage
from tests.helpers.sets import table_result
from tests.sets.test_figure import numbers, run


def test_a_curve_is_of_the_last_training_of_a_policy_and_begins_at_its_first_step(tmp_path):
    first = CellRun(seed=0, path=run(tmp_path / "first", {1: {"reward/mean": 9.0}}))
    records = {1: {"reward/mean": 0.1}, 5: {"eval/dev/f1": 0.25}}
    training = CellRun(seed=0, path=run(tmp_path / "second", records), after=first)
    evaluation = CellRun(seed=0, path=tmp_path / "eval", command="eval", after=training)
    untrained = CellRun(seed=0, path=tmp_path / "none", command="eval")
    diagrams = ({"metric": ("eval/f1",), "label": "F1"}, {"metric": ("reward/mean",), "label": "reward"})
    runs = {("RR", "H"): [evaluation], ("LLM", "H"): [untrained]}
    rows = numbers(TablePage(table_result(runs, figure={"diagrams": diagrams})).figure)
    assert [(row["diagram"], row["row"], row["step"], row["mean"]) for row in rows] == [
        ("F1", "RR", "5", "0.25"),
        ("reward", "RR", "1", "0.1"),
    ]
    assert TablePage(table_result(runs)).figure is None
