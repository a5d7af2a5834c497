"""The truth of decisions, over programs whose values are enumerated: unbiased, with the errors that it should have."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.audit.numbers import Decision, Paths, Truth, influence
from mmrl.audit.plays import Place, Plays
from mmrl.errors import ConfigError, EngineFailure
from mmrl.rollout.plans import Fork, Tree, fork_on_first, independent
from mmrl.rollout.sample import play
from tests.audit.stand import Stand, plays_of
from tests.helpers.tabular import Table, bifurcation, skipping, two

M, N = 8, 4
SEEDS = 200


def measured(table: Table, seed: int, **keys: Any) -> tuple[Plays, list[tuple[Place, Truth]]]:
    plays = plays_of(table, seed, **{"continuations": M, **keys})
    plays.record()
    places = plays.draw()
    truths = plays.truths(places)
    return plays, [
        (place, Truth(continued=found["continued"], others=found["others"]))  # type: ignore[arg-type]
        for place, found in zip(places, truths, strict=True)
        if found is not None
    ]


def where(plays: Plays, place: Place) -> tuple[int, tuple[int, ...], int]:
    """Number of the example, history and reply of a decision."""
    leaf = plays.recorded[place.call.example, place.path]
    replies = [int(call.text.removeprefix("r")) for call in leaf.calls]
    number = int(place.call.example.removeprefix("train"))
    return number, tuple(replies[: place.position]), replies[place.position]


def error(table: Table, example: int, history: tuple[int, ...], reply: int) -> float:
    """The variance of the estimate of D, enumerated."""

    def after(h: tuple[int, ...]) -> float:
        if table.following(h) is None:
            return 0.0
        mean = table.v(example, h)
        ways = [(p, (*h, r)) for r, p in enumerate(table.probabilities(h))]
        return math.fsum(p * (after(n) + (table.v(example, n) - mean) ** 2) for p, n in ways)

    between = table.variance_of_q(example, history)
    within = math.fsum(p * after((*history, r)) for r, p in enumerate(table.probabilities(history)))
    return after((*history, reply)) / M + (between + within / 2) / N


Seed = tuple[Plays, list[tuple[Place, Truth]]]
TABLES = {"two": two(examples=2), "stops": two(examples=2, stops=True), "skipping": skipping(examples=2)}


@cache
def simulated(name: str) -> list[Seed]:
    return [measured(TABLES[name], seed, decisions=2) for seed in range(SEEDS)]


@pytest.mark.parametrize("name", TABLES)
def test_the_truth_is_unbiased_and_as_exact_as_enumerated(name: str) -> None:
    table = TABLES[name]
    residuals, squares, expected = [], [], []
    for plays, found in simulated(name):
        for place, truth in found:
            at = where(plays, place)
            residuals.append(truth.difference - table.d(*at))
            squares.append(residuals[-1] ** 2)
            expected.append(error(table, *at))
    assert abs(fmean(residuals)) < 4 * math.sqrt(fmean(expected) / len(residuals))
    assert fmean(squares) == pytest.approx(fmean(expected), rel=0.15)


@pytest.mark.parametrize("name", TABLES)
def test_influence_is_unbiased(name: str) -> None:
    table = TABLES[name]
    values: dict[str, list[float]] = {module: [] for module in table.modules}
    for plays, found in simulated(name):
        decisions = [
            Decision(example=p.call.example, call=p.call.id, module=p.call.module, truth=truth) for p, truth in found
        ]
        called = Counter(call.module for leaf in plays.recorded.values() for call in leaf.calls)
        paths = Paths(examples=[e for e, _ in plays.recorded], calls={m: called[m] for m in table.modules})
        # The denominator is enumerated: two outcomes of the variance that they should have.
        outcomes = {f"train{e}": [0.0, math.sqrt(2 * table.variance(e))] for e in range(table.examples)}
        for module, (value, _) in influence(decisions, paths, outcomes, 0).items():
            # Not called on any of these paths: no influence there.
            values[module].append(value or 0.0)
    for module, found_values in values.items():
        assert abs(fmean(found_values) - table.influence(module)) < 4 * stdev(found_values) / math.sqrt(SEEDS)
    assert math.fsum(map(table.influence, table.modules)) == pytest.approx(1)


def test_only_the_module_that_matters_has_influence() -> None:
    table = bifurcation("b", examples=2)
    totals = dict.fromkeys(table.modules, 0.0)
    for seed in range(40):
        plays, found = measured(table, seed, decisions=4)
        for place, truth in found:
            example, history, reply = where(plays, place)
            if place.call.module in ("c", "d"):  # after it: nothing is left to chance, so D is 0 to the last bit
                assert truth.difference == 0 and truth.spread == 0
            assert table.d(example, history, reply) == pytest.approx(0) or place.call.module == "b"
            totals[place.call.module] += truth.spread / table.variance(0) / len(found) * 4 / 40
    assert totals["b"] == pytest.approx(1, abs=0.15)
    assert totals["a"] == pytest.approx(0, abs=0.15)


def test_paths_and_seeds_of_an_audit_are_its_own() -> None:
    table = two(examples=1)
    stand = Stand(table)
    plays = plays_of(table, stand=stand, decisions=2, continuations=2)
    plays.record()
    places = plays.draw()
    stand.engine.requests.clear()
    plays.truths(places)
    orders = [request.order[0] for request in stand.engine.requests]
    # The second module's decision ends the rollout: what follows its replies needs no call.
    assert sorted(orders) == [
        *(f"train0/p0#0~q{n}#1" for n in range(2)),
        *(f"train0/p0#0~v{n}.{k}" + f"#{c}" for n in range(2) for k, c in ((0, 0), (0, 1), (1, 1))),
        *(f"train0/p0#1~v{n}.0#1" for n in range(2)),
    ]
    assert len({request.sampling.seed for request in stand.engine.requests}) == len(orders)


def test_equal_histories_share_their_other_replies() -> None:
    _, found = measured(two(examples=1), 0, decisions=8)
    of_first = [truth for place, truth in found if place.call.module == "first"]
    assert len(of_first) == 4 and len({tuple(truth.others) for truth in of_first}) == 1


def test_histories_differ_by_what_tools_returned() -> None:
    plays, found = measured(two(examples=1), 0, decisions=8)
    place = next(place for place, _ in found if place.call.module == "second")
    read = replace(place, call=replace(place.call, prompt_ids=(*place.call.prompt_ids, 0)))
    assert plays._history(read) != plays._history(place) == plays._history(replace(place))


def test_what_fails_from_outside_is_drawn_anew_three_times() -> None:
    table = two(examples=1)
    stand = Stand(table)
    plays = plays_of(table, stand=stand, decisions=2, continuations=2)
    plays.record()
    places = plays.draw()
    honest = stand.engine.answer

    def failing(times: int) -> None:
        def reply(request: Any) -> str:
            if "~q0" in request.order[0] and not request.order[0].partition("#")[2].count(f"r{times}"):
                raise EngineFailure("gone")
            return honest(request)

        stand.engine.answer = reply

    failing(2)
    assert all(found is not None for found in plays.truths(places))
    failing(4)
    # The last module's decision has nothing behind it that could fail.
    assert [found is not None for found in plays.truths(places)] == [p.call.module == "second" for p in places]


def test_a_program_that_does_not_repeat_itself_is_refused() -> None:
    stand = Stand(two(examples=1))
    plays = plays_of(stand.table, stand=stand, decisions=2, continuations=2)
    plays.record()
    places = plays.draw()
    stand.task.program.run, honest = None, stand.task.program.run

    async def other(example: Any, ctx: Any) -> Any:
        await ctx.call("second", [{"role": "user", "content": "h"}])
        return await honest(example, ctx)

    stand.task.program.run = other
    with pytest.raises(ConfigError, match="call 'second' for call 'first'"):
        plays.truths(places)
    # Also where a row's batch meets it first: its rollouts would be left out of the credit without a word.
    row: Any = SimpleNamespace(reward_set="outcome")
    roots = list(plays._planted(plays.examples[0], independent(2), 0))
    with pytest.raises(ConfigError, match="call 'second' for call 'first'"):
        plays._batch(row, stand.environment(None, (0, 1)), roots, 0)


@pytest.mark.parametrize(
    "plan",
    [independent(3), fork_on_first(("first",), 3), (Tree((Fork("second", 3),)),), fork_on_first(("first",), 2) * 2],
    ids=["independent", "first", "second", "two trees"],
)
@pytest.mark.parametrize("seed", range(4))  # the tree that has the path is drawn
def test_a_recorded_path_is_a_branch_of_any_plan(plan: tuple[Tree, ...], seed: int) -> None:
    table = two(examples=1)
    stand = Stand(table, seed)
    plays = plays_of(table, seed, stand=stand)
    plays.record()
    recorded = plays.recorded["train0", 0]
    (example,) = plays.examples
    stand.engine.requests.clear()
    roots = list(plays._planted(example, plan, 0))
    trees = asyncio.run(play(stand.environment(None, (0, 1)), roots, "outcome"))
    leaves = [leaf for tree in trees for leaf in tree]
    # No tree has a call of its own by the name of a recorded one.
    by_name: dict[str, set[int]] = {}
    for leaf in leaves:
        for call in leaf.calls:
            by_name.setdefault(call.id, set()).add(id(call.completion_ids))
    assert all(len(replies) == 1 for replies in by_name.values())
    assert len(leaves) == sum(tree.size for tree in plan)
    own = [leaf for leaf in leaves if [c.id for c in leaf.calls] == [c.id for c in recorded.calls]]
    assert len(own) == 1 and own[0].rollout.reward == recorded.rollout.reward
    # A plan's own calls less those of the recorded path.
    plain = asyncio.run(
        play(Stand(table).environment(None, (0, 1)), list(plays._planted(example, plan, 99)), "outcome")
    )
    calls = {call.id for tree in plain for leaf in tree for call in leaf.calls}
    assert len(stand.engine.requests) == len(calls) - len(recorded.calls)
