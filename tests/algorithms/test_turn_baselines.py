"""Baselines of single turns where rollouts differ in length: `missing_turn` of `mt_grpo_variable`."""

import functools
import math
import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mmrl.config import ALGO_SCHEMAS
from tests.helpers.forests import Grow, advantage, by_call, chains, numbers, turns
from tests.helpers.forests import credit as credit_by

TOLERANCE = 1e-9
PLAIN: dict[str, Any] = {"scale": False, "alpha": 1.0}


credit = functools.partial(credit_by, name="mt_grpo_variable")


THREE = ((1.0, 0.5, 1.0), (1.0, 0.0), (0.5,))
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
    entries = by_call(credit(turns(*THREE), **{**PLAIN, **options}))
    found = [[advantage(entries[f"q/{i}#{turn}"]) for turn in range(len(row))] for i, row in enumerate(expected)]
    assert found == [pytest.approx(row, abs=TOLERANCE) for row in expected]


def test_absorb_is_the_default_and_its_part_is_named():
    entries = by_call(credit(turns(*THREE), **PLAIN))
    assert entries["q/2#0"].parts == pytest.approx({"outcome": 0.5, "own_advantage": 0.0, "absent_turns": -5 / 6})
    assert entries["q/1#1"].parts == pytest.approx({"outcome": 0.0, "own_advantage": -0.5, "absent_turns": -1 / 6})
    assert "absent_turns" not in entries["q/0#2"].parts and "absent_turns" not in entries["q/1#0"].parts
    assert by_call(credit(turns(*THREE), **PLAIN, missing_turn="absorb")) == entries
    for other in ("zero", "exclude"):
        found = by_call(credit(turns(*THREE), **PLAIN, missing_turn=other))
        assert not any("absent_turns" in entry.parts for entry in found.values())
        assert [e.weights for e in found.values()] == [e.weights for e in entries.values()]


def test_two_turns_have_no_such_choice():
    with pytest.raises(ValidationError, match="missing_turn"):
        ALGO_SCHEMAS["mt_grpo"].model_validate({"name": "mt_grpo", "missing_turn": "absorb"})


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


@settings(max_examples=60)
@given(
    chains(turn_rewards=st.one_of(numbers, st.none())),
    st.sampled_from([1.0, 0.9, 0.0]),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
    st.booleans(),
)
def test_absorb_is_its_definition(forest, alpha, turn_coef, scale, loo):
    options: dict[str, Any] = {"alpha": alpha, "turn_coef": turn_coef, "scale": scale, "eps": 1e-6}
    entries = by_call(credit(forest, **options, baseline="leave_one_out" if loo else "mean"))
    expected = slow(forest, alpha=alpha, turn_coef=turn_coef, scale=scale, loo=loo)
    assert {name: entry.advantages[0] for name, entry in entries.items()} == pytest.approx(expected, abs=TOLERANCE)


@settings(max_examples=40)
@given(chains(modules=("a", "b", "c"), linear=True, turn_rewards=numbers), st.booleans())
def test_with_equal_lengths_and_all_rewards_present_absorb_is_zero(forest, scale):
    absorb, zero = (credit(forest, scale=scale, missing_turn=missing) for missing in ("absorb", "zero"))
    assert absorb.entries == zero.entries


# -- bias and variance for a policy that decides when to stop (the table of docs/turn-rewards.md) ----------------------

GOES_ON = 1 / (1 + math.exp(-0.3))
TURNS, REWARD, ROLLOUTS = 4, 0.5, 8
TRUE_GRADIENT = REWARD * sum(turn * GOES_ON ** (turn - 1) for turn in range(1, 5)) * GOES_ON * (1 - GOES_ON)
UNBIASED: dict[str, Any] = {"loss_mean": "constant", "loss_length": 1}
PLAIN_PPO = {"whiten": "none", "gae_lambda": 1.0, "gamma": 1.0, "beta": 0.0}
ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, leave_one_out": ("grpo", {"baseline": "leave_one_out", "scale": False}),
    "grpo, mean": ("grpo", {"scale": False}),
    "absorb, leave_one_out": ("mt_grpo_variable", {**PLAIN, "baseline": "leave_one_out"}),
    "absorb, mean": ("mt_grpo_variable", PLAIN),
    "absorb, leave_one_out, alpha 0.9": ("mt_grpo_variable", {**PLAIN, "alpha": 0.9, "baseline": "leave_one_out"}),
    "absorb, leave_one_out, loss_mean=seq": (
        "mt_grpo_variable",
        {**PLAIN, "baseline": "leave_one_out", "loss_mean": "seq", "loss_length": None},
    ),
    "absorb, mean, scale": ("mt_grpo_variable", {"alpha": 1.0}),
    "zero, leave_one_out": ("mt_grpo_variable", {**PLAIN, "baseline": "leave_one_out", "missing_turn": "zero"}),
    "zero, mean": ("mt_grpo_variable", {**PLAIN, "missing_turn": "zero"}),
    "exclude, leave_one_out": ("mt_grpo_variable", {**PLAIN, "baseline": "leave_one_out", "missing_turn": "exclude"}),
    "exclude, mean": ("mt_grpo_variable", {**PLAIN, "missing_turn": "exclude"}),
    "mt_ppo, critic knows V": ("mt_ppo", PLAIN_PPO),
    "mt_ppo, critic knows V, lambda 0": ("mt_ppo", {**PLAIN_PPO, "gae_lambda": 0.0}),
    "mt_ppo, critic says 0": ("mt_ppo zero", PLAIN_PPO),
    "mt_ppo, critic says 0, lambda 0": ("mt_ppo zero", {**PLAIN_PPO, "gae_lambda": 0.0}),
    "ppo, critic knows V": ("ppo", PLAIN_PPO),
}


