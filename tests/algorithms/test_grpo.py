"""GRPO-OR, GRPO-MR and MT-GRPO: turns, options; docs/turn-rewards.md has the worked numbers, run by test_docs."""

from functools import partial

import pytest

from tests.helpers.forests import Grow, advantage, by_call, documented, singles, turns
from tests.helpers.forests import credit as credit_by

SEARCH = documented("turns")
"""Four rollouts of a two-turn search: outcomes 1.7, 0.1, 1.4 and 0.3, turn rewards 0.7, 0.2, none (no tool) and 0."""
THREE_TURNS = documented("more_turns")
"""Outcomes 1, 0.2 and -1, turn rewards 0.2 and -0.1, 0.2 and 0.1, and -0.3 alone."""
credit = partial(credit_by, eps=1e-4)


def test_everything_up_to_the_first_tool_result_is_the_first_turn():
    """A call whose tool use was malformed has no turn reward; it belongs to the turn of the result that follows."""
    grow = Grow(("agent",))
    for index, (turn, outcome) in enumerate(((0.7, 1.0), (0.2, 0.0))):
        grow.call(f"q/{index}e", None, "agent")
        grow.call(f"q/{index}s", f"q/{index}e", "agent", turn_reward=turn)
        grow.call(f"q/{index}t", f"q/{index}s", "agent", turn_reward=0.1)
        grow.call(f"q/{index}a", f"q/{index}t", "agent")
        grow.end(f"q/{index}a", outcome)
    entries = by_call(credit(grow.forest, "mt_grpo"))
    assert advantage(entries["q/0e"]) == advantage(entries["q/0s"]) == pytest.approx(2 * 0.707, abs=1e-3)
    assert advantage(entries["q/0t"]) == advantage(entries["q/0a"]) == pytest.approx(0.707, abs=1e-3)
    assert entries["q/0s"].reward == pytest.approx(0.8), "one turn reward per rollout: their sum"


def test_rollouts_without_a_tool_call_by_option():
    plain = by_call(credit(SEARCH, "mt_grpo", no_tool="outcome"))
    assert advantage(plain["2a"]) == pytest.approx(0.661792, abs=5e-7)
    excluded = by_call(credit(SEARCH, "mt_grpo", missing_turn="exclude"))
    assert excluded["0s"].group_size == 3 and excluded["0s"].mean == pytest.approx(0.3)


def test_turn_coefficient_and_discount():
    base = by_call(credit(SEARCH, "mt_grpo"))["0s"]
    own = base.parts["own_advantage"]
    assert advantage(by_call(credit(SEARCH, "mt_grpo", turn_coef=0.5))["0s"]) == pytest.approx(own / 2 + 1.039959)
    assert advantage(by_call(credit(SEARCH, "mt_grpo", alpha=0.5))["0s"]) == pytest.approx(own + 1.039959 / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (
            "exclude",
            [[0.797624, 0.220473, 0.927081], [1.416198, 0.839047, 0.132440], [-2.213821, -1.059521]],
        ),
        # turn 1 of the third rollout: reward 0, which is the mean of 0, 0.1 and -0.1
        ("absorb", [[0.505230, -0.071920, 0.927081], [1.708591, 1.131441, 0.132440], [-2.213821, -1.059521]]),
        ("zero", [[0.505230, -0.071920, 0.927081], [1.708591, 1.131441, 0.132440], [-2.213821, -1.059521]]),
    ],
)
def test_variable_turns_worked_example(missing, expected):
    entries = by_call(credit(THREE_TURNS, "mt_grpo_variable", missing_turn=missing))
    for index, advantages in enumerate(expected):
        found = [advantage(entries[f"{index}.{turn}"]) for turn in range(len(advantages))]
        assert found == pytest.approx(advantages, abs=5e-7)


def test_the_token_mean_counts_the_trained_tokens_of_all_turns():
    for name in ("grpo", "grpo_mr", "mt_grpo", "mt_grpo_variable"):
        token = by_call(credit(SEARCH, name, loss_mean="token"))
        assert {w for entry in token.values() for w in entry.weights} == {1 / 17}


