"""Figures of sets: what is drawn of which runs, with numbers worked by hand."""

import csv
import io
import json
from dataclasses import replace

import pytest

from mmrl.sets.figure import LABEL, Diagram, SetFigure, beside
from mmrl.sets.queue import CellRun
from tests.helpers.sets import set_result


def run(folder, records):
    """A training run with these metrics, a mapping per step."""
    (folder / "journal").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"eval": {"split": "dev"}}))
    lines = [json.dumps({"step": 0, "eval/dev/f1": 0.5}), *(json.dumps({"step": n, **r}) for n, r in records.items())]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def table(folders):
    """(row, column) -> one training run per seed, as the set of these."""
    runs = {
        place: [CellRun(seed=seed, path=path) for seed, path in enumerate(paths)] for place, paths in folders.items()
    }
    return set_result(runs)


def figure(result, *diagrams, band="range"):
    return SetFigure(result, [Diagram(*one) for one in diagrams] or [Diagram(("reward/mean",), "reward")], band)


def numbers(drawn):
    return list(csv.DictReader(io.StringIO(drawn.files["figure.csv"])))


@pytest.fixture
def two(tmp_path):
    """Two seeds; the second has a step less."""
    first = run(tmp_path / "a", {1: {"reward/mean": 0.0}, 2: {"reward/mean": 0.5}, 3: {"reward/mean": 1.0}})
    second = run(tmp_path / "b", {1: {"reward/mean": 0.2}, 2: {"reward/mean": 0.7}})
    return table({("RR", "HotpotQA"): [first, second]})


@pytest.mark.parametrize(
    ("band", "low", "high"),
    [("range", [0.0, 0.25], [0.2, 0.45]), ("std", [-0.0414214, 0.208579], [0.241421, 0.491421])],
)
def test_a_curve_is_the_trailing_mean_over_seeds_on_the_steps_that_all_have(two, band, low, high):
    rows = numbers(figure(two, band=band))
    assert [(row["step"], row["mean"], row["seeds"]) for row in rows] == [("1", "0.1", "2"), ("2", "0.35", "2")]
    assert [float(row["low"]) for row in rows] == pytest.approx(low)
    assert [float(row["high"]) for row in rows] == pytest.approx(high)


def test_a_diagram_has_the_first_of_its_metrics_that_is_there(tmp_path):
    run_ = run(tmp_path / "a", {1: {"memory/rss_mb": 100.0}, 2: {"memory/rss_mb": 200.0}})
    memory = (["memory/device_share", "memory/rss_mb"], "memory")
    rows = numbers(figure(table({("RR", "H"): [run_]}), memory))
    assert [(row["diagram"], row["mean"]) for row in rows] == [("memory", "100"), ("memory", "150")]


def test_evaluations_are_of_the_runs_own_split(tmp_path):
    evaluated = run(tmp_path / "a", {1: {"reward/mean": 0.1}, 5: {"eval/dev/f1": 0.25}})
    drawn = figure(table({("RR", "H"): [evaluated]}), (["eval/f1"], "F1"))
    assert [(row["step"], row["mean"]) for row in numbers(drawn)] == [("0", "0.5"), ("5", "0.25")]


def test_columns_that_share_their_training_are_drawn_once(tmp_path):
    one, other = (run(tmp_path / name, {1: {"reward/mean": 0.1}}) for name in "ab")
    shared = figure(table({("RR", "H"): [one], ("RR", "2Wiki"): [one]}))
    apart = figure(table({("RR", "NQ"): [one], ("RR", "H"): [other]}))
    assert [row["column"] for row in numbers(shared)] == [""]
    assert [row["column"] for row in numbers(apart)] == ["NQ", "H"]


def test_before_a_run_has_begun_there_is_no_figure(tmp_path):
    nothing = table({("RR", "H"): [tmp_path / "none"]})
    assert figure(nothing).files == {}


def test_a_damaged_run_is_left_out_and_named(tmp_path, two):
    broken = run(tmp_path / "broken", {1: {"reward/mean": 9.0}})
    (broken / "metrics.jsonl").write_text("{\n{\n")
    two.runs["RR", "HotpotQA"].append(CellRun(seed=2, path=broken))
    drawn = figure(two)
    assert [row["seeds"] for row in numbers(drawn)] == ["2", "2"]
    assert [note for note in two.notes if note.startswith("RR on HotpotQA, seed 2:") and "broken" in note]


def test_a_row_without_runs_leaves_the_others(tmp_path, two):
    two.rows.append("MAPPO")
    two.runs["MAPPO", "HotpotQA"] = [CellRun(seed=0, path=tmp_path / "none")]
    files = figure(two).files
    assert set(files) == {"figure.svg", "figure.png", "figure.csv"}
    assert files["figure.png"][:4] == b"\x89PNG"
    assert figure(two).files["figure.svg"] == files["figure.svg"], "the same numbers, the same bytes"


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("module/reranker/invalid_selection", ["module/reranker/", "invalid_selection"]),
        ("share of the rollouts of a step that search", ["share of the rollouts of a", "step that search"]),
        ("searches / question", ["searches / question"]),
        ("share of module/reranker/invalid_selection", ["share of module/reranker/", "invalid_selection"]),
    ],
)
def test_a_label_beside_an_axis_breaks_between_words(label, lines):
    assert beside(label).splitlines() == lines and max(map(len, lines)) <= LABEL


def test_what_was_typed_goes_with_the_figure_that_it_changes(tmp_path):
    place = ("RR", "HotpotQA")
    made = table({place: [run(tmp_path / "s0", {n: {"reward/mean": 0.1 * n} for n in (1, 2, 3)})]})
    made = replace(made, settings=["train.steps=3"])
    own = figure(made)
    assert "train.steps" not in own.caption and {point["settings"] for point in numbers(own)} == {""}
    made.runs[place][0].other = True
    drawn = figure(made)
    assert drawn.caption.endswith("Not with the set's own settings: train.steps=3.")
    assert {point["settings"] for point in numbers(drawn)} == {"train.steps=3"}
    assert "train.steps=3" in drawn.files["figure.svg"]
