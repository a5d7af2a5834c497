"""Dr.MAS, GiGPO, IGPO, Tree-GRPO, TreeRL's value of a step, MaxRL: worked numbers, slow references, and laws."""

import math
from collections import defaultdict
from dataclasses import replace
from difflib import SequenceMatcher
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.credit.backward import tree_values
from mmrl.errors import DataError
from mmrl.records import Example
from mmrl.stages.information_gain import gold_problems, with_gains
from tests.algorithms.test_laws import LAW, assert_same
from tests.helpers import Fake
from tests.helpers.forests import Grow, advantage, by_call, chains, credit, documented, forked, numbers, singles, turns

TREES = st.one_of(forked(sampler="is"), forked(sampler="os"))


def rows(result):
    """Call -> its advantages, one for each place in the loss, sorted."""
    found = defaultdict(list)
    for entry in result.entries:
        if entry.advantages:
            found[entry.call].append(entry.advantages[0])
    return {call: sorted(values) for call, values in found.items()}


def normal(values, eps=1e-6):
    """(r - mean) / (std + eps) of a list; 0 where there is nothing to compare, or no difference."""
    values = np.array(values, float)
    if len(values) < 2 or np.ptp(values) < 1e-12:
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + eps)


def scored(forest):
    return [rollout for rollout in forest.rollouts if rollout.reward is not None and rollout.leaf is not None]


ONE_CALL = chains(modules=("only",), linear=True)
SPECIAL: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "dr_mas with one call a rollout": (ONE_CALL, "dr_mas", {}, {}),
    "dr_mas with one call a rollout, unscaled": (ONE_CALL, "dr_mas", {"scale": False}, {"scale": False}),
    "tree_grpo with one leaf a tree": (chains(), "tree_grpo", {}, {}),
    "gigpo where no state or prompt repeats": (chains(), "gigpo", {}, {}),
    "gigpo where steps count nothing": (chains(), "gigpo", {"step_coef": 0.0}, {}),
    "igpo without turn rewards": (chains(failures=False), "igpo", {}, {"eps": 1e-6}),
}
"""Case -> forests on which the algorithm with its options has the advantages of GRPO with others."""


@pytest.mark.parametrize("case", SPECIAL)
@LAW
@given(data=st.data())
def test_a_special_case_of_it_is_grpo(case, data):
    forests, name, options, of_grpo = SPECIAL[case]
    forest = data.draw(forests)
    found = credit(forest, name, **options)
    assert found.metrics.get("credit/anchored_share", 0) == 0
    assert_same(rows(found), rows(credit(forest, "grpo", **of_grpo)))


# -- Dr.MAS ------------------------------------------------------------------------------------------------------------


@LAW
@given(chains())
def test_dr_mas_is_a_comparison_of_all_calls_of_a_module(forest):
    members = defaultdict(list)
    for rollout in scored(forest):
        for call in forest.path(rollout):
            members[rollout.example, call.module].append((call.id, rollout.reward))
    expected = {}
    for group in members.values():
        expected |= dict(zip([call for call, _ in group], normal([reward for _, reward in group]), strict=True))
    found = by_call(credit(forest, "dr_mas"))
    assert {call: advantage(entry) for call, entry in found.items()} == pytest.approx(expected, abs=1e-9)


@LAW
@given(st.integers(2, 4), st.lists(numbers, min_size=2, max_size=5).filter(lambda r: len(set(r)) > 1))
def test_dr_mas_with_equally_many_calls_differs_from_grpo_by_the_sample_deviation(times, rewards):
    """With n calls in each of G rollouts the deviation (ddof 1) is smaller by sqrt(n (G - 1) / (n G - 1))."""
    grow = Grow(("agent",))
    for index, reward in enumerate(rewards):
        grow.chain(f"q/{index}", ("agent",) * times, reward)
    size = len(rewards)
    ratio = (times * (size - 1) / (times * size - 1)) ** 0.5
    ours, grpo = (by_call(credit(grow.forest, name, eps=0)) for name in ("dr_mas", "grpo"))
    for call, entry in ours.items():
        assert advantage(entry) * ratio == pytest.approx(advantage(grpo[call]), abs=1e-9)
    plain = [rows(credit(grow.forest, name, scale=False)) for name in ("dr_mas", "grpo")]
    assert_same(*plain)


