"""Baselines of single turns where rollouts differ in length: `missing_turn` of `mt_grpo_variable`."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mmrl.algorithms import ALGORITHMS
from mmrl.config import ALGO_SCHEMAS
from tests.helpers.forests import Grow, advantage, by_call, chains, numbers

TOLERANCE = 1e-9
PLAIN = {"scale": False, "alpha": 1.0}


def credit(forest, **options):
    algo = ALGO_SCHEMAS["mt_grpo_variable"].model_validate({"name": "mt_grpo_variable", **options})
    return ALGORITHMS["mt_grpo_variable"].credit(forest, algo, 0, None)


def forest_of(*rollouts):
    """One example; of each rollout the rewards of its intermediate turns, and its outcome."""
    grow = Grow(("agent",))
    for index, (turns, outcome) in enumerate(rollouts):
        leaf = None
        for turn, reward in enumerate((*turns, None)):
            leaf = grow.call(f"q/{index}t{turn}", leaf, "agent", turn_reward=reward)
        grow.end(leaf, outcome, error=None if outcome is not None else "tool")
    return grow.forest


THREE = (((1.0, 0.5), 1.0), ((1.0,), 0.0), ((), 0.5))
"""Turn 0: 1, 1, absent: less their mean 1/3, 1/3, -2/3. Turn 1: 0.5, absent, absent: 1/3, -1/6, -1/6.
Outcome: 1, 0, 0.5: 1/2, -1/2, 0."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            [[1 / 3 + 1 / 3 + 1 / 2, 1 / 3 + 1 / 2, 1 / 2], [1 / 3 - 1 / 6 - 1 / 2, -1 / 6 - 1 / 2], [-2 / 3 - 1 / 6]],
        ),
        # The outcome reaches turn k with alpha^(n - k), n the rollout's own number of intermediate turns.
        (
            {"alpha": 0.5, "turn_coef": 2.0},
            [[2 / 3 + 1 / 3 + 1 / 8, 2 / 3 + 1 / 4, 1 / 2], [2 / 3 - 1 / 6 - 1 / 4, -1 / 3 - 1 / 2], [-4 / 3 - 1 / 6]],
        ),
        # 3/2 of all of them: G / (G - 1)
        ({"baseline": "leave_one_out"}, [[7 / 4, 5 / 4, 3 / 4], [-1 / 2, -1], [-5 / 4]]),
    ],
)
def test_absent_turns_by_hand(options, expected):
    entries = by_call(credit(forest_of(*THREE), **{**PLAIN, **options}))
    found = [[advantage(entries[f"q/{i}t{turn}"]) for turn in range(len(row))] for i, row in enumerate(expected)]
    assert found == [pytest.approx(row, abs=TOLERANCE) for row in expected]


def test_absorb_is_the_default_and_its_part_is_named():
    entries = by_call(credit(forest_of(*THREE), **PLAIN))
    assert entries["q/2t0"].parts == pytest.approx({"outcome": 0.5, "own_advantage": 0.0, "absent_turns": -5 / 6})
    assert entries["q/1t1"].parts == pytest.approx({"outcome": 0.0, "own_advantage": -0.5, "absent_turns": -1 / 6})
    assert "absent_turns" not in entries["q/0t2"].parts and "absent_turns" not in entries["q/1t0"].parts
    assert by_call(credit(forest_of(*THREE), **PLAIN, missing_turn="absorb")) == entries
    for other in ("zero", "exclude"):
        found = by_call(credit(forest_of(*THREE), **PLAIN, missing_turn=other))
        assert not any("absent_turns" in entry.parts for entry in found.values())
        assert [e.weights for e in found.values()] == [e.weights for e in entries.values()]


def test_two_turns_have_no_such_choice():
    with pytest.raises(ValidationError, match="missing_turn"):
        ALGO_SCHEMAS["mt_grpo"].model_validate({"name": "mt_grpo", "missing_turn": "absorb"})


def test_a_failed_rollout_of_the_model_counts_and_one_of_a_tool_does_not():
    long = (((0.5, 0.5, 0.5), None),)  # the longest, but its tool failed: no turn of it is compared
    with_failure = credit(forest_of(*THREE, *long), **PLAIN)
    assert with_failure.entries == credit(forest_of(*THREE), **PLAIN).entries
    grow = forest_of(*THREE, ((0.5, 0.5, 0.5), 0.0))
    failed = replace(grow, rollouts=(*grow.rollouts[:-1], replace(grow.rollouts[-1], error="length")))
    assert by_call(credit(failed, **PLAIN))["q/2t0"].parts["absent_turns"] != pytest.approx(-5 / 6)


def test_an_example_of_one_rollout_stays_out():
    (entry,) = credit(forest_of(((), 1.0)), **PLAIN).entries
    assert entry.advantages == (0.0,) and entry.weights == (0.0,) and "absent_turns" not in entry.parts


