"""MHGPO: failures, options, plans; docs/mhgpo.md has the worked numbers, run by test_docs."""

from dataclasses import replace

import pytest

from mmrl.algorithms import ALGORITHMS
from mmrl.config import ALGO_SCHEMAS
from mmrl.errors import DataError
from mmrl.rollout.plans import Fork, Tree
from tests.helpers.forests import Grow, advantage, by_call, credit, documented, total_weight

AGENTS = ("rewriter", "reranker", "answerer")
BRANCHES = documented("agents")
"""Outcomes 1, 0.4 and 0; the reranker of branch 2 has penalty -0.5, the answerer of branch 3 has -1."""


@pytest.mark.parametrize(
    ("agent", "rewards", "advantages"),
    [
        ("w", [1.0, -0.1, -1.0], [1.031614, -0.066556, -0.965059]),
        ("r", [1.0, -0.1, -1.0], [1.031614, -0.066556, -0.965059]),
        ("a", [1.0, 0.4, -1.0], [0.844440, 0.259828, -1.104268]),
    ],
)
def test_worked_example_with_penalties_that_are_passed_on(agent, rewards, advantages):
    entries = by_call(credit(BRANCHES, "mhgpo_fof", group_size=3, propagate="full"))
    own = [entries[f"{branch}{agent}"] for branch in (1, 2, 3)]
    assert [entry.reward for entry in own] == pytest.approx(rewards, abs=1e-12)
    assert [advantage(entry) for entry in own] == pytest.approx(advantages, abs=5e-7)


ROUND_ROBIN = documented("round_robin")
"""q0 forks at the rewriter (0), q1 and q2 at the reranker (1); a call is EXAMPLE.AGENT.BRANCH."""


def test_round_robin_reads_the_fork_from_the_tree_when_it_is_not_recorded():
    forest = ROUND_ROBIN
    bare = replace(forest, rollouts=tuple(replace(rollout, fork=None) for rollout in forest.rollouts))
    assert credit(bare, "mhgpo_rr", group_size=2) == credit(forest, "mhgpo_rr", group_size=2)


def oversampled():
    grow = Grow(AGENTS)
    for branch, outcomes in enumerate(((1.0, 0.5), (0.0, 0.4))):
        grow.call(f"q/{branch}w", None, "rewriter")
        grow.call(f"q/{branch}r", f"q/{branch}w", "reranker")
        for sample, outcome in enumerate(outcomes):
            grow.call(f"q/{branch}a{sample}", f"q/{branch}r", "answerer")
            grow.end(f"q/{branch}a{sample}", outcome, fork="rewriter")
    return grow.forest


def test_oversampled_calls_can_be_compared_per_branch():
    result = credit(oversampled(), "mhgpo_fof_os", group_size=2, os_group="parent")
    entries = by_call(result)
    assert entries["q/0a0"].group == entries["q/0a1"].group != entries["q/1a0"].group
    assert entries["q/0a0"].mean == pytest.approx(0.75)
    assert entries["q/0w"].group == entries["q/1w"].group
    assert entries["q/0a0"].weights == pytest.approx([1 / (3 * 4)])
    assert total_weight(result) == pytest.approx(1.0)


def test_random_aggregation_takes_one_successor_and_follows_the_seed():
    taken = {
        seed: by_call(credit(oversampled(), "mhgpo_fof_os", seed=seed, group_size=2, aggregate="random"))["q/0r"].reward
        for seed in range(20)
    }
    assert set(taken.values()) == {1.0, 0.5}
    again = by_call(credit(oversampled(), "mhgpo_fof_os", seed=3, group_size=2, aggregate="random"))
    assert again["q/0r"].reward == taken[3]


def test_model_caused_failures_are_credited_where_they_ended():
    grow = Grow(AGENTS)
    grow.chain("q/0", AGENTS, 1.0, fork="rewriter")
    grow.chain("q/1", AGENTS[:1], 0.0, error="parse", fork="rewriter")
    entries = by_call(credit(grow.forest, "mhgpo_fof", group_size=2))
    assert advantage(entries["q/1#0"]) == pytest.approx(-0.707106, abs=5e-7)
    assert not any(entries["q/0#1"].weights) and entries["q/0#1"].group_size == 1


def test_a_module_that_an_example_never_calls_is_no_slot_of_it():
    grow = Grow((*AGENTS, "never"))
    for branch, outcome in enumerate((1.0, 0.0)):
        grow.chain(f"q/{branch}", AGENTS, outcome, fork="rewriter")
    result = credit(grow.forest, "mhgpo_fof", group_size=2)
    assert by_call(result)["q/0#0"].weights == pytest.approx([1 / 6])
    assert total_weight(result) == pytest.approx(1.0)


