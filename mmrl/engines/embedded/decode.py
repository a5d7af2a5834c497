"""The native decoder for Llama- and Qwen-like models: fused products, preallocated KV cache, shared prompts once.

Under `RowDecoder`, which compares it with the model's own forward before it is trusted; `architecture` says which
models it serves. What it saves against `generate`: growing caches (re-copied at every token there), Python between
small operations, the forward of a prompt for each of its samples, and rows that idle until the longest one is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.engines.embedded.architecture import Layer, Weights, scaled
from mmrl.engines.embedded.batch_rows import BatchRow
from mmrl.engines.embedded.prefixes import PrefixSegment, PrefixStore, passes, plan
from mmrl.engines.embedded.shared_prefix import LEAST_TOKENS, Groups, SharedPrefix, Target, after_prefix, choose

CACHE_STEP = 64
"""The cache's length grows in multiples of this."""


class NativeLoop:
    """Loop that generates by the fused weights of `architecture`, for a `RowDecoder`; logits in the order of its rows.

    The cache is one tensor per layer, (2, rows, kv heads, length, head_dim), keys and values. Row b has `_lengths[b]`
    tokens; those of its `_prefixes[b]` lie in the prefix, which its rows read together, and the cache has what comes
    after them, from column 0. It is zeroed when allocated, so that what a mask hides is never NaN.

    Args:
        model: `architecture.unsupported(model)` must be None.
        stored_tokens: most tokens of shared prefixes cached for prompts to come.
        adapter: the LoRA adapter to apply; None: whichever is active.
        base: a loop with another adapter of the same model, always started before this one.
    """

    refills = True

    def __init__(
        self,
        model: torch.nn.Module,
        stored_tokens: int = 65536,
        adapter: str | None = None,
        base: NativeLoop | None = None,
    ):
        self.weights: Weights = Weights(model, adapter, base.weights if base is not None else None)
        self.stored_tokens = stored_tokens
        self._store = PrefixStore(stored_tokens)
        self.stop()

    def start(self) -> None:
        """Read the weights anew; whoever changes them while prefixes are stored calls `forget` (`set_version` does)."""
        self.weights.refresh()

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
        w = self.weights
        token_bytes = 2 * w.kv_heads * w.head_dim * w.embedding.element_size()
        counts = {prompt: len(indices) for prompt, indices in places.items()}
        prefixes = choose(counts, planned, self._prefixes, token_bytes, w.embedding.device.type)
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
            hidden = self._forward_segments(segments, target)  # (segments, H)
            for segment in segments:
                if not segment.leaf:
                    # A leaf's keys and values already lie in its rows; a copy would pay only if a later prompt goes on
                    # from it, which `_remember` decides when the row is done.
                    self._store.add(segment)
            part = self.weights.head(self.weights.norm(hidden))
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
        hidden = self._forward_tokens(torch.tensor(tokens, device=positions.device), positions)  # (B, H)
        positions += 1  # in place: the tensor stays the same from token to token until rows come or go
        self._lengths = [length + 1 for length in self._lengths]
        return self.weights.head(self.weights.norm(hidden))

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
        w = self.weights
        # Places of rows that have left go where there are more: `batch_tokens` counts live rows, so that many short
        # prompts and later a few long ones would hold as many times the limit.
        rows = max(rows, old_rows * 5 // 4) if rows > old_rows else min(old_rows, rows * 5 // 4)
        if length > old_length:
            length = -(-max(length + CACHE_STEP, old_length * 5 // 4) // CACHE_STEP) * CACHE_STEP
        else:
            length = old_length
        # rows that are about to be filled included: what is copied of them is finite, and masked
        live, filled = min(len(self._lengths), old_rows), min(max(self._cached_lengths(), default=0), old_length)
        for index in range(len(w.layers)):
            new = w.embedding.new_zeros(2, rows, w.kv_heads, length, w.head_dim)
            if self._cache:  # layer by layer: old and new of one layer at a time, never of the whole cache
                new[:, :live, :, :filled] = self._cache[index][:, :live, :, :filled]
                self._cache[index] = new
            else:
                self._cache = [new, *[torch.zeros_like(new) for _ in w.layers[1:]]]
                break
        self._positions = None

    def _set_positions(self) -> None:
        """Set each row's next position, and the mask over the positions that each row holds."""
        device = self.weights.embedding.device
        self._positions = torch.tensor(self._lengths, device=device)
        self._groups = Groups(self._prefixes, device, self.weights.by_onednn)
        cached = self._cached_lengths()
        # Column of the cache - position, per row.
        self._shifts = torch.tensor(cached, device=device) - self._positions
        if len(set(cached)) == 1:
            self._mask = None  # all rows end in the same column: nothing to hide
            return
        columns = torch.arange(self._cache[0].shape[3], device=device)
        hidden = columns >= (self._positions + self._shifts).unsqueeze(1)  # (rows, length): what a row lacks yet
        zeros = torch.zeros(hidden.shape, dtype=self.weights.embedding.dtype, device=device)
        self._mask = zeros.masked_fill_(hidden, float("-inf"))

    def _forward_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Forward one token per row: (B,) ids at (B,) positions -> (B, H) before the last norm; extends the cache."""
        w = self.weights
        assert self._shifts is not None
        rows, length = len(tokens), max(self._cached_lengths()) + 1
        cos, sin = w.rope(max(self._lengths) + 1)
        cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # (B, 1, head_dim)
        # Where each new key and value goes in the cache seen as (rows, head_dim): one indexed write per layer for keys
        # and values of all rows. `where` is (B, 2 * kv heads), keys of all heads, then values.
        _, size, heads, width, _ = self._cache[0].shape
        row = torch.arange(rows, device=tokens.device).unsqueeze(1)
        head = torch.arange(heads, device=tokens.device)
        column = (positions + self._shifts).unsqueeze(1)
        keys = (row * heads + head) * width + column
        where = torch.cat([keys, keys + size * heads * width], dim=1)
        mask = None
        if self._mask is not None:
            self._mask[row, column] = 0.0  # each row now sees its newest token too
            mask = self._mask[:rows, None, None, :length]
        x = F.embedding(tokens, w.embedding)
        for number, (layer, cache) in enumerate(zip(w.layers, self._cache, strict=True)):
            # (B, heads + 2 * kv heads, head_dim): queries, keys, values out of one product
            qkv = layer.qkv(layer.before_attention(x)).view(rows, -1, w.head_dim)
            _rotate(qkv[:, : w.heads + w.kv_heads], cos, sin, layer)
            cache.view(-1, w.head_dim)[where] = qkv[:, w.heads :]
            # Grouped-query attention without copies of keys: the queries of one key head stand as its "positions",
            # (B, kv heads, heads / kv heads, head_dim) against (B, kv heads, length, head_dim).
            query = qkv[:, : w.heads].reshape(rows, w.kv_heads, -1, w.head_dim)
            key, value = cache[:, :rows, :, :length]
            if self._groups:
                mixed = self._groups.attend(query, key, value, mask, number)
            else:
                mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = layer.out.add_to(x, mixed.reshape(rows, -1))
            x = _mlp(layer, x)
        return x

    def _forward_segments(self, segments: Sequence[PrefixSegment], target: Target) -> Tensor:
        """Forward segments on top of one parent, padded on the right (causal attention never sees that).

        Returns:
            (U, H) of the last tokens, before the last norm. Segments that are no leaves get their `cache`.
        """
        w = self.weights
        parent, start = segments[0].parent, segments[0].start
        parts = [segment.ids[start:] for segment in segments]
        count, width = len(parts), max(len(part) for part in parts)
        device = w.embedding.device
        ids = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts], device=device)
        cos, sin = (table[start : start + width, None] for table in w.rope(start + width))
        last = torch.tensor([len(part) - 1 for part in parts], device=device)
        # Padding on the right needs no mask: causal attention looks to the left, and `last` picks each segment's own
        # end. With a parent, every token also sees all of its `start` tokens.
        mask = None
        separate = w.by_onednn and start >= LEAST_TOKENS
        if start and not separate:
            hidden = ~torch.ones(width, start + width, dtype=torch.bool, device=device).tril_(start)
            mask = torch.zeros(hidden.shape, dtype=w.embedding.dtype, device=device).masked_fill_(hidden, float("-inf"))
        pasts: list[Tensor | None] = [None] * len(w.layers)
        if parent is not None:
            pasts = [cache[:, :, :start] for cache in parent.cache]
        x = F.embedding(ids.view(-1), w.embedding)  # (segments * width, H)
        for layer, cache, past in zip(w.layers[:-1], self._cache, pasts, strict=False):
            qkv = layer.qkv(layer.before_attention(x)).view(count, width, -1, w.head_dim)
            _rotate(qkv[:, :, : w.heads + w.kv_heads], cos, sin, layer)
            query = qkv[:, :, : w.heads].transpose(1, 2)
            key, value = target.fill(cache, past, qkv[:, :, w.heads :], separate)
            if separate and past is not None:
                mixed = after_prefix(query, key, value, past)
            else:
                mixed = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=not start, enable_gqa=True
                )
            x = layer.out.add_to(x, mixed.transpose(1, 2).reshape(count * width, -1))
            x = _mlp(layer, x)
        # Nobody reads the last layer's output but for each segment's last token; its keys and values are needed of all.
        layer, split = w.layers[-1], w.heads * w.head_dim
        normed = layer.before_attention(x)
        kv = layer.qkv(normed, slice(split, None)).view(count, width, -1, w.head_dim)
        _rotate(kv[:, :, : w.kv_heads], cos, sin, layer, slice(w.heads, None))
        key, value = target.fill(self._cache[-1], pasts[-1], kv)
        ends = torch.arange(count, device=device) * width + last  # rows of x that are a segment's last token
        query = layer.qkv(normed[ends], slice(0, split)).view(count, w.heads, w.head_dim)
        _rotate(query, cos[last], sin[last], layer, slice(0, w.heads))
        length = key.shape[2]
        # (segments, length): the parent, and the segment's own tokens but for its padding
        visible = torch.arange(length, device=device) <= (last + (length - width)).unsqueeze(1)
        grouped = query.view(count, w.kv_heads, -1, w.head_dim)
        mixed = F.scaled_dot_product_attention(grouped, key, value, attn_mask=visible[:, None, None])
        return _mlp(layer, layer.out.add_to(x[ends], mixed.reshape(count, -1)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layer: Layer, heads: slice = slice(None)) -> None:
    """Apply norm (if the model has one) and rotary position to queries and keys, (..., heads, D), in place."""
    y = x
    if layer.qk_weight is not None:
        # The same two ways as in `Norm`: half precision computes in float32 inside, as the model does.
        if x.dtype == torch.float32:
            assert layer.qk_eps_like is not None
            y = scaled(x, layer.qk_eps_like) * layer.qk_weight[heads]
        else:
            y = F.rms_norm(x, x.shape[-1:], None, layer.qk_eps) * layer.qk_weight[heads]
    # sin carries the sign of the half that is negated, so rotate-half is one roll and one fused multiply-add.
    torch.addcmul(y * cos, y.roll(y.shape[-1] // 2, -1), sin, out=x)


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, dim=-1)
    return layer.down.add_to(x, F.silu(gate).mul_(up))
