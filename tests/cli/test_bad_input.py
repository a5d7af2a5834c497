"""Input that is odd or wrong, under every algorithm: one defined behaviour each (docs/algorithms.md has the table)."""

import json
import math
from dataclasses import replace

import pytest

from mmrl.algorithms import ALGORITHMS
from mmrl.cli import main
from mmrl.config import ALGO_SCHEMAS
from mmrl.errors import DataError
from tests.helpers.forests import Grow

GROUPED = sorted(name for name, algo in ALGORITHMS.items() if not algo.needs_critic)
CRITIC = sorted(name for name, algo in ALGORITHMS.items() if algo.needs_critic)
EVERY = [*GROUPED, *CRITIC]


def grown(*rows, modules=("a", "b"), tokens=2):
    """One rollout per row: (example, modules called, reward); calls have what critics need."""
    grow = Grow(modules)
    for number, (example, called, reward) in enumerate(rows):
        parent = None
        for position, module in enumerate(called):
            size = tokens[position] if isinstance(tokens, tuple) else tokens
            parent = grow.call(
                f"{example}/{number}#{position}",
                parent,
                module,
                size,
                turn_reward=0.1 if position < len(called) - 1 else None,
                values=(0.0,) * size,
                logprobs=(-1.0,) * size,
                ref_logprobs=(-1.0,) * size,
            )
        error = None if reward is not None else "tool"
        grow.end(parent, reward, id=f"{example}/{number}", example=example, error=error, fork="a")
    return grow.forest


def credit(forest, name, **options):
    algo = ALGO_SCHEMAS[name].model_validate({"name": name, **options})
    return ALGORITHMS[name].credit(forest, algo, 0).entries


def weight(entries, *calls):
    return math.fsum(w for entry in entries for w in entry.weights if not calls or entry.call in calls)


def sound(entries):
    for entry in entries:
        assert all(map(math.isfinite, (*entry.advantages, *entry.weights, entry.reward)))
    assert weight(entries) <= 1 + 1e-9


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e200])
def test_a_reward_that_is_no_number_is_refused_by_name(name, value):
    forest = grown(("q", "ab", 1.0), ("q", "ab", value))
    with pytest.raises(DataError, match=r"rollout 'q/1': reward"):
        credit(forest, name)


@pytest.mark.parametrize("name", EVERY)
def test_an_example_without_a_scored_rollout_is_an_empty_group_and_takes_no_share(name):
    rows = [("q", "ab", 1.0), ("q", "ab", 0.0)]
    alone = credit(grown(*rows), name)
    beside = credit(grown(*rows, ("p", "ab", None), ("p", "ab", None)), name)
    assert [(e.call, e.advantages, e.weights) for e in beside] == [(e.call, e.advantages, e.weights) for e in alone]
    assert credit(grown(("p", "ab", None)), name) == ()
    assert credit(grown(), name) == ()


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_no_advantage_and_no_weight(name):
    entries = credit(grown(("q", "ab", 1.0)), name, **({"padding_mode": "ragged"} if name == "mmgrpo" else {}))
    assert entries and weight(entries) == 0
    # IGPO compares turns with each other too, so a turn of a lone rollout has an advantage, and weight 0 all the same.
    assert name == "igpo" or not any(a for entry in entries for a in entry.advantages)


@pytest.mark.parametrize("name", EVERY)
def test_a_module_that_is_never_called_changes_nothing(name):
    rows = [("q", "ab", 1.0), ("q", "ab", 0.0), ("p", "ab", 0.2), ("p", "ab", 0.4)]
    without, beside = (credit(grown(*rows, modules=modules), name) for modules in (("a", "b"), ("a", "b", "never")))
    assert [(e.call, e.advantages, e.weights) for e in beside] == [(e.call, e.advantages, e.weights) for e in without]


@pytest.mark.parametrize("name", EVERY)
def test_ragged_invocations_are_credited(name):
    forest = grown(("q", "abb", 1.0), ("q", "ab", 0.0), ("q", "abbb", 0.5))
    entries = credit(forest, name)
    sound(entries)
    assert {entry.call for entry in entries if any(entry.weights)} >= {"q/0#1", "q/1#1", "q/2#1"} or name == "mhgpo_is"
    assert weight(entries) > 0


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("reward", [None, 0.0])
def test_a_rollout_that_failed_before_its_first_call_has_no_entry(name, reward):
    rows = [("q", "ab", 1.0), ("q", "ab", 0.0)]
    forest = grown(*rows)
    unborn = replace(forest.rollouts[0], id="q/x", leaf=None, reward=reward, error="length" if reward == 0 else "tool")
    beside = replace(forest, rollouts=(*forest.rollouts, unborn))
    found = credit(beside, name)
    sound(found)
    assert {entry.call for entry in found} == set(forest.calls)
    places = {"mmgrpo": 3}.get(name, 2)  # mmGRPO pads its groups to the number of rollouts
    assert len([entry for entry in found if entry.call.endswith("#0")]) == places


@pytest.mark.parametrize("name", EVERY)
def test_a_completion_without_tokens_takes_no_weight(name):
    forest = grown(("q", "ab", 1.0), ("q", "ab", 0.0), tokens=(2, 0))
    entries = credit(forest, name)
    sound(entries)
    for entry in entries:
        assert len(entry.advantages) == len(entry.weights) == forest.calls[entry.call].completion_tokens
    assert weight(entries) == pytest.approx(1.0), "the others have all of it"


@pytest.mark.parametrize("name", CRITIC)
@pytest.mark.parametrize("values", [(0.0,), (0.0,) * 9, None])
def test_values_of_the_wrong_length_are_refused_by_call(name, values):
    forest = grown(("q", "ab", 1.0))
    calls = dict(forest.calls) | {"q/0#1": replace(forest.calls["q/0#1"], values=values)}
    with pytest.raises(DataError, match=r"q/0#1"):
        credit(replace(forest, calls=calls), name)


def test_a_malformed_file_is_refused_with_the_record(tmp_path, capsys):
    """What is malformed: tests/report/test_forest.py."""
    calls = [{"id": "c0", "example": "q", "parent": "c9", "module": "a", "completion_tokens": 2}]
    path = tmp_path / "forest.json"
    path.write_text(json.dumps({"version": 1, "modules": ["a"], "calls": calls, "rollouts": []}))
    assert main(["credit", "algo=grpo", f"rollouts={path}"]) == 2
    assert capsys.readouterr() == ("", f"error: {path}: call 'c0': parent: got 'c9', which is no call\n")
