"""PPO, MT-PPO and MAPPO: placement, whitening, KL, refusals; more worked numbers in docs/ppo.md (test_docs)."""

from dataclasses import replace
from functools import partial

import pytest

from mmrl.errors import DataError
from tests.helpers.forests import Grow, by_call, documented
from tests.helpers.forests import credit as credit_by

AGENTS = documented("critic")
"""F1 0.6; the answerer has penalty -1."""


credit = partial(credit_by, beta=0)


def search(observed):
    """Two searches and an answer: mask 1 1 0 1 1 0 1 1."""
    forest = documented("observed")
    calls = {name: call if observed else replace(call, values=call.values[:2]) for name, call in forest.calls.items()}
    return replace(forest, calls=calls)


def flat(entries, field):
    return [value for index in range(3) for value in getattr(entries[f"{index}"], field)]


@pytest.mark.parametrize(
    ("gamma", "lam", "obs", "position", "expected"),
    [
        (1, 1, "all", "last_generated", [0.8, 0.7, 0.6, 0.9, 0.2, 0.3]),
        (1, 1, "all", "turn_end", [0.8, 0.7, 0.6, 0.9, 0.2, 0.3]),
        (0.9, 0.8, "all", "turn_end", [-0.026802, -0.106669, -0.025983, 0.422246, 0.046, 0.3]),
        (0.9, 0.8, "skip", "last_generated", [0.151504, 0.140977, 0.140246, 0.653120, 0.046, 0.3]),
    ],
)
def test_mt_ppo_worked_example(gamma, lam, obs, position, expected):
    forest = search(observed=obs == "all")
    result = credit(forest, "mt_ppo", gamma=gamma, gae_lambda=lam, obs=obs, position=position)
    assert flat(by_call(result), "raw_advantages") == pytest.approx(expected, abs=5e-7)


def test_whitening_over_all_tokens_counts_observations():
    """Advantages at t = 0..7 with obs=all, turn_end: 0.8 0.7 1.1 0.6 0.9 1.0 0.2 0.3."""
    everything = [0.8, 0.7, 1.1, 0.6, 0.9, 1.0, 0.2, 0.3]
    mean = sum(everything) / 8
    std = (sum((a - mean) ** 2 for a in everything) / 7) ** 0.5
    entries = by_call(credit(search(True), "mt_ppo", obs="all", position="turn_end", whiten="all"))
    trained = [0.8, 0.7, 0.6, 0.9, 0.2, 0.3]
    assert flat(entries, "advantages") == pytest.approx([(a - mean) / std for a in trained], abs=1e-6)
    none = by_call(credit(search(True), "mt_ppo", obs="all", whiten="none"))
    assert flat(none, "advantages") == flat(none, "raw_advantages")


def test_mappo_worked_example_with_a_lower_lambda():
    lower = by_call(credit(AGENTS, "mappo", beta=0.1, gae_lambda=0.95))
    assert lower["w"].raw_advantages == pytest.approx([0.26, 0.4])
    assert lower["a"].raw_advantages == pytest.approx([-0.839375, -0.4625, -0.75])


def test_mappo_options():
    final = by_call(credit(AGENTS, "mappo", penalties=False))
    assert final["a"].token_rewards == pytest.approx([0, 0, 0.6])
    unwhitened = by_call(credit(AGENTS, "mappo", whiten="none"))
    assert unwhitened["a"].advantages == unwhitened["a"].raw_advantages
    in_loss = by_call(credit(AGENTS, "mappo", beta=0.1, kl="loss"))
    assert in_loss["w"].token_rewards == pytest.approx([0, 0.6])


def test_mappo_leaves_out_what_no_scored_rollout_reaches_and_empty_calls():
    grow = Grow(("a", "b"))
    grow.call("q/0", None, "a", 0, values=())
    grow.call("q/1", "q/0", "b", 1, values=(0.5,))
    grow.end("q/1", 1.0)
    grow.call("p/0", None, "a", 1)
    grow.end("p/0", None, error="engine")
    result = credit(grow.forest, "mappo")
    assert set(by_call(result)) == {"q/0", "q/1"}
    assert by_call(result)["q/0"].token_rewards == ()
    assert by_call(result)["q/1"].advantages == (0.0,), "one token alone is its own mean"


