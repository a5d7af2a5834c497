"""Input that is odd or wrong, under every algorithm: one defined behaviour each.

Groups of one, completions without tokens, examples without a scored rollout: tests/credit/test_conventions.py.
"""

import math
from dataclasses import replace

import pytest

from mmrl.errors import DataError
from tests.helpers.forests import REWARDED, Grow, credit, total_weight

EVERY = REWARDED


def grown(*rows, modules=("a", "b")):
    """One rollout per row: (example, modules called, reward); calls have what critics need."""
    grow = Grow(modules)
    estimates = {"values": (0.0, 0.0), "logprobs": (-1.0, -1.0), "ref_logprobs": (-1.0, -1.0)}
    for number, (example, called, reward) in enumerate(rows):
        parent = None
        for position, module in enumerate(called):
            turn_reward = 0.1 if position < len(called) - 1 else None
            name = f"{example}/{number}#{position}"
            parent = grow.call(name, parent, module, 2, turn_reward=turn_reward, **estimates)
        error = None if reward is not None else "tool"
        grow.end(parent, reward, id=f"{example}/{number}", example=example, error=error, fork="a")
    return grow.forest


def sound(found):
    for entry in found.entries:
        assert all(map(math.isfinite, (*entry.advantages, *entry.weights, entry.reward)))
    assert total_weight(found) <= 1 + 1e-9


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e200])
def test_a_reward_that_is_no_number_is_refused_by_name(name, value):
    forest = grown(("q", "ab", 1.0), ("q", "ab", value))
    with pytest.raises(DataError, match=r"rollout 'q/1': reward"):
        credit(forest, name)


@pytest.mark.parametrize("name", EVERY)
def test_a_module_that_is_never_called_changes_nothing(name):
    rows = [("q", "ab", 1.0), ("q", "ab", 0.0), ("p", "ab", 0.2), ("p", "ab", 0.4)]
    without, beside = (
        credit(grown(*rows, modules=modules), name).entries for modules in (("a", "b"), ("a", "b", "never"))
    )
    assert [(e.call, e.advantages, e.weights) for e in beside] == [(e.call, e.advantages, e.weights) for e in without]


@pytest.mark.parametrize("name", EVERY)
def test_ragged_invocations_are_credited(name):
    forest = grown(("q", "abb", 1.0), ("q", "ab", 0.0), ("q", "abbb", 0.5))
    found = credit(forest, name)
    sound(found)
    weighed = {entry.call for entry in found.entries if any(entry.weights)}
    # IS compares each tree's own module, C3 samples of one call: here that of the beginning alone.
    assert weighed >= {"q/0#1", "q/1#1", "q/2#1"} or name in ("mhgpo_is", "c3")
    assert total_weight(found) > 0


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("reward", [None, 0.0])
def test_a_rollout_that_failed_before_its_first_call_has_no_entry(name, reward):
    rows = [("q", "ab", 1.0), ("q", "ab", 0.0)]
    forest = grown(*rows)
    unborn = replace(forest.rollouts[0], id="q/x", leaf=None, reward=reward, error="length" if reward == 0 else "tool")
    beside = replace(forest, rollouts=(*forest.rollouts, unborn))
    found = credit(beside, name)
    sound(found)
    assert {entry.call for entry in found.entries} == set(forest.calls)
    places = {"mmgrpo": 3}.get(name, 2)  # mmGRPO pads its groups to the number of rollouts
    assert len([entry for entry in found.entries if entry.call.endswith("#0")]) == places
