"""C3: worked numbers, the algorithms that it is a case of, and its expected gradient over all forests there are."""

import math
import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mmrl.algorithms import ALGORITHMS
from mmrl.cli.configs import configured
from mmrl.config import ALGO_SCHEMAS
from mmrl.rollout.plans import Fork, Tree
from tests.algorithms.test_laws import LAW, SHARED, TOLERANCE, assert_same, table
from tests.helpers.forests import Grow, advantage, by_call, chains, credit, forked
from tests.helpers.programs import forest_of
from tests.helpers.tabular import bifurcation, skipping, two
from tests.helpers.tabular_model import tabular_environment

CONSTANT: dict[str, Any] = {"loss_mean": "constant", "loss_length": 1}
RLOO: dict[str, Any] = {"baseline": "leave_one_out", "scale": False}


def section(**options):
    return ALGO_SCHEMAS["c3"].model_validate({"name": "c3", **options})


def plan(modules, **options):
    return ALGORITHMS["c3"].plan(section(**options), modules, ())


# -- plan --------------------------------------------------------------------------------------------------------------


def test_calls_that_are_sampled_several_times():
    (tree,) = plan(("a", "b", "c"))
    assert tree == Tree((Fork("a", 2), Fork("b", 2), Fork("c", 4))) and tree.size == 16
    (tree,) = plan(("a", "b"), fanout={"b:2": 3, "a": 2, "b": 1})
    assert tree == Tree((Fork("b", 3, 2), Fork("a", 2))) and tree.size == 6


def test_a_plan_of_too_many_leaves_is_refused():
    """Before the run, with their number; so are modules that the program does not have."""
    check = ALGORITHMS["c3"].check
    many = section(fanout={"a": 5, "b:1": 13})
    assert check(many, ("a", "b"), ()) == [
        "algo.fanout: 65 rollouts of each example (a:0 5, b:1 13), expected at most algo.max_leaves=64"
    ]
    assert check(section(fanout={"a": 5, "b:1": 13}, max_leaves=65), ("a", "b"), ()) == []
    assert check(section(group_size=33), ("a", "b"), ())[0].startswith("algo.fanout: 66 rollouts")
    (problem,) = check(section(fanout={"aa": 1, "b": 2}), ("a", "b"), ())
    assert problem.startswith("algo.fanout: got 'aa', expected one of a, b")


@pytest.mark.parametrize(
    ("fanout", "says"),
    [
        ({"a": 0}, "a: got 0, expected 1 to"),
        ({"a": 1}, "no call is compared"),
        ({}, "no call is compared"),
        ({"a:b": 2}, "got 'a:b', expected a module, or module:invocation"),
        ({"a": 2, "a:0": 3}, "got 'a' and 'a:0', which are the same call"),
    ],
)
def test_numbers_of_samples_that_say_nothing_are_refused(fanout, says):
    with pytest.raises(ValidationError, match=re.escape(says)):
        section(fanout=fanout)


def test_a_search_agent_forks_its_first_three_turns():
    """By a file of the two together; a typed mapping replaces it, a typed call adds to it; others have the rule."""

    def fanout(*words: str) -> Any:
        algo: Any = configured(["algo=c3", *words]).algo
        return algo.fanout

    assert fanout("task=search_agent") == {"agent": 2, "agent:1": 2, "agent:2": 2}
    assert fanout("task=search_agent", "algo.fanout={agent:4,agent\\:1:1}") == {"agent": 4, "agent:1": 1}
    assert fanout("task=search_agent", "algo.fanout.agent=4") == {"agent": 4, "agent:1": 2, "agent:2": 2}
    assert fanout("task=search_agent", "algo.fanout=null") is fanout() is None


def played(table, **options):
    """The forest of the first example, by the real engine; histories of calls by id."""
    env = tabular_environment(table)
    forest = forest_of(env, plans=plan(table.modules, **options))
    assert all(rollout.error is None for rollout in forest.rollouts)
    return forest, {c.id: tuple(map(int, c.prompt_text.removeprefix("[user] h"))) for c in forest.calls.values()}


def siblings(forest):
    """(Parent, module, invocation) -> number of calls."""
    return Counter((call.parent, call.module, call.invocation) for call in forest.calls.values())


