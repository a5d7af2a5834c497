"""The own decode loop for Llama- and Qwen-like models: fused products, preallocated KV cache, shared prompts once.

Under `RowDecoder`. `architecture` says which models it serves; `select` compares it with the model's own forward
before it is trusted. What it saves against `generate`: growing caches (re-copied at every token there), Python between
small operations, the forward of a prompt for each of its samples, and rows that idle until the longest one is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.engines.architecture import Layer, Weights, scaled
from mmrl.engines.rows import Row

CHUNK_TOKENS = 4096
"""Most padded tokens prefilled in one pass."""
WASTE = 1.25
"""Longest over shortest prompt of one pass."""
CACHE_STEP = 64
"""The cache's length grows in multiples of this."""


class OwnLoop:
    """Implements `mmrl.engines.decoder.Loop`.

    The cache is one tensor per layer, (2, rows, kv heads, length, head_dim), keys and values; row b is valid up to
    `_lengths[b]`. It is zeroed when allocated, so that what a mask hides is never NaN.
    """

    refills = True

    def __init__(self, model: torch.nn.Module):
        self.weights = Weights(model)
        self._forget()

    def _forget(self) -> None:
        self._cache: list[Tensor] = []
        self._lengths: list[int] = []
        self._positions: Tensor | None = None
        self._mask: Tensor | None = None

    def start(self) -> None:
        """Read the weights anew."""
        self._forget()
        self.weights.refresh()

    def stop(self) -> None:
        """Forget all rows and free the cache."""
        self._forget()

    def prefill(self, rows: Sequence[Row]) -> Tensor:
        """See `Loop.prefill`; equal prompts are forwarded once."""
        places: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            places.setdefault(row.prompt_ids, []).append(index)
        first = len(self._lengths)
        self._reserve(first + len(rows), max(len(prompt) for prompt in places) + 1)
        self._lengths += [len(row.prompt_ids) for row in rows]
        logits: Tensor | None = None
        for prompts in _chunks(list(places)):
            slots = torch.tensor([first + index for prompt in prompts for index in places[prompt]])
            sources = torch.tensor([number for number, prompt in enumerate(prompts) for _ in places[prompt]])
            hidden = self._forward_prompts(prompts, slots, sources)
            some = self.weights.head(self.weights.norm(hidden))
            if logits is None:
                logits = some.new_empty(len(rows), some.shape[1])
            logits[(slots - first).to(some.device)] = some[sources.to(some.device)]
        self._positions = None
        assert logits is not None
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        """See `Loop.step`."""
        self._reserve(len(tokens), max(self._lengths) + 1)
        if self._positions is None:
            self._place()
        positions = self._positions
        assert positions is not None
        hidden = self._forward_tokens(torch.tensor(tokens, device=positions.device), positions)
        positions += 1
        self._lengths = [length + 1 for length in self._lengths]
        return self.weights.head(self.weights.norm(hidden))

    def keep(self, indices: Sequence[int]) -> list[int]:
        """See `Loop.keep`; the last rows move into the gaps."""
        count = len(indices)
        order = list(range(count))
        kept = set(indices)
        gaps = [index for index in order if index not in kept]
        moved = [index for index in indices if index >= count]
        if gaps:
            longest = max(self._lengths[index] for index in moved)
            to, source = torch.tensor(gaps), torch.tensor(moved)
            for cache in self._cache:
                cache[:, to, :, :longest] = cache[:, source, :, :longest]
            for gap, index in zip(gaps, moved, strict=True):
                order[gap] = index
        self._lengths = [self._lengths[index] for index in order]
        self._positions = None
        return order

    def _reserve(self, rows: int, length: int) -> None:
        """Make the cache large enough; what it holds stays."""
        old_rows, old_length = (self._cache[0].shape[1], self._cache[0].shape[3]) if self._cache else (0, 0)
        if rows <= old_rows and length <= old_length:
            return
        w = self.weights
        rows = max(rows, old_rows)
        if length > old_length:
            length = -(-max(length + CACHE_STEP, old_length * 5 // 4) // CACHE_STEP) * CACHE_STEP
        else:
            length = old_length
        live, filled = len(self._lengths), max(self._lengths, default=0)
        for index in range(len(w.layers)):
            new = w.embedding.new_zeros(2, rows, w.kv_heads, length, w.head_dim)
            if self._cache:
                new[:, :live, :, :filled] = self._cache[index][:, :live, :, :filled]
                self._cache[index] = new
            else:
                self._cache = [new, *[torch.zeros_like(new) for _ in w.layers[1:]]]
                break
        self._positions = None

    def _place(self) -> None:
        """Positions of the next token of each row, and the mask over what each row holds."""
        device = self.weights.embedding.device
        self._positions = torch.tensor(self._lengths, device=device)
        if len(set(self._lengths)) == 1:
            self._mask = None
            return
        columns = torch.arange(self._cache[0].shape[3], device=device)
        hidden = columns >= self._positions.unsqueeze(1)
        zeros = torch.zeros(hidden.shape, dtype=self.weights.embedding.dtype, device=device)
        self._mask = zeros.masked_fill_(hidden, float("-inf"))

    def _forward_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """One token per row: (B,) ids at (B,) positions -> (B, H) before the last norm; extends the cache."""
        w = self.weights
        rows, length = len(tokens), max(self._lengths) + 1
        cos, sin = w.rope(length)
        cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        # Rows of the flattened cache, (B, 2 * kv heads): keys of all heads, then values.
        _, size, heads, width, _ = self._cache[0].shape
        row = torch.arange(rows, device=tokens.device).unsqueeze(1)
        head = torch.arange(heads, device=tokens.device)
        keys = (row * heads + head) * width + positions.unsqueeze(1)
        where = torch.cat([keys, keys + size * heads * width], dim=1)
        mask = None
        if self._mask is not None:
            self._mask[row, positions.unsqueeze(1)] = 0.0
            mask = self._mask[:rows, None, None, :length]
        x = F.embedding(tokens, w.embedding)
        for layer, cache in zip(w.layers, self._cache, strict=True):
            qkv = layer.qkv(layer.before_attention(x)).view(rows, -1, w.head_dim)
            _rotate(qkv[:, : w.heads + w.kv_heads], cos, sin, layer)
            cache.view(-1, w.head_dim)[where] = qkv[:, w.heads :]
            query = qkv[:, : w.heads].reshape(rows, w.kv_heads, -1, w.head_dim)
            key, value = cache[:, :rows, :, :length]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = layer.out.add_to(x, mixed.reshape(rows, -1))
            x = _mlp(layer, x)
        return x

    def _forward_prompts(self, prompts: Sequence[tuple[int, ...]], slots: Tensor, sources: Tensor) -> Tensor:
        """Whole prompts, padded on the right (causal attention never sees that) -> (U, H) of their last tokens.

        Args:
            slots: rows of the cache to fill.
            sources: which prompt fills each.
        """
        w = self.weights
        count, width = len(prompts), max(len(prompt) for prompt in prompts)
        device = w.embedding.device
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        slots, sources = slots.to(device), sources.to(device)
        cos, sin = (table[:width, None] for table in w.rope(width))
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        x = F.embedding(ids.view(-1), w.embedding)
        for layer, cache in zip(w.layers[:-1], self._cache[:-1], strict=True):
            qkv = layer.qkv(layer.before_attention(x)).view(count, width, -1, w.head_dim)
            _rotate(qkv[:, :, : w.heads + w.kv_heads], cos, sin, layer)
            key, value = _fill(cache, slots, sources, qkv[:, :, w.heads :])
            query = qkv[:, :, : w.heads].transpose(1, 2)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = layer.out.add_to(x, mixed.transpose(1, 2).reshape(count * width, -1))
            x = _mlp(layer, x)
        return self._last_layer(x, last, cos, sin, slots, sources)

    def _last_layer(self, x: Tensor, last: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, sources: Tensor) -> Tensor:
        """The last layer needs keys and values of all tokens, and all else of each prompt's last token only."""
        w, layer = self.weights, self.weights.layers[-1]
        count, width = len(last), cos.shape[0]
        normed = layer.before_attention(x)
        split = w.heads * w.head_dim
        kv = layer.qkv(normed, slice(split, None)).view(count, width, -1, w.head_dim)
        _rotate(kv[:, :, : w.kv_heads], cos, sin, layer, slice(w.heads, None))
        key, value = _fill(self._cache[-1], slots, sources, kv)
        at = torch.arange(count, device=x.device) * width + last
        query = layer.qkv(normed[at], slice(0, split)).view(count, w.heads, w.head_dim)
        _rotate(query, cos[last], sin[last], layer, slice(0, w.heads))
        seen = torch.arange(width, device=x.device) <= last.unsqueeze(1)
        grouped = query.view(count, w.kv_heads, -1, w.head_dim)
        mixed = F.scaled_dot_product_attention(grouped, key, value, attn_mask=seen[:, None, None])
        return _mlp(layer, layer.out.add_to(x[at], mixed.reshape(count, -1)))


def _fill(cache: Tensor, slots: Tensor, sources: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Put (U, S, 2 * kv heads, D) into rows of the cache; returns keys and values, (U, kv heads, S, D) each."""
    count, width, heads, size = kv.shape
    both = kv.view(count, width, 2, heads // 2, size).permute(2, 0, 3, 1, 4)
    cache[:, slots, :, :width] = both[:, sources]
    return both[0], both[1]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layer: Layer, heads: slice = slice(None)) -> None:
    """Norm (where the model has one) and rotary position of queries and keys, (..., heads, D), in place."""
    y = x
    if layer.qk_weight is not None:
        assert layer.qk_eps is not None
        if x.dtype == torch.float32:
            y = scaled(x, layer.qk_eps) * layer.qk_weight[heads]
        else:
            y = F.rms_norm(x, x.shape[-1:], None, float(layer.qk_eps)) * layer.qk_weight[heads]
    torch.addcmul(y * cos, y.roll(y.shape[-1] // 2, -1), sin, out=x)


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.before_mlp(x)).chunk(2, dim=-1)
    return layer.down.add_to(x, F.silu(gate).mul_(up))


def _chunks(prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Prompts of similar length together, so that padding stays small; the order depends on lengths and ids alone."""
    chunk: list[tuple[int, ...]] = []
    for prompt in sorted(prompts, key=lambda ids: (len(ids), ids)):
        if chunk and (len(prompt) > WASTE * len(chunk[0]) + 16 or len(prompt) * (len(chunk) + 1) > CHUNK_TOKENS):
            yield chunk
            chunk = []
        chunk.append(prompt)
    yield chunk
