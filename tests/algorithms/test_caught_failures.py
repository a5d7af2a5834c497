"""Credit of calls that could not be parsed and whose program went on: worked numbers, and a slow reference."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.records import Forest, caught
from tests.helpers.forests import MODULES, REWARDED, Grow, advantage, chains, numbers, with_unread
from tests.helpers.forests import credit as credit_by

RANDOM = settings(max_examples=80)


credit = partial(credit_by, name="mmgrpo")


def path(grow, name, calls, reward, **fields):
    """A rollout: one letter per call, small where the reply has none of its two fields and `1` after one of them."""
    parent = None
    for number, call in enumerate(calls):
        bad = (
            {"ok": False, "present_fields": int(call.endswith("1")), "expected_fields": 2} if call[0].islower() else {}
        )
        parent = grow.call(f"q/{name}#{number}", parent, call[0].upper(), **bad)
    grow.end(parent, reward, id=f"q/{name}", **fields)


def worked():
    """r0: a failure with 1 of 2 fields, then A, 1.0. r1: A, 0.0. r2: A, a failure without fields, A, 0.5."""
    grow = Grow(("A",))
    path(grow, "r0", ["a1", "A"], 1.0)
    path(grow, "r1", ["A"], 0.0)
    path(grow, "r2", ["A", "a", "A"], 0.5)
    return grow.forest


def shown(result):
    """Group -> (call, its star for a filler), rewards, advantages."""
    found = defaultdict(lambda: ([], [], []))
    for entry in result.entries:
        calls, rewards, advantages = found[entry.group]
        calls.append(entry.call.removeprefix("q/") + "*" * (entry.filler_of is not None))
        rewards.append(entry.reward)
        advantages.append(advantage(entry))
    return dict(found)


def test_worked_example_fill():
    found = shown(credit(worked(), filler="max", eps=1e-4))
    expected = {
        # std 0.5: 0.5 / 0.5001
        "q:A:0": (["r0#0", "r1#0", "r2#0"], [-0.5, 0, 0.5], [-0.999800, 0, 0.999800]),
        # std 1: 1 / 1.0001
        "q:A:1": (["r0#1", "r1#0*", "r2#1"], [1, 0, -1], [0.999900, 0, -0.999900]),
        "q:A:2": (["r0#1*", "r1#0*", "r2#2"], [1, 0, 0.5], [0.999800, -0.999800, 0]),
    }
    assert list(found) == list(expected)
    for group, (calls, rewards, advantages) in expected.items():
        assert found[group][:2] == (calls, rewards)
        assert found[group][2] == pytest.approx(advantages, abs=5e-7)


def test_worked_example_truncate():
    """One parsed call each stays; the failure of r2 is past it. Of k = 1 two rollouts are left, padded to three."""
    found = shown(credit(worked(), padding_mode="truncate", eps=1e-4))
    assert list(found) == ["q:A:0", "q:A:1"]
    assert found["q:A:0"][:2] == (["r0#0", "r1#0", "r2#0"], [-0.5, 0, 0.5])
    assert found["q:A:1"][:2] == (["r0#1", "r2#1", "r0#1*"], [1, -1, 1])
    # mean 1/3, std sqrt(4/3): 0.666667 / 1.154801 and 1.333333 / 1.154801
    assert found["q:A:1"][2] == pytest.approx([0.577300, -1.154601, 0.577300], abs=1e-6)


def test_what_ended_the_rollout_and_what_was_caught_before():
    """`parse` after a caught failure: of the rollout only its failures are trained, each where it stood."""
    grow = Grow(("A", "B"))
    path(grow, "r0", ["A", "a1", "A", "B", "a"], 0.0, error="parse")
    path(grow, "r1", ["A", "A", "A", "A"], 1.0)
    found = shown(credit(grow.forest, padding_mode="ragged"))
    calls = [found[f"q:A:{k}"][0] for k in range(len(found))]
    assert calls == [["r1#0"], ["r0#1", "r1#1"], ["r1#2"], ["r0#4", "r1#3"]]
    assert (found["q:A:1"][1], found["q:A:3"][1]) == ([-0.5, 1], [-1, 1])
    every = credit(grow.forest, padding_mode="ragged", failing_traces="trajectory")
    rewards = {entry.call: entry.reward for entry in every.entries if entry.call.startswith("q/r0")}
    assert rewards == {"q/r0#0": -1, "q/r0#1": -0.5, "q/r0#2": -1, "q/r0#3": -1, "q/r0#4": -1}


def test_other_model_caused_failures_leave_a_caught_one_its_own_reward():
    grow = Grow(("A", "B"))
    path(grow, "r0", ["a1", "B"], -0.1, error="length")
    path(grow, "r1", ["A", "B"], 1.0)
    rewards = {entry.call: entry.reward for entry in credit(grow.forest).entries}
    assert rewards == {"q/r0#0": -0.5, "q/r0#1": -0.1, "q/r1#0": 1.0, "q/r1#1": 1.0}


@pytest.mark.parametrize("name", ["mhgpo_fof", "mappo"])
def test_its_penalty_counts_where_calls_have_penalties(name):
    """Outcomes 1 and 0, a penalty of -0.25 of the failing call."""
    grow = Grow(("A", "B"))
    for rollout, outcome in (("r0", 1.0), ("r1", 0.0)):
        path(grow, rollout, ["a", "B"], outcome)
        fields: dict[str, Any] = {"values": (0.0,), "logprobs": (-1.0,), "ref_logprobs": (-1.0,)}
        for number in range(2):
            call = grow.calls[f"q/{rollout}#{number}"]
            grow.calls[call.id] = replace(call, penalty=0.0 if call.ok else -0.25, **fields)
    rewards = {entry.call: entry.reward for entry in credit(grow.forest, name=name).entries}
    assert rewards == {"q/r0#0": 0.75, "q/r0#1": 1.0, "q/r1#0": -0.25, "q/r1#1": 0.0}
    off = {entry.call: entry.reward for entry in credit(grow.forest, name=name, penalties=False).entries}
    assert off == {"q/r0#0": 1.0, "q/r0#1": 1.0, "q/r1#0": 0.0, "q/r1#1": 0.0}


# -- random forests ----------------------------------------------------------------------------------------------------

FORESTS = st.builds(with_unread, chains(rollouts=(1, 4)), st.randoms(use_true_random=False))


def reference(forest: Forest, mode: str):
    """Group -> [(call, reward)], written out: every list walked place by place, `filler=max`."""
    groups = defaultdict(list)
    for module in forest.modules:
        for example in forest.examples:
            own = [r for r in forest.rollouts if r.example == example]
            lists = {}
            for rollout in own:
                calls = forest.path(rollout)
                if rollout.reward is None or not calls:
                    continue
                gave_up = rollout.error == "parse" and any(not call.ok for call in calls)
                ending = calls[-1].id if gave_up and not calls[-1].ok else None
                places = []
                for call in calls:
                    if call.module != module or (gave_up and call.ok):
                        continue
                    reward = rollout.reward if call.ok else -1 + call.present_fields / call.expected_fields
                    places.append((call.invocation, call, reward, not call.ok and call.id != ending))
                if len(places) == 1 and places[0][1].id == ending:
                    places = [(0, *places[0][1:])]
                if places:
                    lists[rollout.id] = places
            if mode == "truncate":
                counts = [sum(not c for *_, c in places) for places in lists.values()]
                cut = min((count for count in counts if count), default=0)
                for name, places in lists.items():
                    kept, parsed = [], 0
                    for place in places:
                        parsed += not place[3]
                        if place[3] or parsed <= cut:
                            kept.append(place)
                    lists[name] = kept
            length = max((place[0] + 1 for places in lists.values() for place in places), default=0)
            for k in range(length):
                row = []
                for places in lists.values():
                    here = [(call.id, reward) for place, call, reward, _ in places if place == k]
                    if not here and mode == "fill":
                        others = [place for place in places if not place[3]] or places
                        here = [(others[-1][1].id, others[-1][2])]
                    row += here
                if row and mode != "ragged" and not (mode == "truncate" and len(row) == 1 < len(lists)):
                    row = [row[place % len(row)] for place in range(max(len(row), len(own)))]
                if row:
                    groups[f"{example}:{module}:{k}"] = row
    return dict(groups)


FILLED: dict[str, Any] = {"filler": "max"}


@RANDOM
@given(FORESTS, st.sampled_from(["fill", "truncate", "ragged"]))
def test_groups_are_those_of_the_slow_reference(forest, mode):
    result = credit(forest, padding_mode=mode, **(FILLED if mode == "fill" else {}))
    groups = {group.id: [(m.call.id, pytest.approx(m.reward.total)) for m in group.members] for group in result.groups}
    assert groups == reference(forest, mode)


@RANDOM
@given(FORESTS, st.sampled_from(["fill", "truncate", "ragged"]))
def test_every_caught_failure_is_a_member_once_at_its_own_invocation(forest, mode):
    groups = credit(forest, padding_mode=mode).groups
    for rollout in forest.rollouts:
        for call in caught(rollout, forest.path(rollout)) if rollout.reward is not None else ():
            (found,) = ((g.id, m) for g in groups for m in g.members if m.call is call and not m.filler)
            assert found[0] == f"{call.example}:{call.module}:{call.invocation}"
            assert found[1].reward.parts == {"format": pytest.approx(-1 + call.present_fields / 3)}


@RANDOM
@given(FORESTS)
def test_a_rollout_is_filled_with_a_failure_only_where_nothing_else_of_it_is_trained(forest):
    by_id = {rollout.id: rollout for rollout in forest.rollouts}
    for group in credit(forest).groups:
        owners = [by_id[member.call.id.rpartition("#")[0]] for member in group.members]
        if len({rollout.id for rollout in owners}) < len(owners):
            continue  # repeated from its head, which may be a failure
        for member, rollout in zip(group.members, owners, strict=True):
            if member.filler and member.caught:
                calls = [call for call in forest.path(rollout) if call.module == member.call.module]
                assert rollout.error == "parse" or not any(call.ok for call in calls)


@RANDOM
@given(FORESTS)
def test_modules_without_a_caught_failure_keep_their_groups(forest):
    """Their calls have the outcome, whatever the program caught of other modules."""
    forest = replace(forest, rollouts=tuple(r for r in forest.rollouts if r.error != "parse"))
    read = replace(forest, calls={key: replace(call, ok=True) for key, call in forest.calls.items()})
    failing = {(call.example, call.module) for call in forest.calls.values() if not call.ok}

    def untouched(result):
        return [
            (g.id, [(m.call.id, m.reward.total, m.filler, m.advantage) for m in g.members])
            for g in result.groups
            if (g.members[0].call.example, g.members[0].call.module) not in failing
        ]

    assert untouched(credit(forest)) == untouched(credit(read))


@RANDOM
@given(
    st.builds(
        with_unread, chains(turn_rewards=numbers, penalties=True, critic=True), st.randoms(use_true_random=False)
    ),
    st.sampled_from([name for name in REWARDED if name != "mmgrpo"]),
)
def test_elsewhere_the_call_has_the_rollouts_reward(forest, name):
    """Only mmGRPO has a reward of the form: to the others a failing call is a call like any other."""
    forest = replace(forest, rollouts=tuple(replace(r, fork=MODULES[0]) for r in forest.rollouts))
    read = replace(forest, calls={key: replace(call, ok=True) for key, call in forest.calls.items()})
    found = credit(forest, name=name)
    assert found == replace(credit(read, name=name), groups=found.groups)
