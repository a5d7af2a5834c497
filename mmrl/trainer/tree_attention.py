"""Attention of packed prefix tries: every token sees the tokens on its path from the root, each key read once.

Part of `trainer`. The tokens of a pack lie in depth-first order, so what is below a node follows it without a gap, and
one causal call per node, with the queries of the node and of all below it against the keys of the node alone, covers
every (query, key) pair of the trie exactly once: nothing is masked away, and no key is copied. Large nodes are cut into
pieces, to the same effect. A token that sees several pieces gets several partial results, which are joined by their
log-sum-exp; the backward pass gives every part the joined result (as ring attention does), so it is exact as well.
In the last layer only tokens whose hidden state somebody reads are queries.

`IMPLEMENTATION` is registered with transformers; without a pack's `tree` in the call it is plain SDPA, so a model that
is set to it generates and evaluates as before.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmrl.trainer.tries import Span

IMPLEMENTATION = "mmrl_tree"
"""Name of the attention function in transformers' registry."""

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Rotary positions, softmax attention over the whole context, and logits that are the output head's alone."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose angles depend on the position alone."""


LARGE, PIECE = 384, 256
"""On the CPU, a node that this many tokens see is attended to in pieces of at most so many keys: the kernels cut the
queries of a large call into blocks of 256 and compute a causal block whole, so smaller calls waste less."""


Parts = Callable[[], Iterator[tuple[slice, slice, bool, bool]]]
"""See `Tree.parts`."""