# -- CCPO --------------------------------------------------------------------------------------------------------------


def thinker(joint, alone):
    grow = Grow(("thinker", "solver"))
    for index, (reward, other) in enumerate(zip(joint, alone, strict=True)):
        more: dict[str, Any] = {} if other is None else {"counterfactuals": {"thinker": other}}
        grow.chain(f"q/{index}", ("thinker", "solver"), reward, **more)
    return grow.forest


def test_ccpo_has_the_others_mean_where_a_second_play_failed():
    forest = thinker([1.0, 0.0, 1.0], [0.0, 1.0, None])
    result = credit(forest, "ccpo", credit="difference")
    assert [entry.reward for entry in result.entries if entry.call.endswith("#0")] == [1.0, -1.0, 0.5]
    assert result.metrics["credit/counterfactual_share"] == pytest.approx(2 / 3)
    forest = thinker([1.0, 0.0], [None, None])
    assert_same(rows(credit(forest, "ccpo")), rows(credit(forest, "dr_mas", scale=False)))


@pytest.mark.parametrize(
    ("exchanged", "used"), [(None, ["thinker"]), (("thinker",), ["thinker"]), (("solver",), ["solver"])]
)
@pytest.mark.parametrize("kind", ["bonus", "difference"])
def test_ccpo_uses_no_counterfactual_of_a_module_that_is_not_exchanged(exchanged, used, kind):
    """As a file may have them: of the last module, or of others than `algo.exchanged` names."""
    grow = Grow(("thinker", "solver"))
    for index, reward in enumerate((1.0, 0.0)):
        grow.chain(f"q/{index}", ("thinker", "solver"), reward, counterfactuals={"thinker": 0.0, "solver": 0.25})
    entries = by_call(credit(grow.forest, "ccpo", credit=kind, exchanged=exchanged))
    # bonus: 1 is a success where the others' mean is none; difference: minus what came without the module
    changed = {"thinker": {"bonus": [1.2, 0.0], "difference": [1.0, 0.0]}}
    changed["solver"] = {"bonus": [1.2, 0.0], "difference": [0.75, -0.25]}
    for number, module in enumerate(("thinker", "solver")):
        expected = changed[module][kind] if module in used else [1.0, 0.0]
        assert [entries[f"q/{i}#{number}"].reward for i in (0, 1)] == pytest.approx(expected)


OUTCOMES = st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=5)


@LAW
@given(OUTCOMES, st.booleans())
def test_ccpo_where_the_exchange_changes_nothing(rewards, scale):
    forest = thinker(rewards, rewards)
    difference = by_call(credit(forest, "ccpo", credit="difference", scale=scale))
    assert all(advantage(entry) == 0 for call, entry in difference.items() if call.endswith("#0"))
    # ... and the bonus is not zero there: it follows the mean of the others
    assert_same(rows(credit(forest, "ccpo", bonus_coef=0.0, scale=scale)), rows(credit(forest, "dr_mas", scale=scale)))


@LAW
@given(OUTCOMES, st.data())
def test_ccpo_is_a_comparison_of_rewards_with_their_bonus(rewards, data):
    alone = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(rewards), max_size=len(rewards)))
    solo = np.mean(alone)
    bonus = [0.2 * (float(r > 0.5 and solo < 0.5) - float(r < 0.5 and solo > 0.5)) for r in rewards]
    total = np.array(rewards) + bonus
    found = by_call(credit(thinker(rewards, alone), "ccpo"))
    expected = total - total.mean() if np.ptp(total) > 1e-12 else np.zeros(len(total))
    assert [advantage(found[f"q/{i}#0"]) for i in range(len(rewards))] == pytest.approx(list(expected), abs=1e-9)


# -- Tree-GRPO ---------------------------------------------------------------------------------------------------------


