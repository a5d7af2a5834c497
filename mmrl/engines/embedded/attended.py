"""The loop for models whose layers the native decoder does not know: their own modules, over its cache and prefixes.

The model's forward is called with the new tokens alone; its attention comes here (`models.attending`), where the keys
and values of a row and of the prefix that rows share lie. So it serves windows, caps, sinks, experts and whatever else
a layer is made of, as long as attention is plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from mmrl.engines.embedded.cached_loop import CachedLoop
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.prefixes import PrefixSegment
from mmrl.engines.embedded.shared_prefix import BLOCK, Groups, Softmax, Target
from mmrl.models.attending import AttentionCall, NotPlain, attended_layers, install
from mmrl.models.load import causal_lm


def unattended(model: torch.nn.Module) -> str | None:
    """Return the reason why `AttendedLoop` cannot serve this model, or None."""
    try:
        layers = attended_layers(model)
    except NotPlain as reason:
        return str(reason)
    if len({layer.layer for layer in layers}) < len(layers):
        return "its layers attend more than once"
    if any(layer.key_size != layer.value_size for layer in layers):
        return "its keys and values differ in size"
    return None


class AttendedLoop(CachedLoop):
    """Loop that generates by a model's own layers, for a `RowDecoder`.

    Args:
        model: a causal LM of which `unattended` is None, wrapped by peft or not; its attention is set to one that knows
            what rows share, and is as before without.
        adapter: the LoRA adapter to apply; None: whichever is active.
        stored_tokens: most tokens of shared prefixes cached for prompts to come.
    """

    def __init__(self, model: torch.nn.Module, adapter: str | None = None, stored_tokens: int = 65536):
        self.model = model
        self.own = HFLoop(model, adapter)
        """Switches modes and adapters."""
        layers = attended_layers(model)
        install(model)
        causal = causal_lm(model)
        self.head: torch.nn.Module = causal.get_output_embeddings()
        self._embedding = cast("torch.nn.Embedding", causal.get_input_embeddings())
        super().__init__([(layer.kv_heads, layer.key_size) for layer in layers], stored_tokens, by_onednn=False)

    @property
    @override
    def like(self) -> Tensor:
        return self._embedding.weight.detach()

    @override
    def start(self) -> None:
        """Switch dropout off; weights are the model's own."""
        self.own.start()

    @override
    def stop(self) -> None:
        super().stop()
        self.own.stop()

    @override
    def _forward_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self._groups is not None and self._shifts is not None
        columns = positions + self._shifts
        step = _Step(self._cache, self._groups, positions, columns, max(self._cached_lengths()) + 1)
        return self._forward(tokens[:, None], positions[:, None], step)

    @override
    def _forward_segments(self, segments: Sequence[PrefixSegment], target: Target) -> Tensor:
        start = segments[0].start
        parts = [segment.ids[start:] for segment in segments]
        width, device = max(len(part) for part in parts), self.like.device
        ids = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts], device=device)
        positions = torch.arange(start, start + width, device=device).expand(len(parts), -1)
        rows = torch.arange(len(parts), device=device)
        last = torch.tensor([len(part) - 1 for part in parts], device=device)
        # Logits of all prompt tokens would be segments × positions × vocabulary.
        handle = self.head.register_forward_pre_hook(lambda _, args: (args[0][rows, last][:, None], *args[1:]))
        try:
            return self._forward(ids, positions, _Segments(self._cache, segments, target))
        finally:
            handle.remove()

    def _forward(self, ids: Tensor, positions: Tensor, attending: _Step | _Segments) -> Tensor:
        with self.own.using_adapter():
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                # transformers takes a 4D mask as given and builds none.
                attention_mask=ids.new_zeros(len(ids), 1, 1, 1),
                use_cache=False,
                return_dict=True,
                tree=attending,
            )
        logits: Tensor = output.logits[:, 0]
        return logits


@dataclass(slots=True)
class _Step:
    """Attention of one token of each row in flight."""

    cache: Sequence[Tensor]
    groups: Groups
    positions: Tensor
    """(B,)"""
    columns: Tensor
    """(B,) of the cache, where their keys and values go."""
    length: int
    """Columns that any row has."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Put the tokens' keys and values into the rows and attend to these; see `models.attending`."""
        layer, rows = call.module.layer_idx, torch.arange(len(self.positions), device=self.positions.device)
        cache = self.cache[layer]
        cache[0, rows, :, self.columns], cache[1, rows, :, self.columns] = call.key[:, :, 0], call.value[:, :, 0]
        key, value = cache[:, : len(rows), :, : self.length]
        # Columns are as far apart as the positions of their tokens.
        seen = _seen(self.columns, torch.arange(self.length, device=rows.device), call.window)  # (B, length)
        added = torch.zeros(seen.shape, dtype=key.dtype, device=key.device).masked_fill_(~seen, float("-inf"))
        query = call.query[:, :, 0].unflatten(1, (key.shape[1], -1))  # (B, kv heads, heads / kv heads, D)
        if self.groups or call.softcap is not None or call.sinks is not None:
            softmax = Softmax(call.scale, call.window, call.softcap, call.sinks, self.positions)
            mixed = self.groups.attend(query, key, value, added[:, None, None], layer, softmax)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=added[:, None, None], scale=call.scale)
        return mixed.flatten(1, 2)[:, None]


@dataclass(slots=True)
class _Segments:
    """Attention of segments of prompts that go on from one parent."""

    cache: Sequence[Tensor]
    segments: Sequence[PrefixSegment]
    target: Target

    def attend(self, call: AttentionCall) -> Tensor:
        """Put keys and values where the target says, and attend to the parent and the segments' own."""
        layer, start, parent = call.module.layer_idx, self.segments[0].start, self.segments[0].parent
        past = None if parent is None else parent.cache[layer][:, :, :start]
        new = torch.cat([call.key, call.value], dim=1).transpose(1, 2).contiguous()  # (U, S, 2 * kv heads, D)
        key, value = self.target.fill(self.cache[layer], past, new)
        length = key.shape[2]
        places = torch.arange(length, device=key.device)
        seen = _seen(places[start:], places, call.window)  # (S, P + S)
        if call.softcap is None and call.sinks is None:
            mixed = F.scaled_dot_product_attention(
                call.query, key, value, attn_mask=seen, scale=call.scale, enable_gqa=True
            )
            return mixed.transpose(1, 2)
        softmax = Softmax(call.scale, softcap=call.softcap, sinks=call.sinks)
        grouped = call.query.unflatten(1, (key.shape[1], -1)) * call.scale  # (U, kv heads, g, S, D)
        parts = []
        for begin in range(0, length - start, BLOCK):
            block = slice(begin, begin + BLOCK)
            scores = softmax.bent((grouped[:, :, :, block] @ key.unsqueeze(2).transpose(-1, -2)).float())
            weights = softmax.weights(scores.masked_fill_(~seen[block], float("-inf")))
            parts.append(weights.to(value.dtype) @ value.unsqueeze(2))
        return torch.cat(parts, dim=3).flatten(1, 2).transpose(1, 2)


def _seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return (queries, keys) bool, by places."""
    apart = queries[:, None] - keys
    return apart >= 0 if window is None else (apart >= 0) & (apart < window)
