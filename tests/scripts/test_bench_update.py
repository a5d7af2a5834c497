from __future__ import annotations

import pytest

from scripts.bench.update_shapes import GROUP, SHAPES, Dice, advantages, calls


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_hold_the_same_tokens_for_every_side(name: str) -> None:
    rows = SHAPES[name](Dice(2048))
    made = calls(rows)
    assert len(rows) % 8 == 0
    assert rows == SHAPES[name](Dice(2048))
    assert sum(len(train.call.completion_ids) for train in made) == sum(sum(row.mask) for row in rows)
    last = {train.call.id.split(".")[0]: train.call.prompt_ids + train.call.completion_ids for train in made}
    assert list(last.values()) == [row.prompt + row.completion for row in rows]
    assert sum(weight for call in made for entry in call.entries for weight in entry.weights) == pytest.approx(1)


def test_shapes_share_what_their_algorithm_shares() -> None:
    prompts = {name: len({row.prompt for row in SHAPES[name](Dice(2048))}) for name in SHAPES}
    assert prompts == {
        "is": 8, "fof": 32, "fof_converged": 8, "fof_os": 16, "rr": 26, "hover": 32, "search": 4, "long": 4,
        "demonstrations": 4,
    }  # fmt: skip


def test_advantages_are_normalised_per_group() -> None:
    found = advantages(SHAPES["is"](Dice(2048)))
    for start in range(0, len(found), GROUP):
        assert sum(found[start : start + GROUP]) == pytest.approx(0, abs=1e-9)