def test_kl_is_in_the_reward_of_sampled_tokens_only():
    grow = Grow(("agent",))
    grow.call("q/0", None, "agent", 1, observation_tokens=1, turn_reward=0.5, values=(0.0, 0.0), logprobs=(-1.0, -9.0),
              ref_logprobs=(-2.0, -1.0))  # fmt: skip
    grow.call("q/1", "q/0", "agent", 1, values=(0.0,), logprobs=(-1.0,), ref_logprobs=(-1.5,))
    grow.end("q/1", 1.0)
    entries = by_call(credit(grow.forest, "mt_ppo", beta=0.1, obs="all"))
    assert entries["q/0"].token_rewards == pytest.approx([0.5 - 0.1])
    assert entries["q/0"].raw_advantages == pytest.approx([1.0 - 0.05 + 0.5 - 0.1])
    assert entries["q/0"].parts == pytest.approx({"turn": 0.5, "kl": -0.1})


def test_mappo_never_reads_values_of_observations():
    grow = Grow(("a",))
    grow.end(grow.call("q/0", None, "a", 1, observation_tokens=2, values=(0.5,)), 1.0)
    assert by_call(credit(grow.forest, "mappo"))["q/0"].raw_advantages == pytest.approx((0.5,))


def test_whitening_over_trained_tokens_ignores_estimates_at_observations():
    entries = by_call(credit(search(True), "mt_ppo", obs="all", position="turn_end"))
    assert flat(entries, "advantages") == pytest.approx(
        [0.777454, 0.418629, 0.059804, 1.136279, -1.375496, -1.016671], abs=5e-7
    )


def test_weights_are_the_token_mean():
    grow = Grow(("agent",))
    for example, tokens in (("q", 3), ("p", 5)):
        grow.end(grow.call(f"{example}/0", None, "agent", tokens, values=(0.0,) * tokens), 1.0)
    for name in ("ppo", "mappo"):
        assert {w for e in credit(grow.forest, name).entries for w in e.weights} == {1 / 8}
        assert credit(grow.forest, name).algo == name


@pytest.mark.parametrize("name", ["ppo", "mt_ppo", "mappo"])
def test_what_the_critic_and_the_kl_term_need_is_asked_for_by_call(name):
    grow = Grow(("agent",))
    grow.end(grow.call("q/0", None, "agent", 2), 1.0)
    with pytest.raises(DataError, match=r"call 'q/0': values: missing, expected a critic's value per token"):
        credit(grow.forest, name)
    grow.calls.clear()
    grow.call("q/0", None, "agent", 2, values=(1.0,))
    with pytest.raises(DataError, match=r"call 'q/0': values: got 1 numbers, expected 2"):
        credit(grow.forest, name)
    grow.call("q/0", None, "agent", 2, values=(1.0, 1.0))
    with pytest.raises(DataError, match=r"call 'q/0': logprobs: missing.*algo\.beta=0"):
        credit(grow.forest, name, beta=0.1)
    grow.call("q/0", None, "agent", 2, values=(1.0, 1.0), logprobs=(1.0, 1.0), ref_logprobs=(1.0,))
    with pytest.raises(DataError, match=r"call 'q/0': ref_logprobs: got 1 numbers, expected 2"):
        credit(grow.forest, name, beta=0.1)


def test_values_must_cover_observations_exactly_when_they_take_part():
    with pytest.raises(DataError, match=r"call '0': values: got 3 numbers, expected 2"):
        credit(search(observed=True), "mt_ppo")
    with pytest.raises(DataError, match=r"call '0': values: got 2 numbers, expected 3"):
        credit(search(observed=False), "mt_ppo", obs="all")
