"""Prefixes that rows in flight read together: stored once, attended once per layer and token for all their rows.

Used by `decode`; with it where the keys and values of a prefill go, and the attention of prompts that continue a
prefix. A decode step reads every key and value of every row. Of 64 rows whose prompts share 2,000 tokens, a copy in
each row is 64 times what there is to read, and to hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.engines.embedded.prefixes import Ids, PrefixSegment
from mmrl.models.linear import onednn

LEAST_TOKENS = 256
"""A shorter prefix is copied into each row: the further operations cost more than the reads that they save."""
BLOCK = 512
"""Queries that attend a prefix at once in a prefill."""
LEAST_BYTES = {"cpu": 4 << 20, "gpu": 64 << 20}
"""Reads saved per layer and step that pay for them: about 0.3 ms of a CPU's memory, 30 µs of a GPU's."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `length` tokens of a segment."""

    segment: PrefixSegment
    length: int

    def layer(self, index: int) -> Tensor:
        """Return the keys and values of a layer, (2, kv heads, length, head_dim)."""
        return self.segment.cache[index][:, :, : self.length]


def choose(
    leaves: Mapping[Ids, int],
    segments: Sequence[PrefixSegment],
    live: Sequence[SharedPrefix | None],
    token_bytes: int,
    device: str,
) -> dict[Ids, SharedPrefix]:
    """Choose prompts whose rows share a prefix: the one in common with other prompts, or the whole prompt.

    Args:
        leaves: prompt -> rows that start with it.
        segments: the plan of these prompts.
        live: the prefix of each row in flight.
        token_bytes: of one token's keys and values in one layer.
    """
    # Decided by prompts and by what is in flight alone, both of which the deterministic schedule fixes.
    rows = Counter(prefix for prefix in live if prefix is not None)
    parents: dict[SharedPrefix, list[PrefixSegment]] = {}
    for leaf in segments:
        if leaf.leaf and leaf.parent is not None:
            parents.setdefault(SharedPrefix(leaf.parent, leaf.start), []).append(leaf)
    selected: dict[Ids, SharedPrefix] = {}
    least = LEAST_BYTES["cpu" if device == "cpu" else "gpu"]

    def saved_bytes(prefix: SharedPrefix, count: int) -> int:
        return (count - 1) * prefix.length * token_bytes if prefix.length >= LEAST_TOKENS else 0

    by_leaf = {leaf.ids: SharedPrefix(leaf, len(leaf.ids)) for leaf in segments if leaf.leaf}
    savings = {ids: saved_bytes(prefix, leaves[ids]) for ids, prefix in by_leaf.items()}
    for prefix, siblings in parents.items():
        count = rows[prefix] + sum(leaves[leaf.ids] for leaf in siblings)
        common = saved_bytes(prefix, count)
        if common >= max(least, sum(savings[leaf.ids] for leaf in siblings if savings[leaf.ids] >= least)):
            selected |= {leaf.ids: prefix for leaf in siblings}
    return {ids: by_leaf[ids] for ids, saving in savings.items() if saving >= least and ids not in selected} | selected


