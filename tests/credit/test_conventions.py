"""What no paper says: groups of one, completions without tokens, examples without a scored rollout.

docs/algorithms.md has these conventions in words ("Common rules"); weights are worked out by hand here.
"""

from dataclasses import replace
from typing import Any

import pytest

from mmrl.algorithms import ALGORITHMS, minibatches
from tests.helpers.forests import REWARDED, Grow, advantage, by_call, credit, singles, total_weight, turns

GROUPED = [name for name in REWARDED if not ALGORITHMS[name].needs_critic]
GROUPS_OF_ONE = {"mt_grpo": 2, "gigpo": 4, "tree_grpo": 4}
"""Two rewards are compared; each of three calls has a state, and each of three rollouts a tree, of its own."""
SMALL: dict[str, dict[str, Any]] = {
    "mmgrpo": {"rollouts": 2},
    "ccpo": {"group_size": 2, "scale": True},
    "c3": {"group_size": 2, "scale": True, "baseline": "mean"},
    "ppo": {"beta": 0},
    "mt_ppo": {"beta": 0},
    "mappo": {"beta": 0},
}


def credited(forest, name, minibatch=None, **options):
    return credit(forest, name, minibatch=minibatch, **SMALL.get(name, {"group_size": 2}) | options)


# -- groups of one


@pytest.mark.parametrize("name", [name for name in GROUPED if name != "mmgrpo"])
@pytest.mark.parametrize(("mean", "weight"), [("seq", 1 / 8), ("token", 1 / 4), ("constant", 1 / 8)])
def test_a_group_of_one_is_out_of_the_loss(name, mean, weight):
    """Its share, 1/2 of the step, is lost; but for `token`, where it counts no tokens and the others weigh more."""
    found = credited(singles((1.0, 0.0), (0.7, None)), name, loss_mean=mean)
    entries = by_call(found)
    assert advantage(entries["q1/0"]) == 0 and entries["q1/0"].weights == (0.0, 0.0)
    assert "q1/1" not in entries
    assert entries["q0/0"].weights == pytest.approx((weight, weight))
    assert total_weight(found) == pytest.approx(4 * weight)
    assert found.metrics["credit/groups_of_one"] == GROUPS_OF_ONE.get(name, 1)


@pytest.mark.parametrize("name", GROUPED)
def test_examples_that_tell_nothing_can_be_dropped(name):
    forest = singles((1.0, 1.0), (1.0, 0.0))
    kept, dropped, refilled = (by_call(credited(forest, name, zero_variance=how)) for how in ("keep", "drop", "refill"))
    assert kept["q0/0"].weights == kept["q1/0"].weights == pytest.approx((1 / 8, 1 / 8))
    assert refilled == dropped, "other examples are sampled instead, which credit does not see"
    assert dropped["q0/0"].weights == (0, 0) and dropped["q1/0"].weights == pytest.approx((1 / 4, 1 / 4))


@pytest.mark.parametrize("name", REWARDED)
@pytest.mark.parametrize(
    ("options", "weights", "of_minibatches"),
    [
        ({"loss_mean": "seq"}, (1 / 8, 1 / 16), (1 / 4, 1 / 8)),
        ({"loss_mean": "token"}, (1 / 12, 1 / 12), (1 / 6, 1 / 6)),
        ({"loss_mean": "constant", "loss_length": 10}, (1 / 40, 1 / 40), (1 / 20, 1 / 20)),
        ({"loss_mean": "constant"}, (1 / 16, 1 / 16), (1 / 8, 1 / 8)),  # the longest completion has 4
    ],
)
def test_loss_means_over_the_step_and_over_each_minibatch(name, options, weights, of_minibatches):
    """Two examples of two completions, of 2 and of 4 tokens."""
    forest = singles((1.0, 0.0), (0.0, 1.0), tokens=(2, 4))
    for split, expected in ((None, weights), ({"q0": 0, "q1": 1}, of_minibatches)):
        entries = by_call(credited(forest, name, split, **options))
        for call, entry in entries.items():
            short = call.endswith("0")
            assert entry.weights == pytest.approx([expected[0]] * 2 if short else [expected[1]] * 4)


@pytest.mark.parametrize(("padding", "weight"), [("fill", 1 / 8), ("truncate", 1 / 8), ("ragged", 0.0)])
def test_mmgrpo_repeats_a_single_rollout_to_r_equal_ones(padding, weight):
    """R = 2, one of which has failed: the other is there twice, with equal rewards; `ragged` repeats nothing."""
    found = credited(singles((1.0, 0.0), (0.7, None)), "mmgrpo", padding_mode=padding)
    alone = [e for e in found.entries if e.call == "q1/0"]
    assert [e.filler_of for e in alone] == ([None] if padding == "ragged" else [None, "q1/0"])
    assert all(advantage(e) == 0 and e.weights == pytest.approx((weight, weight)) for e in alone)