@LAW
@given(TREES)
def test_tree_grpo_adds_two_comparisons(forest):
    expected = defaultdict(list)
    for example in forest.examples:
        own = [rollout for rollout in scored(forest) if rollout.example == example]
        over_all = normal([rollout.reward for rollout in own])
        tree = [rollout.id.split("/")[1].split(".")[0] for rollout in own]
        for place, rollout in enumerate(own):
            beside = [i for i, name in enumerate(tree) if name == tree[place]]
            within = normal([own[i].reward for i in beside])[beside.index(place)]
            for call in forest.path(rollout):
                expected[call.id].append(within + over_all[place])
    assert_same(rows(credit(forest, "tree_grpo")), {call: sorted(values) for call, values in expected.items()})


@LAW
@given(TREES)
def test_tree_grpo_on_one_tree_is_twice_grpo(forest):
    first = {example: {} for example in forest.examples}
    for rollout in scored(forest):
        first[rollout.example].setdefault(rollout.id.split("/")[1].split(".")[0], None)
    if any(len(trees) > 1 for trees in first.values()):
        return
    twice = {call: sorted(2 * value for value in row) for call, row in rows(credit(forest, "grpo")).items()}
    assert_same(rows(credit(forest, "tree_grpo")), twice)


# -- GiGPO -------------------------------------------------------------------------------------------------------------


def maze():
    """Two rollouts that pass the same door, the second of them twice."""
    grow = Grow(("agent",))
    for index, (path, reward) in enumerate(((("start", "door"), 1.0), (("start", "door", "door"), 0.0))):
        parent = None
        for turn, place in enumerate(path):
            parent = grow.call(f"q/{index}#{turn}", parent, "agent", facts={"state": place})
        grow.end(parent, reward, id=f"q/{index}")
    return grow.forest


def test_gigpo_worked_example():
    # rollouts: +-0.707107. gamma 0.5: returns 0.5, 1 and 0, 0, 0; door: 1, 0, 0: 1.154701, -0.57735 twice;
    # start: 0.5, 0: +-0.707107
    result = credit(maze(), "gigpo", eps=0.0, gamma=0.5)
    expected = {"q/0#0": 1.414214, "q/0#1": 1.861807, "q/1#0": -1.414214, "q/1#1": -1.284457, "q/1#2": -1.284457}
    found = by_call(result)
    assert {call: advantage(entry) for call, entry in found.items()} == pytest.approx(expected, abs=1e-6)
    assert result.metrics["credit/anchored_share"] == 1 and result.metrics["credit/first_share"] == pytest.approx(0.4)
    # each call counted in the rollouts' mean and std: 1, 1, 0, 0, 0
    counted = by_call(credit(maze(), "gigpo", eps=0.0, step_coef=0.0, count="call"))
    assert advantage(counted["q/0#0"]) == pytest.approx(1.095445, abs=1e-6)
    assert advantage(counted["q/1#0"]) == pytest.approx(-0.730297, abs=1e-6)


def test_gigpo_keeps_an_example_of_equal_outcomes_whose_steps_differ():
    grow = Grow(("agent",))
    for name, size in (("q/0", 1), ("q/1", 2), ("flat/0", 1), ("flat/1", 1)):
        parent = None
        for turn in range(size):
            parent = grow.call(f"{name}#{turn}", parent, "agent", 2, facts={"state": "door"})
        grow.end(parent, 1.0, id=name)
    found = by_call(credit(grow.forest, "gigpo", zero_variance="drop", eps=0.0, gamma=0.5))
    # returns at the door: 1, 0.5, 1; a rollout has half of the only example's weight, over its 2 or 4 tokens
    numbers = {call: (advantage(entry), entry.weights[0]) for call, entry in found.items()}
    expected = {"q/0#0": (3**-0.5, 0.25), "q/1#0": (-2 * 3**-0.5, 0.125), "q/1#1": (3**-0.5, 0.125)}
    assert numbers == {
        **{call: pytest.approx(pair) for call, pair in expected.items()},
        "flat/0#0": (0, 0),
        "flat/1#0": (0, 0),
    }
    unheard = credit(grow.forest, "gigpo", zero_variance="drop", step_coef=0.0)
    assert not any(any(entry.weights) for entry in unheard.entries)