class Target:
    """Destinations of the keys and values of one pass: rows of the cache, and the segments that stay.

    Args:
        slots: rows of the cache that begin with leaves.
        sources: which segment each of them begins with.
        selected: the prefixes of prompts whose rows share one.
    """

    def __init__(
        self,
        segments: Sequence[PrefixSegment],
        slots: Sequence[int],
        sources: Sequence[int],
        selected: Mapping[Ids, SharedPrefix],
    ):
        # A leaf that is a prefix itself holds what its rows read.
        self.stored = [
            (number, segment)
            for number, segment in enumerate(segments)
            if not segment.leaf or (segment.ids in selected and selected[segment.ids].segment is segment)
        ]
        # First column that a row's own part has of what the pass makes -> rows, segments. All leaves of a pass have one
        # parent, so there are at most two: what follows the parent, or all.
        self.parts: dict[int, tuple[list[int], list[int]]] = {}
        for slot, source in zip(slots, sources, strict=True):
            prefix = selected.get(segments[source].ids)
            if prefix is not None and prefix.segment is segments[source]:
                continue
            rows, indices = self.parts.setdefault(prefix.length if prefix is not None else 0, ([], []))
            rows.append(slot)
            indices.append(source)
        # The pass may be wider than any of these rows: the cache has room for their own positions, not for its padding.
        self.longest = {
            first: max(len(segments[index].ids) for index in indices) for first, (_, indices) in self.parts.items()
        }
        for _, segment in self.stored:
            segment.cache = []

    def fill(self, cache: Tensor, past: Tensor | None, kv: Tensor, apart: bool = False) -> tuple[Tensor, Tensor]:
        """Put one layer's keys and values where they belong.

        Args:
            cache: (2, rows, kv heads, length, D).
            past: (2, kv heads, P, D) of the parent.
            kv: (U, S, 2 * kv heads, D), the segments' own.
            apart: return the segments' own alone.

        Returns:
            keys and values, (U, kv heads, P + S, D) each.
        """
        count, width, heads, size = kv.shape
        # (2, segments, kv heads, positions, head_dim)
        new = kv.view(count, width, 2, heads // 2, size).permute(2, 0, 3, 1, 4)
        before = past.shape[2] if past is not None else 0
        # What a leaf's rows hold is their own from then on, so the parent may be forgotten.
        for first, (slots, sources) in self.parts.items():
            end, skipped, longest = max(before - first, 0), max(first - before, 0), self.longest[first]
            if past is not None and end:
                cache[:, slots, :, :end] = past[:, None, :, first:]
            cache[:, slots, :, end : longest - first] = new[:, sources, :, skipped : longest - before]
        for number, segment in self.stored:
            # Copied: a view would hold the whole pass, padding and siblings included. Without gaps: it is multiplied.
            part = new[:, number, :, : len(segment.ids) - before]
            parts = [part] if past is None else [past, part]
            segment.cache.append(torch.cat(parts, dim=2).contiguous())
        if past is None or apart:
            return new[0], new[1]
        # A parent is shared by view until here: `expand` copies nothing, the `cat` is the one copy.
        joined = torch.cat([past.unsqueeze(1).expand(-1, count, -1, -1, -1), new], dim=3)
        return joined[0], joined[1]


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a layer's scores become weights."""

    scale: float
    window: int | None = None
    """A token sees itself and window - 1 before it; None: all."""
    softcap: float | None = None
    """Scores s become c · tanh(s / c)."""
    sinks: Tensor | None = None
    """(heads,) score of a key without a value, one more in each softmax."""
    positions: Tensor | None = None
    """(B,) of the rows' tokens, where there is a window."""

    def bent(self, scores: Tensor) -> Tensor:
        """Return scores under the cap."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights of masked scores, (rows, kv heads, heads / kv heads, ..., keys)."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(scores.shape[1], -1, *[1] * (scores.dim() - 3))
        return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1]

    def near(self, rows: Tensor, length: int) -> Tensor | None:
        """Return (rows, length) bool, which of a prefix's tokens rows see; None: all of them."""
        if self.window is None or self.positions is None:
            return None
        return self.positions[rows, None] - torch.arange(length, device=rows.device) < self.window


class Groups:
    """Rows in flight by their prefix, and the attention of one token of each.

    Args:
        prefixes: of each row; None: the row's cache holds all of it.
        by_onednn: products with a prefix are oneDNN's, as those with the weights are (`model.matmul`).
    """

    def __init__(self, prefixes: Sequence[SharedPrefix | None], device: torch.device, by_onednn: bool = False):
        self.product = _onednn_by_head if by_onednn else _by_head
        by_prefix: dict[SharedPrefix, list[int]] = {}
        for row, prefix in enumerate(prefixes):
            if prefix is not None:
                by_prefix.setdefault(prefix, []).append(row)
        self.groups = [(prefix, torch.tensor(rows, device=device)) for prefix, rows in by_prefix.items()]
        alone = [row for row, prefix in enumerate(prefixes) if prefix is None]
        self.alone = torch.tensor(alone, device=device) if alone else None

    def __bool__(self) -> bool:
        return bool(self.groups)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: int, softmax: Softmax | None = None
    ) -> Tensor:
        """Attend to a row's prefix and its own positions in one softmax, as if they lay in one cache.

        Args:
            query: (B, kv heads, heads / kv heads, D).
            key: (B, kv heads, L, D), of the rows' own positions; `value` likewise.
            mask: (B, 1, 1, L), added; None: all are seen.
            softmax: None: scores by the square root of D, and nothing else.

        Returns:
            (B, kv heads, heads / kv heads, D).
        """
        size = query.shape[-1]
        softmax = softmax or Softmax(size**-0.5)
        query = query * softmax.scale  # before the products, which could overflow in float16
        # (B, kv heads, g, L); softmax in float32, as the model does
        scores = softmax.bent((query @ key.transpose(-1, -2)).float())
        if mask is not None:
            scores += mask
        weights = torch.empty_like(scores)
        added: list[tuple[Tensor, Tensor]] = []
        for prefix, rows in self.groups:
            keys, values = prefix.layer(layer)  # (kv heads, P, D) each
            heads, length = keys.shape[:2]
            # The rows' queries stand side by side: one product per key head with keys that are read once.
            queries = query[rows].transpose(0, 1).reshape(heads, -1, size)  # (kv heads, rows * g, D)
            shared = self.product(queries, keys).float().view(heads, len(rows), -1, length).transpose(0, 1)
            shared = softmax.bent(shared)
            if (near := softmax.near(rows, length)) is not None:
                shared = shared.masked_fill(~near[:, None, None], float("-inf"))
            both = softmax.weights(torch.cat([shared, scores[rows]], dim=-1))  # (rows, kv heads, g, P + L)
            weights[rows] = both[..., length:]
            of_prefix = both[..., :length].transpose(0, 1).reshape(heads, -1, length).to(values.dtype)
            part = self.product(of_prefix, values.transpose(-1, -2))
            added.append((rows, part.view(heads, len(rows), -1, size).transpose(0, 1)))
        if self.alone is not None:
            weights[self.alone] = softmax.weights(scores[self.alone])
        mixed = weights.to(value.dtype) @ value
        for rows, part in added:
            mixed[rows] += part
        return mixed


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply (heads, N, in), (heads, out, in) -> (heads, N, out)."""
    return x @ weight.transpose(-1, -2)


def _onednn_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as `_by_head`, by oneDNN: one product per head, and still twice as fast as MKL's batched one on AMD."""
    return torch.stack([onednn(rows, matrix, None) for rows, matrix in zip(x, weight, strict=True)])


