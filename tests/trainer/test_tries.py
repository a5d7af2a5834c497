from __future__ import annotations

import random
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.trainer import tries
from mmrl.trainer.tries import MAX_HEIGHT, bin_pack, build_tries, flatten, make_node, split_trie


@st.composite
def sequences(draw: Any) -> list[tuple[int, ...]]:
    """Sequences of which none is a prefix of another, with many shared beginnings."""
    found: set[tuple[int, ...]] = set()
    for _ in range(draw(st.integers(1, 9))):
        begin: tuple[int, ...] = ()
        if found and draw(st.booleans()):
            host = draw(st.sampled_from(sorted(found)))
            begin = host[: draw(st.integers(0, len(host)))]
        found.add(begin + tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))))
    kept = [one for one in sorted(found) if not any(other != one and other[: len(one)] == one for other in found)]
    return draw(st.permutations(kept))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing costs nothing, so everything that can be shared is."""
    monkeypatch.setattr(tries, "MERGE_COST", 0.0)
    monkeypatch.setattr(tries, "NODE_COST", 0)


@given(sequences(), st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_every_row_lies_on_a_path_of_one_pack(
    rows: list[tuple[int, ...]], budget: int, share: int, sharing: bool
) -> None:
    for made in (build_tries(rows), [make_node(row, 0, len(ids)) for row, ids in enumerate(rows)]):
        packs = bin_pack(made, budget, share)
        seen = []
        for pack in packs:
            layout = flatten(pack, rows)
            seen += list(layout.paths)
            assert len(layout.ids) == len(layout.depths) == sum(trie.tokens for trie in pack)
            assert len(layout.ids) <= budget or len(layout.paths) == 1
            for row, path in layout.paths.items():
                where = [index for span in path for index in range(span.begin, span.end)]
                assert tuple(layout.ids[at] for at in where) == rows[row]
                assert [layout.depths[at] for at in where] == list(range(len(rows[row])))
                for above, below in pairwise(path):
                    assert above.end <= below.begin < below.stop <= above.stop
        assert sorted(seen) == list(range(len(rows)))


@given(rows=sequences())
def test_each_distinct_prefix_is_forwarded_once(rows: list[tuple[int, ...]]) -> None:
    with patch.multiple(tries, MERGE_COST=0.0, NODE_COST=0):
        layout = flatten(build_tries(rows), rows)
    assert len(layout.ids) == len({row[: n + 1] for row in rows for n in range(len(row))})


@given(sequences(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[tuple[int, ...]], budget: int, dice: random.Random) -> None:
    other = dice.sample(rows, len(rows))
    one, two = ([flatten(pack, many).ids for pack in bin_pack(build_tries(many), budget)] for many in (rows, other))
    assert one == two


def test_a_short_shared_run_is_repeated_rather_than_shared() -> None:
    long = [(9, 9, 9, tail, *range(200)) for tail in range(2)]
    assert [trie.tokens for trie in build_tries(long)] == [204, 204]
    short = [(*[9] * 100, tail) for tail in range(2)]
    assert [trie.tokens for trie in build_tries(short)] == [102]


def test_a_trie_beyond_the_budget_is_cut_between_branches() -> None:
    rows = [(*[9] * 100, *[branch] * 20) for branch in range(5)]
    (trie,) = build_tries(rows)
    assert trie.tokens == 200
    parts = split_trie(trie, 150, 150)
    assert [part.tokens for part in parts] == [140, 140, 120]
    assert [part.tokens for part in split_trie(trie, 10, 10)] == [120] * 5


def test_what_is_repeated_is_at_most_half_of_a_part_where_there_is_room(free: None) -> None:
    rows = [(*[9] * 100, *[branch] * 20) for branch in range(5)]
    (trie,) = build_tries(rows)
    assert [part.tokens for part in split_trie(trie, 110, 220)] == [200]
    assert [part.tokens for part in split_trie(trie, 110, 150)] == [140, 140, 120]  # no more than that
    (wide,) = build_tries([(*[9] * 100, *[branch] * 20) for branch in range(8)])
    assert [part.tokens for part in split_trie(wide, 200, 400)] == [200, 160]  # half is room enough: as without
    # Two prefixes above each other: 60 for both sides of a fork, 40 for each, and six calls of 10 below.
    rows = [(*[9] * 60, *[side] * 40, *[branch] * 10) for side in (1, 2) for branch in range(3, 9)]
    (trie,) = build_tries(rows)
    assert trie.tokens == 60 + 2 * (40 + 60)
    assert [part.tokens for part in split_trie(trie, 110, 110)] == [110] * 12
    assert [part.tokens for part in split_trie(trie, 110, 220)] == [140, 120] * 2


@given(st.integers(1, 60), st.integers(1, 3), st.data())
def test_parts_hold_each_row_once_within_their_bounds(budget: int, times: int, data: st.DataObject) -> None:
    alphabet = st.integers(0, 2)
    rows = data.draw(st.lists(st.lists(alphabet, min_size=1, max_size=40).map(tuple), min_size=1, max_size=12))
    most, longest = times * budget, max(map(len, rows))
    tries = build_tries(rows)
    for trie in tries:
        assert all(part.tokens <= max(most, longest) for part in split_trie(trie, budget, most))
    found = sorted(row for pack in bin_pack(tries, budget, 1, most) for row in flatten(pack, rows).paths)
    without = sorted(row for pack in bin_pack(tries, budget) for row in flatten(pack, rows).paths)
    assert found == without


def test_pairs_are_those_that_attend(free: None) -> None:
    rows = [(1, 2, 3, 4), (1, 2, 5), (6,)]
    assert [trie.pairs for trie in build_tries(rows)] == [1 + 2 + (3 + 4) + 3, 1]


def test_packs_come_in_multiples_of_the_processes_and_cost_alike() -> None:
    rows = [(branch, *[9] * (50 + branch)) for branch in range(12)]
    packs = bin_pack(build_tries(rows), 400, 2)
    assert len(packs) == 2
    costs = [sum(trie.cost for trie in pack) for pack in packs]
    assert max(costs) < 1.1 * min(costs)
    assert len(bin_pack(build_tries(rows), 250, 4)) == 4
    assert len(bin_pack(build_tries(rows[:1]), 250, 4)) == 1
    # Three of 60 tokens: two packs of 100 would have room for their tokens, and none for the third.
    assert [len(pack) for pack in bin_pack(build_tries([(n, *[9] * 59) for n in range(3)]), 100, 1)] == [1, 1, 1]


def test_deep_forks_do_not_grow_without_bound(free: None) -> None:
    trunk = [0] * 500
    rows = [(*trunk[:n], 1) for n in range(1, 500)]
    packs = bin_pack(build_tries(rows), 10**7)
    layout = flatten(packs[0], rows)
    assert max(len(path) for path in layout.paths.values()) <= MAX_HEIGHT + 2
    assert len(layout.paths) == len(rows)
