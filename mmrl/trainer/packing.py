"""Calls to packs: the tensors of one forward, and where in it which token is scored.

Part of `trainer`. Whoever forwards a `Pack` sees ids and a list of (position, target); how calls share tokens is
decided here and in `tries` alone. Two ways: `trie` forwards each distinct prefix once (`tree_attention`), `padded` has
a row per call, for models whose layers cannot share and as the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.trainer.objective import TrainCall
from mmrl.trainer.tree_attention import Tree
from mmrl.trainer.tries import Bed, lay, places, plant, spread

MAX_SCORED = 4096
"""Scored positions per padded pack: logits take vocabulary size × 4 bytes each (0.6 MB at 152k), so they are bounded
too. Of tries they are computed in chunks (`logprobs`)."""


@dataclass(slots=True, kw_only=True)
class Pack:
    """One forward. R rows of width W, N scored positions, E entry tokens.

    Padded rows are padded on the right: with causal attention no real token sees padding, so no mask is needed. Tries
    lie in one row, one after the other.
    """

    calls: tuple[TrainCall, ...]
    """In the order of their scored positions; a row may hold several."""
    input_ids: torch.Tensor
    """(R, W) int64."""
    positions: torch.Tensor
    """(N,) int64: index into the R * W hidden states; position t predicts the token at t + 1."""
    targets: torch.Tensor
    """(N,) int64: the sampled token ids. Several scored positions may be equal, with different targets."""
    sampled: torch.Tensor
    """(N,) log-probabilities as sampled; NaN where they are not known."""
    known_ref: torch.Tensor
    """(N,) reference log-probabilities as handed in; NaN where they are not known."""
    entry_index: torch.Tensor
    """(E,) int64 into N: the scored position of each entry token."""
    advantages: torch.Tensor
    """(E,)"""
    weights: torch.Tensor
    """(E,)"""
    returns: torch.Tensor
    """(E,) the critic's targets; NaN without a critic."""
    old_values: torch.Tensor
    """(N,) the critic's values before the step; NaN where they are not known."""
    modules: torch.Tensor
    """(N,) int64: index of the call's module in the list that `make_packs` was given."""
    tokens: int
    """Real tokens forwarded."""
    tree: Tree | None = None
    """Who sees whom, where the row holds tries."""
    position_ids: torch.Tensor | None = None
    """(R, W) int64: depth of each token in its trie; None: its place in its row."""
    filler: bool = False
    """A copy with weights 0 that keeps processes in step; counts as forwarded tokens only."""
    old: torch.Tensor | None = field(default=None)
    """(N,) the ratio's denominator, filled in before the first update of a step that has several."""
    ref: torch.Tensor | None = field(default=None)
    """(N,) reference log-probabilities, filled in when the KL term needs them."""

    @property
    def forwarded(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model is called with."""
        if self.tree is None:
            return {"input_ids": self.input_ids, "use_cache": False}
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            # transformers takes a 4D mask as given, so it makes none of its own; `tree_attention` reads `tree` alone.
            "attention_mask": self.input_ids.new_zeros(1, 1, 1, 1),
            "use_cache": False,
            "tree": self.tree,
        }

    def to(self, device: torch.device) -> Pack:
        """The same pack with its tensors on `device` (in place)."""
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device, non_blocking=True))
        return self


def make_packs(
    calls: Sequence[TrainCall],
    budget: int,
    *,
    beta: float,
    modules: Sequence[str],
    dtype: torch.dtype = torch.float32,
    score_all: bool = False,
    tries: bool = False,
    share: int = 1,
) -> list[Pack]:
    """Split `calls` into packs of at most `budget` forwarded tokens; a longer call gets a pack of its own.

    Longest first, so that a budget that does not fit in memory fails at once; ties keep the order of `calls`. The
    result depends on the arguments only.

    Args:
        beta: weight of the KL term: with 0, tokens without advantage are left out.
        modules: module names; `Pack.modules` indexes into it.
        dtype: of the per-token numbers.
        score_all: score every completion token, whatever its entries (to compute log-probabilities).
        tries: forward each distinct prefix once; without it rows are padded.
        share: make the number of packs of tries a multiple of this where there are enough tries.
    """
    parts = [_Part.of(call, beta, score_all) for call in calls]
    rows = _rows([part for part in parts if part.scored])
    if tries:
        ids = [row.ids for row in rows]
        return [_trie_pack(lay(nodes, ids), rows, modules, dtype) for nodes in spread(plant(ids), budget, share)]
    packs: list[Pack] = []
    group: list[_Row] = []
    for row in rows:
        scored = sum(other.scored for other in group) + row.scored
        if group and ((len(group) + 1) * len(group[0].ids) > budget or scored > MAX_SCORED):
            packs.append(_pack(group, modules, dtype))
            group = []
        group.append(row)
    return [*packs, _pack(group, modules, dtype)] if group else packs


@dataclass(frozen=True, slots=True)
class _Part:
    """One call, its active entries, and which of its completion tokens are scored."""

    call: TrainCall
    entries: tuple[tuple[tuple[int, ...], int], ...]
    """(completion tokens, entry number) of each active entry."""
    scored: tuple[int, ...]

    @classmethod
    def of(cls, call: TrainCall, beta: float, score_all: bool) -> _Part:
        entries = tuple(
            (tuple(t for t, weight in enumerate(entry.weights) if weight != 0), number)
            for number, entry in enumerate(call.entries)
            if entry.active(beta)
        )
        needed = {t for tokens, _ in entries for t in tokens}
        return cls(call, entries, tuple(range(len(call.completion_ids)) if score_all else sorted(needed)))

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens to forward: nothing follows the last scored one, and that one is only predicted."""
        return (self.call.prompt_ids + self.call.completion_ids)[: len(self.call.prompt_ids) + self.scored[-1]]


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens that are forwarded once, and every call that is a prefix of them."""

    ids: tuple[int, ...]
    parts: tuple[_Part, ...]

    @property
    def scored(self) -> int:
        """Scored positions."""
        return sum(len(part.scored) for part in self.parts)


def _rows(parts: Sequence[_Part]) -> list[_Row]:
    """One row per call that is no prefix of another, longest first; ties in the order of the calls.

    With causal attention a prefix has the same hidden states in any row that begins with it, so equal calls (converged
    rollouts) and a turn that later turns go on from cost nothing of their own.
    """
    ids = [part.ids for part in parts]
    order = sorted(range(len(parts)), key=lambda i: (ids[i], i))
    hosts: dict[int, list[int]] = {}
    host = -1
    for i in reversed(order):
        # In lexicographic order a prefix of any sequence is a prefix of the one that comes next.
        if host < 0 or ids[host][: len(ids[i])] != ids[i]:
            host = i
        hosts.setdefault(host, []).append(i)
    ranked = sorted(hosts.items(), key=lambda item: (-len(ids[item[0]]), min(item[1])))
    return [_Row(ids[host], tuple(parts[i] for i in sorted(members))) for host, members in ranked]


def _trie_pack(bed: Bed, rows: Sequence[_Row], modules: Sequence[str], dtype: torch.dtype) -> Pack:
    found = [(rows[row], places(path)) for row, path in bed.paths.items()]
    pack = _filled(found, torch.tensor([bed.ids]), modules, dtype)
    pack.tree = Tree(bed.spans, tuple(sorted(set(pack.positions.tolist()))))
    pack.position_ids = torch.tensor([bed.depths])
    pack.tokens = len(bed.ids)
    return pack


def _pack(rows: Sequence[_Row], modules: Sequence[str], dtype: torch.dtype) -> Pack:
    width = max(len(row.ids) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.ids)] = torch.tensor(row.ids)
    found = [(row, range(number * width, (number + 1) * width)) for number, row in enumerate(rows)]
    return _filled(found, input_ids, modules, dtype)


def _filled(
    rows: Sequence[tuple[_Row, Sequence[int]]], input_ids: torch.Tensor, modules: Sequence[str], dtype: torch.dtype
) -> Pack:
    """The pack of rows and, for each, where in the flattened `input_ids` its tokens lie."""
    positions: list[int] = []
    targets: list[int] = []
    sampled: list[float] = []
    known_ref: list[float] = []
    old_values: list[float] = []
    returns: list[float] = []
    module: list[int] = []
    entry_index: list[int] = []
    advantages: list[float] = []
    weights: list[float] = []
    for part, where in [(part, where) for row, where in rows for part in row.parts]:
        call = part.call
        at = {t: len(positions) + offset for offset, t in enumerate(part.scored)}
        start = len(call.prompt_ids) - 1
        positions += [where[start + t] for t in part.scored]
        targets += [call.completion_ids[t] for t in part.scored]
        sampled += _known(call.old_logprobs, part.scored)
        known_ref += _known(call.ref_logprobs, part.scored)
        old_values += _known(call.old_values, part.scored)
        module += [modules.index(call.module)] * len(part.scored)
        for tokens, entry in part.entries:
            entry_index += [at[t] for t in tokens]
            advantages += [call.entries[entry].advantages[t] for t in tokens]
            weights += [call.entries[entry].weights[t] for t in tokens]
            returns += _known(call.entries[entry].returns, tokens)
    return Pack(
        calls=tuple(part.call for row, _ in rows for part in row.parts),
        input_ids=input_ids,
        positions=torch.tensor(positions),
        targets=torch.tensor(targets),
        sampled=torch.tensor(sampled, dtype=dtype),
        known_ref=torch.tensor(known_ref, dtype=dtype),
        entry_index=torch.tensor(entry_index, dtype=torch.int64),
        advantages=torch.tensor(advantages, dtype=dtype),
        weights=torch.tensor(weights, dtype=dtype),
        returns=torch.tensor(returns, dtype=dtype),
        old_values=torch.tensor(old_values, dtype=dtype),
        modules=torch.tensor(module),
        tokens=sum(len(row.ids) for row, _ in rows),
    )


def _known(values: tuple[float, ...] | None, tokens: Sequence[int]) -> list[float]:
    return [float("nan") if values is None else values[t] for t in tokens]
