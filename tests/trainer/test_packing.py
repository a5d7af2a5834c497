from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.trainer.objective import TrainCall
from mmrl.trainer.packing import MAX_SCORED, Pack, make_packs
from tests.helpers.trainer_cases import train_call, train_entry, with_changes

numbers = st.sampled_from([0.0, 0.25, -1.5, 2.0])


@st.composite
def calls(draw: st.DrawFn) -> list[TrainCall]:
    found = []
    for index in range(draw(st.integers(1, 7))):
        tokens = draw(st.integers(1, 6))
        per_token = st.lists(numbers, min_size=tokens, max_size=tokens).map(tuple)
        entries = draw(st.lists(st.builds(train_entry, advantages=per_token, weights=per_token), max_size=3))
        found.append(
            train_call(
                id=str(index),
                module=draw(st.sampled_from("ab")),
                prompt_ids=tuple(range(100, 100 + draw(st.integers(1, 8)))),
                completion_ids=tuple(1000 * (index + 1) + t for t in range(tokens)),
                logprobs=draw(st.sampled_from([None, tuple(-float(t) for t in range(tokens))])),
                entries=tuple(entries),
            )
        )
    return found


def entry_tokens(packs: list[Pack]) -> Counter[tuple[int, float, float]]:
    """(token id, advantage, weight) of everything that enters the loss."""
    return Counter(
        (int(pack.targets[at]), float(advantage), float(weight))
        for pack in packs
        for at, advantage, weight in zip(pack.entry_index, pack.advantages, pack.weights, strict=True)
    )


@given(calls(), st.integers(1, 60), st.sampled_from([0.0, 0.1]))
def test_every_active_token_enters_once_per_entry_whatever_the_budget(
    calls: list[TrainCall], budget: int, beta: float
) -> None:
    packs = make_packs(calls, budget, beta=beta, modules=["a", "b"])
    expected = Counter(
        (token, advantage, weight)
        for call in calls
        for entry in call.entries
        if any(w and (beta or a) for a, w in zip(entry.advantages, entry.weights, strict=True))
        for token, advantage, weight in zip(call.call.completion_ids, entry.advantages, entry.weights, strict=True)
        if weight
    )
    assert entry_tokens(packs) == expected
    assert all(pack.forwarded <= budget or pack.input_ids.shape[0] == 1 for pack in packs)


@given(calls(), st.integers(1, 60))
def test_a_token_is_scored_once_at_the_position_before_it(calls: list[TrainCall], budget: int) -> None:
    """However many entries it has."""
    packs = make_packs(calls, budget, beta=0.1, modules=["a", "b"])
    scored = [int(token) for pack in packs for token in pack.targets]
    assert len(scored) == len(set(scored))
    for pack in packs:
        for position, target, module in zip(
            pack.positions.tolist(), pack.targets.tolist(), pack.modules.tolist(), strict=True
        ):
            row, column = divmod(position, pack.input_ids.shape[1])
            call = calls[target // 1000 - 1]
            ids = call.call.prompt_ids + call.call.completion_ids
            assert pack.input_ids[row, : column + 1].tolist() == list(ids[: column + 1])
            assert ids[column + 1] == target
            assert call.call.module == "ab"[module]


def make(prompt: int, tokens: int, index: int = 0, weight: float = 1.0) -> TrainCall:
    entry = train_entry(advantages=(1.0,) * tokens, weights=(weight,) * tokens)
    return train_call(
        id=str(index), module="a", prompt_ids=(1,) * prompt, completion_ids=(2,) * tokens, entries=(entry,)
    )


def test_calls_of_like_length_share_a_pack() -> None:
    calls = [with_changes(make(size, 2), prompt_ids=(size,) * size) for size in (2, 50, 3, 49)]
    packs = make_packs(calls, 110, beta=0.0, modules=["a"])
    assert [[len(call.call.prompt_ids) for call in pack.calls] for pack in packs] == [[50, 49], [3, 2]]


def turn(prompt: tuple[int, ...], completion: tuple[int, ...], name: str, advantage: float) -> TrainCall:
    size = len(completion)
    entry = train_entry(advantages=(advantage,) * size, weights=(1 / size,) * size)
    return train_call(id=name, module="a", prompt_ids=prompt, completion_ids=completion, entries=(entry,))


def test_equal_calls_and_earlier_turns_are_forwarded_once() -> None:
    first = turn((1, 2), (3, 4), "first", 1.0)
    second = turn((1, 2, 3, 4, 5), (6, 7), "second", 2.0)
    twin = turn((1, 2, 3, 4, 5), (6, 7), "twin", 3.0)
    fork = turn((1, 2), (3, 9), "fork", 4.0)
    (pack,) = make_packs([first, second, twin, fork], 100, beta=0.0, modules=["a"])
    # Of `fork`, 9 is only predicted, from the row that holds 1 2 3 as well.
    assert pack.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert [call.call.id for call in pack.calls] == ["first", "second", "twin", "fork"]
    assert pack.positions.tolist() == [1, 2, 4, 5, 4, 5, 1, 2]
    assert pack.targets.tolist() == [3, 4, 6, 7, 6, 7, 3, 9]
    assert pack.advantages.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


def test_unsampled_tail_and_last_token_are_not_forwarded() -> None:
    entry = train_entry(advantages=(1.0, 1.0, 1.0), weights=(1.0, 1.0, 0.0))
    call = train_call(id="0", module="a", prompt_ids=(1, 2), completion_ids=(3, 4, 5), entries=(entry,))
    (pack,) = make_packs([call], 100, beta=0.0, modules=["a"])
    assert pack.input_ids.tolist() == [[1, 2, 3]]
    assert pack.targets.tolist() == [3, 4]


def test_unknown_sampling_logprobs_are_nan_not_zero() -> None:
    (pack,) = make_packs([make(2, 3)], 100, beta=0.0, modules=["a"])
    assert torch.isnan(pack.sampled).all()
    assert torch.isnan(pack.known_ref).all()


def test_nothing_to_train_gives_no_pack() -> None:
    assert make_packs([make(2, 3, weight=0.0)], 100, beta=0.1, modules=["a"]) == []
    assert make_packs([], 100, beta=0.1, modules=[]) == []


def test_scoring_everything_ignores_entries() -> None:
    (pack,) = make_packs([make(2, 3, weight=0.0)], 100, beta=0.0, modules=["a"], score_all=True)
    assert len(pack.targets) == 3
    assert pack.entry_index.numel() == 0


def test_logits_are_bounded_as_well_as_tokens() -> None:
    calls = [with_changes(make(1, 3000), prompt_ids=(index,)) for index in range(2)]
    packs = make_packs(calls, 10**6, beta=0.0, modules=["a"])
    assert [len(pack.calls) for pack in packs] == [1, 1]
    assert 3000 < MAX_SCORED < 6000