@LAW
@given(chains(turn_rewards=numbers), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 1.0, 0.5]), st.data())
def test_gigpo_adds_the_comparison_of_returns_within_a_state(forest, gamma, coef, data):
    names = data.draw(st.lists(st.sampled_from("xyz"), min_size=len(forest.calls), max_size=len(forest.calls)))
    for call, name in zip(list(forest.calls.values()), names, strict=True):
        forest.calls[call.id] = replace(call, facts={"state": name})
    episodes, states = {}, defaultdict(list)
    for example in forest.examples:
        own = [rollout for rollout in scored(forest) if rollout.example == example]
        for rollout, value in zip(own, normal([rollout.reward for rollout in own]), strict=True):
            path = forest.path(rollout)
            rewards = [call.turn_reward for call in path[:-1]] + [rollout.reward]
            for place, call in enumerate(path):
                episodes[call.id] = value
                value_to_go = sum(gamma**step * reward for step, reward in enumerate(rewards[place:]))
                states[example, call.module, call.facts["state"]].append((call.id, value_to_go))
    expected = dict(episodes)
    for group in states.values():
        for (call, _), step in zip(group, normal([value for _, value in group]), strict=True):
            expected[call] += coef * step
    found = by_call(credit(forest, "gigpo", gamma=gamma, step_coef=coef))
    assert {call: advantage(entry) for call, entry in found.items()} == pytest.approx(expected, abs=1e-6)


@LAW
@given(chains())
def test_gigpo_anchored_at_the_first_call_alone_is_grpo_after_it(forest):
    for call in list(forest.calls.values()):
        state = "start" if call.parent is None else call.id
        forest.calls[call.id] = replace(call, facts={"state": state}, module="agent")
    grpo, found = by_call(credit(forest, "grpo")), by_call(credit(forest, "gigpo", gamma=1.0))
    for call, entry in found.items():
        factor = 2 if forest.calls[call].parent is None else 1
        assert advantage(entry) == pytest.approx(factor * advantage(grpo[call]), abs=1e-9)


def places(*names):
    """Rollouts of one call, each in a state with this name."""
    grow = Grow(("agent", "other"))
    for index, name in enumerate(names):
        module, _, state = name.rpartition(":")
        grow.end(
            grow.call(f"q/{index}", None, module or "agent", facts={"state": state}), float(index), id=f"q/{index}"
        )
    return grow.forest


def test_states_named_alike_are_one_from_the_ratio_that_is_asked_for():
    # 9 of 10 characters: a ratio of 0.9. The third is as alike to the second alone, which is not the state's first.
    forest = places("0123456789", "012345678x", "01234567yx", "other:0123456789")

    def sizes(similarity):
        groups = credit(forest, "gigpo", similarity=similarity).groups
        return [len(group.members) for group in groups if ":state" in group.id]

    assert sizes(None) == sizes(0.95) == [1, 1, 1, 1]
    assert sizes(0.9) == [2, 1, 1] and sizes(0.8) == [3, 1]


@LAW
@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=2, max_size=6), st.sampled_from([0.5, 0.8, 0.99]))
def test_states_by_similarity_are_clusters_by_their_first_name(names, least):
    clusters = []
    for index, name in enumerate(names):
        alike = (c for c in clusters if SequenceMatcher(None, name, names[c[0]]).ratio() >= least)
        if (cluster := next(alike, None)) is None:
            clusters.append([index])
        else:
            cluster.append(index)
    groups = credit(places(*names), "gigpo", similarity=least).groups
    found = [[int(member.call.id[2:]) for member in group.members] for group in groups if ":state" in group.id]
    assert found == clusters


def test_prompts_are_a_state_only_where_they_are_equal():
    grow = Grow(("agent",))
    for index in range(2):
        grow.end(grow.call(f"q/{index}", None, "agent", prompt_ids=(*range(99), 100 + index)), float(index))
    assert credit(grow.forest, "gigpo", similarity=0.5).metrics["credit/anchored_share"] == 0