def test_a_turn_with_signal_keeps_its_example():
    entries = by_call(credit(SEARCH, "mt_grpo", zero_variance="drop"))
    assert all(entry.weights[0] > 0 for entry in entries.values())


def test_the_merged_advantage_is_that_of_merged_grpo_over_the_whole_batch_too():
    """Merged rewards 1.5, 0 (an example whose rollouts all search) and 1, 0: mean 0.625, sample deviation 0.75."""
    grow = Grow(("agent",))
    for name, turn, outcome in (("p/0", 0.5, 1.0), ("p/1", 0.0, 0.0), ("q/0", 0.5, 0.5), ("q/1", None, 0.0)):
        leaf = None if turn is None else grow.call(f"{name}s", None, "agent", turn_reward=turn)
        grow.end(grow.call(f"{name}a", leaf, "agent"), outcome, id=name)
    for name in ("mt_grpo", "grpo_mr"):
        entry = by_call(credit(grow.forest, name, std_over="batch"))["q/1a"]
        assert entry.std == pytest.approx(0.75)
        assert advantage(entry) == pytest.approx((0.0 - 0.5) / (0.75 + 1e-4)), "no tool: its GRPO-MR advantage"


def test_shared_calls_enter_once_per_rollout():
    grow = Grow(("a", "b"))
    grow.call("q/a", None, "a", 2)
    for index in range(2):
        grow.call(f"q/b{index}", "q/a", "b", 2)
        grow.end(f"q/b{index}", float(index))
    found = [entry for entry in credit(grow.forest, "grpo").entries if entry.call == "q/a"]
    assert [entry.advantages[0] > 0 for entry in found] == [False, True]


def test_merged_rewards_count_every_intermediate_turn():
    merged = by_call(credit(THREE_TURNS, "grpo_mr"))
    assert merged["0.0"].reward == pytest.approx(1.0 + 0.2 - 0.1)
    assert merged["1.0"].reward == pytest.approx(0.2 + 0.2 + 0.1)


def test_the_turn_coefficient_leaves_merged_advantages_alone():
    entries = by_call(credit(SEARCH, "mt_grpo", turn_coef=0.0))
    assert advantage(entries["2a"]) == pytest.approx(0.297015, abs=5e-7)
    assert advantage(entries["0s"]) == pytest.approx(1.039959, abs=5e-7)


def test_a_turn_without_a_reward_has_no_advantage_of_its_own():
    forest = turns((0.4, 1.0), (0.1, 0.0), (None, 0.5))
    entries = by_call(credit(forest, "mt_grpo_variable", missing_turn="exclude"))
    assert entries["q/2#0"].parts["own_advantage"] == 0.0 and entries["q/0#0"].group_size == 2
    assert advantage(entries["q/2#0"]) == advantage(entries["q/2#1"])


def test_a_single_rollout_counts_in_b_even_where_flat_examples_are_dropped():
    for name in ("grpo", "mt_grpo"):
        entries = by_call(credit(singles((1.0,), (1.0, 0.0)), name, zero_variance="drop"))
        assert entries["q1/0"].weights == (0.125, 0.125)


def test_the_share_of_examples_in_which_a_turn_tells_nothing():
    """Turn 0: 0.5 and 0.5 on q, 0.2 and 0.7 on r, so one example of two; turn 1: 0.1 and 0.3 on q alone.

    The one rollout of s is compared with nobody.
    """
    grow = Grow(("agent",))
    turn_rewards = {"q/0": (0.5, 0.1), "q/1": (0.5, 0.3), "r/0": (0.2,), "r/1": (0.7,), "s/0": (0.4,)}
    for name, rewards in turn_rewards.items():
        leaf = None
        for number, turn in enumerate((*rewards, None)):
            leaf = grow.call(f"{name}{number}", leaf, "agent", turn_reward=turn)
        grow.end(leaf, float(name[-1]), id=name)
    metrics = credit(grow.forest, "mt_grpo_variable").metrics
    shares = {key: value for key, value in metrics.items() if key.startswith("turn/")}
    assert shares == {"turn/0/zero_variance_share": 0.5, "turn/1/zero_variance_share": 0.0}
