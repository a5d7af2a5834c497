"""Token sequences to prefix tries, and tries to packs: what is forwarded once, and together with what.

Part of `trainer`; knows no torch and no calls. A trie's node is a run of tokens between two forks. Where a shared run
is too short to pay for the bookkeeping of sharing it, its tokens are repeated in each branch instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

Ids = tuple[int, ...]

MERGE_COST = 0.04
"""Cost of joining one token's attention over one more ancestor, in forwarded tokens (measured: docs/performance.md)."""
NODE_COST = 4
"""Cost of one more attention call per layer, in forwarded tokens."""
PAIRS_PER_TOKEN = 4096
"""Attended (query, key) pairs that cost as much as a forwarded token; used to balance packs, not to share."""
MAX_HEIGHT = 200
"""Forks below each other that a trie may have."""


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens, and what forks after it."""

    row: int
    """A sequence that runs through it; of a leaf, the one that ends in it."""
    begin: int
    end: int
    """Its tokens are begin..end of that sequence."""
    children: tuple[Node, ...] = ()
    tokens: int = 0
    """Tokens in it and below it."""
    height: int = 0

    @property
    def length(self) -> int:
        """Tokens in the node itself."""
        return self.end - self.begin

    @property
    def pairs(self) -> int:
        """Attended (query, key) pairs of the trie, in which this node is the root."""
        found, stack = 0, [self]
        while stack:
            node = stack.pop()
            stack += node.children
            found += node.length * (node.length + 1) // 2 + node.length * (node.tokens - node.length)
        return found

    @property
    def cost(self) -> float:
        """Work of forwarding the trie, in tokens."""
        return self.tokens + self.pairs / PAIRS_PER_TOKEN


def grow(row: int, begin: int, end: int, children: Sequence[Node] = ()) -> Node:
    """A node over `children`; over a single one, that child made longer."""
    if len(children) == 1:
        return lengthened(children[0], begin)
    tokens = end - begin + sum(child.tokens for child in children)
    height = 1 + max((child.height for child in children), default=-1)
    return Node(row, begin, end, tuple(children), tokens, height)


def lengthened(node: Node, begin: int) -> Node:
    """The node with the tokens from `begin` on in it."""
    return replace(node, begin=begin, tokens=node.tokens + node.begin - begin)


@dataclass(slots=True)
class _Open:
    """A node whose beginning is not known yet."""

    row: int
    end: int
    children: list[Node]

    def finish(self, begin: int) -> list[Node]:
        """The node from depth `begin` on, or, where sharing it does not pay, its branches from there on."""
        if not self.children:
            return [grow(self.row, begin, self.end)]
        node = grow(self.row, begin, self.end, self.children)
        below = node.tokens - node.length
        saved = node.length * (len(self.children) - 1)
        if saved > MERGE_COST * below + NODE_COST and node.height <= MAX_HEIGHT:
            return [node]
        return [lengthened(child, begin) for child in self.children]


def plant(rows: Sequence[Ids], *, share: bool = True) -> list[Node]:
    """The tries of `rows`, of which none is a prefix of another, in lexicographic order.

    Args:
        share: without it every row is a trie of its own.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i], i))
    if not share:
        return [grow(i, 0, len(rows[i])) for i in order]
    arrays = [np.asarray(rows[i], dtype=np.int64) for i in order]
    # From the root down to where the newest row left the one before it; the depths where they fork rise strictly.
    path = [_Open(-1, 0, [])]
    for at, row in enumerate(order):
        fork = _common(arrays[at], arrays[at + 1]) if at + 1 < len(order) else 0
        node = _Open(row, len(rows[row]), [])
        while path[-1].end > fork:
            above = path.pop()
            above.children += node.finish(above.end)
            node = above
        if path[-1].end == fork:
            path[-1].children += node.finish(fork)
        else:
            path.append(_Open(row, fork, node.finish(fork)))
    return path[0].children


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common prefix of two sequences."""
    size = min(len(left), len(right))
    differ = left[:size] != right[:size]
    return int(differ.argmax()) if differ.any() else size


def cut(node: Node, budget: int) -> list[Node]:
    """The trie in parts of at most `budget` tokens, cut between branches, what is above them repeated.

    A single sequence is never cut, so a longer one is a part of its own.
    """
    if node.tokens <= budget or not node.children:
        return [node]
    room = budget - node.length
    parts = [part for child in node.children for part in cut(child, room)]
    groups: list[list[Node]] = []
    filled = 0
    for part in parts:
        if not groups or filled + part.tokens > room:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.tokens
    return [grow(node.row, node.begin, node.end, group) for group in groups]


def spread(tries: Sequence[Node], budget: int, share: int = 1) -> list[list[Node]]:
    """Tries to packs of at most `budget` tokens (or one trie), of like cost, their number a multiple of `share`.

    There may be fewer packs than that where there are fewer tries. Largest pack first, so that a budget that does not
    fit in memory fails at once.
    """
    parts = sorted((part for trie in tries for part in cut(trie, budget)), key=lambda trie: -trie.cost)
    count = -(-sum(part.tokens for part in parts) // budget)
    while True:
        count = -(-count // share) * share
        packs = _fill(parts, budget, count)
        if packs is not None or count >= len(parts):
            break
        count += 1
    filled = [pack for pack in packs or [[part] for part in parts] if pack]
    return sorted(filled, key=lambda pack: -sum(trie.cost for trie in pack))


def _fill(parts: Sequence[Node], budget: int, count: int) -> list[list[Node]] | None:
    """`count` packs, each part into the cheapest one so far that has room; None where one fits nowhere."""
    packs: list[list[Node]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for part in parts:
        fitting = [i for i in range(count) if not packs[i] or tokens[i] + part.tokens <= budget]
        if not fitting:
            return None
        at = min(fitting, key=lambda i: costs[i])
        packs[at].append(part)
        tokens[at] += part.tokens
        costs[at] += part.cost
    return packs


@dataclass(frozen=True, slots=True)
class Span:
    """Where a node lies in its pack: tokens begin..end, and what is below it up to `stop`."""

    begin: int
    end: int
    stop: int
    depth: int
    """Tokens before it on its path."""


@dataclass(frozen=True, slots=True)
class Bed:
    """Tries laid out one after the other, every node before what is below it."""

    spans: tuple[Span, ...]
    ids: Ids
    depths: tuple[int, ...]
    """Of each token: how many come before it on its path."""
    paths: dict[int, tuple[Span, ...]]
    """Row -> its nodes from the root to the leaf."""


def lay(tries: Sequence[Node], rows: Sequence[Ids]) -> Bed:
    """Tokens, positions and nodes of one pack."""
    spans: list[Span] = []
    ids: list[int] = []
    depths: list[int] = []
    paths: dict[int, tuple[Span, ...]] = {}
    stack: list[tuple[Node, tuple[Span, ...]]] = [(trie, ()) for trie in reversed(tries)]
    while stack:
        node, above = stack.pop()
        at = len(ids)
        span = Span(at, at + node.length, at + node.tokens, node.begin)
        spans.append(span)
        ids += rows[node.row][node.begin : node.end]
        depths += range(node.begin, node.end)
        path = (*above, span)
        if not node.children:
            paths[node.row] = path
        stack += [(child, path) for child in reversed(node.children)]
    return Bed(tuple(spans), tuple(ids), tuple(depths), paths)


def places(path: Sequence[Span]) -> list[int]:
    """Where in the pack each token of a path lies."""
    return [at for span in path for at in range(span.begin, span.end)]
