"""Packs of calls: the tensors of one forward, and the positions of the scored tokens in it.

Part of `trainer`. Whoever forwards a `Pack` sees ids and a list of (position, target); how calls share tokens is
decided here and in `tries` alone. Two ways (`choice`): `trie` forwards each distinct prefix once
(`tree_attention`), `padded` has a row per call, for models whose layers cannot share and as the reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mmrl.trainer.objective import TrainCall, active
from mmrl.trainer.tree_attention import PrefixTree
from mmrl.trainer.tries import TrieLayout, bin_pack, build_tries, flatten

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU_TOKENS = 4096
"""Most tokens per pack on a CPU: more were not faster, and activations are most of its memory."""
GPU_TOKENS = 65536
LEAST_TOKENS = 512
CPU_SHARE, GPU_SHARE = 0.125, 0.4
"""Share of the device's memory that activations may take."""
WIDER_ON_CPU = 2
"""Times its tokens for a pack that would otherwise repeat more than it adds: a quarter of the memory does no harm."""
MAX_SCORED = 4096
"""Scored positions per padded pack: logits take vocabulary size × 4 bytes each (0.6 MB at 152k), so they are bounded
too. Of tries they are computed in chunks (`logprobs`)."""


def token_budget(tokens: int | None, model: PreTrainedModel, checkpointing: bool) -> tuple[int, int]:
    """Return tokens per pack, and of one where that is hardly more than the prefix which its calls share.

    Both are `tokens` (`train.microbatch_tokens`), or what the device's whole memory allows.
    """
    if tokens is not None:
        return tokens, tokens
    # Fixed once, from the whole memory and not what is free now: the budget decides which calls share a pack and so in
    # which order gradients are summed. A resumed run must pack as it did before, or its losses differ in the last bits.
    config, size = model.config.get_text_config(), model.dtype.itemsize
    if on_gpu := model.device.type == "cuda":
        memory, limit = GPU_SHARE * torch.cuda.get_device_properties(model.device).total_memory, GPU_TOKENS
    else:
        memory, limit = CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), CPU_TOKENS
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list) else inner  # one for each layer (Gemma 3n)
    # What a decoder layer keeps for its backward pass: about 12 tensors of its own width and 4 of the inner one.
    layer = size * (12 * hidden + 4 * inner)
    # A gated delta net's reference kernels keep about 24 more in float32, as wide as its values.
    states = 24 * 4 * getattr(config, "linear_num_value_heads", 0) * getattr(config, "linear_value_head_dim", 0)
    recurrent = (getattr(config, "layer_types", None) or []).count("linear_attention")
    # With gradient checkpointing, one layer's activations at a time and every layer's input.
    per_token = layer + states + layers * size * hidden if checkpointing else layers * layer + recurrent * states
    fitting = int(memory / per_token) // LEAST_TOKENS * LEAST_TOKENS
    budget = max(LEAST_TOKENS, min(limit, fitting))
    # A GPU's budget is a large share of its memory already.
    return budget, budget if on_gpu else WIDER_ON_CPU * budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What one teacher knows of M tokens of a pack, by its weights before the step's first update."""

    places: tuple[int, ...]
    """Rising indices into the pack's N scored positions."""
    states: torch.Tensor
    """(M, H) what the teacher's head sees there, after its own prompts: its logits would take V / H times as much."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """(n, H) to (n, V) by the teacher's head."""


