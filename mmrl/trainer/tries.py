"""Prefix tries of token sequences, whose shared prefixes are forwarded once, and packs of tries.

Part of `trainer`; knows no torch and no calls. A trie's node is a run of tokens between two forks. Where a shared run
is too short to pay for the bookkeeping of sharing it, its tokens are repeated in each branch instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.engines.embedded.prefixes import Ids, common_prefix

# The two costs below are in forwarded tokens and decide which forks are worth sharing. They were measured once, on a
# CPU (docs/performance.md), and are constants on purpose: measured anew on each machine, they would cut other tries,
# and the sums of a loss would be added in another order.
MERGE_COST = 0.04
"""Cost of joining one token's attention over one more ancestor, in forwarded tokens."""
NODE_COST = 4
"""Cost of one more attention call per layer, in forwarded tokens."""
PAIRS_PER_TOKEN = 4096
"""Attended (query, key) pairs that cost as much as a forwarded token; used to balance packs, not to share."""
MAX_HEIGHT = 200
"""Forks below each other that a trie may have (`split_trie` recurses once per fork)."""


@dataclass(frozen=True, slots=True)
class TrieNode:
    """A run of tokens, and what forks after it."""

    row: int
    """A sequence that runs through it; of a leaf, the one that ends in it."""
    begin: int
    end: int
    """The node's tokens are begin..end of that sequence, so `begin` is also its depth in the trie, in tokens."""
    children: tuple[TrieNode, ...] = ()
    tokens: int = 0
    """Tokens in it and below it."""
    height: int = 0
    """Forks on the longest path below it, its own included; 0 for a leaf."""

    @property
    def length(self) -> int:
        """Tokens in the node itself."""
        return self.end - self.begin

    @property
    def pairs(self) -> int:
        """Attended (query, key) pairs of the trie, in which this node is the root."""
        total, stack = 0, [self]
        while stack:
            node = stack.pop()
            stack += node.children
            # Its own triangle, and all that is below it against all of it: every pair is counted at its key's node.
            total += node.length * (node.length + 1) // 2 + node.length * (node.tokens - node.length)
        return total

    @property
    def cost(self) -> float:
        """Work of forwarding the trie, in tokens."""
        return self.tokens + self.pairs / PAIRS_PER_TOKEN


def make_node(row: int, begin: int, end: int, children: Sequence[TrieNode] = ()) -> TrieNode:
    """Return a node over `children`; over a single one, that child made longer."""
    if len(children) == 1:
        return lengthened(children[0], begin)
    tokens = end - begin + sum(child.tokens for child in children)
    height = 1 + max((child.height for child in children), default=-1)
    return TrieNode(row, begin, end, tuple(children), tokens, height)


def lengthened(node: TrieNode, begin: int) -> TrieNode:
    """Return the node with the tokens from `begin` on in it."""
    return replace(node, begin=begin, tokens=node.tokens + node.begin - begin)


@dataclass(slots=True)
class _OpenNode:
    """A node whose beginning is not known yet."""

    row: int
    end: int
    children: list[TrieNode]

    def close(self, begin: int) -> list[TrieNode]:
        """Return the node from depth `begin` on, or, where sharing it does not pay, its branches from there on."""
        if not self.children:
            return [make_node(self.row, begin, self.end)]
        node = make_node(self.row, begin, self.end, self.children)
        below = node.tokens - node.length
        # Forwarding the run once saves it in every branch but one. The price: each token below joins one more partial
        # attention result, and every layer makes one more call.
        saved = node.length * (len(self.children) - 1)
        if saved > MERGE_COST * below + NODE_COST and node.height <= MAX_HEIGHT:
            return [node]
        return [lengthened(child, begin) for child in self.children]


