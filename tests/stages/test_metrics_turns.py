"""Metrics per turn and per rollout, and the gap between sampler and trainer by module."""

from dataclasses import replace
from typing import Any

import pytest

from mmrl.algorithms import assign_credit
from mmrl.config import ALGO_SCHEMAS
from mmrl.stages.step_metrics import TURNS, credit_metrics, forest_metrics, never_metrics
from mmrl.tasks import TASKS
from tests.helpers.forests import Grow
from tests.helpers.trainer_cases import agreeing, trained


def agent_forest():
    grow = Grow(("agent",))
    rows = [((0.5,), 1.0), ((0.5, 0.1), 0.0), ((), 0.3)]
    for number, (turns, outcome) in enumerate(rows):
        parent = None
        for turn, reward in enumerate((*turns, None)):
            parent = grow.call(
                f"q/{number}.{turn}", parent, "agent", 2 + turn, turn_reward=reward, ok=(number, turn) != (1, 2)
            )
        grow.end(parent, outcome)
    grow.end(None, None, error="tool")
    return grow.forest


def test_calls_and_turns_of_a_rollout_and_behaviour_by_turn():
    metrics = forest_metrics(agent_forest())
    assert metrics["rollouts/calls_per_rollout"] == pytest.approx((2 + 3 + 1) / 3), "those that made a call"
    assert metrics["rollouts/turns_per_rollout"] == pytest.approx((2 + 3 + 1) / 3)
    assert [metrics[f"turn/{turn}/calls"] for turn in range(3)] == [3, 2, 1]
    assert [metrics[f"turn/{turn}/length"] for turn in range(3)] == [2, 3, 4]
    assert [metrics[f"turn/{turn}/format_rate"] for turn in range(3)] == [1, 1, 0]


def never(name):
    kind: Any = TASKS[name]
    return never_metrics(kind)


def test_what_a_task_never_has_is_no_metric():
    assert never("search_agent") == {"penalty", "format_rate"}, "a share of 1 beside `format` 0 would mislead"
    assert never("hotpotqa") == {"format_rate"}
    assert never("banking77") == {"penalty"}
    all_of = set(forest_metrics(agent_forest()))
    left_out = all_of - set(forest_metrics(agent_forest(), never("search_agent")))
    turns = {f"turn/{turn}/format_rate" for turn in range(3)}
    assert left_out == {"module/agent/penalty", "module/agent/format_rate"} | turns


def test_rewards_and_constant_groups_by_turn():
    forest = agent_forest()
    algo = ALGO_SCHEMAS["mt_grpo_variable"].model_validate({"name": "mt_grpo_variable", "missing_turn": "exclude"})
    credit = assign_credit(forest, algo, 0)
    metrics = credit_metrics(forest, credit.entries)
    assert metrics["turn/0/reward"] == pytest.approx((0.5 + 0.5 + 0.3) / 3)
    assert metrics["turn/1/reward"] == pytest.approx((1.0 + 0.1) / 2)
    assert credit.metrics["turn/0/zero_variance_share"] == 1.0, "both rollouts with a first turn earned 0.5 there"
    assert "turn/1/zero_variance_share" not in credit.metrics, "one rollout alone is no group"


def test_programs_whose_calls_have_contexts_of_their_own_have_no_turns():
    grow = Grow(("a", "b"))
    grow.chain("q/0", ("a", "b"), 1.0)
    flat = replace(grow.forest, calls={k: replace(call, turn=0) for k, call in grow.forest.calls.items()})
    metrics = forest_metrics(flat)
    assert not [key for key in metrics if key.startswith("turn/")]
    assert (metrics["rollouts/calls_per_rollout"], metrics["rollouts/turns_per_rollout"]) == (2, 1)


def test_many_turns_do_not_make_many_metrics():
    grow = Grow(("agent",))
    grow.chain("q/0", ("agent",) * (TURNS + 5), 1.0)
    assert {key.split("/")[1] for key in forest_metrics(grow.forest) if key.startswith("turn/")} == {
        str(turn) for turn in range(TURNS)
    }


def test_the_gap_is_told_by_module(tmp_path):
    def shifted(trainer):
        both = zip(agreeing(trainer), agreeing(trainer, -0.25), strict=True)
        return [moved if exact.call.module == "b" else exact for exact, moved in both]

    _, (metrics,) = trained(tmp_path, calls_of=shifted)
    assert metrics["module/a/logprob_gap_mean"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["module/b/logprob_gap_mean"] == pytest.approx(0.25, abs=1e-5)


def test_similarity_is_a_mean_over_all_pairs():
    """Of eight texts one differs: 21 of 28 pairs are equal. Texts that are nothing but an article are equal too."""
    grow = Grow(("a", "b"))
    for number in range(8):
        leaf = grow.call(f"q/{number}#0", None, "a", text="another" if number == 0 else "one answer")
        grow.end(grow.call(f"q/{number}#1", leaf, "b", text="The!"), float(number), id=f"q/{number}")
    algo = ALGO_SCHEMAS["dr_mas"].model_validate({"name": "dr_mas"})
    metrics = credit_metrics(grow.forest, assign_credit(grow.forest, algo, 0).entries)
    assert metrics["similarity/a"] == pytest.approx(21 / 28)
    assert metrics["similarity/b"] == 1.0


def test_failed_rollouts_count_as_the_task_says_and_retries_are_counted():
    grow = Grow(("a",))
    grow.end(grow.call("q/0", None, "a", attempts=3), 1.0, metrics={"leakage": 0.2})
    grow.end(grow.call("q/1", None, "a"), -0.5, error="parse")
    metrics = forest_metrics(grow.forest, failed={"leakage": 1.0})
    assert metrics["task/leakage"] == pytest.approx(0.6)
    assert metrics["module/a/attempts"] == 2.0
    assert forest_metrics(grow.forest)["task/leakage"] == pytest.approx(0.1)