def test_equal_prompts_of_a_module_are_a_state():
    grow = Grow(("agent",))
    for index, reward in enumerate((1.0, 0.0)):
        first = grow.call(f"q/{index}a", None, "agent", prompt_ids=(1, 2))
        grow.end(grow.call(f"q/{index}b", first, "agent", prompt_ids=(1, 2, 3 + index)), reward)
    result = credit(grow.forest, "gigpo", gamma=1.0, eps=0.0)
    assert result.metrics["credit/anchored_share"] == result.metrics["credit/first_share"] == 0.5
    assert advantage(by_call(result)["q/0a"]) == pytest.approx(2**0.5)


# -- TreeRL's value of a step ------------------------------------------------------------------------------------------


def test_tree_value_worked_example():
    # leaves 1, 0, 0.5, 0 against the mean of the others: 0.833333, -0.5, 0.166667, -0.5; V(0a) = 0.166667
    forest = documented("trees")
    expected = {"0a": 0.333333, "0b": 1.5, "0c": -1.166667, "1a": 0.333333, "2a": -1.0}
    assert tree_values(forest) == pytest.approx(expected, abs=1e-6)
    algo: dict[str, Any] = {"aggregate": "tree_value", "penalties": False, "scale": False}
    entries = by_call(credit(forest, "mhgpo_fof", **algo))
    assert {call: entry.reward for call, entry in entries.items()} == pytest.approx(expected, abs=1e-6)


@LAW
@given(TREES)
def test_tree_values_are_local_plus_global_advantages(forest):
    leaves = defaultdict(list)
    for rollout in scored(forest):
        leaves[rollout.example].append(rollout)
    value = defaultdict(list)
    for own in leaves.values():
        for rollout in own:
            others = [other.reward for other in own if other is not rollout]
            for call in forest.path(rollout):
                value[call.id].append(rollout.reward - np.mean(others) if others else 0.0)
    mean = {call: float(np.mean(values)) for call, values in value.items()}
    expected = {call: (own - mean.get(forest.calls[call].parent, 0.0)) + own for call, own in mean.items()}
    assert tree_values(forest) == pytest.approx(expected, abs=1e-9)
    for own in leaves.values():
        if len({rollout.reward for rollout in own}) == 1:
            calls = [call.id for rollout in own for call in forest.path(rollout)]
            assert [expected[call] for call in calls] == pytest.approx([0.0] * len(calls), abs=1e-9)


# -- MaxRL -------------------------------------------------------------------------------------------------------------


def test_maxrl_divides_by_the_mean_reward():
    found = credit(singles((1.0, 0.0, 0.0, 0.0), (0.0, 0.0)), "grpo", scale="mean")
    assert [advantage(entry) for entry in found.entries] == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0]


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(DataError, match=r"algo\.scale: mean needs rewards of 0 or more; group 'q0' has -0\.5"):
        credit(singles((1.0, -0.5)), "grpo", scale="mean")


@LAW
@given(chains(rollouts=(2, 5), failures=False))
def test_maxrl_is_dr_grpo_over_the_mean(forest):
    forest = replace(forest, rollouts=tuple(replace(r, reward=r.reward + 2.5) for r in forest.rollouts))
    plain, divided = (by_call(credit(forest, "grpo", scale=scale)) for scale in (False, "mean"))
    for call, entry in divided.items():
        assert advantage(entry) * entry.mean == pytest.approx(advantage(plain[call]), abs=1e-9)


# -- whitening apart ---------------------------------------------------------------------------------------------------