@dataclass(slots=True, kw_only=True)
class Pack:
    """Batch of a single forward. R rows of width W, N scored positions, E entry tokens.

    Padded rows are padded on the right: with causal attention no real token sees padding, so no mask is needed. Tries
    lie in one row, one after the other.
    """

    # N and E differ since a call may take several places in the loss (one per entry), yet is scored once.
    calls: tuple[TrainCall, ...]
    """Calls in the order of their scored positions; a row may hold several."""
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
    rewarded: torch.Tensor
    """(E,) bool: False for tokens of distillation, in which KL term and critic have no part."""
    returns: torch.Tensor
    """(E,) the critic's targets; NaN without a critic."""
    old_values: torch.Tensor
    """(N,) the critic's values before the step; NaN where they are not known."""
    kl_weights: torch.Tensor
    """(N,) weights of the divergence from a teacher (`algo.distill_kl=exact`); 0 where there is none."""
    modules: torch.Tensor
    """(N,) int64: index of the call's module in the list that `make_packs` was given."""
    of_call: torch.Tensor
    """(N,) int64: index into `calls`."""
    tokens: int
    """Real tokens forwarded."""
    tree: PrefixTree | None = None
    """Tree of the tokens, where the row holds tries."""
    position_ids: torch.Tensor | None = None
    """(R, W) int64: depth of each token in its trie; None: its place in its row."""
    filler: bool = False
    """A copy with weights 0 that keeps processes in step; counts as forwarded tokens only."""
    old: torch.Tensor | None = field(default=None)
    """(N,) the ratio's denominator, filled in before the first update of a step that has several."""
    ref: torch.Tensor | None = field(default=None)
    """(N,) reference log-probabilities, filled in when the KL term needs them."""
    taught: tuple[Taught, ...] = ()
    """Filled in before the first update of a step, for tokens with `kl_weights` (`teaching`)."""

    @property
    def forwarded(self) -> int:
        """Tokens forwarded, padding included."""
        return self.input_ids.numel()

    @property
    def inputs(self) -> dict[str, object]:
        """Arguments of the model."""
        if self.tree is None:
            return {"input_ids": self.input_ids, "use_cache": False}
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            # transformers takes a 4D mask as given and builds none; `tree_attention` reads `tree` alone.
            "attention_mask": self.input_ids.new_zeros(1, 1, 1, 1),
            "use_cache": False,
            "tree": self.tree,
        }

    def to(self, device: torch.device) -> Pack:
        """Move the pack's tensors to `device`, in place; returns the pack."""
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device, non_blocking=True))
        return self

    def old_logprobs(self, current: torch.Tensor, recompute: bool) -> torch.Tensor:
        """Return the denominator of the ratio, (N,); `current`: the policy's own log-probabilities, detached.

        With `recompute` (`train.old_logprobs`), or where the sampler's are not known, the trainer's own before the
        step's first update stand in.
        """
        if self.old is not None:
            return self.old
        # Not filled in by `freeze_old` in a step of one update without dropout alone: it would compute `current` again.
        return current if recompute else torch.where(self.sampled.isnan(), current, self.sampled)


