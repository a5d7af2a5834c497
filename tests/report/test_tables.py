"""Intervals are right, reproducible and paired; numbers are printed so that a person can read them."""

import math
import random

import numpy as np
import pytest

from mmrl.report import stats
from mmrl.report.stats import (
    Difference,
    bootstrap_interval,
    compare_items,
    duration,
    modules_in,
    number,
    paired_difference,
    series,
    short,
    sparkline,
    splits_in,
    trailing_mean,
)
from mmrl.report.tables import before_after_table


def test_the_interval_is_that_of_a_plain_bootstrap():
    draw = random.Random(2)
    values = [draw.random() ** 2 for _ in range(80)]
    means = sorted(sum(draw.choices(values, k=80)) / 80 for _ in range(10_000))
    low, high = bootstrap_interval(values, (0, "x"), 10_000)
    assert low == pytest.approx(means[250], abs=0.004)
    assert high == pytest.approx(means[9750], abs=0.004)


def test_the_interval_covers_the_true_mean_about_19_times_in_20():
    draw = random.Random(3)
    hits = 0
    for trial in range(300):
        low, high = bootstrap_interval([draw.gauss(5, 2) for _ in range(60)], (trial,), 300)
        hits += low <= 5 <= high
    assert 0.90 <= hits / 300 <= 0.985


def test_equal_keys_give_equal_intervals_and_others_do_not():
    values = [random.Random(n).random() for n in range(50)]
    assert bootstrap_interval(values, (1, "em"), 200) == bootstrap_interval(tuple(values), (1, "em"), 200)
    assert bootstrap_interval(values, (1, "em"), 200) != bootstrap_interval(values, (2, "em"), 200)
    assert bootstrap_interval(values, (1, "em"), 200) != bootstrap_interval(values, (1, "f1"), 200)


def test_resampling_in_pieces_is_the_same(monkeypatch):
    values = np.array([random.Random(n).random() for n in range(30)])
    whole = stats.bootstrap_means(values, (1,), 500)
    monkeypatch.setattr(stats, "_CELLS", 100)
    assert (stats.bootstrap_means(values, (1,), 500) == whole).all()


@pytest.mark.parametrize(
    ("values", "ends"), [([], (math.nan, math.nan)), ([0.5], (0.5, 0.5)), ([1.0] * 20, (1.0, 1.0))]
)
def test_edges_of_an_interval(values, ends):
    assert bootstrap_interval(values, (1,)) == pytest.approx(ends, nan_ok=True)


def test_pairing_sees_a_small_steady_gain_that_two_intervals_cannot():
    draw = random.Random(4)
    before = [draw.random() for _ in range(100)]
    after = [value + 0.02 + draw.gauss(0, 0.01) for value in before]
    found = paired_difference(before, after, (0,))
    assert paired_difference(after, before, (0,)).certain  # worse for sure is sure, too
    assert found.certain and 0.015 < found.low < found.difference < found.high < 0.025
    (_, high_before), (low_after, _) = (bootstrap_interval(v, (0,)) for v in (before, after))
    assert high_before > low_after


def test_no_difference_is_not_certain():
    draw = random.Random(5)
    values = [draw.random() for _ in range(100)]
    shuffled = paired_difference(values, random.Random(6).sample(values, 100), (0,))
    assert not shuffled.certain and shuffled.verdict == "may be chance"
    same = paired_difference(values, values, (0,))
    assert (same.low, same.high, same.verdict) == (0, 0, "unchanged")


def test_items_are_matched_by_id_not_by_place():
    before = [{"id": "a", "metrics": {"em": 0.0}}, {"id": "b", "metrics": {"em": 1.0}}]
    after = [{"id": "b", "metrics": {"em": 1.0, "new": 1.0}}, {"id": "c", "metrics": {"em": 0.0}}]
    found = compare_items(before, after, seed=0)
    assert list(found) == ["em"]
    assert (found["em"].n, found["em"].before, found["em"].after) == (1, 1.0, 1.0)
    assert compare_items(before, [], seed=0) == {}


