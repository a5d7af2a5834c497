"""The laws that reduce one algorithm to another (1 to 3 and 5 to 9), as far as they concern credit.

Random forests, tolerance 1e-9. Gradients and the remaining laws are the trainer's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import ALGORITHMS
from mmrl.config import ALGO_SCHEMAS
from mmrl.records import Forest
from tests.helpers.forests import MODULES, REWARDED, Grow, by_call, chains, credit, forked, numbers, relabelled

TOLERANCE = 1e-9
LAW = settings(max_examples=60)

SHARED: dict[str, Any] = {"eps": 1e-4, "ddof": 1, "loss_mean": "seq"}
CRITIC = [name for name, algorithm in ALGORITHMS.items() if algorithm.needs_critic]
# but for CCPO, whose rewards depend on outcomes of further rollouts
GROUPED = [name for name in REWARDED if name not in (*CRITIC, "ccpo")]
GROUPED_AS_ONE = [name for name in GROUPED if name != "c3"]


def table(result, call=lambda name: name):
    """What each call's tokens are multiplied with, entries sorted so that their order does not matter."""
    found = defaultdict(list)
    for entry in result.entries:
        found[call(entry.call)].append((entry.reward, entry.group_size, *entry.advantages, *entry.weights))
    return {name: sorted(rows) for name, rows in found.items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, rows in first.items():
        for one, other in zip(rows, second[name], strict=True):
            assert one == pytest.approx(other, abs=TOLERANCE), name


def advantages(result):
    found = defaultdict(list)
    for entry in result.entries:
        found[entry.call].append(list(entry.advantages))
    return {name: sorted(rows) for name, rows in found.items()}


# -- 1 and 2: one algorithm is a special case of another ---------------------------------------------------------------


ONCE = chains(modules=("only",), linear=True)
RAGGED: dict[str, Any] = SHARED | {"padding_mode": "ragged"}
REDUCTIONS = {
    "1: mmGRPO on one module called once": (
        chains(modules=("only",), linear=True, rollouts=(2, 5), failures=False),
        ("mmgrpo", SHARED),
        ("grpo", SHARED),
    ),
    "1: also with failures when nothing is padded": (ONCE, ("mmgrpo", RAGGED), ("grpo", SHARED)),
    "2: fork-on-first with one agent": (ONCE, ("mhgpo_fof", SHARED), ("grpo", SHARED)),
    "2: fork-on-first without penalties": (chains(linear=True), ("mmgrpo", RAGGED), ("mhgpo_fof", SHARED)),
    "2: oversampling once per branch": (
        chains(linear=True, penalties=True),
        ("mhgpo_fof_os", {}),
        ("mhgpo_fof", {}),
    ),
    # As p = (1, 0, 0) makes them; programs may start elsewhere.
    "2: round robin that always forks first": (
        chains(penalties=True).map(lambda forest: with_forks_at_the_root(forest)),
        ("mhgpo_rr", {}),
        ("mhgpo_fof", {}),
    ),
    "5: one turn": (ONCE, ("mt_grpo", SHARED), ("grpo", SHARED)),
    "5: one turn of any number": (ONCE, ("mt_grpo_variable", SHARED), ("grpo", SHARED)),
}
"""Law -> forests on which the first algorithm with its options is the second."""


@pytest.mark.parametrize("law", REDUCTIONS)
@LAW
@given(data=st.data())
def test_one_algorithm_is_a_special_case_of_another(law, data):
    forests, (first, of_first), (second, of_second) = REDUCTIONS[law]
    forest = data.draw(forests)
    assert_same(table(credit(forest, first, **of_first)), table(credit(forest, second, **of_second)))


def test_law_2_round_robin_plan_with_all_probability_on_the_first_is_fork_on_first():
    rr = ALGO_SCHEMAS["mhgpo_rr"].model_validate({"name": "mhgpo_rr", "fork_probs": (1.0, 0.0, 0.0)})
    fof = ALGO_SCHEMAS["mhgpo_fof"].model_validate({"name": "mhgpo_fof"})
    for example in range(50):
        (tree,) = ALGORITHMS["mhgpo_rr"].plan(rr, MODULES, (0, 0, f"q{example}"))
        (first,) = ALGORITHMS["mhgpo_fof"].plan(fof, MODULES, (0, 0, f"q{example}"))
        assert tree.fork_name == first.fork_name and tree.forks[0].width == first.forks[0].width
        assert tree.forks[0].module == MODULES[0] and first.forks[0].module is None, "the first call is that module's"


@LAW
@given(chains())
def test_law_2_the_groups_agree_on_ragged_programs_too(forest):
    """Weights then differ: Eq. 6 averages over the slots of an example first, mmGRPO over all groups."""
    ragged = credit(forest, "mmgrpo", **RAGGED)
    for one, other in zip(*map(advantage_rows, (ragged, credit(forest, "mhgpo_fof", **SHARED))), strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)


def advantage_rows(result):
    return [rows for _, entries in sorted(advantages(result).items()) for rows in entries]


# -- 3: homogeneous and heterogeneous groups ---------------------------------------------------------------------------


@LAW
@given(chains(linear=True, rollouts=(2, 5), failures=False))
def test_law_3_every_token_has_grpos_advantage(forest):
    fof, grpo = (advantages(credit(forest, name, **SHARED)) for name in ("mhgpo_fof", "grpo"))
    assert fof.keys() == grpo.keys() == forest.calls.keys()
    for name, (row,) in fof.items():
        assert row == pytest.approx(grpo[name][0], abs=TOLERANCE)


# -- 5 and 6: turns ----------------------------------------------------------------------------------------------------


@LAW
@given(st.data(), st.sampled_from(["mt_grpo", "mt_grpo_variable"]), numbers)
def test_law_5_equal_intermediate_rewards_give_grpos_advantage_on_every_turn(data, name, reward):
    forest = data.draw(chains(modules=("search", "answer"), linear=True, turn_rewards=st.just(reward)))
    turns, outcome = advantages(credit(forest, name, **SHARED)), advantages(credit(forest, "grpo", **SHARED))
    for call, rows in turns.items():
        assert rows[0] == pytest.approx(outcome[call][0], abs=TOLERANCE)


@LAW
@given(chains(turn_rewards=st.just(0.0), critic=True), st.sampled_from([(1.0, 1.0), (0.9, 0.8)]))
def test_law_6_mt_ppo_without_turn_rewards_is_ppo(forest, discount):
    options: dict[str, Any] = {"gamma": discount[0], "gae_lambda": discount[1], "beta": 0.1}
    turns, outcome = (credit(forest, name, **options) for name in ("mt_ppo", "ppo"))
    assert len(turns.entries) == len(outcome.entries)
    for one, other in zip(turns.entries, outcome.entries, strict=True):
        for field in ("advantages", "raw_advantages", "returns", "token_rewards", "weights"):
            assert getattr(one, field) == pytest.approx(getattr(other, field), abs=TOLERANCE)


@LAW
@given(chains(turn_rewards=numbers, critic=True), st.data())
def test_law_6_undiscounted_returns_are_the_rewards_to_come_wherever_they_stand(forest, data):
    observed = data.draw(st.sampled_from([1, 2]))
    longer = with_observations(forest, observed)
    runs = [
        credit(forest, "mt_ppo", beta=0),
        credit(longer, "mt_ppo", beta=0, obs="all"),
        credit(longer, "mt_ppo", beta=0, obs="all", position="turn_end"),
    ]
    paths = {rollout.id: forest.path(rollout) for rollout in forest.rollouts if rollout.reward is not None}
    expected = {}
    for rollout in forest.rollouts:
        path = paths.get(rollout.id, ())
        for position, call in enumerate(path):
            expected[call.id] = rollout.reward + sum(later.turn_reward for later in path[position:-1])
    for run in runs:
        assert {entry.call for entry in run.entries} == expected.keys()
        for entry in run.entries:
            assert entry.returns == pytest.approx([expected[entry.call]] * len(entry.returns), abs=TOLERANCE)


def with_observations(forest: Forest, count: int) -> Forest:
    calls = {
        call.id: replace(call, observation_tokens=count, values=(*(call.values or ()), *[0.3] * count))
        for call in forest.calls.values()
    }
    return replace(forest, calls=calls)


# -- 7: affine invariance ----------------------------------------------------------------------------------------------

AFFINE = chains(rollouts=(2, 5), turn_rewards=numbers, penalties=True)


@LAW
# but for IGPO, which compares outcomes with turn rewards
@given(AFFINE, numbers, st.sampled_from([name for name in GROUPED if name != "igpo"]))
def test_law_7_a_constant_added_to_every_outcome_changes_no_advantage(forest, constant, name):
    forest = with_forks_at_the_root(forest)
    assert_advantages(credit(forest, name), credit(mapped(forest, lambda r: r + constant), name))


@LAW
@given(
    AFFINE,
    st.sampled_from([0.5, 2.0, 30.0]),
    st.sampled_from(GROUPED),
    st.sampled_from(["group", "batch"]),
    st.sampled_from(["mean", "leave_one_out"]),
)
def test_law_7_a_positive_factor_acts_through_eps_alone(forest, factor, name, std_over, baseline):
    forest = with_forks_at_the_root(forest)
    options = {"eps": 0, "scale": True, "std_over": std_over, "baseline": baseline}
    scaled = mapped(forest, lambda r: r * factor, factor)
    assert_advantages(credit(forest, name, **options), credit(scaled, name, **options))


def assert_advantages(first, second):
    assert [entry.call for entry in first.entries] == [entry.call for entry in second.entries]
    for one, other in zip(first.entries, second.entries, strict=True):
        assert one.advantages == pytest.approx(other.advantages, abs=TOLERANCE)
        assert one.weights == pytest.approx(other.weights, abs=TOLERANCE)


def mapped(forest: Forest, change, factor: float = 1.0) -> Forest:
    rollouts = tuple(r if r.reward is None else replace(r, reward=change(r.reward)) for r in forest.rollouts)
    calls = {
        call.id: replace(
            call,
            penalty=call.penalty * factor,
            turn_reward=None if call.turn_reward is None else call.turn_reward * factor,
        )
        for call in forest.calls.values()
    }
    return replace(forest, rollouts=rollouts, calls=calls)


def with_forks_at_the_root(forest: Forest) -> Forest:
    rollouts = [replace(r, fork=path[0].module if (path := forest.path(r)) else None) for r in forest.rollouts]
    return replace(forest, rollouts=tuple(rollouts))


def forests_of(name, failures=True, **options):
    """Forests as the algorithm `name` samples them; `options` are those of `chains`."""
    if sampler := {"mhgpo_rr": "rr", "mhgpo_is": "is", "mhgpo_fof_os": "os"}.get(name):
        return forked(sampler=sampler, failures=failures)
    return chains(turn_rewards=numbers, penalties=True, critic=name in CRITIC, failures=failures, **options)


# -- 8: equivariance ---------------------------------------------------------------------------------------------------


@LAW
@given(st.data(), st.sampled_from([*GROUPED, *CRITIC]))
def test_law_8_names_and_orders_carry_no_meaning(data, name):
    forest = data.draw(forests_of(name))
    shuffle = data.draw(st.randoms(use_true_random=False))
    places = {identifier: shuffle.random() for identifier in [*forest.calls, *(r.id for r in forest.rollouts)]}
    calls = {old: f"c{number}" for number, old in enumerate(sorted(forest.calls, key=places.__getitem__))}
    modules = {old: f"m{number}" for number, old in enumerate(forest.modules)}
    other = relabelled(forest, calls, modules, places.__getitem__)
    # Cyclic padding starts at the first rollout and fillers are drawn, so mmGRPO is compared without either.
    options: dict[str, Any] = {"padding_mode": "ragged"} if name == "mmgrpo" else {}
    assert_same(table(credit(forest, name, **options), call=calls.__getitem__), table(credit(other, name, **options)))


# -- 9: weights --------------------------------------------------------------------------------------------------------


@LAW
# but for C3, whose weights sum to the compared calls of a path (`test_c3`)
@given(st.data(), st.sampled_from([*GROUPED_AS_ONE, *CRITIC]), st.sampled_from(["seq", "token"]))
def test_law_9_the_weights_of_an_optimizer_step_sum_to_one(data, name, mean):
    forest = data.draw(forests_of(name, failures=False, rollouts=(2, 5), linear=True))
    steps = {example: data.draw(st.integers(0, 1)) for example in forest.examples}
    result = credit(forest, name, minibatch=steps, loss_mean=mean)
    lost = lost_shares(forest, result, steps) if mean == "seq" else {}
    sums = defaultdict(list)
    for entry in result.entries:
        sums[steps[forest.calls[entry.call].example]] += entry.weights
    for step, weights in sums.items():
        assert all(weight >= 0 for weight in weights)
        expected = 1.0 - lost.get(step, 0.0)
        if mean == "token" and not any(weights):
            continue
        assert math.fsum(weights) == pytest.approx(expected, abs=TOLERANCE)


def lost_shares(forest, result, steps):
    """Share of each step that groups of one keep from the others: 1 / (B · n) for each such slot."""
    examples = defaultdict(set)
    slots = defaultdict(set)
    trained = set()
    for entry in result.entries:
        call = forest.calls[entry.call]
        examples[steps[call.example]].add(call.example)
        slots[call.example].add((call.module, call.invocation))
        if any(entry.weights):
            trained.add((call.example, call.module, call.invocation))
    return {
        step: math.fsum(
            1 / (len(own) * len(slots[example]))
            for example in own
            for slot in slots[example]
            if (example, *slot) not in trained
        )
        for step, own in examples.items()
    }


@LAW
@given(
    chains(tokens=st.integers(0, 3), turn_rewards=numbers, penalties=True, critic=True),
    st.sampled_from([*GROUPED_AS_ONE, *CRITIC]),
)
def test_law_9_no_weights_beyond_one_whatever_fails_or_is_empty(forest, name):
    options: dict[str, Any] = {} if name in CRITIC else {"zero_variance": "keep"}
    result = credit(with_forks_at_the_root(forest), name, **options)
    assert math.fsum(w for entry in result.entries for w in entry.weights) <= 1 + TOLERANCE
    for entry in result.entries:
        tokens = forest.calls[entry.call].completion_tokens
        assert len(entry.advantages) == len(entry.weights) == tokens
        assert all(math.isfinite(value) for value in (*entry.advantages, *entry.weights, entry.reward))


@LAW
@given(st.data(), st.sampled_from(GROUPED), st.sampled_from(["group", "batch"]))
def test_law_9_dropping_leaves_out_what_has_no_advantage_and_nothing_else(data, name, std_over):
    forest = data.draw(forests_of(name, failures=False, examples=4, rollouts=(2, 4)))
    outcomes = {example: data.draw(st.sampled_from([None, 1.0])) for example in forest.examples}
    rollouts = tuple(r if outcomes[r.example] is None else replace(r, reward=1.0) for r in forest.rollouts)
    calls = {c.id: replace(c, facts={"state": data.draw(st.sampled_from("xy"))}) for c in forest.calls.values()}
    forest = replace(forest, rollouts=rollouts, calls=calls)
    taught = {}
    for how in ("keep", "drop"):
        result = credit(forest, name, zero_variance=how, scale=True, std_over=std_over)
        taught[how] = {e.call for e in result.entries if any(e.weights) and any(e.advantages)}
        examples = {forest.calls[entry.call].example for entry in result.entries if any(entry.weights)}
    assert taught["keep"] == taught["drop"]
    assert examples == {forest.calls[call].example for call in taught["drop"]}


@pytest.mark.parametrize("mean", ["seq", "token", "constant"])
@pytest.mark.parametrize("name", ["grpo", "mmgrpo", "mhgpo_fof", "dr_mas", "mappo"])
def test_tokens_of_a_frozen_module_count_nowhere(name, mean):
    """Two rollouts of a frozen module's 100 tokens and a trained one's 5 and 3: weights as if the 5 and 3 were all.

    A frozen module's group keeps its share of a mean over groups, so that its freezing changes no other update.
    """
    grow = Grow(("big", "small"))
    for number, tokens in enumerate((5, 3)):
        first = grow.call(f"q/{number}b", None, "big", 100, values=(9.0 * number,) * 100)
        last = grow.call(f"q/{number}s", first, "small", tokens, values=(0.0,) * tokens)
        grow.end(last, float(number), id=f"q/{number}", fork="small")
    found = by_call(credit(grow.forest, name, frozen=("big",), loss_mean=mean, beta=0.0))
    assert not any(found["q/0b"].weights + found["q/1b"].weights)
    expected = {"seq": (1 / 10, 1 / 6), "token": (1 / 8, 1 / 8), "constant": (1 / 10, 1 / 10)}[mean]
    if name in ("mmgrpo", "dr_mas") and mean != "token":
        expected = (expected[0] / 2, expected[1] / 2)
    assert (found["q/0s"].weights[0], found["q/1s"].weights[0]) == pytest.approx(expected)
    if name == "mappo":
        # Advantages before whitening are the outcomes, 0 and 1, at 5 and 3 tokens.
        assert found["q/0s"].advantages == pytest.approx((-(3 / 8) / (15 / 56) ** 0.5,) * 5)
