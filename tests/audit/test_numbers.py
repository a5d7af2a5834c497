"""The numbers of an audit, by hand and against plain definitions."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, pvariance, stdev

import pytest

from mmrl import rng
from mmrl.audit import numbers
from mmrl.audit.numbers import Credited, Decision, Judged, Paths, Truth
from mmrl.audit.plays import credited
from mmrl.credit.entries import Credit, Entry
from tests.helpers.tabular import two


def test_the_worked_number_of_the_docs() -> None:
    truth = Truth(continued=(1, 1, 0, 1), others=((1, 0), (0, 0)))
    assert truth.difference == 0.75 - 0.25
    # Outcomes from 0 to 1: one more of each beside the samples.
    assert numbers.add_one_variance((1, 1, 0, 1), 0, 1) == pytest.approx(4 / 6 * 2 / 6)
    assert truth.error(0, 1) == pytest.approx(math.sqrt(2 / 9 / 4 + 0.171875 / 2))
    # Between replies 0.125, of which 0.25 / 2 are the noise of two continuations.
    assert truth.spread == pytest.approx(0.0)
    assert truth.halves == (1 - 0.5, 0.5 - 0.0)


def test_equal_outcomes_do_not_mean_certainty() -> None:
    truth = Truth(continued=(1.0,) * 16, others=((0.0, 0.0),) * 8)
    assert truth.difference == 1 and truth.error(0, 1) > 0.08


def slow_ranks(values: list[int]) -> list[float]:
    return [fmean(i for i, other in enumerate(sorted(values)) if other == value) for value in values]


@pytest.mark.parametrize("seed", range(20))
def test_rank_correlation_with_ties(seed: int) -> None:
    draw = random.Random(seed)
    first, second = ([draw.randrange(5) for _ in range(12)] for _ in range(2))
    a, b = slow_ranks(first), slow_ranks(second)
    assert numbers.ranks(first).tolist() == a
    covariance = fmean((x - fmean(a)) * (y - fmean(b)) for x, y in zip(a, b, strict=True))
    expected = covariance / math.sqrt(pvariance(a) * pvariance(b))
    assert numbers.spearman(first, second) == pytest.approx(expected)


def test_rank_correlation_of_what_does_not_vary() -> None:
    assert numbers.spearman([1, 1, 1], [1, 2, 3]) is None and numbers.spearman([1, 2], [1, 2]) is None


def one(difference: float, clear: bool, credit: float | None, push: float = 0.0, example: str = "q") -> Judged:
    return Judged(example, "a", difference, clear, Credited(credit, push))


def test_right_sign_counts_zero_and_no_credit_against_a_row() -> None:
    row = [one(1, True, 2), one(-1, True, 3), one(1, True, 0), one(-1, True, None), one(1, False, -9)]
    assert numbers.right_sign(row) == 0.25
    assert numbers.right_sign([one(1, False, 1)]) is None


def test_signal_is_the_share_of_the_push() -> None:
    row = [one(1, True, 1, -3.0), one(1, False, 1, 1.0), one(1, True, None, 0.0)]
    assert numbers.signal(row) == 0.75
    assert numbers.signal([one(1, True, 0, 0.0)]) is None


def test_fidelity_pools_credited_calls_and_looks_within_examples() -> None:
    # Two examples with other scales: within each the order is right, together it is not.
    row = [one(d, True, c, example=e) for e, shift in (("q", 0), ("r", 10)) for d, c in ((0 - shift, 1 + shift),)]
    row += [one(d - s, True, d + s, example=e) for e, s in (("q", 0.0), ("r", 10.0)) for d in (1, 2, 3)]
    row = row[2:]
    assert numbers.within_examples(row, 0)[0] == pytest.approx(1)
    pooled = numbers.fidelity(row)
    assert pooled is not None and pooled < 0
    assert numbers.fidelity([*row, one(100, True, None)]) == pooled


def test_bootstrap_resamples_examples() -> None:
    row = [one(d, True, d, 1.0, example=str(d)) for d in range(30)]
    value, interval = numbers.over_examples(row, lambda part: fmean(j.difference for j in part), 0)
    assert value == 14.5 and interval is not None
    error = stdev(range(30)) / math.sqrt(30)
    assert interval[0] == pytest.approx(14.5 - 1.96 * error, abs=0.6)
    assert interval[1] == pytest.approx(14.5 + 1.96 * error, abs=0.6)
    assert numbers.over_examples(row, lambda part: fmean(j.difference for j in part), 0) == (value, interval)


def test_credit_is_a_mean_and_push_a_sum_over_entries_and_tokens() -> None:
    entries = (
        Entry(call="c", reward=0, advantages=(2.0, 2.0), weights=(0.1, 0.1)),
        Entry(call="c", reward=0, advantages=(-1.0, -1.0), weights=(0.3, 0.3)),
        Entry(call="d", reward=0, advantages=(5.0,), weights=(0.0,)),
    )
    credit = Credit(algo="x", entries=entries)
    found = credited(credit, "c")
    assert (found.credit, found.push) == (pytest.approx(-0.25), pytest.approx(-0.2))
    assert credited(credit, "d") == Credited(None, 0) == credited(credit, "absent")


def test_influence_is_a_ratio_of_means_scaled_up_for_calls_not_drawn() -> None:
    # On q's path the module has 3 calls and on r's 1; one of each is drawn: each stands for 2.
    truths = {
        "q": Truth(continued=(0, 0), others=((1, 1), (0, 0))),
        "r": Truth(continued=(0, 0), others=((1, 0), (0, 1))),
    }
    decisions = [Decision(example=e, call=e, module="a", truth=truth) for e, truth in truths.items()]
    paths = Paths(examples=["q", "r"], calls={"a": 4, "b": 0})
    found = numbers.influence(decisions, paths, {"q": [0.0, 2.0], "r": [0.0, 0.0]}, 0)
    # Var_o Q: 0.5 less no noise; 0 less 0.25. Over 2 paths; Var(R) is 2 and 0, its mean 1.
    assert found["a"][0] == pytest.approx(2 * (0.5 - 0.25) / 2 / 1)
    assert found["b"] == (None, None)


def test_the_ceiling_is_what_perfect_credit_reaches() -> None:
    """True D is credited; its correlation with the measured D is the ceiling, up to what ranks differ from numbers."""
    draw = random.Random(0)
    decisions, credits = [], []
    for number in range(400):
        worth, base = draw.uniform(0.1, 0.9), 0.5
        samples = [float(draw.random() < worth) for _ in range(8)]
        others = [(float(draw.random() < base), float(draw.random() < base)) for _ in range(4)]
        decisions.append(
            Decision(example=str(number), call=str(number), module="a", truth=Truth(continued=samples, others=others))
        )
        credits.append(worth - base)
    reached = numbers.spearman(credits, [decision.truth.difference for decision in decisions])
    assert numbers.ceiling(decisions) == pytest.approx(reached, abs=0.06)


def test_noise_alone_has_no_ceiling() -> None:
    draw = random.Random(1)
    truths = [
        Truth(continued=[float(draw.random() < 0.5) for _ in range(8)], others=[(0.0, 1.0)] * 4) for _ in range(300)
    ]
    found = numbers.ceiling([Decision(example=str(n), call=str(n), module="a", truth=t) for n, t in enumerate(truths)])
    assert found is not None and found < 0.4


def test_samples_that_the_credit_has_seen_flatter_it() -> None:
    """The trap: leave-one-out credit against D from the very outcomes that it is made of, and from others."""
    table, shared, apart = two(examples=1), [], []
    chances = table.probabilities(())
    for seed in range(300):
        draw = rng.stream("trap", seed)

        def outcome(reply: int, draw: random.Random = draw) -> float:
            second = draw.choices(range(3), weights=table.probabilities((reply,)))[0]
            return table.outcome(0, (reply, second))

        replies = draw.choices(range(2), weights=chances, k=8)
        outcomes = [outcome(reply) for reply in replies]
        credit = outcomes[0] - fmean(outcomes[1:])
        others = [o for r, o in zip(replies, outcomes, strict=True) if r == replies[0]]
        shared.append((credit, fmean(others) - fmean(outcomes)))
        again = [outcome(reply) for reply in draw.choices(range(2), weights=chances, k=8)]
        apart.append((credit, fmean(outcome(replies[0]) for _ in range(len(others))) - fmean(again)))
    seen = numbers.spearman(*map(list, zip(*shared, strict=True)))
    fresh = numbers.spearman(*map(list, zip(*apart, strict=True)))
    assert seen is not None and fresh is not None and seen > fresh + 0.2


def test_pairs_estimate_the_spread_without_bias() -> None:
    """All outcomes of two replies with two continuations each, weighted by their chances."""
    p, q = (0.3, 0.7), ((0.2, 0.8), (0.6, 0.4))  # chances of the replies; of the outcomes 0 and 1 after each
    expected = 0.0
    for replies in itertools.product(range(2), repeat=2):
        for outcomes in itertools.product(range(2), repeat=4):
            chance = math.prod(p[r] for r in replies)
            chance *= math.prod(q[replies[n // 2]][o] for n, o in enumerate(outcomes))
            pairs = [(float(outcomes[0]), float(outcomes[1])), (float(outcomes[2]), float(outcomes[3]))]
            expected += chance * Truth(continued=(0,), others=pairs).spread
    mean = p[0] * q[0][1] + p[1] * q[1][1]
    assert expected == pytest.approx(p[0] * (q[0][1] - mean) ** 2 + p[1] * (q[1][1] - mean) ** 2)


def test_a_module_without_decisions_has_no_numbers() -> None:
    assert numbers.over_examples(list[Judged](), numbers.fidelity, 0) == (None, None) == numbers.within_examples([], 0)
    assert numbers.over_examples(list[Decision](), numbers.ceiling, 0) == (None, None)
