"""`mmrl plan replicas=N`: a step's rollouts on several servers, played call by call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.cli import main
from mmrl.plan.fleet import Fleet, PlayedCall, Speed, calls_of, play
from mmrl.report.journal import read_step
from mmrl.report.rundir import RunDir
from tests.helpers.runs import fake_run

FAST = 1e9
"""Calls a second of a driver that never waits."""


def chain(example: str, *lengths: float, start: int = 0) -> list[PlayedCall]:
    """Calls of one path."""
    return [
        PlayedCall(example=example, parent=start + turn - 1 if turn else None, prefill=0, completion=length)
        for turn, length in enumerate(lengths)
    ]


def test_calls_side_by_side_and_one_after_the_other_by_hand() -> None:
    """Tokens of 0.1 s. Two paths of 10 + 20 and 40 tokens: side by side 4 s; with one place 7 s."""
    calls = [*chain("a", 10, 20), *chain("b", 40, start=2)]
    wide = play(calls, 1, Speed(at_once=8, step_s=0.1), 1, FAST)
    assert wide.seconds == pytest.approx(4.0, abs=1e-6)
    assert wide.busy_s == pytest.approx(4.0, abs=1e-6)
    assert wide.nine_tenths == pytest.approx(3.0, abs=1e-6)
    assert play(calls, 1, Speed(at_once=1, step_s=0.1), 1, FAST).seconds == pytest.approx(7.0, abs=1e-6)
    # On a server each: examples do not share one.
    apart = play(calls, 2, Speed(at_once=1, step_s=0.1), 1, FAST)
    assert apart.seconds == pytest.approx(4.0, abs=1e-6) and apart.busy_s == pytest.approx(7.0, abs=1e-6)


def test_rows_slow_each_other_down_and_prompts_come_first_by_hand() -> None:
    """A step of 0.1 s and 0.1 s for each row: two rows of 10 tokens decode at 0.3 s a token, one at 0.2 s."""
    speed = Speed(at_once=8, step_s=0.1, row_s=0.1)
    assert play(chain("a", 10), 1, speed, 1, FAST).seconds == pytest.approx(2.0, abs=1e-6)
    two = [*chain("a", 10), *chain("b", 10, start=1)]
    assert play(two, 1, speed, 1, FAST).seconds == pytest.approx(3.0, abs=1e-6)
    # Both at 0.3 s until the shorter one has ended, then the other's last 10 tokens at 0.2 s.
    uneven = [*chain("a", 10), *chain("b", 20, start=1)]
    assert play(uneven, 1, speed, 1, FAST).seconds == pytest.approx(5.0, abs=1e-6)
    prompts = [PlayedCall(example=name, parent=None, prefill=50, completion=10) for name in "ab"]
    filled = play(prompts, 1, Speed(at_once=8, step_s=0.1, prefill_s=0.01), 1, FAST)
    assert filled.seconds == pytest.approx(0.5 + 0.5 + 1.0, abs=1e-6)


def test_a_driver_s_ceiling_by_hand() -> None:
    """Ten calls that one process sends at 5 a second: the last goes out after 2 s; two processes need 1 s."""
    calls = [call for number in range(10) for call in chain(str(number), 1, start=number)]
    speed = Speed(at_once=100, step_s=0.001)
    assert play(calls, 1, speed, 1, 5.0).seconds == pytest.approx(2.001, abs=1e-6)
    assert play(calls, 1, speed, 2, 5.0).seconds == pytest.approx(1.001, abs=1e-6)


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_no_step_is_shorter_than_its_longest_path_or_its_work(
    paths: list[list[int]], servers: int, at_once: int
) -> None:
    calls: list[PlayedCall] = []
    for number, lengths in enumerate(paths):
        calls += chain(str(number), *lengths, start=len(calls))
    played = play(calls, servers, Speed(at_once=at_once, step_s=0.5), 1, FAST)
    work, longest = 0.5 * sum(map(sum, paths)), 0.5 * max(map(sum, paths))
    assert played.seconds >= max(longest, work / (servers * at_once)) - 1e-6
    assert played.seconds <= work + 1e-3
    assert work / at_once - 1e-6 <= played.busy_s <= min(work, servers * played.seconds) + 1e-3
    assert played.nine_tenths <= played.seconds
    alone = play(calls, len(paths), Speed(at_once=1000, step_s=0.5), 1, FAST)
    assert alone.seconds == pytest.approx(longest, abs=1e-3)


def test_a_journal_s_calls_are_repeated_for_larger_batches(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=1)
    forest = read_step(RunDir.read(run.path), 1)[0]
    examples = {call.example for call in forest.calls.values()}
    twice = calls_of(forest, 2 * len(examples))
    assert len(twice) == 2 * len(forest.calls)
    assert sum(call.completion for call in twice) == 2 * sum(c.completion_tokens for c in forest.calls.values())
    assert all(call.parent is None or twice[call.parent].example == call.example for call in twice)


def test_batches_sampled_together_fill_each_other_s_tails() -> None:
    """One path of 100 tokens and seven of 10 on two places: alone 10 s of which half are idle, two batches 17 s."""
    calls = [*chain("long", 100), *(call for number in range(7) for call in chain(str(number), 10, start=1 + number))]
    fleet = Fleet(
        calls=calls, servers=1, speed=Speed(at_once=2, step_s=0.1), training=1, staleness=2, update_s=1.0, push_s=0.5
    )
    one, two = fleet.step(1, 1), fleet.step(1, 2)
    assert one.rollouts.seconds == pytest.approx(10.0, abs=0.02)
    assert two.rollouts.seconds == pytest.approx(17.0 / 2, abs=0.5)
    assert two.seconds == two.rollouts.seconds + 0.5 < one.seconds == one.rollouts.seconds + 0.5
    assert fleet.step(1, 0).seconds == pytest.approx(one.rollouts.seconds + 1.5)


SPLIT = ("model=qwen3_8b", "hardware=multinode", "device=h100", "engine.gpu_memory=0.9")


def planned(capsys: Any, *words: str) -> dict[str, Any]:
    assert main(["plan", "--json", "dry=0", *words]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_two_nodes_train_and_four_serve(capsys: Any) -> None:
    plan = planned(capsys, *SPLIT, "replicas=32", "train.batch_size=256")
    step, seconds = plan["fleet"]["step"], plan["seconds_per_step"]
    assert (step["servers"], step["training"], step["staleness"]) == (32, 16, 0)
    assert step["seconds"] == pytest.approx(sum(seconds.values()))
    assert {split["servers"] + split["training"] for split in plan["fleet"]["splits"]} == {48}
    times = [split["seconds"] for split in plan["fleet"]["splits"]]
    assert times == sorted(times) and all(0 <= split["idle"] < 1 for split in plan["fleet"]["splits"])
    # The weights of the servers are not on the devices that train.
    assert "engine's copy" not in plan["memory_bytes"]
    ahead = planned(capsys, *SPLIT, "replicas=32", "train.batch_size=256", "train.staleness=1")["fleet"]["step"]
    longer = max(ahead["rollouts"]["seconds"], ahead["update_s"])
    assert ahead["seconds"] == pytest.approx(longer + ahead["push_s"]) and ahead["seconds"] < step["seconds"]


def test_measured_times_and_lengths_take_the_place_of_assumed_ones(capsys: Any) -> None:
    words = (*SPLIT, "replicas=32", "train.batch_size=8")
    slow, fast = (planned(capsys, *words, f"token_ms={pace}")["fleet"]["step"]["rollouts"] for pace in (50, 25))
    assert 1.7 < slow["seconds"] / fast["seconds"] < 2.0
    assert main(["plan", "dry=0", *SPLIT, "replicas=32"]) == 0
    text = capsys.readouterr().out
    assert "rollouts on 32 servers of a device each" in text and "least idle:" in text
