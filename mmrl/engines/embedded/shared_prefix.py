"""Prefixes that rows in flight read together: stored once, attended once per layer and token for all their rows.

Used by `decode`. A decode step reads every key and value of every row. Of 64 rows whose prompts share 2,000 tokens, a
copy in each row is 64 times what there is to read, and to hold.
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
LEAST_BYTES = {"cpu": 4 << 20, "gpu": 64 << 20}
"""Reads saved per layer and step that pay for them: about 0.3 ms of a CPU's memory, 30 µs of a GPU's."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `length` tokens of a segment."""

    segment: PrefixSegment
    length: int

    def layer(self, index: int) -> Tensor:
        """Keys and values of a layer, (2, kv heads, length, head_dim)."""
        return self.segment.cache[index][:, :, : self.length]


def choose(
    leaves: Mapping[Ids, int],
    segments: Sequence[PrefixSegment],
    live: Sequence[SharedPrefix | None],
    token_bytes: int,
    device: str,
) -> dict[Ids, SharedPrefix]:
    """Which prompts' rows share a prefix: the one that they have in common with other prompts, or the whole prompt.

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
    chosen: dict[Ids, SharedPrefix] = {}
    least = LEAST_BYTES["cpu" if device == "cpu" else "gpu"]

    def saved(prefix: SharedPrefix, count: int) -> int:
        return (count - 1) * prefix.length * token_bytes if prefix.length >= LEAST_TOKENS else 0

    whole = {leaf.ids: SharedPrefix(leaf, len(leaf.ids)) for leaf in segments if leaf.leaf}
    own = {ids: saved(prefix, leaves[ids]) for ids, prefix in whole.items()}
    for prefix, several in parents.items():
        count = rows[prefix] + sum(leaves[leaf.ids] for leaf in several)
        together = saved(prefix, count)
        if together >= max(least, sum(own[leaf.ids] for leaf in several if own[leaf.ids] >= least)):
            chosen |= {leaf.ids: prefix for leaf in several}
    return {ids: whole[ids] for ids, save in own.items() if save >= least and ids not in chosen} | chosen


class Groups:
    """Rows in flight by their prefix, and the attention of one token of each.

    Args:
        prefixes: of each row; None: the row's cache holds all of it.
        by_onednn: products with a prefix are oneDNN's, as those with the weights are (`model.matmul`).
    """

    def __init__(self, prefixes: Sequence[SharedPrefix | None], device: torch.device, by_onednn: bool = False):
        self.product = _onednn_by_head if by_onednn else _by_head
        found: dict[SharedPrefix, list[int]] = {}
        for row, prefix in enumerate(prefixes):
            if prefix is not None:
                found.setdefault(prefix, []).append(row)
        self.groups = [(prefix, torch.tensor(rows, device=device)) for prefix, rows in found.items()]
        alone = [row for row, prefix in enumerate(prefixes) if prefix is None]
        self.alone = torch.tensor(alone, device=device) if alone else None

    def __bool__(self) -> bool:
        return bool(self.groups)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layer: int) -> Tensor:
        """One softmax over a row's prefix and its own positions, as if they lay in one cache.

        Args:
            query: (B, kv heads, heads / kv heads, D).
            key: (B, kv heads, L, D), of the rows' own positions; `value` likewise.
            mask: (B, 1, 1, L), added; None: all are seen.

        Returns:
            (B, kv heads, heads / kv heads, D).
        """
        size = query.shape[-1]
        query = query * size**-0.5  # before the products, which could overflow in float16
        scores = (query @ key.transpose(-1, -2)).float()  # (B, kv heads, g, L); softmax in float32, as the model does
        if mask is not None:
            scores += mask
        weights = torch.empty_like(scores)
        added: list[tuple[Tensor, Tensor]] = []
        for prefix, rows in self.groups:
            keys, values = prefix.layer(layer)  # (kv heads, P, D) each
            heads, length = keys.shape[:2]
            # The rows' queries stand side by side: one product per key head with keys that are read once.
            asked = query[rows].transpose(0, 1).reshape(heads, -1, size)  # (kv heads, rows * g, D)
            shared = self.product(asked, keys).float().view(heads, len(rows), -1, length).transpose(0, 1)
            both = torch.cat([shared, scores[rows]], dim=-1).softmax(-1)  # (rows, kv heads, g, P + L)
            weights[rows] = both[..., length:]
            of_prefix = both[..., :length].transpose(0, 1).reshape(heads, -1, length).to(values.dtype)
            part = self.product(of_prefix, values.transpose(-1, -2))
            added.append((rows, part.view(heads, len(rows), -1, size).transpose(0, 1)))
        if self.alone is not None:
            weights[self.alone] = scores[self.alone].softmax(-1)
        mixed = weights.to(value.dtype) @ value
        for rows, part in added:
            mixed[rows] += part
        return mixed


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """(heads, N, in), (heads, out, in) -> (heads, N, out)."""
    return x @ weight.transpose(-1, -2)


def _onednn_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """The same; it has no batched product, and one for each head is still twice as fast as MKL's on AMD."""
    return torch.stack([onednn(one, of_head, None) for one, of_head in zip(x, weight, strict=True)])