def test_a_turn_that_one_rollout_alone_reached_stays_in_the_loss():
    """`missing_turn=exclude`: own advantage 0 there; the outcome's still arrives, and the weight is its own."""
    forest = turns((0.5, 0.9, 1.0), (0.1, 0.0))
    entries = by_call(credited(forest, "mt_grpo_variable", missing_turn="exclude"))
    assert entries["q/0#1"].group_size == 1 and entries["q/0#1"].parts["own_advantage"] == 0
    assert advantage(entries["q/0#1"]) == advantage(entries["q/0#2"]) == pytest.approx(0.707106, abs=1e-6)
    assert entries["q/0#1"].weights == pytest.approx((1 / 6,))


def test_a_slot_of_several_groups_belongs_to_those_that_are_kept():
    """`os_group=parent`: b has four calls in two groups; where one group shrank to one call, the other has the slot."""
    grow = Grow(("a", "b"))
    for branch in range(2):
        grow.call(f"q/a{branch}", None, "a")
        for leaf in range(2):
            failed = (branch, leaf) == (1, 1)
            call = grow.call(f"q/b{branch}{leaf}", f"q/a{branch}", "b")
            grow.end(call, None if failed else float(leaf), fork="a", error="tool" if failed else None)
    entries = by_call(credited(grow.forest, "mhgpo_fof_os", os_group="parent"))
    # n = 2 slots of 1/2 each: a's two calls, and the two kept ones of b's three.
    assert [entries[f"q/b{name}"].weights[0] for name in ("00", "01", "10")] == pytest.approx([1 / 4, 1 / 4, 0])
    assert [entries[f"q/a{branch}"].weights[0] for branch in (0, 1)] == pytest.approx([1 / 4, 1 / 4])


@pytest.mark.parametrize("regroup", ["alg3", "agent_chunks", "by_agent_fork"])
def test_a_single_call_that_is_dropped_keeps_its_place_in_n(regroup):
    """Three trees that fork at b, G = 2: of three single calls of a, chunks keep two; the third's half of q is lost."""
    grow = Grow(("a", "b"))
    for example in range(3):
        grow.call(f"q{example}/a", None, "a")
        for branch in range(2):
            grow.end(grow.call(f"q{example}/{branch}", f"q{example}/a", "b"), float(branch + example), fork="b")
    found = credited(grow.forest, "mhgpo_rr", regroup=regroup)
    weights = sorted(entry.weights[0] for entry in found.entries if entry.call.endswith("a"))
    kept = 3 if regroup == "by_agent_fork" else 2
    assert weights == pytest.approx([0] * (3 - kept) + [1 / 6] * kept)
    assert total_weight(found) == pytest.approx(0.5 + kept / 6)


@pytest.mark.parametrize(("regroup", "groups"), [("agent_chunks", 2), ("alg3", 3), ("by_agent_fork", 5)])
def test_what_single_calls_are_compared_with(regroup, groups):
    """Module a is called twice above the fork at b or c: two trees of each kind. Chunks mix forks, `alg3` all calls."""
    grow = Grow(("a", "b", "c"), step=1)
    for example, fork in enumerate("bbcc"):
        for position in range(2):
            grow.call(f"q{example}/a{position}", f"q{example}/a{position - 1}" if position else None, "a")
        trunk = f"q{example}/a1" if fork == "b" else grow.call(f"q{example}/b", f"q{example}/a1", "b")
        for branch in range(3):
            middle = grow.call(f"q{example}/b{branch}", trunk, "b") if fork == "b" else trunk
            grow.end(grow.call(f"q{example}/c{branch}", middle, "c"), (example + branch) % 4 / 4, fork=fork)
    entries = credited(grow.forest, "mhgpo_rr", regroup=regroup, group_size=3).entries
    single = [e for e in entries if e.call in grow.calls and (e.call[3] == "a" or e.call.endswith("/b"))]
    found = {}
    for entry in single:
        found.setdefault(entry.group, []).append(grow.calls[entry.call])
    dropped = len(found.pop(None, []))
    kinds = [{(call.module, call.invocation) for call in calls} for calls in found.values()]
    assert len(single) == 10
    if regroup == "by_agent_fork":
        # (a, 0) and (a, 1) at each fork, and b above the fork at c: pairs, one by one.
        assert [len(calls) for calls in found.values()] == [2] * groups and dropped == 0
    else:
        assert [len(calls) for calls in found.values()] == [3] * groups
        assert dropped == 10 - 3 * groups
        assert all(len(kind) == 1 for kind in kinds) == (regroup == "agent_chunks")


# -- completions without tokens


@pytest.mark.parametrize("name", GROUPED)
def test_a_completion_without_tokens_is_compared_and_takes_no_weight(name):
    """G counts the sequences that have tokens: the other one of the group has all of its share."""
    forest = singles((1.0, 0.0), (0.0, 1.0), tokens=(2, 0))
    found = credited(forest, name)
    entries = by_call(found)
    assert entries["q0/0"].mean == 0.5 and advantage(entries["q0/0"]) == pytest.approx(0.7071, abs=1e-3)
    assert entries["q0/1"].advantages == entries["q0/1"].weights == ()
    assert entries["q0/0"].weights == pytest.approx((1 / 4, 1 / 4)) and total_weight(found) == pytest.approx(1.0)