@LAW
@given(chains(turn_rewards=numbers, critic=True, rollouts=(1, 3)))
def test_whitening_by_turn_makes_both_kinds_white(forest):
    plain, apart = (credit(forest, "mt_ppo", beta=0.0, whiten_within=kind) for kind in ("batch", "turn"))
    assert [entry.raw_advantages for entry in plain.entries] == [entry.raw_advantages for entry in apart.entries]
    for last in (True, False):
        own = [entry for entry in apart.entries if ("outcome" in entry.parts) is last]
        raw = [a for entry in own for a in entry.raw_advantages]
        white = [a for entry in own for a in entry.advantages]
        if len(raw) > 1 and np.ptp(raw) > 1e-3:
            assert np.mean(white) == pytest.approx(0, abs=1e-6) and np.std(white, ddof=1) == pytest.approx(1, abs=1e-4)


# -- IGPO --------------------------------------------------------------------------------------------------------------


def test_igpo_worked_examples():
    # Together: gains 0.5, -0.1, 0.2 and outcomes 1, 0 have mean 0.32 and deviation 0.443847. Apart: gains mean 0.2 and
    # deviation 0.3, so 1, -1, 0; outcomes +-0.707107.
    joint, apart = (by_call(credit(documented("gains"), "igpo", eps=0.0, normalise=n)) for n in ("joint", "separate"))
    values = {"0a": 0.991333, "0b": 0.585787, "0c": 1.532061, "1a": -0.991333, "1b": -0.720969}
    assert {call: advantage(entry) for call, entry in joint.items()} == pytest.approx(values, abs=1e-6)
    values = {"0a": 0.707107, "0b": -0.292893, "0c": 0.707107, "1a": -0.707107, "1b": -0.707107}
    assert {call: advantage(entry) for call, entry in apart.items()} == pytest.approx(values, abs=1e-6)
    assert [(apart[call].group, apart[call].group_size) for call in ("0a", "0c")] == [("q:turns", 3), ("q", 2)]


@pytest.mark.parametrize("normalise", ["joint", "separate"])
def test_igpo_drops_an_example_only_where_neither_turns_nor_outcomes_differ(normalise):
    dropping = {"normalise": normalise, "zero_variance": "drop"}
    for gains, kept in (((0.5, 0.2), True), ((1.0, 1.0), False)):
        result = credit(turns((gains[0], 1.0), (gains[1], 1.0)), "igpo", **dropping)
        assert {sum(entry.weights) > 0 for entry in result.entries} == {kept}


def test_igpo_apart_has_one_deviation_of_the_batch_for_turns_and_one_for_outcomes():
    apart: dict[str, Any] = {"normalise": "separate", "std_over": "batch", "eps": 0.0}
    found = by_call(credit(turns((0.3, 1.0), (0.1, 0.0)), "igpo", **apart))
    assert [entry.std for entry in found.values()] == pytest.approx([0.02**0.5, 0.5**0.5] * 2)


@LAW
@given(chains(turn_rewards=numbers), st.sampled_from([1.0, 0.5, 0.0]), st.sampled_from(["joint", "separate"]))
def test_igpo_normalises_turns_and_outcomes_and_adds_them_up_from_the_end(forest, gamma, normalise):
    rewards = defaultdict(list)
    for rollout in scored(forest):
        path = forest.path(rollout)
        own = [(call, call.turn_reward) for call in path[:-1] if call.turn_reward is not None]
        rewards[rollout.example].append([*own, (path[-1], rollout.reward)])
    expected = {}
    for rollouts in rewards.values():
        flat = iter(normal([value for own in rollouts for _, value in own]))
        normalised = [{call.id: next(flat) for call, _ in own} for own in rollouts]
        if normalise == "separate":
            gains = iter(normal([value for own in rollouts for _, value in own[:-1]]))
            ends = iter(normal([own[-1][1] for own in rollouts]))
            normalised = [
                {call.id: next(gains) for call, _ in own[:-1]} | {own[-1][0].id: next(ends)} for own in rollouts
            ]
        of_example = [rollout for rollout in scored(forest) if rollout.example == rollouts[0][-1][0].example]
        for rollout, values in zip(of_example, normalised, strict=True):
            running = 0.0
            for call in reversed(forest.path(rollout)):
                running = values.get(call.id, 0.0) + gamma * running
                expected[call.id] = [running]
    found = rows(credit(forest, "igpo", gamma=gamma, normalise=normalise))
    assert_same({call: expected[call] for call in found}, found)