def test_ragged_invocations_form_their_own_slots():
    grow = Grow(("a", "b"))
    grow.chain("q/0", "abb", 1.0, fork="a")
    grow.chain("q/1", "ab", 0.5, fork="a")
    grow.chain("q/2", "abb", 0.0, fork="a")
    entries = by_call(credit(grow.forest, "mhgpo_fof", group_size=3))
    assert entries["q/0#2"].group_size == 2 and entries["q/0#1"].group_size == 3
    assert entries["q/0#2"].weights == pytest.approx([1 / (3 * 2)])
    assert entries["q/0#1"].weights == pytest.approx([1 / (3 * 3)])


def test_plans():
    def plan(name, modules=AGENTS, key=(0, 0, "q"), **options):
        algo = ALGO_SCHEMAS[name].model_validate({"name": name, "group_size": 3, **options})
        return ALGORITHMS[name].plan(algo, modules, key)

    assert plan("mhgpo_fof") == (Tree((Fork(None, 3),), "rewriter"),)
    assert plan("mhgpo_fof_os") == (Tree((Fork(None, 3), Fork("answerer", 3)), "rewriter"),)
    assert plan("mhgpo_is") == tuple(Tree((Fork(agent, 3),), agent) for agent in AGENTS)
    assert plan("mhgpo_rr", fork_probs=(0, 0, 1)) == (Tree((Fork("answerer", 3),), "answerer"),)
    drawn = [plan("mhgpo_rr", key=(0, 0, f"q{i}"))[0].fork_name for i in range(2000)]
    shares = [drawn.count(agent) / 2000 for agent in AGENTS]
    assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.04)
    four = [plan("mhgpo_rr", modules=tuple("abcd"), key=(0, 0, f"q{i}"))[0].fork_name for i in range(2000)]
    assert [four.count(name) / 2000 for name in "abcd"] == pytest.approx([0.25] * 4, abs=0.04)


def test_check():
    def check(name, modules=AGENTS, **options):
        algo = ALGO_SCHEMAS[name].model_validate({"name": name, **options})
        return ALGORITHMS[name].check(algo, modules, ("outcome",))

    assert check("mhgpo_rr") == check("mhgpo_is") == check("mhgpo_fof") == check("mhgpo_fof_os") == []
    assert "algo.train_modules: got 'reranke'" in check("mhgpo_fof", train_modules=("reranke",))[0]
    assert "did you mean 'reranker'" in check("mhgpo_rr", freeze_modules=("reranke",))[0]
    assert check("mhgpo_fof", freeze_modules=AGENTS) == [
        "algo.freeze_modules: no module is left to train; "
        "expected at least one of rewriter, reranker, answerer outside of it"
    ]
    assert "no module is left" in check("mhgpo_fof", train_modules=())[0]
    assert "expected 3" in check("mhgpo_rr", fork_probs=(0.5, 0.5))[0]
    assert "use algo=mhgpo_fof" in check("mhgpo_fof_os", modules=("only",))[0]
    assert check("mhgpo_fof_os", modules=("a", "b")) == []
    assert check("mhgpo_is", train_modules=("answerer",), freeze_modules=("rewriter", "reranker")) == [
        "algo.freeze_modules: got rewriter, reranker, which has no effect: algo.train_modules leaves it out already"
    ]
    (unknown,) = check("mhgpo_is", train_modules=("answerer",), freeze_modules=("reranke",))
    assert unknown.startswith("algo.freeze_modules: got 'reranke'")


def forest_with(field, value):
    grow = Grow(("a",))
    grow.call("q/0", None, "a", **({} if field == "reward" else {field: value}))
    grow.end("q/0", value if field == "reward" else 1.0, id="q/r")
    return grow.forest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.1e100, -1.1e100])
@pytest.mark.parametrize("field", ["reward", "penalty", "turn_reward"])
def test_numbers_that_are_not_finite_or_too_large_are_refused_with_the_record(value, field):
    with pytest.raises(DataError) as caught:
        credit(forest_with(field, value), "mhgpo_fof")
    record = "rollout 'q/r'" if field == "reward" else "call 'q/0'"
    says = f"{record}: {field}: got {value}, expected a finite number of at most 1e+100 in size"
    assert caught.value.problems == [says]


@pytest.mark.parametrize("value", [1e100, -1e100])
@pytest.mark.parametrize("field", ["reward", "penalty", "turn_reward"])
def test_the_largest_numbers_are_credited(value, field):
    assert [entry.call for entry in credit(forest_with(field, value), "mhgpo_fof").entries] == ["q/0"]


def test_later_invocations_are_no_slots_of_independent_sampling():
    repeated = Grow(("a",))
    for branch, outcome in enumerate((1.0, 0.0)):
        repeated.chain(f"q/{branch}", "aa", outcome, fork="a")
    result = by_call(credit(repeated.forest, "mhgpo_is"))
    assert result["q/0#0"].weights == pytest.approx([0.5]) and result["q/0#1"].weights == (0.0,)
    frozen = by_call(credit(repeated.forest, "mhgpo_is", freeze_modules=("a",)))
    assert not any(any(entry.weights) for entry in frozen.values())
