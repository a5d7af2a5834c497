"""The loop for hybrids: a model's own forward, prompts that begin alike forwarded once, rows joining as others leave.

Under `RowDecoder`, between `decode` and `hf_loop`. What a recurrent layer knows of a prefix is a state and the last
inputs of its convolution, both at the prefix's end: they are kept there and copied for each continuation, and a prefix
is never cut shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from mmrl.engines.embedded.batch_rows import BatchRow
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.prefixes import Ids, PrefixSegment, PrefixStore, passes, plan
from mmrl.models.load import HYBRIDS, causal_lm, unknown_layers


def serves(model: torch.nn.Module) -> bool:
    """Return True if `StateLoop` knows the layers of this model."""
    causal = causal_lm(model)
    return type(causal).__name__ in HYBRIDS and unknown_layers(causal, HYBRIDS) is None


class StateLoop(HFLoop):
    """Loop that generates by `model(...)`, for a `RowDecoder`; rows are padded on the left, as those of `HFLoop`.

    Prefixes are stored as two tensors for each layer, with one row: keys and values, (1, kv heads, tokens, head_dim),
    or a convolution's inputs and a state, (1, channels, width) and (1, heads, key dim, value dim).

    Args:
        model: `serves(model)` must be true.
        adapter: see `HFLoop`.
        stored_tokens: most tokens of shared prefixes cached for prompts to come; a state counts as its bytes.
    """

    refills = True

    def __init__(self, model: torch.nn.Module, adapter: str | None = None, stored_tokens: int = 65536):
        super().__init__(model, adapter)
        causal = causal_lm(model)
        self.config: Any = causal.config
        self.attends = [kind == "full_attention" for kind in self.config.layer_types]
        self.stored_tokens = stored_tokens
        state = 4 * self.config.linear_num_value_heads * self.config.linear_key_head_dim
        state *= self.config.linear_value_head_dim * self.attends.count(False)
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        token = 2 * causal.dtype.itemsize * self.config.num_key_value_heads * width
        self._state_tokens = state // (token * max(1, self.attends.count(True)))
        self._live: list[BatchRow] = []
        self._lengths: list[int] = []
        self.forget()

    @override
    def stop(self) -> None:
        super().stop()
        self._live, self._lengths = [], []

    @override
    def forget(self) -> None:
        """Forget all prefixes."""
        self._store = PrefixStore(self.stored_tokens, self._state_tokens)

    @override
    def share_all(self) -> None:
        """See `CachedLoop.share_all`."""
        self._store.share_all()

    @override
    def prefill(self, rows: Sequence[BatchRow]) -> Tensor:
        """See `NativeLoop.prefill`."""
        prompts = list(dict.fromkeys(row.prompt_ids for row in rows))
        logits: dict[Ids, Tensor] = {}
        leaves: dict[Ids, list[Tensor]] = {}
        for segments in self._passes(plan(prompts, self._store)):
            for segment, last in zip(segments, self._forward_segments(segments), strict=True):
                if segment.leaf:
                    logits[segment.ids], leaves[segment.ids] = last, segment.cache
                else:
                    self._store.add(segment)
        for prompt in prompts:
            self._store.see(prompt, len(prompt))
        live = [] if self._cache is None else [_parts(self._cache)]
        self._live += rows
        self._lengths += [len(row.prompt_ids) for row in rows]
        width = max(self._lengths)
        blocks = [self._padded(parts, width) for parts in (*live, *(leaves[row.prompt_ids] for row in rows))]
        self._cache = self._made([torch.cat(tensors) for tensors in zip(*blocks, strict=True)])
        mask = [[0] * (width - length) + [1] * length for length in self._lengths]
        self._mask = torch.tensor(mask, device=logits[prompts[0]].device)
        return torch.stack([logits[row.prompt_ids] for row in rows])

    @override
    def step(self, tokens: Sequence[int]) -> Tensor:
        self._lengths = [length + 1 for length in self._lengths]
        return super().step(tokens)

    @override
    def keep(self, indices: Sequence[int]) -> list[int]:
        for index in sorted({*range(len(self._live))} - {*indices}):
            row, length = self._live[index], self._lengths[index]
            ids = (*row.prompt_ids, *row.ids)[:length]  # the newest token was never forwarded
            self._store.see(ids, len(row.prompt_ids))
            if self._store.continued:
                self._store.add(PrefixSegment(ids, leaf=True, cache=self._row(_parts(self._cache), index, length)))
        self._live = [self._live[index] for index in indices]
        self._lengths = [self._lengths[index] for index in indices]
        return super().keep(indices)

    def _passes(self, planned: Sequence[PrefixSegment]) -> Iterator[list[PrefixSegment]]:
        """Yield segments that are forwarded together: after a parent those of one length, since padding that follows
        its state would change it; at the start padding on the left changes nothing."""
        for several in passes(planned):
            if several[0].parent is None:
                yield several
            else:
                yield from (list(group) for _, group in groupby(several, key=lambda segment: len(segment.ids)))

    def _forward_segments(self, segments: Sequence[PrefixSegment]) -> Tensor:
        """Forward segments on top of one parent; returns (U, V) logits after each, whose `cache` it fills in."""
        parent, start = segments[0].parent, segments[0].start
        count, width = len(segments), max(len(segment.ids) for segment in segments)
        gaps = [width - len(segment.ids) for segment in segments]
        ids = [[*[0] * gap, *segment.ids[start:]] for gap, segment in zip(gaps, segments, strict=True)]
        mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
        cache = None if parent is None else self._made([part.expand(count, *part.shape[1:]) for part in parent.cache])
        device = next(self.model.parameters()).device
        logits, made = self._call(torch.tensor(ids, device=device), torch.tensor(mask, device=device), cache)
        parts = _parts(made)
        for number, segment in enumerate(segments):
            segment.cache = self._row(parts, number, len(segment.ids))
        return logits

    def _row(self, parts: Sequence[Tensor], row: int, length: int) -> list[Tensor]:
        """Copy one row's part of a cache; of a view the other rows would stay in memory."""
        return [part.clone() for part in self._padded([part[row : row + 1] for part in parts], length)]

    def _padded(self, parts: Sequence[Tensor], width: int) -> list[Tensor]:
        """Pad keys and values on the left to `width` tokens; where there are more, those on the left are padding."""
        return [
            F.pad(part[:, :, -width:], (0, 0, max(0, width - part.shape[2]), 0)) if self.attends[index // 2] else part
            for index, part in enumerate(parts)
        ]

    def _made(self, parts: Sequence[Tensor]) -> Any:
        """Return a cache of copies of these tensors."""
        from transformers import DynamicCache

        cache: Any = DynamicCache(config=self.config)
        for layer, attends in enumerate(self.attends):
            first, second = parts[2 * layer : 2 * layer + 2]
            if attends:
                cache.update(first, second, layer)
            else:
                cache.update_conv_state(first, layer)
                cache.update_recurrent_state(second, layer)
        return cache


def _parts(cache: Any) -> list[Tensor]:
    return [
        part
        for layer in cache.layers
        for part in (
            (layer.keys, layer.values) if hasattr(layer, "keys") else (layer.conv_states[0], layer.recurrent_states[0])
        )
    ]
