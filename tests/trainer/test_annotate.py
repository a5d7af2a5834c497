from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrl.config.algo import PpoConfig
from mmrl.records import Call, Forest, Rollout
from mmrl.trainer.forwards import annotate, observation_ids
from tests.helpers.trainer_cases import make_trainer


def call(number: int, parent: str | None, prompt: tuple[int, ...], ids: tuple[int, ...], **kwargs: Any) -> Call:
    return Call(
        id=f"q/0#{number}", example="q", parent=parent, module="agent", turn=number, prompt_ids=prompt,
        prompt_tokens=len(prompt), completion_ids=ids, completion_tokens=len(ids),
        logprobs=(-1.0,) * len(ids), **kwargs,
    )  # fmt: skip


def forest() -> Forest:
    """Two turns in one context: prompt 5 6, sampled 7 8 9, observed 10 11, sampled 12 13."""
    first = call(0, None, (5, 6), (7, 8, 9), observation_tokens=2)
    second = call(1, first.id, (5, 6, 7, 8, 9, 10, 11), (12, 13))
    rollout = Rollout(id="q/0", example="q", leaf=second.id, reward=1.0)
    return Forest(calls={c.id: c for c in (first, second)}, rollouts=(rollout,), modules=("agent",))


def trainer(folder: Path, **algo: Any) -> Any:
    return make_trainer(folder, algo=PpoConfig(**{"name": "ppo", "beta": 0.0, "critic": "head", **algo}))


@pytest.mark.parametrize(("obs", "end"), [("skip", 3), ("all", 5)])
def test_values_of_a_turn_are_read_in_its_own_context(obs: str, end: int, tmp_path: Path) -> None:
    """Observation tokens have values with `obs=all`."""
    made = trainer(tmp_path, obs=obs)
    first, second = annotate(made.forwards, forest()).calls.values()
    whole = call(9, None, (5, 6), (7, 8, 9, 10, 11, 12, 13))
    (expected,) = made.forwards.values([whole])
    assert first.values == pytest.approx(expected[:end], abs=1e-6)
    assert second.values == pytest.approx(expected[5:], abs=1e-6)
    assert first.ref_logprobs is None


def test_reference_logprobs_come_with_a_kl_term(tmp_path: Path) -> None:
    made = trainer(tmp_path, beta=0.1)
    found = annotate(made.forwards, forest())
    assert [c.ref_logprobs for c in found.calls.values()] == made.forwards.policy_logprobs(
        list(forest().calls.values())
    )
    assert [c.logprobs for c in found.calls.values()] == [c.logprobs for c in forest().calls.values()]


def test_without_a_critic_the_forest_is_left_alone(tmp_path: Path) -> None:
    given = forest()
    assert annotate(make_trainer(tmp_path).forwards, given) is given


def test_an_observation_is_read_from_whichever_later_call_has_it(tmp_path: Path) -> None:
    """Calls of another context may lie between; where none has it, its call was left out, and it has no values."""
    given = forest()
    first, second = given.calls.values()
    assert observation_ids(given, first) == ((10, 11), 3)
    other = replace(second, id="q/0#x", prompt_ids=(1, 2, 3), parent=first.id)
    between = {first.id: first, other.id: other, second.id: replace(second, parent=other.id)}
    assert observation_ids(replace(given, calls=between), first) == ((10, 11), 3)
    elsewhere = replace(given, calls={first.id: first, second.id: replace(second, prompt_ids=(1, 2, 3))})
    assert observation_ids(elsewhere, first) == ((), 3)
    found, _ = annotate(trainer(tmp_path, obs="all").forwards, elsewhere).calls.values()
    assert (found.observation_tokens, len(found.values)) == (0, first.completion_tokens)


def test_an_end_of_turn_that_was_taken_back_is_no_part_of_what_follows(tmp_path: Path) -> None:
    """Sampled 7 8 9, of which 9 ended the turn: the context goes on as 7 8, then observed 10 11."""
    given = forest()
    first, second = given.calls.values()
    calls = {first.id: first, second.id: replace(second, prompt_ids=(5, 6, 7, 8, 10, 11))}
    made = trainer(tmp_path, obs="all")
    found, _ = annotate(made.forwards, replace(given, calls=calls)).calls.values()
    (expected,) = made.forwards.values([call(9, None, (5, 6), (7, 8, 10, 11))])
    # 7 and 8; then 9, and 10 in its place, come after the same tokens; then 11.
    assert found.values == pytest.approx([*expected[:3], *expected[2:]], abs=1e-6)
    assert len(found.values) == first.completion_tokens + first.observation_tokens