def test_a_module_that_is_left_out_loses_its_own_fork_alone():
    """A first reply of 1 leaves `b` out: `c` forks all the same, and so does it behind `b`."""
    forest, _ = played(skipping(), fanout={"a": 6, "b": 2, "c": 3})
    found = siblings(forest)
    firsts = [call for call in forest.calls.values() if call.module == "a"]
    assert {call.text for call in firsts} == {"r0", "r1"}
    for call in firsts:
        after = {key: count for key, count in found.items() if key[0] == call.id}
        assert after == ({(call.id, "b", 0): 2} if call.text == "r0" else {(call.id, "c", 0): 3})
    assert all(found[call.id, "c", 0] == 3 for call in forest.calls.values() if call.module == "b")


def test_a_branch_that_stops_early_is_one_leaf():
    forest, _ = played(two(stops=True), fanout={"first": 6, "second": 2})
    firsts = Counter(call.text for call in forest.calls.values() if call.module == "first")
    assert firsts["r0"] and firsts["r1"] and len(forest.rollouts) == 2 * firsts["r0"] + firsts["r1"]


def test_a_later_call_of_a_module_forks_where_it_is_named():
    """An agent of three turns that forks at the second alone: the first is one call, the third has no siblings."""
    table = bifurcation()
    agent = replace(
        table, replies={"a": 2}, following=lambda history: "a" if len(history) < 3 else None, outcome=lambda e, h: h[1]
    )
    forest, _ = played(agent, fanout={"a:1": 4})
    assert sorted(siblings(forest).values()) == [1, 1, 1, 1, 1, 4]
    result = credit(forest, "c3")
    trained = {entry.call for entry in result.entries if any(entry.weights)}
    assert {forest.calls[call].invocation for call in trained} == {1} and len(trained) == 4
    assert result.metrics["credit/without_siblings"] == pytest.approx(5 / 9)


# -- worked numbers ----------------------------------------------------------------------------------------------------


def test_values_are_means_of_children_and_weights_follow_the_paths():
    """One of two first replies stops at once; behind the other a worker has a branch that stops and one that goes on.

    V(0) = mean(1, mean(0, 1)) = 0.75, where the mean of its three leaves would be 2/3.
    """
    grow = Grow(("p", "w", "j"))
    grow.call("q/0p", None, "p")
    grow.end(grow.call("q/1p", None, "p"), 0.5)
    grow.call("q/0w", "q/0p", "w")
    grow.end(grow.call("q/0v", "q/0p", "w", 3), 1.0)
    grow.end(grow.call("q/0j", "q/0w", "j"), 0.0)
    grow.end(grow.call("q/0k", "q/0w", "j"), 1.0)
    found = by_call(credit(grow.forest, "c3"))
    assert {call: entry.reward for call, entry in found.items()} == pytest.approx(
        {"q/0p": 0.75, "q/1p": 0.5, "q/0w": 0.5, "q/0v": 1, "q/0j": 0, "q/0k": 1}
    )
    assert {call: advantage(entry) for call, entry in found.items()} == pytest.approx(
        {"q/0p": 0.25, "q/1p": -0.25, "q/0w": -0.5, "q/0v": 0.5, "q/0j": -1, "q/0k": 1}
    )
    weights = {"q/0p": 1 / 2, "q/1p": 1 / 2, "q/0w": 1 / 4, "q/0v": 1 / 4, "q/0j": 1 / 8, "q/0k": 1 / 8}
    assert {call: sum(entry.weights) for call, entry in found.items()} == pytest.approx(weights)
    grow.end(grow.call("p/1", grow.call("p/0", None, "p"), "w"), 1.0, example="p")
    beside = by_call(credit(grow.forest, "c3"))
    assert {call: 2 * sum(beside[call].weights) for call in weights} == pytest.approx(weights), "an example more"
    assert not any(beside["p/0"].weights + beside["p/1"].weights), "without siblings"