def test_an_item_without_a_metric_counts_0_as_in_the_mean():
    # All rollouts of a part of the items failed, so that nothing reported the metrics of the program.
    whole = [{"id": name, "metrics": {"em": 1.0, "searches": 2.0}} for name in "ab"]
    part = [whole[0], {"id": "b", "metrics": {"em": 0.0}}]
    found = compare_items(whole, part, seed=0)["searches"]
    assert (found.n, found.before, found.after) == (2, 2.0, 1.0)


def test_the_main_metric_comes_first_and_reward_last():
    items = [{"id": "a", "metrics": {"em": 0.0, "reward": 0.0, "acc": 0.0, "f1": 1.0}}]
    assert list(compare_items(items, items, 0, main_metric="f1")) == ["f1", "em", "acc", "reward"]


def test_the_table_says_what_is_not_certain():
    def difference(low, high):
        return Difference(n=200, before=0.37, after=0.91, difference=0.54, low=low, high=high)

    table = before_after_table({"em": difference(0.4, 0.6), "f1": difference(-0.1, 0.6)}, "dev")
    em, f1 = (line for line in table.splitlines() if line.lstrip().startswith(("em", "f1")))
    assert "0.370  0.910      +0.540" in em and "chance" not in em
    assert "[-0.100, +0.600]" in f1 and f1.endswith("may be chance")
    assert table.startswith("dev (200 items)")
    assert "no items" in before_after_table({}, "dev")


@pytest.mark.parametrize("size", [1e15, 1e39, 9.9e99])
def test_scores_of_any_size_keep_a_table_narrow(size):
    change = Difference(n=6, before=size, after=-size, difference=-2 * size, low=-3 * size, high=size)
    row = before_after_table({"x": change}, "dev").splitlines()[-1]
    assert row.split() == [
        *("x", f"{size:.1e}", f"{-size:.1e}", f"{-2 * size:+.1e}"),
        *(f"[{-3 * size:+.1e},", f"{size:+.1e}]", "may", "be", "chance"),
    ]
    assert len(row) < 100
    small = Difference(n=6, before=1e14, after=-0.5, difference=0.0, low=-0.5, high=0.5)
    assert "100000000000000.000  -0.500" in before_after_table({"x": small}, "dev")


def test_series_skips_what_is_no_number():
    history = [{"step": s, "a": v} for s, v in enumerate([1, None, math.nan, True, "x", 2.5, math.inf])]
    steps, values = series(history, "a")
    assert steps.tolist() == [0, 5] and values.tolist() == [1.0, 2.5]
    assert number(np.float32(0.5)) == 0.5


def test_names_in_keys():
    record = {"module/a.b/reward": 1, "module/c/x": 2, "module/": 1, "eval/dev/em": 1, "eval/test/em": 1}
    assert modules_in([record]) == ("a.b", "c")
    assert splits_in([record]) == ("dev", "test")


def test_trailing_mean():
    assert trailing_mean(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [1.0, 1.5, 2.5, 3.5]
    assert trailing_mean(np.array([]), 2).tolist() == []


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 24) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0], 24) == "▄▄"
    assert sparkline([math.nan], 24) == ""
    assert len(sparkline(range(1000), 24)) == 24
    assert sparkline([0, 1], 24, ascii_only=True).isascii()
    assert sparkline([1, 1, 3, 3], 2) == "▁█"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.4123, "0.412"),
        (12345, "12.3k"),
        (2.5e6, "2.5M"),
        (2.5e9, "2.5G"),
        (2.5e12, "2.5T"),
        (1e15, "1.0e+15"),
        (-1e100, "-1.0e+100"),
        (10**18, "1.0e+18"),
        (7, "7"),
        (-3, "-3"),
        (21.04, "21.0"),
        (140.2, "140"),
        (96.0, "96"),
        (1e-6, "1.0e-06"),
        (0.0, "0.000"),
        (-0.5, "-0.500"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_short(value, shown):
    assert short(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
        (270000, "3 d 3 h"),
        (math.nan, "-"),
    ],
)
def test_duration(seconds, shown):
    assert duration(seconds) == shown
