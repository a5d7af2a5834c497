"""Prefix trees of prompts, on ids alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.engines.embedded.prefixes import LEAST_SAVED, LEAST_SHARED, PrefixSegment, PrefixStore, common_prefix, plan
from mmrl.engines.embedded.shared_prefix import choose

few = st.lists(st.integers(0, 1), min_size=1, max_size=60).map(tuple)


@given(few, few)
def test_shared_is_the_longest_common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    slow = 0
    while slow < min(len(a), len(b)) and a[slow] == b[slow]:
        slow += 1
    assert common_prefix(a, b) == slow


@st.composite
def prompt_sets(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Prompts grown from each other, so that they share long beginnings."""
    made: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(made))
        cut = draw(st.integers(0, len(base)))
        made.append(base[:cut] + (draw(st.integers(0, 3)),) * draw(st.integers(1, 50)))
    return sorted(set(made[1:]), reverse=draw(st.booleans()))


@settings(max_examples=200, deadline=None)
@given(prompt_sets(), prompt_sets())
def test_every_prompt_is_covered_and_nothing_is_forwarded_twice_for_long(
    earlier: list[tuple[int, ...]], prompts: list[tuple[int, ...]]
) -> None:
    store = PrefixStore(10_000)
    for ids in earlier:
        store.add(PrefixSegment(ids))
    segments = plan(prompts, store)
    assert sorted(s.ids for s in segments if s.leaf) == sorted(prompts)
    for position, segment in enumerate(segments):
        assert 0 <= segment.start < len(segment.ids)
        if segment.parent is None:
            assert segment.start == 0
        else:
            assert segment.parent in segments[:position] or segment.parent.ids in earlier
            assert segment.start <= len(segment.parent.ids)
            assert segment.ids[: segment.start] == segment.parent.ids[: segment.start]
    total = sum(len(segment.ids) - segment.start for segment in segments)
    assert total <= sum(map(len, prompts))
    leaves = {s.ids: s for s in segments if s.leaf}
    for a, b in zip(sorted(prompts), sorted(prompts)[1:], strict=False):
        common = min(common_prefix(a, b), len(a) - 1, len(b) - 1)
        repeated = common - max(leaves[a].start, leaves[b].start)
        assert repeated < max(LEAST_SHARED, LEAST_SAVED)


def test_the_store_finds_the_longest_and_drops_the_least_recently_used() -> None:
    store = PrefixStore(100)
    first, second = (1,) * 40, (1,) * 20 + (2,) * 20
    store.add(PrefixSegment(first))
    store.add(PrefixSegment(second))
    found, length = store.find((1,) * 30 + (5,))
    assert found is not None
    assert (found.ids, length) == (first, 30)
    store.add(PrefixSegment((3,) * 40))
    assert store.tokens == 80
    assert store.find(second)[1] == 20  # second itself is gone, its beginning is first's
    assert store.find(first)[1] == 39  # at least one token is left to forward
    store.add(PrefixSegment((4,) * 101))
    assert len(store) == 2


def rows_by_prefix(samples: int, prompts: int, header: int, tail: int) -> dict[int, int]:
    """Length of a shared prefix -> rows, of prompts with a header in common."""
    ids = {(*range(header), *range(10_000 * (n + 1), 10_000 * (n + 1) + tail)): samples for n in range(prompts)}
    chosen = choose(ids, plan(list(ids), PrefixStore(0)), [], 1536, "cpu")
    made: dict[int, int] = {}
    for prompt, prefix in chosen.items():
        made[prefix.length] = made.get(prefix.length, 0) + ids[prompt]
    return made


def test_what_is_shared_is_what_saves_most() -> None:
    assert rows_by_prefix(samples=1, prompts=32, header=2000, tail=20) == {2000: 32}  # a classifier's evaluation
    assert rows_by_prefix(samples=12, prompts=8, header=2000, tail=20) == {2000: 96}  # and its groups
    assert rows_by_prefix(samples=16, prompts=8, header=300, tail=700) == {1000: 128}  # groups of long prompts
    assert rows_by_prefix(samples=4, prompts=8, header=60, tail=400) == {}  # too little to pay for it
    assert rows_by_prefix(samples=1, prompts=300, header=60, tail=40) == {}