def test_the_tree_of_the_authors_own_test():
    """Two reasoners, four actors behind each (the numbers of tests/test_credit_mechanism.py of EIT-EAST-Lab/C3)."""
    grow = Grow(("reasoner", "actor"))
    for branch, outcomes in enumerate(((1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.0))):
        grow.call(f"q/{branch}", None, "reasoner")
        for leaf, outcome in enumerate(outcomes):
            grow.end(grow.call(f"q/{branch}{leaf}", f"q/{branch}", "actor"), outcome)
    found = {call.removeprefix("q/"): advantage(e) for call, e in by_call(credit(grow.forest, "c3")).items()}
    expected = {"0": 1 / 4, "1": -1 / 4, "00": 2 / 3, "01": -2 / 3, "02": -2 / 3, "03": 2 / 3}
    assert found == pytest.approx(expected | {"10": -1 / 3, "11": -1 / 3, "12": 1.0, "13": -1 / 3})


def test_a_leaf_without_a_reward_is_left_out():
    """Of three samples of `w` one failed from outside: the two left have half of the share each, and the value."""
    grow = Grow(("p", "w"))
    for branch, rewards in enumerate(((1.0, 0.0, None), (None, None, None), (0.0, 0.0, 0.0))):
        parent = grow.call(f"q/{branch}p", None, "p")
        for leaf, reward in enumerate(rewards):
            call = grow.call(f"q/{branch}w{leaf}", parent, "w")
            grow.end(call, reward, error="tool" if reward is None else None)
    found = by_call(credit(grow.forest, "c3"))
    assert set(found) == {"q/0p", "q/2p", "q/0w0", "q/0w1", *(f"q/2w{leaf}" for leaf in range(3))}
    assert found["q/0p"].reward == 0.5 and advantage(found["q/0p"]) == 0.5
    assert found["q/0w0"].weights == pytest.approx((1 / 4,)) and found["q/2w0"].weights == pytest.approx((1 / 6,))


def test_groups_without_an_advantage_can_be_dropped():
    """They take no weight from the others; an example of them alone is as if it had not been sampled."""
    grow = Grow(("p", "w"))
    for example, outcomes in (("q", ((1.0, 0.0), (1.0, 1.0))), ("s", ((1.0, 1.0), (1.0, 1.0)))):
        for branch, rewards in enumerate(outcomes):
            parent = grow.call(f"{example}/{branch}p", None, "p")
            for leaf, reward in enumerate(rewards):
                grow.end(grow.call(f"{example}/{branch}w{leaf}", parent, "w"), reward)
    weights = {
        how: {c: sum(e.weights) for c, e in by_call(credit(grow.forest, "c3", zero_variance=how)).items()}
        for how in ("keep", "drop")
    }
    assert weights["keep"] == pytest.approx({c: 1 / 4 if c.endswith("p") else 1 / 8 for c in weights["keep"]})
    kept = {"q/0p": 1 / 2, "q/1p": 1 / 2, "q/0w0": 1 / 4, "q/0w1": 1 / 4}
    assert weights["drop"] == pytest.approx(dict.fromkeys(weights["drop"], 0.0) | kept)


# -- what it is a case of ----------------------------------------------------------------------------------------------


@LAW
@given(chains(modules=("only",), linear=True), st.sampled_from(["seq", "token", "constant"]))
def test_one_module_called_once_is_rloo(forest, mean):
    ours, rloo = credit(forest, "c3", loss_mean=mean), credit(forest, "grpo", loss_mean=mean, **RLOO)
    assert_same(table(ours), table(rloo))


@LAW
@given(chains(linear=True, rollouts=(2, 5)))
def test_compared_by_depth_it_has_the_advantages_of_fork_on_first(forest):
    """Whose plan forks at the first module alone."""
    ours, fof = (
        by_call(found)
        for found in (credit(forest, "c3", siblings="depth"), credit(forest, "mhgpo_fof", **RLOO, penalties=False))
    )
    assert ours.keys() == fof.keys()
    for call, entry in ours.items():
        assert entry.reward == pytest.approx(fof[call].reward, abs=TOLERANCE)
        assert entry.advantages == pytest.approx(fof[call].advantages, abs=TOLERANCE)


def test_its_plan_with_one_width_is_that_of_fork_on_first():
    first = {name: ALGORITHMS[name].plan for name in ("c3", "mhgpo_fof")}
    fof = ALGO_SCHEMAS["mhgpo_fof"].model_validate({"name": "mhgpo_fof", "group_size": 3})
    (ours,), (theirs,) = (
        first["c3"](section(fanout={"a": 3}), ("a", "b"), ()),
        first["mhgpo_fof"](fof, ("a", "b"), ()),
    )
    assert (ours.size, [fork.width for fork in ours.forks]) == (theirs.size, [fork.width for fork in theirs.forks])


