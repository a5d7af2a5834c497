"""The pure pieces of credit on their own: normalisation, weights, estimation, forks."""

from __future__ import annotations

import math
import statistics

import pytest

from mmrl.config.algo import GrpoConfig, MhgpoFofConfig
from mmrl.credit.backward import EstimatedCall, backward, critic_credit, gae, whitening
from mmrl.credit.entries import Group, Member, Reward
from mmrl.credit.groups import compare, std_of
from mmrl.credit.loss_weights import Unit, per_token, two_level
from mmrl.credit.scored import scored_rollouts
from mmrl.credit.slots import ForkView, three_level
from mmrl.records import Call
from tests.helpers.forests import Grow

MHGPO = MhgpoFofConfig(name="mhgpo_fof")


def compared(*groups, **options):
    """Groups of bare rewards, compared."""
    made = [Group("g", tuple(Member((), Reward(reward)) for reward in rewards)) for rewards in groups]
    return compare(made, GrpoConfig(name="grpo", **options))


def normalise(rewards, **options):
    return compared(rewards, **options)[0]


def advantages(group):
    return tuple(member.advantage for member in group.members)


def weights(units, shares, loss_mean, loss_length=None, minibatch=None):
    return per_token(units, shares, GrpoConfig(name="grpo", loss_mean=loss_mean, loss_length=loss_length), minibatch)


def test_normalise_by_hand():
    result = normalise([1.0, 0.0, 0.5], eps=0.1)
    assert result.mean == 0.5 and result.std == 0.5
    assert advantages(result) == pytest.approx((0.5 / 0.6, -0.5 / 0.6, 0.0))
    assert advantages(normalise([1.0, 0.0], eps=0, ddof=0)) == pytest.approx((1.0, -1.0))
    rloo = normalise([1.0, 0.0, 0.0, 0.0], eps=9, scale=False, baseline="leave_one_out")
    assert advantages(rloo) == pytest.approx((1.0, -1 / 3, -1 / 3, -1 / 3))


def test_one_deviation_over_the_batch_by_hand():
    """1, 0, 3, 0 pooled (a group of one is compared with nothing): mean 1, variance (0 + 1 + 4 + 1) / 3 = 2."""
    first, second, one = compared([1.0, 0.0], [3.0, 0.0], [9.0], eps=0, std_over="batch")
    assert first.std == second.std == pytest.approx(math.sqrt(2)) and one.std is None
    assert advantages(first) == pytest.approx((0.5 / math.sqrt(2), -0.5 / math.sqrt(2)))
    assert advantages(second) == pytest.approx((1.5 / math.sqrt(2), -1.5 / math.sqrt(2)))


def test_normalise_without_a_comparison():
    assert normalise([], eps=0).of_one and normalise([], eps=0).mean is None
    single = normalise([3.0], eps=0)
    unscaled = normalise([2.0, 2.0], eps=0, scale=False)
    assert unscaled.std is None and unscaled.mean == 2.0 and unscaled.constant
    assert single.of_one and not single.constant and advantages(single) == (0.0,) and single.mean == 3.0


@pytest.mark.parametrize("eps", [0, 1e-6])
def test_constant_groups_have_no_advantage_even_when_averages_round(eps):
    rounded = [0.1 + 0.2, 0.3, 0.3]
    result = normalise(rounded, eps=eps)
    assert result.constant and not result.of_one and advantages(result) == (0.0, 0.0, 0.0) and result.std == 0.0
    assert not normalise([0.3, 0.3 + 1e-9], eps=eps).constant
    assert normalise([0.0, 9e-13], eps=eps).constant and not normalise([0.0, 1.1e-12], eps=eps).constant
    assert normalise([1e6, 1e6 + 1e-7], eps=eps).constant, "relative to the size of the rewards"
    assert not normalise([-1e6, -1e6 + 1e-5], eps=eps).constant
    assert normalise([-1e6, -1e6 + 1e-7], eps=eps).constant