def slow(forest, *, alpha, turn_coef, scale, loo, eps=1e-6, ddof=1):
    """Advantages by the definition: absent turns are turns of reward 0, each quantity compared on its own."""
    paths = defaultdict(list)
    for rollout in forest.rollouts:
        if rollout.reward is not None and rollout.leaf is not None:
            path, call = [], rollout.leaf
            while call is not None:
                path.insert(0, forest.calls[call])
                call = path[0].parent
            paths[rollout.example].append((path, rollout.reward))
    found = {}
    for members in paths.values():
        size = len(members)

        def compared(values, size=size):
            mean = sum(values) / size
            if size < 2 or max(values) - min(values) < 1e-12:
                return [0.0] * size
            std = math.sqrt(sum((v - mean) ** 2 for v in values) / (size - ddof))
            factor = (size / (size - 1) if loo else 1.0) / (std + eps if scale else 1.0)
            return [(v - mean) * factor for v in values]

        longest = max(len(path) - 1 for path, _ in members)
        turns = [
            compared([(path[t].turn_reward or 0.0) if t < len(path) - 1 else 0.0 for path, _ in members])
            for t in range(longest)
        ]
        outcome = compared([reward for _, reward in members])
        for i, (path, _) in enumerate(members):
            n = len(path) - 1
            for k, call in enumerate(path):
                later = sum(alpha ** (t - k) * turns[t][i] for t in range(k, longest))
                found[call.id] = turn_coef * later + alpha ** (n - k) * outcome[i]
    return found


@settings(max_examples=60, deadline=None)
@given(
    chains(turn_rewards=st.one_of(numbers, st.none())),
    st.sampled_from([1.0, 0.9, 0.0]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
    st.booleans(),
)
def test_absorb_is_its_definition(forest, alpha, turn_coef, scale, loo):
    options = {"alpha": alpha, "turn_coef": turn_coef, "scale": scale, "eps": 1e-6}
    entries = by_call(credit(forest, **options, baseline="leave_one_out" if loo else "mean"))
    expected = slow(forest, alpha=alpha, turn_coef=turn_coef, scale=scale, loo=loo)
    assert {name: entry.advantages[0] for name, entry in entries.items()} == pytest.approx(expected, abs=TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(chains(modules=("a", "b", "c"), linear=True, turn_rewards=numbers), st.booleans())
def test_with_equal_lengths_and_all_rewards_present_absorb_is_zero(forest, scale):
    absorb, zero = (credit(forest, scale=scale, missing_turn=missing) for missing in ("absorb", "zero"))
    assert absorb.entries == zero.entries


# -- the bias of a policy that decides when to stop --------------------------------------------------------------------

GROUPS = 1000
GOES_ON = 1 / (1 + math.exp(-0.3))
TRUE_GRADIENT = 0.5 * sum(turn * GOES_ON ** (turn - 1) for turn in range(1, 5)) * GOES_ON * (1 - GOES_ON)


@pytest.fixture(scope="module")
def stopping():
    """1,000 groups of 8: before each of 4 turns a policy goes on with probability p; each turn earns 0.5.

    With each call the derivative of its decision's log-probability by the logit of p.
    """
    draws = random.Random(0)
    grow, scores = Grow(("agent",)), {}
    for example in range(GROUPS):
        for index in range(8):
            leaf = None
            for turn in range(5):
                goes_on = turn < 4 and draws.random() < GOES_ON
                name = f"q{example}/{index}t{turn}"
                scores[name] = 0.0 if turn == 4 else (1 - GOES_ON if goes_on else -GOES_ON)
                leaf = grow.call(name, leaf, "agent", turn_reward=0.5 if goes_on else None)
                if not goes_on:
                    break
            grow.end(leaf, 0.0)
    return grow.forest, scores


@pytest.mark.parametrize(
    ("missing", "baseline", "expected"),
    [
        ("absorb", "leave_one_out", TRUE_GRADIENT),
        ("absorb", "mean", 7 / 8 * TRUE_GRADIENT),  # a rollout's own reward is in its baseline
        ("zero", "leave_one_out", 0.327),
        ("exclude", "leave_one_out", 0.0),
    ],
)
def test_the_gradient_of_a_policy_that_decides_when_to_stop(stopping, missing, baseline, expected):
    forest, scores = stopping
    unbiased = {"scale": False, "alpha": 1.0, "loss_mean": "constant", "loss_length": 1}
    entries = credit(forest, missing_turn=missing, baseline=baseline, **unbiased).entries
    gradient = sum(scores[e.call] * e.advantages[0] * e.weights[0] for e in entries)
    # one group's estimate deviates by about 0.18
    assert gradient == pytest.approx(expected, abs=4 * 0.18 / math.sqrt(GROUPS))
    assert pytest.approx(0.476, abs=5e-4) == TRUE_GRADIENT
