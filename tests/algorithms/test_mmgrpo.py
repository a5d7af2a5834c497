"""mmGRPO: padding, selection, failures, options; docs/mmgrpo.md has the worked groups, run by test_docs."""

from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms.mmgrpo import most_diverse
from mmrl.config.algo import MmgrpoConfig
from mmrl.credit.entries import Member, Reward
from mmrl.rollout.plans import Tree
from tests.helpers.forests import Grow, advantage, documented, singles, total_weight
from tests.helpers.forests import credit as credit_by

MAX: dict[str, Any] = {"eps": 1e-4, "filler": "max"}
PROGRAM = documented("program")
"""r0 calls A, B, B: 1.0. r1 A, B: 0.0. r2 A, B, B, B: 0.5. r3: A, and B, which fails with 1 of 2 fields."""


credit = partial(credit_by, name="mmgrpo")


def groups(result):
    """Group id -> [(call, reward, advantage, filler?)]."""
    found = {}
    for entry in result.entries:
        found.setdefault(entry.group, []).append(
            (entry.call.removeprefix("q/"), entry.reward, advantage(entry), entry.filler_of is not None)
        )
    return found


def column(members, index):
    return [member[index] for member in members]


def test_worked_example_variants():
    trajectory = groups(credit(PROGRAM, failing_traces="trajectory", on_missing="skip_example", **MAX))
    assert column(trajectory["q:A:0"], 0) == ["r0.A0", "r1.A0", "r2.A0", "r3.A0"]
    assert column(trajectory["q:A:0"], 1) == [1, 0, 0.5, -0.5]
    assert "q:A:0" not in groups(credit(PROGRAM, on_missing="skip_example", **MAX))
    assert list(groups(credit(PROGRAM, padding_mode="truncate", eps=1e-4))) == ["q:A:0", "q:B:0"]
    selected = groups(credit(PROGRAM, group_size=3, rollouts=4, **MAX))
    assert column(selected["q:A:0"], 0) == ["r0.A0", "r2.A0", "r1.A0"]
    assert column(selected["q:A:0"], 2) == pytest.approx([0.999800, 0, -0.999800], abs=5e-7)
    assert column(selected["q:B:0"], 0) == ["r0.B0", "r1.B0", "r3.B0"]
    assert column(selected["q:B:0"], 2) == pytest.approx([1.090947, -0.218189, -0.872757], abs=5e-7)


def test_random_fillers_are_own_calls_and_follow_the_seed():
    grow = Grow(("A",))
    grow.chain("q/r0", "A" * 8, 1.0)
    grow.chain("q/r1", "AAA", 0.0)
    chosen = {}
    for seed in range(6):
        found = groups(credit(grow.forest, seed=seed))
        chosen[seed] = tuple(found[f"q:A:{k}"][1][0] for k in range(8))
        assert chosen[seed][:3] == ("r1#0", "r1#1", "r1#2")
        assert set(chosen[seed]) <= {"r1#0", "r1#1", "r1#2"}
    assert len(set(chosen.values())) > 1
    assert len(set(chosen[0][3:])) > 1, "drawn for each place on its own"
    assert chosen[3] == tuple(groups(credit(grow.forest, seed=3))[f"q:A:{k}"][1][0] for k in range(8))


def test_fill_from_the_group_repeats_its_head():
    found = groups(credit(PROGRAM, fill_source="group", eps=1e-4))
    assert column(found["q:B:1"], 0) == ["r0.B1", "r2.B1", "r0.B1", "r2.B1"]
    assert column(found["q:B:2"], 0) == ["r2.B2"] * 4
    assert column(found["q:B:2"], 2) == [0, 0, 0, 0]


def test_ragged_groups_are_cut_and_never_enlarged():
    assert total_weight(credit(PROGRAM, padding_mode="ragged")) == pytest.approx(3 / 4), "B:2 is a group of one"
    large = groups(credit(PROGRAM, padding_mode="ragged", rollouts=4, group_size=2))
    assert column(large["q:A:0"], 0) == ["r0.A0", "r1.A0"] and column(large["q:B:2"], 0) == ["r2.B2"]


def test_the_invocation_of_a_failing_call():
    grow = Grow(("A",))
    grow.chain("q/r0", "AAA", 1.0)
    first = grow.call("q/r1#0", None, "A")
    grow.call("q/r1#1", first, "A", ok=False, expected_fields=2)
    grow.end("q/r1#1", 0.0, id="q/r1", error="parse")
    assert column(groups(credit(grow.forest, padding_mode="ragged"))["q:A:0"], 0) == ["r0#0", "r1#1"]
    true = groups(credit(grow.forest, padding_mode="ragged", failing_index="true"))
    assert column(true["q:A:0"], 0) == ["r0#0"]
    assert column(true["q:A:1"], 0) == ["r0#1", "r1#1"]
    assert column(true["q:A:1"], 1) == [1.0, -1.0]