@functools.cache
def stopping(examples, turns, critic_says_0):
    """Groups of 8: before each of 4 turns a policy goes on with probability p; each turn earns 0.5.

    With each call the derivative of its decision's log-probability by the logit of p. What has no turn rewards gets
    their sum as outcome. A critic knows the reward to come before each decision, or says 0.
    """
    draws = random.Random(0)
    grow, scores = Grow(("agent",)), {}
    to_come = [REWARD * sum(GOES_ON**n for n in range(1, TURNS - turn + 1)) for turn in range(TURNS + 1)]
    for example in range(examples):
        for index in range(ROLLOUTS):
            leaf = None
            for turn in range(TURNS + 1):
                goes_on = turn < TURNS and draws.random() < GOES_ON
                name = f"q{example}/{index}t{turn}"
                scores[name] = 0.0 if turn == TURNS else (1 - GOES_ON if goes_on else -GOES_ON)
                reward = REWARD if goes_on and turns else None
                # At the end everything is paid that was earned before, so a critic of the outcome adds it.
                earned = 0.0 if turns else REWARD * turn
                value = 0.0 if critic_says_0 else to_come[turn] + earned
                leaf = grow.call(name, leaf, "agent", turn_reward=reward, values=(value,))
                if not goes_on:
                    grow.end(leaf, earned)
                    break
    return grow.forest, scores


def estimate(name, examples):
    """Mean and standard deviation, over groups of 8 rollouts, of the gradient of the expected return."""
    algorithm, options = ESTIMATORS[name]
    forest, scores = stopping(examples, algorithm.startswith("mt_"), algorithm.endswith("zero"))
    algorithm = algorithm.partition(" ")[0]
    groups = defaultdict(float)
    for entry in credit_by(forest, algorithm, **{**UNBIASED, **options}).entries:
        groups[entry.call.partition("/")[0]] += scores[entry.call] * entry.advantages[0] * entry.weights[0] * examples
    return statistics.fmean(groups.values()), statistics.stdev(groups.values())


def documented():
    """Rows of the table: name, then mean and standard deviation."""
    rows = (line.strip("| \n").split(" | ") for line in Path("docs/turn-rewards.md").read_text("utf-8").splitlines())
    return {row[0]: (float(row[1]), float(row[2])) for row in rows if row[0] in ESTIMATORS}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_gradient_of_a_policy_that_decides_when_to_stop(name):
    examples = 500
    mean, deviation = estimate(name, examples)
    expected_mean, expected_deviation = documented()[name]
    assert mean == pytest.approx(expected_mean, abs=4 * expected_deviation / math.sqrt(examples) + 0.001)
    assert deviation == pytest.approx(expected_deviation, rel=0.12)


def test_which_estimators_have_no_bias():
    assert pytest.approx(0.476, abs=5e-4) == TRUE_GRADIENT
    unbiased = {"grpo, leave_one_out", "absorb, leave_one_out", "mt_ppo, critic knows V", "mt_ppo, critic says 0"}
    unbiased |= {"mt_ppo, critic knows V, lambda 0", "ppo, critic knows V"}
    found = documented()
    assert {name for name, (mean, _) in found.items() if abs(mean - TRUE_GRADIENT) < 0.004} == unbiased
    seven_eighths = {name for name, (mean, _) in found.items() if abs(mean - 7 / 8 * TRUE_GRADIENT) < 0.004}
    assert seven_eighths == {"grpo, mean", "absorb, mean"}  # a rollout's own reward is in its baseline


if __name__ == "__main__":  # python -m tests.algorithms.test_turn_baselines: the rows of the table
    for row in ESTIMATORS:
        print("| {} | {:.3f} | {:.3f} |".format(row, *estimate(row, 20_000)), flush=True)