def test_standard_deviation():
    values = [1.0, 4.0, -2.0, 0.5]
    assert std_of(values, 1) == pytest.approx(statistics.stdev(values))
    assert std_of(values, 0) == pytest.approx(statistics.pstdev(values))
    assert std_of([1.0], 1) == 0.0 and std_of([], 0) == 0.0


def test_two_level_shares():
    units = [Unit("q", "g1", 2), Unit("q", "g1", 3), Unit("q", "g2", 1), Unit("p", "g3", 0), Unit("p", "g4", 5, False)]
    assert two_level(units) == pytest.approx([1 / 6, 1 / 6, 1 / 3, 0, 0])
    assert two_level(units, {"q": 0, "p": 1}) == pytest.approx([1 / 4, 1 / 4, 1 / 2, 0, 0])


def test_three_level_shares():
    units = [Unit("q", "a", 2), Unit("q", "a", 3), Unit("q", "b", 1), Unit("p", "a", 4), Unit("p", "a", 4, False)]
    filled = [("q", "a"), ("q", "b"), ("p", "a"), ("p", "b"), ("r", "a")]
    assert three_level(units, filled) == pytest.approx([1 / 12, 1 / 12, 1 / 6, 1 / 6, 0])
    steps = {"q": 0, "p": 1, "r": 1}
    assert three_level(units, filled, steps) == pytest.approx([1 / 4, 1 / 4, 1 / 2, 1 / 4, 0])


def test_weights_weights():
    units = [Unit("q", "g", 2), Unit("q", "g", 4), Unit("p", "h", 3), Unit("p", "i", 9, False)]
    shares = [0.25, 0.25, 0.5, 0.0]
    assert weights(units, shares, "seq", None) == pytest.approx([1 / 8, 1 / 16, 1 / 6, 0])
    assert weights(units, shares, "token", None) == pytest.approx([1 / 9, 1 / 9, 1 / 9, 0])
    assert weights(units, shares, "token", None, {"q": 0, "p": 1}) == pytest.approx([1 / 6, 1 / 6, 1 / 3, 0])
    assert weights(units, shares, "constant", 5) == pytest.approx([0.05, 0.05, 0.1, 0])
    assert weights(units, shares, "constant", None) == pytest.approx([0.25 / 9, 0.25 / 9, 0.5 / 9, 0])
    assert weights([], [], "constant", None) == []


def test_gae_by_hand():
    """Two tokens: A_1 = r_1 - V_1; A_0 = r_0 + gamma V_1 - V_0 + gamma lambda A_1."""
    assert gae([1.0, 2.0], [0.5, 0.25], 0.9, 0.5) == pytest.approx([1.0 + 0.9 * 0.25 - 0.5 + 0.45 * 1.75, 1.75])
    assert gae([], [], 1, 1) == []


def test_explained_variance_by_hand():
    """Returns 1, 0, 2 around 1, errors (advantages) 0.5, 0, -0.5 around 0: 1 - (0.5/3) / (2/3)."""
    call = Call(id="c", example="q", parent=None, module="a", completion_tokens=3)
    estimated = EstimatedCall(call, {}, (0.0,) * 3, (0.5, 0.0, 2.5), (0.5, 0.0, -0.5), 1.0)
    assert critic_credit("x", [estimated], "none").metrics == {"credit/explained_variance": pytest.approx(0.75)}
    flat = EstimatedCall(call, {}, (0.0,) * 3, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), 1.0)
    assert critic_credit("x", [flat], "none").metrics == {}


def test_whitening():
    mean, factor = whitening([1.0, 2.0, 6.0])
    assert mean == 3.0 and factor == pytest.approx(1 / math.sqrt(7 + 1e-8))
    assert whitening([1.0, 3.0])[1] == pytest.approx(1 / math.sqrt(2 + 1e-8))
    assert whitening([4.0])[0] == 4.0 and whitening([]) == (0.0, 1.0)


