"""Plan of the forwards of a batch of prompts: a prefix that prompts share is forwarded once. Knows no torch.

Used by `decode`. Prompts of one batch share instruction headers, questions, retrieved documents; a later prompt extends
an earlier one by a turn. `plan` cuts prompts into segments of a prefix tree; `PrefixStore` keeps what later prompts may
start with.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Ids = tuple[int, ...]

LEAST_SHARED = 16
"""Tokens beyond the parent that make a segment of their own."""
LEAST_SAVED = 64
"""Tokens not forwarded again that pay for one more pass."""
MOST_REMEMBERED = 1024
"""Sequences remembered by their ids."""
CHUNK_TOKENS = 4096
"""Most padded tokens prefilled in one pass."""
WASTE = 1.25
"""Longest over shortest prompt of one pass."""


@dataclass(slots=True, eq=False)
class PrefixSegment:
    """Tokens start..len(ids) of a sequence, forwarded on top of the first `start` tokens of `parent`."""

    ids: Ids
    start: int = 0
    parent: PrefixSegment | None = None
    leaf: bool = False
    """A whole prompt; otherwise something that several prompts share."""
    cache: list[Tensor] = field(default_factory=list)
    """Of `decode`, per layer: keys and values of all `ids`, (2, kv heads, len(ids), head_dim). The decoder fills it in
    when the segment is to be stored."""


def common_prefix(a: Ids, b: Ids) -> int:
    """Return the length of the longest common prefix."""
    # Slices compare in C: a bisection over slices beats a loop over tokens by far for prompts of thousands.
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixStore:
    """Sequences whose keys and values are stored, and the ids alone of recent others.

    Args:
        limit: most tokens stored in all; the least recently used sequence goes first.
        state_tokens: what a sequence's state takes beside its tokens, counted in tokens; None: there is no state, and
            a sequence can be cut anywhere.
    """

    def __init__(self, limit: int, state_tokens: int | None = None):
        self.limit = limit
        self.state_tokens = state_tokens
        self.tokens = 0
        self.least_shared, self.least_saved = LEAST_SHARED, LEAST_SAVED
        self.continued = False
        """True if a prompt ever went on after a completion (a turn later): then finished rows are worth keeping."""
        # Sorted ids beside each dict: the sequence with the longest common prefix stands next to where a prompt would
        # be put in, so a lookup is a bisection and two comparisons, not one with every stored sequence.
        self._sorted: list[Ids] = []
        self._stored: dict[Ids, PrefixSegment] = {}  # in order of use
        self._remembered_sorted: list[Ids] = []
        self._remembered: dict[Ids, int] = {}  # in order of arrival; length of the prompt in it

    def __len__(self) -> int:
        return len(self._stored)

    def share_all(self) -> None:
        """Let prompts share what does not pay too: a check of how they share sees few tokens."""
        self.least_shared = self.least_saved = 1

    def add(self, segment: PrefixSegment) -> None:
        """Store a segment whose cache is filled."""
        if segment.ids in self._stored or self._size(segment.ids) > self.limit:
            return
        self._stored[segment.ids] = segment
        insort(self._sorted, segment.ids)
        self.tokens += self._size(segment.ids)
        # Counted in tokens of whole sequences: each holds its parent's part as a copy, so a parent may go before its
        # children, and a child's cache never dangles.
        while self.tokens > self.limit:
            ids = next(iter(self._stored))
            del self._stored[ids]
            del self._sorted[bisect_left(self._sorted, ids)]
            self.tokens -= self._size(ids)

    def _size(self, ids: Ids) -> int:
        return len(ids) + (self.state_tokens or 0)

    def find(self, prompt: Ids) -> tuple[PrefixSegment | None, int]:
        """Find the stored sequence that shares most with the prompt, and how much; the last token is never included."""
        best, length = self._cut(prompt) if self.state_tokens is None else self._whole(prompt)
        if best is None or length < LEAST_SHARED:
            return None, 0
        segment = self._stored.pop(best)
        self._stored[best] = segment  # now the most recently used
        return segment, length

    def _cut(self, prompt: Ids) -> tuple[Ids | None, int]:
        index = bisect_left(self._sorted, prompt)
        best, length = None, 0
        for neighbour in self._sorted[max(0, index - 1) : index + 1]:  # the longest common prefix is with a neighbour
            # The last token is always forwarded: its output is what the first sampled token is drawn from.
            common = min(common_prefix(neighbour, prompt), len(prompt) - 1)
            if common > length:
                best, length = neighbour, common
        return best, length

    def _whole(self, prompt: Ids) -> tuple[Ids | None, int]:
        """Find the longest stored sequence that the prompt begins with."""
        begin = prompt[:-1]
        # Of those that stand before `begin`, the last one: if it is no prefix, all prefixes are of what both share.
        while index := bisect_right(self._sorted, begin):
            common = common_prefix(self._sorted[index - 1], begin)
            if common == len(self._sorted[index - 1]):
                return begin[:common], common
            begin = begin[:common]
        return None, 0

    def see(self, ids: Ids, prompt_length: int) -> None:
        """Remember the ids of a sequence: a prompt of `prompt_length` tokens, then sampled tokens."""
        if ids in self._remembered:
            return
        self._remembered[ids] = prompt_length
        insort(self._remembered_sorted, ids)
        if len(self._remembered) > MOST_REMEMBERED:
            oldest = next(iter(self._remembered))
            del self._remembered[oldest]
            del self._remembered_sorted[bisect_left(self._remembered_sorted, oldest)]

    def meet(self, prompt: Ids) -> int:
        """Return the longest prefix length shared with a remembered sequence; notices a turn that continues one."""
        index = bisect_left(self._remembered_sorted, prompt)
        longest = 0
        for neighbour in self._remembered_sorted[max(0, index - 1) : index + 1]:
            common = common_prefix(neighbour, prompt)
            longest = max(longest, common)
            # Beyond the prompt of the earlier sequence means into what was sampled: a program goes on in its context.
            self.continued |= self._remembered[neighbour] < common
        return longest


def plan(prompts: Sequence[Ids], store: PrefixStore) -> list[PrefixSegment]:
    """Cut prompts into segments, parents before children.

    Args:
        prompts: without duplicates.
        store: what is known already; not changed, but for the order of use.

    Returns:
        One leaf per prompt and the shared segments; a leaf has at least one token of its own.
    """
    # The plan is a function of prompts and store, both of which the deterministic schedule fixes; sorting takes out the
    # order of arrival. Which tokens are forwarded together decides the last bits of their keys and values.
    roots: dict[tuple[int, int], tuple[PrefixSegment | None, int, list[Ids]]] = {}
    for prompt in sorted(prompts):
        segment, length = store.find(prompt)
        roots.setdefault((id(segment), length), (segment, length, []))[2].append(prompt)
    segments: list[PrefixSegment] = []  # parents before children: a stack pops a parent's branches after it
    stack = list(roots.values())
    while stack:
        parent, start, group = stack.pop()
        if len(group) == 1:
            prompt = group[0]
            common = min(store.meet(prompt), len(prompt) - 1)
            if common - start >= store.least_saved:  # shared with one that came before: the next to come shall find it
                parent = PrefixSegment(prompt[:common], start, parent)
                start = common
                segments.append(parent)
            segments.append(PrefixSegment(prompt, start, parent, leaf=True))
            continue
        common = common_prefix(group[0], group[-1])  # sorted: common to all between
        length = min(common, min(len(prompt) for prompt in group) - 1)
        # One more pass costs about as much as LEAST_SAVED tokens in a pass that runs anyway, so a shared part is cut
        # off only where all siblings together save more.
        if length - start >= store.least_shared and (len(group) - 1) * (length - start) >= store.least_saved:
            parent = PrefixSegment(group[0][:length], start, parent)
            start = length
            segments.append(parent)
        # By the first token in which they differ; a prompt that ends here (it is a prefix of the others) is its own
        # branch.
        branches: dict[int | None, list[Ids]] = {}
        for prompt in group:
            branches.setdefault(prompt[common] if len(prompt) > common else None, []).append(prompt)
        stack.extend((parent, start, branch) for branch in branches.values())
    return segments


def passes(segments: Sequence[PrefixSegment]) -> Iterator[list[PrefixSegment]]:
    """Yield segments of one parent and similar length together, parents' passes before their children's.

    The order depends on lengths and ids alone.
    """
    # One pass has one parent and one start, so that its keys and values are one tensor that all of it sees. Parents
    # come first since `plan` lists them first and dicts keep that order.
    siblings: dict[tuple[int, int], list[PrefixSegment]] = {}
    for segment in segments:
        siblings.setdefault((id(segment.parent), segment.start), []).append(segment)
    for several in siblings.values():
        chunk: list[PrefixSegment] = []
        for segment in sorted(several, key=lambda leaf: (len(leaf.ids), leaf.ids)):
            length = len(segment.ids) - segment.start
            shortest = len(chunk[0].ids) - chunk[0].start if chunk else 0
            # Sorted by length, a pass pads by at most a quarter (and 16 tokens, for short ones).
            if chunk and (length > WASTE * shortest + 16 or length * (len(chunk) + 1) > CHUNK_TOKENS):
                yield chunk
                chunk = []
            chunk.append(segment)
        yield chunk