def after_prefix(query: Tensor, key: Tensor, value: Tensor, prefix: Tensor) -> Tensor:
    """Attend causally in U segments of S tokens that continue one prefix, whose keys are read in place.

    In float32 on a CPU, by oneDNN's products. With a copy of the prefix for each segment the copies and a masked kernel
    take twice as long. With MKL's products that is less of a gain, and other last digits than before in every run.

    Args:
        query: (U, heads, S, D).
        key: (U, kv heads, S, D), the segments' own; `value` likewise.
        prefix: (2, kv heads, P, D), keys and values.

    Returns:
        (U, heads, S, D).
    """
    count, heads, width, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    # The queries of all segments stand side by side: (kv heads, U * g * S, D).
    rows = (query * size**-0.5).unflatten(1, (kv_heads, groups)).transpose(0, 1).reshape(kv_heads, -1, size)
    part, lse = torch.empty_like(rows), rows.new_empty(rows.shape[:2])
    for head in range(kv_heads):
        keys, values = prefix[0, head], prefix[1, head].t()  # (P, D), (D, P)
        # In blocks whose scores stay in the processor's cache: they are read four times.
        for begin in range(0, rows.shape[1], BLOCK):
            block = slice(begin, begin + BLOCK)
            queries = rows[head, block]
            scores = onednn(queries, keys, None)
            maximum = scores.amax(-1, keepdim=True)
            total = scores.sub_(maximum).exp_().sum(-1, keepdim=True)
            mixed = onednn(scores, values, None)
            torch.div(mixed, total, out=part[head, block])
            lse[head, block] = (maximum + total.log()).squeeze(-1)

    def by_segment(x: Tensor) -> Tensor:
        return x.view(kv_heads, count, groups, width, -1).transpose(0, 1).reshape(count, heads, width, -1)

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    causal, causal_lse = kernel(query, *(x.repeat_interleave(groups, 1) for x in (key, value)), 0.0, True)
    # exp(lse) / (exp(causal_lse) + exp(lse)), without an exponential that could overflow.
    share = torch.sigmoid(by_segment(lse) - causal_lse.unsqueeze(-1))
    joined: Tensor = causal + (by_segment(part) - causal) * share
    return joined
