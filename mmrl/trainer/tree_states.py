"""Recurrent layers of packed prefix tries: every node starts from the state in which its parent ends.

Part of `trainer`, beside `tree_attention`. A gated delta net (Qwen 3.5, Qwen3-Next, OLMo Hybrid) mixes tokens in two
places, a short causal convolution and the delta rule over a state. Both are functions of transformers' modelling files,
to which the layers hand on the pack's `tree`. With one, these very functions are called on other rows: in front of
each node stand the last tokens of its path, for the convolution; nodes are batched level by level, each with its
parent's final state, for the delta rule. Autograd adds up what children say of their parent's state. So whatever
kernel stands behind the functions is used, and without a tree they are what they were.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from mmrl.trainer.tries import NodeSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmrl.trainer.tree_attention import PrefixTree

CHUNK = 64
"""Tokens that the delta rule takes at once; what is shorter it takes as one chunk of the next power of two."""


@dataclass(frozen=True, slots=True)
class NodeBatch:
    """Nodes that are forwarded together, padded on the right: B of one level, with at most L tokens each."""

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    """Node above each; none of roots."""
    tokens: torch.Tensor
    """(B, L) int64: place of each token in the pack; its length where a node has no more."""
    chunk: int
    ends: bool
    """Nothing follows any of them, so nobody needs their final states."""


class TreeStates:
    """Order in which the nodes of one pack of N tokens run through recurrent layers; the same in all of them."""

    def __init__(self, spans: Sequence[NodeSpan], device: torch.device):
        self.spans, self.device = spans, device
        self.length = spans[-1].end
        self.parents: list[int | None] = []
        path: list[int] = []
        # Only what takes equally many chunks shares a batch: padding then costs no chunk that a node alone would not.
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for number, span in enumerate(spans):
            while path and spans[path[-1]].stop <= span.begin:
                path.pop()
            self.parents.append(path[-1] if path else None)
            size = span.end - span.begin
            chunk = min(CHUNK, 1 << (size - 1).bit_length())
            shapes.setdefault((len(path), chunk, -(-size // chunk)), []).append(number)
            path.append(number)
        self.batches = [self._batch(shapes[shape], shape[1]) for shape in sorted(shapes)]
        self.places = torch.cat([batch.tokens.flatten() for batch in self.batches]).argsort()[: self.length]
        """(N,) int64: where each token of the pack stands in the batches, one after the other, padding included."""
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _batch(self, nodes: Sequence[int], chunk: int) -> NodeBatch:
        spans = [self.spans[number] for number in nodes]
        longest = max(span.end - span.begin for span in spans)
        rows = [[*range(s.begin, s.end), *[self.length] * (longest - s.end + s.begin)] for s in spans]
        parents = [parent for number in nodes if (parent := self.parents[number]) is not None]
        ends = all(span.stop == span.end for span in spans)
        return NodeBatch(tuple(nodes), tuple(parents), torch.tensor(rows, device=self.device), chunk, ends)

    def windows(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a convolution over `width` tokens, made once.

        Returns:
            (M,) the nodes' tokens, before each node the `width` - 1 that come before it on its path (N for none), and
            (N,) where in these the tokens themselves stand.
        """
        if width not in self._windows:
            rows: list[int] = []
            places: list[int] = []
            tails: list[list[int]] = []
            for span, parent in zip(self.spans, self.parents, strict=True):
                before = [self.length] * (width - 1) if parent is None else tails[parent]
                window = [*before, *range(span.begin, span.end)]
                places += range(len(rows) + len(before), len(rows) + len(window))
                rows += window
                tails.append(window[len(window) - (width - 1) :])
            self._windows[width] = torch.tensor(rows, device=self.device), torch.tensor(places, device=self.device)
        return self._windows[width]


def _states(tree: PrefixTree, device: torch.device) -> TreeStates:
    if device not in tree.states:
        tree.states[device] = TreeStates(tree.spans, device)
    return tree.states[device]


def _convolve(
    original: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *args: Any,
    tree: PrefixTree | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Convolve (1, C, N) with (C, width) weights along each path."""
    if tree is None:
        return original(hidden, weight, *args, **kwargs)
    rows, places = _states(tree, hidden.device).windows(weight.shape[-1])
    # One zero more: what a root's first tokens see before them. `index_select`, since x[rows] has a slow backward pass.
    before = F.pad(hidden, (0, 1)).index_select(-1, rows)
    return original(before, weight, *args, **kwargs).index_select(-1, places)


def _delta_rule(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    tree: PrefixTree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule along each path: (1, N, heads, D) queries, keys, values; (1, N, heads) g, beta."""
    if tree is None:
        return original(query, key, value, g=g, beta=beta, **kwargs)
    plan = _states(tree, query.device)
    # A token of zeros stands for padding: without decay (g) and update (beta) it leaves the state as it is.
    padded = [F.pad(x[0], (*(0, 0) * (x.ndim - 2), 0, 1)) for x in (query, key, value, g, beta)]
    states: dict[int, torch.Tensor] = {}
    results: list[torch.Tensor] = []
    for batch in plan.batches:
        initial = torch.stack([states[parent] for parent in batch.parents]) if batch.parents else None
        shape = batch.tokens.shape
        queries, keys, values, decays, rates = (
            x.index_select(0, batch.tokens.flatten()).unflatten(0, shape) for x in padded
        )
        kwargs |= {"initial_state": initial, "output_final_state": not batch.ends, "chunk_size": batch.chunk}
        result, final = original(queries, keys, values, g=decays, beta=rates, **kwargs)
        if final is not None:
            states |= zip(batch.nodes, final, strict=True)
        results.append(result.flatten(0, 1))
    return torch.cat(results).index_select(0, plan.places)[None], None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
"""Functions of modelling files, by name, and what stands for them."""


def install(causal: PreTrainedModel) -> None:
    """Let the recurrent layers of a causal LM know packs; without a pack they are as before."""
    files = {type(layer.linear_attn).__module__ for layer in causal.model.layers if hasattr(layer, "linear_attn")}
    for file in files:
        for function, known in FUNCTIONS.items():
            original = getattr(sys.modules[file], function)
            if not isinstance(original, functools.partial):
                setattr(sys.modules[file], function, functools.partial(known, original))
