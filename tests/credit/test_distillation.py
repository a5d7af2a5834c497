"""Loss entries of `algo.distill`: worked numbers, and the laws that they keep beside every algorithm."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import ALGORITHMS
from mmrl.config import ALGO_SCHEMAS
from mmrl.records import Forest
from mmrl.stages.collect import with_signal
from tests.helpers.forests import MODULES, Grow, chains, credit, forked

EVERY = sorted(set(ALGORITHMS) - {"distill", "ccpo"})  # CCPO's rewards come from further rollouts


def two_questions() -> Forest:
    """Rewriter and answerer; of the second question one rollout failed, and one asks the answerer twice."""
    grow = Grow(("rewriter", "answerer"))
    first = grow.call("a/0#0", None, "rewriter", 2, distillation=(0.5, -1.0))
    grow.end(grow.call("a/0#1", first, "answerer", 1, distillation=(-2.0,)), 1.0, id="a/0", example="a")
    second = grow.call("b/0#0", None, "rewriter", 4, distillation=(0.0, 0.0, 1.0, -1.0))
    # A call that two rollouts share is one call.
    grow.end(grow.call("b/0#1", second, "answerer", 2, distillation=(0.25, 0.75)), 0.0, id="b/0", example="b")
    again = grow.call("b/1#1", second, "answerer", 3, distillation=(1.0, 1.0, 1.0))
    grow.end(grow.call("b/1#2", again, "answerer", 1, distillation=(3.0,)), 0.0, id="b/1", example="b")
    lost = grow.call("b/2#0", None, "rewriter", 1, distillation=(9.0,))
    grow.end(lost, None, id="b/2", example="b", error="tool")
    return grow.forest


WORKED = {
    # Two rewriters, three answerers, one second answerer; coefficient 0.5.
    "seq": {
        "a/0#0": 0.5 / (2 * 2),
        "b/0#0": 0.5 / (2 * 4),
        "a/0#1": 0.5 / (3 * 1),
        "b/0#1": 0.5 / (3 * 2),
        "b/1#1": 0.5 / (3 * 3),
        "b/1#2": 0.5,
    },
    # 6 tokens of rewriters, 6 of first answerers, 1 of a second one.
    "token": dict.fromkeys(["a/0#0", "b/0#0", "a/0#1", "b/0#1", "b/1#1"], 0.5 / 6) | {"b/1#2": 0.5},
    "constant": dict.fromkeys(["a/0#0", "b/0#0"], 0.5 / (2 * 8))
    | dict.fromkeys(["a/0#1", "b/0#1", "b/1#1"], 0.5 / (3 * 8))
    | {"b/1#2": 0.5 / 8},
}


@pytest.mark.parametrize("loss_mean", WORKED)
def test_worked_numbers(loss_mean: str) -> None:
    length: dict[str, Any] = {"loss_length": 8} if loss_mean == "constant" else {}
    forest = two_questions()
    distill = dict.fromkeys(forest.modules, "policy")
    result = credit(forest, "distill", distill=distill, distill_coef=0.5, loss_mean=loss_mean, **length)
    assert {entry.call: entry.weights for entry in result.entries} == {
        name: pytest.approx((weight,) * forest.calls[name].completion_tokens)
        for name, weight in WORKED[loss_mean].items()
    }
    assert all(entry.advantages == forest.calls[entry.call].distillation for entry in result.entries)
    assert result.metrics["module/rewriter/teacher_gap"] == pytest.approx(8.5 / 7)


def test_calls_that_no_teacher_could_read_are_counted() -> None:
    forest = two_questions()
    calls = {name: replace(call, distillation=None) if name == "b/1#1" else call for name, call in forest.calls.items()}
    result = credit(replace(forest, calls=calls), "distill", distill=dict.fromkeys(forest.modules, "policy"))
    assert result.metrics["module/answerer/untaught_share"] == pytest.approx(1 / 4)
    assert result.metrics["module/rewriter/untaught_share"] == 0
    assert "b/1#1" not in {entry.call for entry in result.entries}


def test_how_much_teachers_weigh_beside_rewards() -> None:
    """Rewards 0 and 1 of one question, so A = -0.5 and 0.5; each call counts half, among rewards and teachers."""
    grow = Grow(("m",))
    for reward, gaps in ((0.0, (-2.0, -1.0)), (1.0, (0.5, -0.5))):
        name = f"q/{reward:.0f}"
        grow.end(grow.call(f"{name}#0", None, "m", 2, distillation=gaps), reward, id=name, example="q")
    forest = grow.forest
    found = [
        credit(forest, "grpo", distill={"m": "policy"}, distill_coef=coef, scale=False).metrics for coef in (1.0, 0.1)
    ]
    # Teachers: (1.5 + 0.5) / 2 of the calls' means; rewards: 0.5 of each of two calls, of which each counts half.
    assert [metrics["credit/teachers_to_rewards"] for metrics in found] == pytest.approx([1.0 / 0.5, 0.1 / 0.5])
    alone = credit(forest, "distill", distill={"m": "policy"}).metrics
    assert "credit/teachers_to_rewards" not in alone


@pytest.mark.parametrize("size", [1, 3])
def test_rollouts_of_an_example_are_as_many_as_asked_for(size: int) -> None:
    algo = ALGO_SCHEMAS["distill"].model_validate({"name": "distill", "distill": {"a": "policy"}, "group_size": size})
    assert len(ALGORITHMS["distill"].plan(algo, ("a",), (0, 1, "q"))) == size


def test_the_share_of_a_call_is_that_within_its_minibatch() -> None:
    result = credit(
        two_questions(), "distill", minibatch={"a": 0, "b": 1}, distill={"rewriter": "policy", "answerer": "policy"}
    )
    assert {e.call: sum(e.weights) for e in result.entries if e.call.endswith("#0")} == {"a/0#0": 1, "b/0#0": 1}


def with_gaps(forest: Forest, modules: Any, seed: int = 0) -> Forest:
    draw = random.Random(seed)
    calls = {
        name: replace(call, distillation=tuple(draw.uniform(-3, 3) for _ in range(call.completion_tokens)))
        if call.module in modules
        else call
        for name, call in forest.calls.items()
    }
    return replace(forest, calls=calls)


def beside(name: str, forest: Forest, coefficient: float, modules: Any) -> Any:
    options: dict[str, Any] = {"distill": dict.fromkeys(modules, "initial"), "distill_coef": coefficient, "beta": 0.0}
    return credit(forest, name, **options)


@pytest.mark.parametrize("name", EVERY)
@given(forest=st.one_of(chains(), forked(sampler="is")), data=st.data())
@settings(max_examples=20)
def test_an_algorithm_is_left_as_it_is_and_every_call_of_a_module_has_one_more_entry(
    name: str, forest: Forest, data: st.DataObject
) -> None:
    modules = data.draw(st.sets(st.sampled_from(MODULES), min_size=1))
    filled = {k: replace(c, values=(0.0,) * c.completion_tokens) for k, c in forest.calls.items()}
    # A file may bring gaps of other modules, too.
    forest = with_gaps(replace(forest, calls=filled), MODULES)
    alone, both = credit(forest, name, beta=0.0), beside(name, forest, 0.7, sorted(modules))
    rewarded = [entry for entry in both.entries if not entry.distilled]
    distilled = [entry for entry in both.entries if entry.distilled]
    assert rewarded == list(alone.entries)
    assert with_signal(forest, both) == with_signal(forest, alone), "a teacher is no reason to keep an example"
    credited = {call.id for r in forest.rollouts if r.reward is not None for call in forest.path(r)}
    expected = {name for name in credited if forest.calls[name].module in modules}
    assert sorted(entry.call for entry in distilled) == sorted(expected)
    # Each module and invocation weighs the coefficient.
    totals: dict[Any, float] = defaultdict(float)
    for entry in distilled:
        call = forest.calls[entry.call]
        totals[call.module, call.invocation] += math.fsum(entry.weights)
    if ALGO_SCHEMAS[name].model_fields["loss_mean"].default != "constant":
        assert all(total == pytest.approx(0.7) for total in totals.values())
    none = beside(name, forest, 0.0, sorted(modules))
    assert all(not any(entry.weights) for entry in none.entries if entry.distilled)


def test_a_module_out_of_the_loss_is_not_distilled_either() -> None:
    result = credit(two_questions(), "grpo", frozen=["rewriter"], distill={"rewriter": "policy", "answerer": "policy"})
    assert {forest_module(entry.call): any(entry.weights) for entry in result.entries if entry.distilled} == {
        "rewriter": False,
        "answerer": True,
    }


def forest_module(call: str) -> str:
    return two_questions().calls[call].module