@LAW
@given(st.one_of(forked(sampler="is"), forked(sampler="os"), forked(sampler="rr"), chains()))
def test_the_weights_of_an_example_are_those_of_its_paths(forest):
    """The compared calls of a slot have together the share of the paths that reach them: at most 1 of an example."""
    result = credit(forest, "c3", minibatch=dict.fromkeys(forest.examples, 0), **SHARED | {"scale": False})
    slots = defaultdict(list)
    for entry in result.entries:
        call = forest.calls[entry.call]
        slots[call.module, call.invocation] += entry.weights
    assert all(math.fsum(weights) <= 1 + TOLERANCE for weights in slots.values())
    at_root = [e for e in result.entries if forest.calls[e.call].parent is None]
    if at_root and all(e.group_size > 1 for e in at_root):
        assert math.fsum(w for e in at_root for w in e.weights) == pytest.approx(1)


# -- expectation -------------------------------------------------------------------------------------------------------

CASES = {
    "two modules": (two(seed=1), {"first": 2, "second": 2}),
    "a branch that stops early": (two(seed=2, stops=True), {"first": 3, "second": 2}),
    "three of the last": (two(seed=3, stops=True), {"first": 2, "second": 3}),
    "a module that is left out": (skipping(seed=4), {"a": 2, "b": 2, "c": 2}),
}


def by_paths(forest, result):
    return [entry.weights[0] for entry in result.entries]


def expected_gradient(table, widths, weights=by_paths):
    """The gradient that credit gives the table's parameters, averaged over all forests by their probability."""
    total = {history: [0.0] * len(table.logits(history)) for history in table.histories}
    for chance, forest in table.forests(lambda history: widths[table.module(history)]):
        result = credit(forest, "c3", **CONSTANT)
        for entry, weight in zip(result.entries, weights(forest, result), strict=True):
            call = forest.calls[entry.call]
            row = total[call.facts["history"]]
            for reply, score in enumerate(table.score_gradient(call.facts["history"], int(call.text[1:]))):
                row[reply] += chance * weight * entry.advantages[0] * score
    return total


def length(gradient, truth):
    """<g, G> / <G, G>: 1 where g is G."""
    pairs = [(g, t) for history, row in truth.items() for g, t in zip(gradient[history], row, strict=True)]
    return math.fsum(g * t for g, t in pairs) / math.fsum(t * t for _, t in pairs)


@pytest.mark.parametrize("case", CASES)
def test_the_expected_gradient_is_that_of_the_expected_outcome(case):
    table, widths = CASES[case]
    found, truth = expected_gradient(table, widths), table.gradient()
    for history, row in truth.items():
        assert found[history] == pytest.approx(row, abs=1e-12)
    assert length(found, truth) == pytest.approx(1)


def test_equal_weights_of_all_calls_of_a_module_are_biased():
    """Where branches stop early: those that go on then count as if all did."""

    def alike(forest, result):
        calls = Counter(call.module for call in forest.calls.values())
        return [1 / calls[forest.calls[entry.call].module] for entry in result.entries]

    cases = ("two modules", "a branch that stops early", "three of the last")
    lengths = [length(expected_gradient(*CASES[case], alike), CASES[case][0].gradient()) for case in cases]
    assert lengths[0] == pytest.approx(1) and min(lengths[1:]) > 1.2


@pytest.mark.parametrize("matters", ["a", "b", "d"])
def test_a_module_whose_reply_cannot_matter_has_no_advantage_on_average(matters):
    """Forks at `a` and `d`: an advantage of `a` is chance where `b` decides, and exactly 0 after what decided."""
    table, widths = bifurcation(matters, seed=5), {"a": 2, "b": 1, "c": 1, "d": 2}
    means = defaultdict(float)
    for chance, forest in table.forests(lambda history: widths[table.module(history)]):
        for entry in credit(forest, "c3").entries:
            call = forest.calls[entry.call]
            if call.module in "ad":
                means[call.module, call.text] += chance * entry.advantages[0]
                if matters in "ab" and call.module == "d":
                    assert entry.advantages[0] == 0
    for (module, _), mean in means.items():
        assert (mean == pytest.approx(0, abs=1e-12)) == (module != matters)
