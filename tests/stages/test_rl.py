"""Data order and mini-batches of the weight stage."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mmrl.algorithms import minibatches
from mmrl.credit.entries import Credit, Entry
from mmrl.records import Call, Example, Forest
from mmrl.stages.collect import batch_of, train_calls

EXAMPLES = [Example(id=f"q{i}", inputs={}) for i in range(10)]


@given(size=st.integers(1, 10), seed=st.integers(0, 5))
def test_each_epoch_holds_every_example_and_no_batch_one_twice(size, seed):
    batches = -(-10 // size)
    for epoch in range(2):
        chosen = [batch_of(EXAMPLES, size, epoch * batches + i + 1, seed) for i in range(batches)]
        assert all(len(batch) == size == len({e.id for e in batch}) for batch in chosen)
        counts = Counter(e.id for batch in chosen for e in batch)
        assert set(counts) == {e.id for e in EXAMPLES}
        assert max(counts.values()) - min(counts.values()) <= 1, "topped up with least-used examples"


def test_epochs_and_seeds_are_shuffled_differently_and_repeatably():
    def order(epoch, seed):
        return [e.id for i in range(5) for e in batch_of(EXAMPLES, 2, epoch * 5 + i + 1, seed)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)


@given(count=st.integers(1, 10))
def test_minibatches_split_by_example_evenly(count):
    assigned = minibatches([example.id for example in EXAMPLES], count)
    sizes = Counter(assigned.values())
    assert set(sizes) == set(range(count))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert list(assigned.values()) == sorted(assigned.values())


def call(name, example):
    return Call(
        id=name, example=example, parent=None, module="m", completion_tokens=2, prompt_ids=(1,), completion_ids=(2, 3)
    )


def test_a_call_is_trained_once_with_all_its_entries_and_uncredited_calls_are_not():
    calls = {name: call(name, "q1") for name in ("a", "b")}
    forest = Forest(calls=calls, rollouts=(), modules=("m",))
    entries = tuple(Entry(call="a", reward=1.0, advantages=(value, value), weights=(0.5, 0.5)) for value in (1.0, -1.0))
    (trained,) = train_calls(forest, Credit(algo="x", entries=entries), {"q1": 3})
    assert (trained.call.id, trained.minibatch, trained.call.completion_ids) == ("a", 3, (2, 3))
    assert [entry.advantages[0] for entry in trained.entries] == [1.0, -1.0]