def test_rewards_are_backed_up_through_every_level():
    grow = Grow(("a", "b", "c"))
    grow.call("q/a", None, "a", penalty=-1.0)
    for branch in range(2):
        grow.call(f"q/b{branch}", "q/a", "b", penalty=-0.25)
        for leaf in range(2):
            grow.call(f"q/c{branch}{leaf}", f"q/b{branch}", "c", penalty=-0.5)
            grow.end(f"q/c{branch}{leaf}", 1.0 * branch + 0.5 * leaf)
    shared = backward(grow.forest, MHGPO)
    assert [shared[c].total for c in ("q/c11", "q/b1", "q/a")] == pytest.approx([1.0, 1.0, -0.25])
    full = backward(grow.forest, MhgpoFofConfig(name="mhgpo_fof", propagate="full", aggregate="max"))
    assert full["q/b1"].parts == {"shared": 1.0, "penalty": -0.25}
    assert full["q/a"].parts == {"shared": 0.75, "penalty": -1.0}
    plain = backward(grow.forest, MhgpoFofConfig(name="mhgpo_fof", penalties=False, aggregate="min"))
    assert plain["q/a"].total == 0.0 and plain["q/c11"].total == 1.5


def test_a_rollout_that_ends_where_another_goes_on_is_one_more_successor():
    grow = Grow(("a", "b"))
    grow.call("q/a", None, "a")
    grow.call("q/b", "q/a", "b")
    grow.end("q/b", 1.0)
    grow.end("q/a", 0.0, error="length")
    assert backward(grow.forest, MHGPO)["q/a"].total == 0.5


def test_scored_rollouts_have_a_reward_and_a_call():
    grow = Grow(("a",))
    grow.chain("q/0", "a", 1.0)
    grow.chain("q/1", "a", None, error="judge")
    grow.end(None, 0.0, error="length")
    assert [scored.rollout.id for scored in scored_rollouts(grow.forest)] == ["q/0"]


def test_forks_recorded_and_read_from_the_tree():
    grow = Grow(("a", "b", "c"))
    grow.call("q/a", None, "a")
    for branch in range(2):
        grow.call(f"q/b{branch}", "q/a", "b")
        grow.call(f"q/c{branch}", f"q/b{branch}", "c")
        grow.end(f"q/c{branch}", 1.0)
    grow.end(None, None, error="tool")
    inferred = ForkView(grow.forest)
    assert inferred.at_fork == {"q/b0", "q/b1"} and dict(inferred.above_fork) == {"q/a": "b"}
    for index, rollout in enumerate(grow.rollouts[:2]):
        grow.rollouts[index] = type(rollout)(id=rollout.id, example="q", leaf=rollout.leaf, reward=1.0, fork="c")
    recorded = ForkView(grow.forest)
    assert recorded.at_fork == {"q/c0", "q/c1"}
    assert dict(recorded.above_fork) == {"q/a": "c", "q/b0": "c", "q/b1": "c"}


def test_forks_are_read_from_the_last_level_of_a_tree():
    grow = Grow(("a", "b", "c"))
    grow.call("q/a", None, "a")
    grow.call("q/b", "q/a", "b")
    for branch in range(2):
        grow.end(grow.call(f"q/c{branch}", "q/b", "c"), 1.0)
    view = ForkView(grow.forest)
    assert view.at_fork == {"q/c0", "q/c1"} and dict(view.above_fork) == {"q/a": "c", "q/b": "c"}


def test_a_tree_that_never_reached_its_fork_is_all_above_it():
    grow = Grow(("a", "b"))
    grow.chain("q/0", "a", 0.0, error="parse", fork="b")
    view = ForkView(grow.forest)
    assert view.at_fork == frozenset() and dict(view.above_fork) == {"q/0#0": "b"}