def build_tries(rows: Sequence[Ids]) -> list[TrieNode]:
    """Return the tries of `rows`, of which none is a prefix of another, in lexicographic order.

    The calls of a group meet in one trie because they begin alike: the same system prompt and question, and in a
    multi-turn program the turns before. Causal attention gives a token the same hidden state in every sequence that
    has the same tokens before it, so a shared prefix is forwarded once and its gradient sums over the branches.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i], i))
    # One pass over the sorted rows, as a suffix array's LCP intervals are built: neighbours share the longest
    # prefixes, so the common prefix with the next row says which open nodes end here. Linear in tokens once sorted.
    # From the root down to where the newest row left the one before it; the depths where they fork rise strictly.
    path = [_OpenNode(-1, 0, [])]
    for index, row in enumerate(order):
        fork = common_prefix(rows[row], rows[order[index + 1]]) if index + 1 < len(order) else 0
        node = _OpenNode(row, len(rows[row]), [])
        # Nodes that reach deeper than the fork get no further branch: they are closed, deepest first.
        while path[-1].end > fork:
            parent = path.pop()
            parent.children += node.close(parent.end)
            node = parent
        if path[-1].end == fork:
            path[-1].children += node.close(fork)
        else:
            # The fork lies inside the node that was just closed: a new node ends there, with that one below it.
            path.append(_OpenNode(row, fork, node.close(fork)))
    return path[0].children


def split_trie(node: TrieNode, budget: int, max_tokens: int) -> list[TrieNode]:
    """Return the trie in parts of at most `budget` tokens, cut between branches, what is above them repeated.

    A single sequence is never cut, so a longer one is a part of its own. A part may have up to `max_tokens` tokens if
    more than half of it would otherwise be repeated tokens.
    """
    if node.tokens <= budget or not node.children:
        return [node]
    # Each part repeats the node's own tokens, which its branches therefore cannot use. Demonstrations of about as many
    # tokens as the budget would leave room for one or two calls, and be forwarded again for each of them.
    capacity = max(budget - node.length, min(node.length, max_tokens - node.length))
    parts = [part for child in node.children for part in split_trie(child, capacity, max_tokens - node.length)]
    # Neighbours stay together (next fit, not first fit): they share the most.
    groups: list[list[TrieNode]] = []
    filled = 0
    for part in parts:
        if not groups or filled + part.tokens > capacity:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.tokens
    return [make_node(node.row, node.begin, node.end, group) for group in groups]


def bin_pack(
    tries: Sequence[TrieNode], budget: int, share: int = 1, max_tokens: int | None = None
) -> list[list[TrieNode]]:
    """Sort tries into packs of at most `budget` tokens (or one trie), of like cost, in a multiple of `share` packs.

    There may be fewer packs than that where there are fewer tries. Largest pack first, so that a budget that does not
    fit in memory fails at once.

    Args:
        max_tokens: see `split_trie`; None: `budget`.
    """
    # Both sorts are stable and no set or hash is iterated: the same calls give the same packs in the same order on
    # every machine and after a resume, which is what makes the summed loss equal to the bit.
    parts = sorted(
        (part for trie in tries for part in split_trie(trie, budget, max_tokens or budget)), key=lambda trie: -trie.cost
    )
    # No fewer packs than the tokens need; with several processes (`share`) all must do as many forwards.
    count = -(-sum(part.tokens for part in parts) // budget)
    while True:
        count = -(-count // share) * share
        packs = _fill(parts, budget, count)
        if packs is not None or count >= len(parts):
            break
        count += 1
    filled = [pack for pack in packs or [[part] for part in parts] if pack]
    return sorted(filled, key=lambda pack: -sum(trie.cost for trie in pack))


def _fill(parts: Sequence[TrieNode], budget: int, count: int) -> list[list[TrieNode]] | None:
    """Fill `count` packs, each part into the cheapest that has room; None if a part fits nowhere."""
    packs: list[list[TrieNode]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for part in parts:
        # An empty pack takes any part, since a single sequence may be longer than the budget.
        open_packs = [i for i in range(count) if not packs[i] or tokens[i] + part.tokens <= budget]
        if not open_packs:
            return None
        index = min(open_packs, key=lambda i: costs[i])
        packs[index].append(part)
        tokens[index] += part.tokens
        costs[index] += part.cost
    return packs


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Place of a node in its pack: tokens begin..end, and all below it up to `stop`."""

    begin: int
    end: int
    stop: int
    depth: int
    """Tokens before it on its path."""


@dataclass(frozen=True, slots=True)
class TrieLayout:
    """Tries laid out one after the other, every node before what is below it."""

    spans: tuple[NodeSpan, ...]
    ids: Ids
    """(packed tokens,)"""
    depths: tuple[int, ...]
    """(packed tokens,): how many come before each on its path, its position for the rotary angles."""
    paths: dict[int, tuple[NodeSpan, ...]]
    """Row -> its nodes from the root to the leaf."""


def flatten(tries: Sequence[TrieNode], rows: Sequence[Ids]) -> TrieLayout:
    """Return tokens, positions and nodes of one pack."""
    spans: list[NodeSpan] = []
    ids: list[int] = []
    depths: list[int] = []
    paths: dict[int, tuple[NodeSpan, ...]] = {}
    # Depth first, so a node's tokens and all that is below them are one slice begin..stop: `tree_attention` then needs
    # no gather and no mask. A stack, not recursion, and reversed so that it pops in lexicographic order.
    stack: list[tuple[TrieNode, tuple[NodeSpan, ...]]] = [(trie, ()) for trie in reversed(tries)]
    while stack:
        node, ancestors = stack.pop()
        begin = len(ids)
        span = NodeSpan(begin, begin + node.length, begin + node.tokens, node.begin)
        spans.append(span)
        ids += rows[node.row][node.begin : node.end]
        depths += range(node.begin, node.end)
        path = (*ancestors, span)
        if not node.children:
            paths[node.row] = path
        stack += [(child, path) for child in reversed(node.children)]
    return TrieLayout(tuple(spans), tuple(ids), tuple(depths), paths)