def share_of_process(packs: list[Pack], processes: int, rank: int) -> list[Pack]:
    """Return every `processes`-th pack from `rank` on; short processes repeat the last pack with weight 0.

    All do as many forwards that way: FSDP waits for all of them in each.
    """
    missing = -len(packs) % processes
    if missing:
        filler = replace(packs[-1], filler=True)
        filler.weights, filler.kl_weights = torch.zeros_like(filler.weights), torch.zeros_like(filler.kl_weights)
        packs = [*packs, *[filler] * missing]
    return packs[rank::processes]


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
    max_tokens: int | None = None,
    border: int | None = None,
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
        max_tokens: tokens of a pack of tries that would otherwise repeat more than it adds; None: `budget`.
        border: rows longer than this share no padded pack with shorter ones (`models.load.rope_border`).
    """
    scored_calls = [_ScoredCall.from_call(call, beta, score_all) for call in calls]
    rows = _packed_rows([call for call in scored_calls if call.scored])
    if tries:
        ids = [row.ids for row in rows]
        bins = bin_pack(build_tries(ids), budget, share, max_tokens)
        # Packs of tries have no bound on scored positions: `logprobs` computes their logits in chunks.
        return [_trie_pack(flatten(nodes, ids), rows, modules, dtype) for nodes in bins]
    packs: list[Pack] = []
    group: list[_PackedRow] = []
    for row in rows:
        positions = sum(packed.scored for packed in group) + row.scored
        # Rows come longest first, so the first one of a group is its width.
        crossed = border is not None and bool(group) and len(group[0].ids) > border >= len(row.ids)
        if crossed or (group and ((len(group) + 1) * len(group[0].ids) > budget or positions > MAX_SCORED)):
            packs.append(_padded_pack(group, modules, dtype))
            group = []
        group.append(row)
    return [*packs, _padded_pack(group, modules, dtype)] if group else packs


@dataclass(frozen=True, slots=True)
class _ScoredCall:
    """Call with its active entries and the indices of its completion tokens that are scored."""

    train: TrainCall
    entries: tuple[tuple[tuple[int, ...], int], ...]
    """(completion tokens, entry number) of each active entry."""
    scored: tuple[int, ...]
    """Indices into the completion, rising."""

    @classmethod
    def from_call(cls, train: TrainCall, beta: float, score_all: bool) -> _ScoredCall:
        # Tokens of weight 0 add nothing to the loss: they are not scored, and what follows the last scored one is not
        # forwarded (`ids`).
        entries = tuple(
            (tuple(t for t, weight in enumerate(entry.weights) if weight != 0), number)
            for number, entry in enumerate(train.entries)
            if active(entry, beta) and not (entry.distilled and train.kl_weights)
        )
        # Scored once, however many entries a token has: its log-probability is the same in all of them.
        needed = {t for tokens, _ in entries for t in tokens}
        count = len(train.call.completion_ids)
        return cls(train, entries, tuple(range(count) if score_all or train.kl_weights else sorted(needed)))

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens to forward: nothing follows the last scored one, and that one is only predicted."""
        call = self.train.call
        return (call.prompt_ids + call.completion_ids)[: len(call.prompt_ids) + self.scored[-1]]


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """Tokens that are forwarded once, and every call that is a prefix of them."""

    ids: tuple[int, ...]
    calls: tuple[_ScoredCall, ...]

    @property
    def scored(self) -> int:
        """Scored positions."""
        return sum(len(call.scored) for call in self.calls)


def _packed_rows(calls: Sequence[_ScoredCall]) -> list[_PackedRow]:
    """Make a row per call that is no prefix of another, longest first; ties in the order of the calls.

    With causal attention a prefix has the same hidden states in any row that begins with it, so equal calls (converged
    rollouts) and a turn that later turns go on from cost nothing of their own.
    """
    ids = [call.ids for call in calls]
    order = sorted(range(len(calls)), key=lambda i: (ids[i], i))
    hosts: dict[int, list[int]] = {}
    host = -1
    for i in reversed(order):
        # In lexicographic order a prefix of any sequence is a prefix of the one that comes next.
        if host < 0 or ids[host][: len(ids[i])] != ids[i]:
            host = i
        hosts.setdefault(host, []).append(i)
    # A total order over rows, by length and then by their first call's place: one batch has one split into packs, and
    # its floating-point sums run in one order, so that a loss is equal to the bit when it is computed again.
    ranked = sorted(hosts.items(), key=lambda item: (-len(ids[item[0]]), min(item[1])))
    return [_PackedRow(ids[host], tuple(calls[i] for i in sorted(members))) for host, members in ranked]


def _trie_pack(layout: TrieLayout, rows: Sequence[_PackedRow], modules: Sequence[str], dtype: torch.dtype) -> Pack:
    placed = [
        (rows[row], [i for span in path for i in range(span.begin, span.end)]) for row, path in layout.paths.items()
    ]
    pack = _pack(placed, torch.tensor([layout.ids]), modules, dtype)  # ids: (1, packed tokens)
    pack.tree = PrefixTree(layout.spans, tuple(sorted(set(pack.positions.tolist()))))
    pack.position_ids = torch.tensor([layout.depths])  # (1, packed tokens)
    # Not the sum over rows: shared tokens count once.
    pack.tokens = len(layout.ids)
    return pack


