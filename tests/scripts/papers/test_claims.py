"""Claims by two intervals: over items and over seeds; the model of each row; the task that a claim rests on."""

import random
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from scripts.papers.page import TablePage
from scripts.papers.values import student_t
from tests.helpers.sets import table_result

VALUES = [
    ([0.5882852550416057, 0.5518127858509001, 0.5980606294055856], (0.5517467464760962, 0.6061548744572905)),
    ([0.6300070686319132, 0.6072855392902813, 0.5668630224927328], (0.5688760168118003, 0.6325854024003997)),
    ([0.4333079364029651, 0.3922315435906112, 0.38757014737649487], (0.371743952709061, 0.4362634156780699)),
    ([0.43826183490473436, 0.40845973833212335, 0.39028103964247823], (0.3812076736139585, 0.44328952716252323)),
]
CLAIM = (0.18203367674393522, (0.15138059546983967, 0.21166090552239586), (0.1562456331241246, 0.2078217203637459))
"""Computed when item scores were nested dicts."""


class Run:
    """A finished evaluation: the first `right` of 100 items are right, or item -> score."""

    finished = True

    def __init__(self, seed, column, right, model, source=None):
        self.seed = seed
        scores = {f"d{n}": float(n < right) for n in range(100)} if isinstance(right, int) else right
        self.after = pandas.DataFrame({"em": scores})
        self.questions = (column, None, frozenset(self.after.index))
        self.items = frozenset((source or column, item) for item in self.after.index)
        facts = {"policy": model, "engine.name": "transformers"}
        get = lambda key, default=None: facts.get(key, default)  # noqa: E731
        self.overview = SimpleNamespace(evaluates=True, get=get, summary={}, environment={}, config={})
        self.chain = [self.overview]


def result(
    cells, scale="paper", models=("tiny", "tiny"), claims=({"more": "A", "than": "B"},), planned=None, source=None
):
    """Of (row, column) -> how many of 100 items are right, per seed.

    `planned`: runs of a cell, if not all finished; `source`: one file from which all columns draw.
    """
    made = table_result(dict.fromkeys(cells, ()), scale, claims=claims)
    played = dict(zip(made.rows, models, strict=False))
    begun = {
        (row, column): [Run(seed, column, right, played[row], source) for seed, right in enumerate(rights)]
        for (row, column), rights in cells.items()
    }
    vars(made)["read"] = (begun, [])
    vars(made)["runs"] = {
        cell: [SimpleNamespace(path=Path("run"), seed=0, other=False)] * (planned or len(rights))
        for cell, rights in cells.items()
    }
    return made


def verdict(*arguments, **options):
    (one,) = result(*arguments, **options).verdicts
    return one


@pytest.mark.parametrize(
    ("more", "than", "says"),
    [
        ([70, 71, 69], [50, 49, 51], "held"),
        ([50, 49, 51], [70, 71, 69], "not held"),
        ([95, 52, 60], [50, 49, 51], "undecided"),  # over items it is certain; its seeds lie too far apart
        ([70, 71], [50, 49], "undecided"),  # two seeds
        ([50, 51, 49], [50, 49, 51], "undecided"),
        ([70, 71, 69], [50], "held"),  # a row that is not trained has one evaluation, which stands for all
    ],
)
def test_a_claim_is_held_where_items_and_seeds_agree(more, than, says):
    assert verdict({("A", "H"): more, ("B", "H"): than}).verdict == says


def test_a_seed_that_alone_has_finished_does_not_stand_for_the_others():
    one = verdict({("A", "H"): [40, 38, 41], ("B", "H"): [20]}, planned=3)
    assert (one.verdict, one.seeds, one.over_seeds) == ("undecided", 1, None)
    assert one.difference == pytest.approx(0.2), "of the seed that both have"


