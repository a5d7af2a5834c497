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
from typing_extensions import override

from mmrl.engines.embedded.architecture import Layer, Weights, scaled
from mmrl.engines.embedded.cached_loop import CachedLoop
from mmrl.engines.embedded.prefixes import PrefixSegment
from mmrl.engines.embedded.shared_prefix import LEAST_TOKENS, Target, after_prefix


class NativeLoop(CachedLoop):
    """Loop that generates by the fused weights of `architecture`, for a `RowDecoder`.

    Args:
        model: `architecture.unsupported(model)` must be None.
        stored_tokens: most tokens of shared prefixes cached for prompts to come.
        adapter: the LoRA adapter to apply; None: whichever is active.
        base: a loop with another adapter of the same model, always started before this one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stored_tokens: int = 65536,
        adapter: str | None = None,
        base: NativeLoop | None = None,
    ):
        self.weights: Weights = Weights(model, adapter, base.weights if base is not None else None)
        w = self.weights
        super().__init__([(w.kv_heads, w.head_dim)] * len(w.layers), stored_tokens, w.by_onednn)

    @property
    @override
    def like(self) -> Tensor:
        return self.weights.embedding

    @override
    def start(self) -> None:
        """Read the weights anew; whoever changes them while prefixes are stored calls `forget` (`set_version` does)."""
        self.weights.refresh()

    @override
    def _forward_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
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
        return w.head(w.norm(x))

    @override
    def _forward_segments(self, segments: Sequence[PrefixSegment], target: Target) -> Tensor:
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
        return w.head(w.norm(_mlp(layer, layer.out.add_to(x[ends], mixed.reshape(count, -1)))))


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