@dataclass(slots=True)
class Tree:
    """The nodes of one pack, for the attention."""

    spans: tuple[Span, ...]
    read: tuple[int, ...] | None = None
    """Tokens whose last hidden state is read, in rising order; None: all. Of others it is not computed on the CPU."""
    masks: dict[Any, Any] = field(default_factory=dict)
    """Block masks by device, made once per pack."""

    @property
    def tokens(self) -> int:
        """Length of the pack."""
        return max((span.stop for span in self.spans), default=0)

    def parts(self) -> Iterator[tuple[slice, slice, bool, bool]]:
        """Calls of a kernel that cover each (query, key) pair once: queries, keys, whether causal, and whether no call
        before had these queries."""
        for span in self.spans:
            if span.stop - span.begin < LARGE:
                yield slice(span.begin, span.stop), slice(span.begin, span.end), True, not span.depth
                continue
            count = -(-(span.end - span.begin) // PIECE)
            cuts = [span.begin + (span.end - span.begin) * number // count for number in range(count + 1)]
            for begin, end in itertools.pairwise(cuts):
                first = not span.depth and begin == span.begin
                yield slice(begin, end), slice(begin, end), True, first
                if end < span.stop:
                    yield slice(end, span.stop), slice(begin, end), False, first

    def parts_read(self) -> Iterator[tuple[slice, slice, bool, bool]]:
        """The same for the pairs whose query is in `read`; queries are slices of `read`."""
        read = self.read or ()
        for span in self.spans:
            stop = bisect_left(read, span.stop)
            for begin, end, own in _runs(read, span):
                at, below = bisect_left(read, begin), bisect_left(read, end)
                first = not span.depth and begin == span.begin
                whole = own and stop - at < LARGE
                if own:
                    yield slice(at, stop if whole else below), slice(begin, end), True, first
                if not whole and below < stop:
                    yield slice(below, stop), slice(begin, end), False, first

    def stops(self, device: torch.device) -> torch.Tensor:
        """(N,) where the part of the trie that sees a token ends: token k is seen by k..stops[k]."""
        sizes = torch.tensor([span.end - span.begin for span in self.spans])
        return torch.tensor([span.stop for span in self.spans]).repeat_interleave(sizes).to(device)

    def mask(self, device: torch.device) -> torch.Tensor:
        """(N, N) bool: whether the row's token sees the column's."""
        at = torch.arange(self.tokens, device=device)
        return (at[None] <= at[:, None]) & (at[:, None] < self.stops(device)[None])


def _runs(read: Sequence[int], span: Span) -> Iterator[tuple[int, int, bool]]:
    """The tokens of a node in runs, (begin, end, whether they are in `read`); of those that are, a piece at most."""
    at, begin = bisect_left(read, span.begin), span.begin
    while begin < span.end:
        following = read[at] if at < len(read) else span.end
        if following > begin:
            yield begin, min(following, span.end), False
            begin = following
            continue
        size = 1
        while size < PIECE and at + size < len(read) and read[at + size] == begin + size < span.end:
            size += 1
        yield begin, begin + size, True
        at, begin = at + size, begin + size


def why_not(model: Any) -> str | None:
    """Why the layers of this causal LM (wrapped by peft or not) cannot share prefixes, or None."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    name, config = type(causal).__name__, causal.config
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    layer_types = getattr(config, "layer_types", None)
    if any(kind != "full_attention" for kind in layer_types or ()):
        return "some of its layers do not attend to the whole context"
    if layer_types is None and getattr(config, "sliding_window", None) is not None:
        return "its attention is limited to a sliding window"
    if config.rope_parameters.get("rope_type") not in STATIC_ROPE:
        return f"its position encoding '{config.rope_parameters.get('rope_type')}' depends on the length"
    if getattr(config, "attention_dropout", 0.0):
        return "its attention has dropout"
    if config._attn_implementation not in ("sdpa", IMPLEMENTATION):
        return f"its attention is '{config._attn_implementation}', not sdpa"
    return None


def last_parts(model: Any) -> tuple[torch.nn.Module, ...]:
    """What the last layer of a causal LM of one of the `FAMILIES` needs for the tokens alone whose result is read."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    layer = causal.model.layers[-1]
    return layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp


def prepare(model: Any) -> None:
    """Set a causal LM to the attention that knows packs; for everybody else it is still SDPA."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    causal.set_attn_implementation(IMPLEMENTATION)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: (1, heads, N, D) queries to (1, N, heads, D); keys may have fewer heads."""
    if tree is None:
        made: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return made
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast, norms and rotary angles may have left queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cpu":
        last = tree.read is not None and module.layer_idx == module.config.num_hidden_layers - 1
        if not last:
            return TreeAttention.apply(query, key, value, tree.parts, scale), None
        read = torch.tensor(tree.read)
        rows = TreeAttention.apply(query[:, :, read], key, value, tree.parts_read, scale)
        return rows.new_zeros(1, key.shape[2], *rows.shape[2:]).index_copy(1, read, rows), None
    return flex(query, key, value, tree, scale).transpose(1, 2), None


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree, scale: float) -> torch.Tensor:
    """The same by one masked call over the whole pack, (1, heads, N, D): slow and simple, for comparison."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=tree.mask(query.device), scale=scale, enable_gqa=True
    )


@functools.cache
def _flex_kernel(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic: a fixed shape would be compiled anew for every pack.
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree, scale: float) -> torch.Tensor:
    """The same by FlexAttention, (1, heads, N, D): the path on a GPU, whose kernels align a causal mask otherwise."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = query.device
    if device not in tree.masks:
        stops = tree.stops(device)

        def sees(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q) & (q < stops[k])

        tree.masks[device] = create_block_mask(sees, None, None, tree.tokens, tree.tokens, device=str(device))
    kernel = _flex_kernel(device.type == "cuda")
    grouped = query.shape[1] != key.shape[1]
    made: torch.Tensor = kernel(query, key, value, block_mask=tree.masks[device], scale=scale, enable_gqa=grouped)
    return made


class TreeAttention(torch.autograd.Function):
    """The CPU path, on PyTorch's own flash kernels for CPUs.

    They align a causal mask at the upper left: query i sees keys 0..i, so queries beyond the last key see all of them,
    which is what tokens below a node do.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: Parts, scale: float
    ) -> torch.Tensor:
        """(1, heads, Q, D) to (1, Q, heads, D); keys and values are (1, heads, N, D)."""
        size, heads, width = query.shape[2], query.shape[1], value.shape[-1]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        joined = value.new_empty(1, size, heads, width)
        out = joined.transpose(1, 2)
        lse = torch.empty(1, size, heads, dtype=torch.promote_types(value.dtype, torch.float32)).transpose(1, 2)
        for queries, keys, causal, first in parts():
            part, part_lse = kernel(query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale)
            if first:
                out[:, :, queries] = part
                lse[:, :, queries] = part_lse
            else:
                _join(out[:, :, queries], lse[:, :, queries], part, part_lse)
        ctx.save_for_backward(query, key, value, joined, lse)
        ctx.parts, ctx.scale = parts, scale
        return joined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Sums over the calls of the forward pass, each with the joined result."""
        query, key, value, joined, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        out, grad = joined.transpose(1, 2), grad.transpose(1, 2)
        for_query = torch.empty_like(query)
        for_key, for_value = torch.zeros_like(key), torch.zeros_like(value)
        for queries, keys, causal, first in ctx.parts():
            gradients = kernel(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            if first:
                for_query[:, :, queries] = gradients[0]
            else:
                for_query[:, :, queries] += gradients[0]
            for_key[:, :, keys].add_(gradients[1])
            for_value[:, :, keys].add_(gradients[2])
        return for_query, for_key, for_value, None, None


def _join(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Softmax over the union of two sets of keys, in place, from the softmax over each and its log-sum-exp."""
    share = torch.sigmoid(part_lse - lse)
    out.lerp_(part, share.unsqueeze(-1).to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))