def test_seeds_and_items_of_a_claim_are_those_that_all_seeds_have():
    """A metric that some items lack, as a fact of a module that was not reached there."""
    few, all_of = {"d0": 1.0, "d1": 0.0}, {"d0": 1.0, "d1": 0.0, "d2": 1.0}
    one = verdict({("A", "H"): [all_of, few, all_of], ("B", "H"): [few, all_of, {**few, "d0": 0.0}]})
    assert one.difference == pytest.approx(1 / 6) and one.items == 2
    half = 4.3027 * (1 / 12) ** 0.5 / 3**0.5
    assert one.over_seeds == pytest.approx((1 / 6 - half, 1 / 6 + half))


def test_the_intervals_by_hand():
    one = verdict({("A", "H"): [70, 72, 74], ("B", "H"): [50, 50, 50]})
    assert one.difference == pytest.approx(0.22) and one.seeds == 3
    # differences 0.20, 0.22, 0.24: standard deviation 0.02; t of two degrees of freedom 4.3027
    half = 4.3027 * 0.02 / 3**0.5
    assert one.over_seeds == pytest.approx((0.22 - half, 0.22 + half))
    assert 0.1 < one.interval[0] < 0.22 < one.interval[1] < 0.35


def drawn(row, column, seed):
    """Item -> a score, in an order of its own."""
    noise = random.Random(f"{row} {column} {seed}")
    scores = {f"d{n}": min(1.0, max(0.0, noise.gauss(0.6 if row == "A" else 0.4, 0.3))) for n in range(90)}
    return {item: scores[item] for item in noise.sample(sorted(scores), 90)}


def test_numbers_stay_as_they_were_to_the_last_bit():
    """Sums depend on the order of what is added, draws on their keys: another order would change published numbers."""
    cells = {(row, column): [drawn(row, column, seed) for seed in range(3)] for row in "AB" for column in "HW"}
    one = result(cells)
    values = [(list(value.seeds.values()), value.interval) for value in one.values]
    (claim,) = one.verdicts
    assert values == VALUES
    assert (claim.difference, claim.interval, claim.over_seeds) == CLAIM


def test_rows_of_two_models_do_not_compare_at_mini():
    cells = {("A", "H"): [70, 71, 69], ("B", "H"): [50, 49, 51]}
    assert verdict(cells, "mini", ("tiny", "tiny_qa")).verdict == "not comparable at mini"
    assert verdict(cells, "paper", ("llama", "qwen")).verdict == "held"
    assert verdict(cells, "mini").verdict == "held"
    assert "before training A is tiny, B is tiny_qa" in result(cells, "mini", ("tiny", "tiny_qa")).notes
    assert "before training every row is tiny" in result(cells, "mini").notes


def test_a_claim_over_several_tasks_names_the_one_that_it_rests_on():
    level = [50, 49, 51]
    rests = {("A", "H"): [90, 91, 89], ("B", "H"): level, ("A", "W"): level, ("B", "W"): [50, 50, 49]}
    one = verdict(rests)
    assert one.verdict == "held" and one.rests_on == ("H",)
    made = result(rests)
    claim = next(part for part in TablePage(made).parts if part.title == "Claims").rows[1]
    assert claim[2] == "held; rests on H"
    both = {("A", "H"): [90, 91, 89], ("B", "H"): level, ("A", "W"): [80, 82, 81], ("B", "W"): level}
    assert verdict(both).rests_on == ()


def test_a_claim_over_columns_that_share_questions_is_not_decided():
    """As on the mini world, where tasks draw from one list of questions."""
    some = {f"d{n}": float(n < 90) for n in range(40, 140)}
    less = {item: float(item < "d5") for item in some}
    cells = {("A", "H"): [90, 91, 89], ("B", "H"): [50, 49, 51], ("A", "W"): [some] * 3, ("B", "W"): [less] * 3}
    claims = tuple({"more": "A", "than": "B", "cells": cells} for cells in ((), ("H",)))
    over_both, on_one = result(cells, claims=claims, source="mini").verdicts
    assert over_both.verdict == "undecided (its columns share questions)" and over_both.interval[0] > 0
    assert on_one.verdict == "held"
    assert any("(H and W share 60)" in note for note in result(cells, source="mini").notes)
    apart = result(cells)
    assert apart.verdicts[0].verdict == "held" and apart.shared == {}


def test_quantiles_of_students_t():
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 40):
        assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-4)
