"""Rows in flight over one cache of keys and values, and what prompts share: a loop without the model's layers.

Under `RowDecoder`; `decode` and `attended` say how tokens are forwarded. A prompt that begins as another one does is
forwarded from there on; rows join while others are in flight, and leave when they are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.engines.embedded.batch_rows import BatchRow
from mmrl.engines.embedded.prefixes import PrefixSegment, PrefixStore, passes, plan
from mmrl.engines.embedded.shared_prefix import Groups, SharedPrefix, Target, choose

CACHE_STEP = 64
"""The cache's length grows in multiples of this."""


class CachedLoop(ABC):
    """Loop over a cache, for a `RowDecoder`; logits in the order of its rows.

    The cache is one tensor per layer, (2, rows, kv heads, length, head_dim), keys and values. Row b has `_lengths[b]`
    tokens; those of its `_prefixes[b]` lie in the prefix, which its rows read together, and the cache has what comes
    after them, from column 0. It is zeroed when allocated, so that what a mask hides is never NaN.

    Args:
        shapes: key heads and their size, by layer.
        stored_tokens: most tokens of shared prefixes cached for prompts to come.
        by_onednn: products with a prefix are oneDNN's (`model.matmul`).
    """

    refills = True

    def __init__(self, shapes: Sequence[tuple[int, int]], stored_tokens: int, by_onednn: bool):
        self.shapes, self.stored_tokens, self.by_onednn = shapes, stored_tokens, by_onednn
        self._store = PrefixStore(stored_tokens)
        self.stop()

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """Any tensor of the type of keys and values, on their device."""

    @abstractmethod
    def start(self) -> None:
        """Look at the weights afresh; whoever changes them while prefixes are stored calls `forget`."""

    def stop(self) -> None:
        """Forget all rows and free the cache."""
        self._cache: list[Tensor] = []
        self._lengths: list[int] = []
        self._rows: list[BatchRow] = []
        self._prefixes: list[SharedPrefix | None] = []
        self._groups: Groups | None = None
        self._shifts: Tensor | None = None
        self._positions: Tensor | None = None
        self._mask: Tensor | None = None

    def forget(self) -> None:
        """Forget all prefixes."""
        self._store = PrefixStore(self.stored_tokens)

    def share_all(self) -> None:
        """See `PrefixStore.share_all`; until `forget`."""
        self._store.share_all()

    def prefill(self, rows: Sequence[BatchRow]) -> Tensor:
        """Append rows; returns the (len(rows), V) logits after their prompts. What prompts share is forwarded once."""
        # Equal prompts (the samples of a group) are one leaf: forwarded once, copied into each of their rows or shared.
        places: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            places.setdefault(row.prompt_ids, []).append(index)
        first = len(self._lengths)
        planned = plan(list(places), self._store)
        like = self.like
        heads, size = self.shapes[0]
        token_bytes = 2 * heads * size * like.element_size()
        counts = {prompt: len(indices) for prompt, indices in places.items()}
        prefixes = choose(counts, planned, self._prefixes, token_bytes, like.device.type)
        self._prefixes += [prefixes.get(row.prompt_ids) for row in rows]
        self._lengths += [len(row.prompt_ids) for row in rows]
        self._rows += rows
        self._reserve(len(self._rows), max(self._cached_lengths()[first:]) + 1)
        logits: Tensor | None = None
        for segments in passes(planned):
            # `order`: rows of this prefill, `sources`: the segment of this pass that each of them continues.
            leaves = [(number, places[s.ids]) for number, s in enumerate(segments) if s.leaf]
            order = [index for _, indices in leaves for index in indices]
            sources = [number for number, indices in leaves for _ in indices]
            target = Target(segments, [first + index for index in order], sources, prefixes)
            part = self._forward_segments(segments, target)  # (segments, V)
            for segment in segments:
                if not segment.leaf:
                    # A leaf's keys and values already lie in its rows; a copy would pay only if a later prompt goes on
                    # from it, which `_remember` decides when the row is done.
                    self._store.add(segment)
            if logits is None:
                logits = part.new_empty(len(rows), part.shape[1])
            logits[order] = part[sources]
        for prompt in places:
            self._store.see(prompt, len(prompt))
        self._positions = None
        assert logits is not None
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Extend the rows in flight by one token each; returns (B, V) logits."""
        self._reserve(len(tokens), max(self._cached_lengths()) + 1)
        if self._positions is None:
            self._set_positions()
        positions = self._positions
        assert positions is not None
        logits = self._forward_tokens(torch.tensor(tokens, device=positions.device), positions)
        positions += 1  # in place: the tensor stays the same from token to token until rows come or go
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def keep(self, indices: Sequence[int]) -> list[int]:
        """Forget all rows but these (ascending); returns them in their new order: the last rows move into the gaps."""
        count = len(indices)
        order = list(range(count))
        survivors = set(indices)
        for index in range(len(self._rows)):
            if index not in survivors:
                self._remember(index)
        # Live rows stay at 0..count-1, so that a step takes a view of the cache and not a gather. Only as many rows are
        # copied as have left, not all that come after the first gap.
        gaps = [index for index in order if index not in survivors]
        moved = [index for index in indices if index >= count]
        if gaps:
            cached = self._cached_lengths()
            longest = max(cached[index] for index in moved)
            to, source = torch.tensor(gaps), torch.tensor(moved)
            for cache in self._cache:
                # (2, rows, kv heads, positions, head_dim); the right side is a copy, so overlaps do no harm
                cache[:, to, :, :longest] = cache[:, source, :, :longest]
            for gap, index in zip(gaps, moved, strict=True):
                order[gap] = index
        self._lengths = [self._lengths[index] for index in order]
        self._rows = [self._rows[index] for index in order]
        self._prefixes = [self._prefixes[index] for index in order]
        self._positions = None
        return order

    def _cached_lengths(self) -> list[int]:
        """Return the tokens of each row that lie in the cache."""
        return [n - (prefix.length if prefix else 0) for n, prefix in zip(self._lengths, self._prefixes, strict=True)]

    def _remember(self, index: int) -> None:
        """Remember a finished row's ids, and its keys and values too if a later prompt may go on from them."""
        row, length = self._rows[index], self._lengths[index]
        ids = (*row.prompt_ids, *row.ids)[:length]  # the newest token was never forwarded
        self._store.see(ids, len(row.prompt_ids))
        if self._store.continued:
            # Cloned, since the row's place in the cache is about to be given away. (2, kv heads, length, head_dim)
            prefix, cached = self._prefixes[index], self._cached_lengths()[index]
            cache = [layer[:, index, :, :cached].clone() for layer in self._cache]
            if prefix is not None:
                cache = [torch.cat([prefix.layer(number), part], dim=2) for number, part in enumerate(cache)]
            self._store.add(PrefixSegment(ids, leaf=True, cache=cache))

    def _reserve(self, rows: int, length: int) -> None:
        """Make the cache large enough; what it holds stays."""
        old_rows, old_length = (self._cache[0].shape[1], self._cache[0].shape[3]) if self._cache else (0, 0)
        if rows <= old_rows and length <= old_length:
            return
        # A quarter more than is needed, so that a batch which grows row by row or token by token is copied a
        # logarithmic number of times only. Zeros: a masked value is multiplied by 0, and 0 × NaN of fresh memory would
        # be NaN.
        # Places of rows that have left go where there are more: `batch_tokens` counts live rows, so that many short
        # prompts and later a few long ones would hold as many times the limit.
        rows = max(rows, old_rows * 5 // 4) if rows > old_rows else min(old_rows, rows * 5 // 4)
        if length > old_length:
            length = -(-max(length + CACHE_STEP, old_length * 5 // 4) // CACHE_STEP) * CACHE_STEP
        else:
            length = old_length
        # rows that are about to be filled included: what is copied of them is finite, and masked
        live, filled = min(len(self._lengths), old_rows), min(max(self._cached_lengths(), default=0), old_length)
        for index, (heads, size) in enumerate(self.shapes):
            new = self.like.new_zeros(2, rows, heads, length, size)
            if index < len(self._cache):  # layer by layer: old and new of one at a time, never of the whole cache
                new[:, :live, :, :filled] = self._cache[index][:, :live, :, :filled]
                self._cache[index] = new
            else:
                self._cache.append(new)
        self._positions = None

    def _set_positions(self) -> None:
        """Set each row's next position, and the mask over the positions that each row holds."""
        device = self.like.device
        self._positions = torch.tensor(self._lengths, device=device)
        self._groups = Groups(self._prefixes, device, self.by_onednn)
        cached = self._cached_lengths()
        # Column of the cache - position, per row.
        self._shifts = torch.tensor(cached, device=device) - self._positions
        if len(set(cached)) == 1:
            self._mask = None  # all rows end in the same column: nothing to hide
            return
        columns = torch.arange(self._cache[0].shape[3], device=device)
        hidden = columns >= (self._positions + self._shifts).unsqueeze(1)  # (rows, length): what a row lacks yet
        zeros = torch.zeros(hidden.shape, dtype=self.like.dtype, device=device)
        self._mask = zeros.masked_fill_(hidden, float("-inf"))

    @abstractmethod
    def _forward_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Forward one token per row, (B,) ids at (B,) positions -> (B, V) logits; extends the cache."""

    @abstractmethod
    def _forward_segments(self, segments: Sequence[PrefixSegment], target: Target) -> Tensor:
        """Forward segments on top of one parent, padded on the right (causal attention never sees that).

        Returns:
            (U, V) logits of the last tokens. Segments that are no leaves get their `cache`.
        """