def _padded_pack(rows: Sequence[_PackedRow], modules: Sequence[str], dtype: torch.dtype) -> Pack:
    # (rows, width), padded on the right with id 0; nobody scores or attends to what lies behind a row's end.
    width = max(len(row.ids) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.ids)] = torch.tensor(row.ids)
    placed = [(row, range(number * width, (number + 1) * width)) for number, row in enumerate(rows)]
    return _pack(placed, input_ids, modules, dtype)


def _pack(
    rows: Sequence[tuple[_PackedRow, Sequence[int]]],
    input_ids: torch.Tensor,
    modules: Sequence[str],
    dtype: torch.dtype,
) -> Pack:
    """Return the pack of rows and, for each, where in the flattened `input_ids` its tokens lie."""
    placed = [(scored_call, where) for row, where in rows for scored_call in row.calls]
    # One flat list per tensor: calls in row order, within a call its scored tokens in order, its entries one by one.
    # Offset of each call's first scored position in the pack's N.
    offsets = [0]
    for scored_call, _ in placed:
        offsets.append(offsets[-1] + len(scored_call.scored))

    def per_position(values: Sequence[Sequence[float]], kind: torch.dtype = dtype) -> torch.Tensor:
        """Make (N,) or (E,) from one sequence per call or per entry, in pack order."""
        return torch.tensor([value for part in values for value in part], dtype=kind)

    entries = [
        (scored_call.train.entries[number], tokens, {t: offset + i for i, t in enumerate(scored_call.scored)})
        for (scored_call, _), offset in zip(placed, offsets, strict=False)
        for tokens, number in scored_call.entries
    ]
    calls = [(scored_call.train.call, scored_call.scored) for scored_call, _ in placed]
    return Pack(
        calls=tuple(scored_call.train for scored_call, _ in placed),
        input_ids=input_ids,
        # The token at index P + t is predicted at index P + t - 1.
        positions=per_position(
            [
                [where[len(scored_call.train.call.prompt_ids) - 1 + t] for t in scored_call.scored]
                for scored_call, where in placed
            ],
            torch.int64,
        ),
        targets=per_position([[call.completion_ids[t] for t in scored] for call, scored in calls], torch.int64),
        sampled=per_position([_values_at(call.logprobs, scored) for call, scored in calls]),
        known_ref=per_position([_values_at(call.ref_logprobs, scored) for call, scored in calls]),
        old_values=per_position([_values_at(call.values, scored) for call, scored in calls]),
        kl_weights=per_position(
            [_values_at(c.train.kl_weights or [0.0] * len(c.train.call.completion_ids), c.scored) for c, _ in placed]
        ),
        modules=per_position([[modules.index(call.module)] * len(scored) for call, scored in calls], torch.int64),
        of_call=per_position([[number] * len(scored) for number, (_, scored) in enumerate(calls)], torch.int64),
        entry_index=per_position([[index[t] for t in tokens] for _, tokens, index in entries], torch.int64),
        advantages=per_position([_values_at(entry.advantages, tokens) for entry, tokens, _ in entries]),
        weights=per_position([_values_at(entry.weights, tokens) for entry, tokens, _ in entries]),
        rewarded=per_position([[not entry.distilled] * len(tokens) for entry, tokens, _ in entries], torch.bool),
        returns=per_position([_values_at(entry.returns, tokens) for entry, tokens, _ in entries]),
        tokens=sum(len(row.ids) for row, _ in rows),
    )


def _values_at(values: Sequence[float] | None, tokens: Sequence[int]) -> list[float]:
    """Return the values of the tokens; NaN, which no loss can pass over unseen, where there are none."""
    return [float("nan") if values is None else values[t] for t in tokens]