@pytest.mark.parametrize(
    ("present", "expected", "reward"), [(0, 0, -1.0), (0, 3, -1.0), (1, 3, -2 / 3), (2, 3, -1 / 3), (3, 3, 0.0)]
)
def test_format_failure_rewards(present, expected, reward):
    grow = Grow(("A",))
    grow.chain("q/r0", "A", 1.0)
    grow.call("q/r1#0", None, "A", ok=False, present_fields=present, expected_fields=expected)
    grow.end("q/r1#0", 0.0, error="parse")
    entry = credit(grow.forest).entries[1]
    assert entry.reward == pytest.approx(reward) and entry.parts == {"format": pytest.approx(reward)}
    shifted = credit(grow.forest, format_failure_score=-2, format_failure_best=1).entries[1]
    assert shifted.reward == pytest.approx(-2 + 3 * (reward + 1))


def overlong():
    grow = Grow(("A", "B"))
    grow.chain("q/r0", "AB", 1.0)
    grow.chain("q/r1", "AB", 0.0)
    grow.call("q/r2#0", None, "A", prompt_tokens=95, tokens=5)
    grow.call("q/r2#1", "q/r2#0", "B", prompt_tokens=96, tokens=5)
    grow.end("q/r2#1", 0.5, id="q/r2")
    return grow.forest


def test_overlong_calls_are_filtered():
    def used(**options):
        return {entry.call for entry in credit(overlong(), **options).entries if entry.call.startswith("q/r2")}

    assert used() == {"q/r2#0", "q/r2#1"}
    assert used(max_context=100) == {"q/r2#0"}
    assert used(max_context=100, overlong="trajectory") == set()
    assert used(max_context=100, overlong="trajectory", on_missing="skip_example") == set()
    assert len(credit(overlong(), max_context=100, overlong="trajectory", on_missing="skip_example").entries) == 6
    assert used(max_context=None) == {"q/r2#0", "q/r2#1"}
    assert credit(overlong(), max_context=4).entries != (), "unknown prompts count as empty"
    grow = Grow(("A",))
    for index in range(2):
        grow.call(f"q/{index}", None, "A", tokens=9)
        grow.end(f"q/{index}", float(index))
    assert len(credit(grow.forest, max_context=9).entries) == 2
    assert credit(grow.forest, max_context=8).entries == (), "a group left empty is dropped"


def test_selection_takes_even_ranks():
    grow = Grow(("A",))
    for index in range(6):
        grow.chain(f"q/r{index}", "A", index / 5)
    found = groups(credit(grow.forest, rollouts=6, group_size=3))
    assert column(found["q:A:0"], 0) == ["r5#0", "r3#0", "r0#0"], "rank 2.5 rounds to the even rank 2"
    kept = groups(credit(grow.forest, rollouts=6, group_size=6))
    assert column(kept["q:A:0"], 0) == [f"r{i}#0" for i in range(6)], "a group of the right size keeps its order"


def test_more_places_than_members_repeat_ranks():
    grow = Grow(("A",))
    grow.chain("q/r0", "A", 1.0)
    grow.chain("q/r1", "A", 0.0)
    members = [Member((call,), Reward(reward)) for call, reward in zip(grow.calls.values(), (1.0, 0.0), strict=True)]
    picked = most_diverse(members, 4)
    assert [m.reward.total for m in picked] == [1.0, 1.0, 0.0, 0.0]
    assert [m.filler for m in picked] == [False, True, False, True]


def test_plan_is_teacher_major():
    def plan(**options):
        return ALGORITHMS["mmgrpo"].plan(MmgrpoConfig(name="mmgrpo", rollouts=4, **options), ("A",), (0, 0, "q"))

    assert plan() == (Tree(),) * 4
    gpt = {"name": "gpt", "policy": "tiny"}
    counted = ({**gpt, "rollouts": 1}, {"name": "student", "rollouts": 3})
    assert plan(teachers=counted) == (Tree(teacher="gpt"), Tree(), Tree(), Tree())
    assert plan(teachers=({"name": "student"}, gpt)) == (Tree(), Tree(), Tree(teacher="gpt"), Tree(teacher="gpt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollouts": 4, "group_size": 5}, "group_size: got 5, expected at most rollouts=4"),
        ({"group_size": 1}, "greater than or equal to 2"),
        ({"padding_mode": "truncate", "fill_source": "group"}, "fill_source: got group"),
    ],
)
def test_values_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        MmgrpoConfig(name="mmgrpo", **options)


def test_metrics_and_parts():
    result = credit(singles((1.0, 0.0), (1.0, 1.0)))
    assert result.metrics["credit/groups"] == 2.0 and result.metrics["credit/zero_variance_share"] == 0.5
    assert result.entries[0].parts == {"outcome": 1.0} and result.algo == "mmgrpo"