@pytest.mark.parametrize("name", GROUPED)
def test_an_example_without_any_token_is_not_counted(name):
    forest = singles((1.0, 0.0), (0.0, 1.0))
    empty = {name: replace(call, completion_tokens=0) for name, call in forest.calls.items() if call.example == "q1"}
    found = credited(replace(forest, calls={**forest.calls, **empty}), name)
    assert by_call(found)["q0/0"].weights == pytest.approx((1 / 4, 1 / 4)) and total_weight(found) == pytest.approx(1)


def test_a_slot_without_any_token_does_not_count_in_n():
    """MHGPO: module b never wrote anything; n = 1, so a's calls have all of the example."""
    grow = Grow(("a", "b"))
    for branch in range(2):
        grow.end(grow.call(f"q/b{branch}", grow.call(f"q/a{branch}", None, "a"), "b", 0), float(branch), fork="a")
    entries = by_call(credited(grow.forest, "mhgpo_fof"))
    assert [entries[f"q/a{branch}"].weights for branch in (0, 1)] == [(0.5,), (0.5,)]


def test_a_rollout_counts_the_tokens_of_all_its_calls():
    """GRPO: a call without tokens inside a rollout that has some changes nothing."""
    grow = Grow(("a", "b"))
    grow.end(grow.call("q/b0", grow.call("q/a0", None, "a", 3), "b", 0), 1.0)
    grow.end(grow.call("q/b1", grow.call("q/a1", None, "a", 2), "b", 1), 0.0)
    entries = by_call(credited(grow.forest, "grpo"))
    assert entries["q/a0"].weights == pytest.approx((1 / 6,) * 3) and entries["q/b1"].weights == pytest.approx((1 / 6,))


@pytest.mark.parametrize(
    ("lengths", "rewards"), [((2, 0, 1), (0, 0.7, 1)), ((0, 2, 1), (0.3, 0.4, 1)), ((1, 1, 0), (0.3, 1.4))]
)
def test_a_turns_reward_falls_on_the_token_before_it_and_at_the_start_on_the_first(lengths, rewards):
    """MT-PPO, turn rewards 0.3 and 0.4, outcome 1."""
    grow = Grow(("a",))
    parent = None
    for turn, length in enumerate(lengths):
        turn_reward = (0.3, 0.4, None)[turn]
        parent = grow.call(f"q/{turn}", parent, "a", length, values=(0.0,) * length, turn_reward=turn_reward)
    grow.end(parent, 1.0)
    found = credited(grow.forest, "mt_ppo")
    assert [r for entry in found.entries for r in entry.token_rewards] == pytest.approx(rewards)
    assert total_weight(found) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["ppo", "mt_ppo", "mappo"])
def test_a_sequence_without_tokens_has_no_place_for_a_reward(name):
    """A rollout (MAPPO: a call) without tokens has an entry, and changes nothing of the others."""
    alone, beside = credited(singles((1.0,)), name), credited(singles((1.0,), (0.0, 1.0), tokens=(2, 0)), name)
    assert by_call(beside)["q1/1"].token_rewards == () and by_call(beside)["q1/1"].weights == ()
    assert by_call(alone)["q0/0"].returns == by_call(beside)["q0/0"].returns
    assert by_call(beside)["q0/0"].weights == pytest.approx((1 / 4, 1 / 4))
    (nothing,) = credited(singles((1.0,), tokens=(0,)), name).entries
    assert nothing.advantages == nothing.weights == nothing.returns == ()


# -- examples without a scored rollout


@pytest.mark.parametrize("name", REWARDED)
def test_an_example_without_a_scored_rollout_is_as_if_it_had_not_been_drawn(name):
    whole, beside = singles((1.0, 0.0), (0.2, 0.4)), singles((1.0, 0.0), (0.2, 0.4), (None, None))
    assert credited(beside, name).entries == credited(whole, name).entries
    assert total_weight(credited(beside, name)) == pytest.approx(1.0)


@pytest.mark.parametrize("name", REWARDED)
def test_it_keeps_its_place_among_the_mini_batches(name):
    """Three examples in three mini-batches, the middle one without a scored rollout: its step has no weight at all."""
    forest = singles((1.0, 0.0), (None, None), (0.2, 0.4))
    split = minibatches(forest.examples, 3)
    assert split == {"q0": 0, "q1": 1, "q2": 2}
    weight = [0.0, 0.0, 0.0]
    for entry in credited(forest, name, split).entries:
        weight[split[forest.calls[entry.call].example]] += sum(entry.weights)
    assert weight == pytest.approx([1, 0, 1])


@pytest.mark.parametrize("name", REWARDED)
def test_a_step_without_any_scored_rollout_has_no_entries(name):
    grow = Grow(("a",))
    grow.end(None, None, error="tool")
    grow.end(None, 0.0, error="length")
    assert credited(grow.forest, name).entries == ()
