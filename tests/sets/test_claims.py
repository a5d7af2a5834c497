"""Claims by two intervals: over items and over seeds; the model of each row; the task that a claim rests on."""

from types import SimpleNamespace

import pytest

from mmrl.sets.cells import SetResult, student_t
from mmrl.sets.page import parts_of
from mmrl.sets.spec import SetSpec

ITEMS = [f"d{n}" for n in range(100)]


class Run:
    """A finished evaluation: the first `right` of its items are right."""

    finished, before = True, ()

    def __init__(self, seed, column, right, model):
        self.seed, self.right, self.after = seed, right, ITEMS
        self.questions = (column, None, frozenset(ITEMS))
        facts = {"policy": model, "engine.name": "transformers"}
        get = lambda key, default=None: facts.get(key, default)  # noqa: E731
        self.overview = SimpleNamespace(evaluates=True, get=get, summary={}, environment={}, config={})
        self.first = self.overview

    def values(self, items, metric):
        return {item: float(n < self.right) for n, item in enumerate(items)}


def result(cells, scale="paper", models=("tiny", "tiny"), claims=({"more": "A", "than": "B"},)):
    """Of (row, column) -> how many of 100 items are right, per seed."""
    rows, columns = (list(dict.fromkeys(place[end] for place in cells)) for end in (0, 1))
    spec = SetSpec.model_validate(
        {
            "shows": "x",
            "scores": {"EM": "em"},
            "rows": {row: {} for row in rows},
            "columns": {column: {} for column in columns},
            "claims": claims,
        }
    )
    played = dict(zip(rows, models, strict=False))
    begun = {
        (row, column): {seed: Run(seed, column, right, played[row]) for seed, right in enumerate(rights)}
        for (row, column), rights in cells.items()
    }
    made = SetResult(
        name="x",
        spec=spec,
        scale=scale,
        rows=rows,
        columns=columns,
        metrics={place: {"EM": "em"} for place in cells},
        runs=dict.fromkeys(cells, ()),
    )
    vars(made)["read"] = (begun, [])
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


def test_the_intervals_by_hand():
    one = verdict({("A", "H"): [70, 72, 74], ("B", "H"): [50, 50, 50]})
    assert one.difference == pytest.approx(0.22) and one.seeds == 3
    # differences 0.20, 0.22, 0.24: standard deviation 0.02; t of two degrees of freedom 4.3027
    half = 4.3027 * 0.02 / 3**0.5
    assert one.over_seeds == pytest.approx((0.22 - half, 0.22 + half))
    assert 0.1 < one.interval[0] < 0.22 < one.interval[1] < 0.35


def test_rows_of_two_models_do_not_compare_at_mini():
    cells = {("A", "H"): [70, 71, 69], ("B", "H"): [50, 49, 51]}
    assert verdict(cells, "mini", ("tiny", "tiny_qa")).verdict == "not comparable at mini"
    assert verdict(cells, "paper", ("llama", "qwen")).verdict == "held"
    assert verdict(cells, "mini").verdict == "held"
    titles = {part.title: part.rows for part in parts_of(result(cells, "mini", ("tiny", "tiny_qa")))}
    assert titles["The model that plays each row"][1:] == [["A", "tiny"], ["B", "tiny_qa"]]
    assert "The model that plays each row" not in {part.title for part in parts_of(result(cells, "mini"))}


def test_a_claim_over_several_tasks_names_the_one_that_it_rests_on():
    level = [50, 49, 51]
    rests = {("A", "H"): [90, 91, 89], ("B", "H"): level, ("A", "W"): level, ("B", "W"): [50, 50, 49]}
    one = verdict(rests)
    assert one.verdict == "held" and one.rests_on == ("H",)
    made = result(rests)
    claim = next(part for part in parts_of(made) if part.title == "Claims").rows[1]
    assert claim[2] == "held; rests on H"
    both = {("A", "H"): [90, 91, 89], ("B", "H"): level, ("A", "W"): [80, 82, 81], ("B", "W"): level}
    assert verdict(both).rests_on == ()


def test_quantiles_of_students_t():
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 40):
        assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-4)
