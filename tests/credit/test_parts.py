"""The pure pieces of credit on their own: normalisation, explained variance, rewards of a tree, forks."""

import math

import pytest

from mmrl.config.algo import GrpoConfig, MhgpoFofConfig
from mmrl.credit.backward import EstimatedCall, backward, critic_credit
from mmrl.credit.entries import Group, Member, Reward
from mmrl.credit.groups import compare
from mmrl.credit.slots import ForkView
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
    assert normalise([], eps=0).is_singleton and normalise([], eps=0).mean is None
    single = normalise([3.0], eps=0)
    unscaled = normalise([2.0, 2.0], eps=0, scale=False)
    assert unscaled.std is None and unscaled.mean == 2.0 and unscaled.constant
    assert single.is_singleton and not single.constant and advantages(single) == (0.0,) and single.mean == 3.0


@pytest.mark.parametrize("eps", [0, 1e-6])
def test_constant_groups_have_no_advantage_even_when_averages_round(eps):
    rounded = [0.1 + 0.2, 0.3, 0.3]
    result = normalise(rounded, eps=eps)
    assert result.constant and not result.is_singleton and advantages(result) == (0.0, 0.0, 0.0) and result.std == 0.0
    assert not normalise([0.3, 0.3 + 1e-9], eps=eps).constant
    assert normalise([0.0, 9e-13], eps=eps).constant and not normalise([0.0, 1.1e-12], eps=eps).constant
    assert normalise([1e6, 1e6 + 1e-7], eps=eps).constant, "relative to the size of the rewards"
    assert not normalise([-1e6, -1e6 + 1e-5], eps=eps).constant
    assert normalise([-1e6, -1e6 + 1e-7], eps=eps).constant


def test_explained_variance_by_hand():
    """Returns 1, 0, 2 around 1, errors (advantages) 0.5, 0, -0.5 around 0: 1 - (0.5/3) / (2/3)."""
    call = Call(id="c", example="q", parent=None, module="a", completion_tokens=3)
    estimated = EstimatedCall(call, {}, (0.0,) * 3, (0.5, 0.0, 2.5), (0.5, 0.0, -0.5), 1.0)
    assert critic_credit("x", [estimated], "none").metrics == {"credit/explained_variance": pytest.approx(0.75)}
    flat = EstimatedCall(call, {}, (0.0,) * 3, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), 1.0)
    assert critic_credit("x", [flat], "none").metrics == {}


def test_a_rollout_that_ends_where_another_goes_on_is_one_more_successor():
    grow = Grow(("a", "b"))
    grow.call("q/a", None, "a")
    grow.call("q/b", "q/a", "b")
    grow.end("q/b", 1.0)
    grow.end("q/a", 0.0, error="length")
    assert backward(grow.forest, MHGPO)["q/a"].total == 0.5


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