class Closed(Fake):
    """A task whose frame is token 9 and whose gold answers are single tokens."""

    def closing(self, example):
        return "9", example.metadata["answers"]


def gains_of(forest, golds, probability, *kind):
    examples = {"q": Example(id="q", inputs={}, metadata={"answers": golds})}
    seen = []

    def logprobs(calls):
        seen.extend((call.prompt_ids, call.completion_ids) for call in calls)
        return [[math.log(probability(call.prompt_ids, gold)) for gold in call.completion_ids] for call in calls]

    return with_gains(forest, Closed(), examples, lambda text: [int(digit) for digit in text], logprobs, *kind), seen


def prompted(*prompts):
    """One rollout whose calls have these prompts."""
    forest = turns((*(0.0 for _ in prompts[1:]), 1.0))
    calls = zip(forest.calls.values(), prompts, strict=True)
    return replace(forest, calls={call.id: replace(call, prompt_ids=ids, turn_reward=None) for call, ids in calls})


def test_a_turns_gain_is_what_it_adds_to_the_probability_of_the_likeliest_gold_answer():
    chance = {((1, 9), 5): 0.1, ((1, 9), 6): 0.2, ((1, 2, 9), 5): 0.6, ((1, 2, 9), 6): 0.3, ((1, 2, 3, 9), 5): 0.5}
    chance[(1, 2, 3, 9), 6] = 0.1
    forest, seen = gains_of(prompted((1,), (1, 2), (1, 2, 3)), ["5", "6"], lambda prompt, gold: chance[prompt, gold])
    assert [call.turn_reward for call in forest.calls.values()] == [pytest.approx(0.4), pytest.approx(-0.1), None]
    assert [call.facts["gold_probability"] for call in forest.calls.values()] == pytest.approx([0.2, 0.6, 0.5])
    assert sorted(seen) == sorted(((*prompt,), (gold,)) for prompt, gold in chance)


@LAW
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6), st.integers(1, 3))
def test_gains_add_up_and_a_gold_answer_of_several_tokens_has_their_mean(chances, tokens):
    prompts = [tuple(range(1, 1 + number)) for number in range(1, 1 + len(chances))]
    forest, _ = gains_of(prompted(*prompts), ["5" * tokens], lambda prompt, gold: chances[len(prompt) - 2])
    gains = [call.turn_reward for call in forest.calls.values()]
    assert sum(gains[:-1]) == pytest.approx(chances[-1] - chances[0]) and gains[-1] is None


def test_a_gain_of_logprobs_counts_a_small_probability_as_much_as_a_large_one():
    chance = {1: 1e-6, 2: 1e-3, 3: 1e-4}
    prompts = (1,), (1, 2), (1, 2, 3)
    forest, _ = gains_of(prompted(*prompts), ["55"], lambda prompt, gold: chance[len(prompt) - 1], "logprob")
    logs = [math.log(value) for value in chance.values()]
    assert [call.turn_reward for call in forest.calls.values()][:2] == pytest.approx([math.log(1e3), math.log(0.1)])
    assert [call.facts for call in forest.calls.values()] == [{"gold_logprob": pytest.approx(value)} for value in logs]


def test_equal_prompts_are_forwarded_once():
    forest = turns((0.0, 1.0), (0.0, 0.0))
    calls = {name: replace(call, prompt_ids=(1, 2) if call.parent else (1,)) for name, call in forest.calls.items()}
    _, seen = gains_of(replace(forest, calls=calls), ["5"], lambda prompt, gold: 0.5)
    assert len(seen) == 2


def test_gain_needs_a_task_that_can_be_closed_and_gold_answers():
    examples = [Example(id=name, inputs={}, metadata={"answers": golds}) for name, golds in (("a", []), ("b", ["5"]))]
    (problem,) = gold_problems(Closed(), examples)
    assert "1 of 2 training examples have no gold answer (the first: 'a')" in problem
    (problem,) = gold_problems(cast("Any", SimpleNamespace(name="mine")), examples)
    assert "task=mine has no `closing`" in problem
