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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmrl.models.load import HYBRIDS, causal_lm, unknown_layers
from mmrl.trainer import tree_states
from mmrl.trainer.tries import NodeSpan

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedConfig, PreTrainedModel

    from mmrl.trainer.tree_states import TreeStates

IMPLEMENTATION = "mmrl_tree"
"""Name of the attention function in transformers' registry."""

LARGE, PIECE = 384, 256
"""On the CPU, a node that this many tokens see is attended to in pieces of at most so many keys: the kernels cut the
queries of a large call into blocks of 256 and compute a causal block whole, so smaller calls waste less."""


class KernelCall(NamedTuple):
    """Call of an attention kernel, (queries, D) against (keys, D) in each head."""

    queries: slice
    keys: slice
    causal: bool
    """Query i sees keys 0..i of this call; else all of them."""
    first: bool
    """No call before had these queries, so its result is written, not joined."""


KernelCalls = Callable[[], Iterator[KernelCall]]
"""See `PrefixTree.kernel_calls`; called once in the forward pass and once in the backward pass."""


@dataclass(slots=True)
class PrefixTree:
    """The nodes of one pack, for the attention. N is the number of packed tokens."""

    spans: tuple[NodeSpan, ...]
    read: tuple[int, ...] | None = None
    """Tokens whose last hidden state is read, in rising order; None: all. Of others it is not computed on the CPU."""
    masks: dict[torch.device, BlockMask] = field(default_factory=dict)
    """Block masks by device, made once per pack: every layer uses the same one."""
    states: dict[torch.device, TreeStates] = field(default_factory=dict)
    """Likewise what recurrent layers use."""

    @property
    def tokens(self) -> int:
        """Length of the pack."""
        return max((span.stop for span in self.spans), default=0)

    def kernel_calls(self) -> Iterator[KernelCall]:
        """Yield calls that cover each (query, key) pair of the tries once.

        The order is that of the packed tokens, always: partial results are joined in floating point, so another order
        would change the last bits of the loss.
        """
        for span in self.spans:
            # A root (depth 0) is the first node that its tokens and all below it attend to.
            if span.stop - span.begin < LARGE:
                yield KernelCall(slice(span.begin, span.stop), slice(span.begin, span.end), True, not span.depth)
                continue
            count = -(-(span.end - span.begin) // PIECE)
            cuts = [span.begin + (span.end - span.begin) * number // count for number in range(count + 1)]
            for begin, end in itertools.pairwise(cuts):
                first = not span.depth and begin == span.begin
                # The triangle of the piece, then the rectangle of everything after it that sees the whole piece.
                yield KernelCall(slice(begin, end), slice(begin, end), True, first)
                if end < span.stop:
                    yield KernelCall(slice(end, span.stop), slice(begin, end), False, first)

    def kernel_calls_read(self) -> Iterator[KernelCall]:
        """Yield the calls for the pairs whose query is in `read`; queries are slices of `read`."""
        read = self.read or ()
        for span in self.spans:
            stop = bisect_left(read, span.stop)
            for begin, end, is_read in _runs(read, span):
                # inside..below: queries inside the run; below..stop: queries after it, which see all its keys. The
                # causal mask pairs query i with key i, hence runs of which either every token is read or none.
                inside, below = bisect_left(read, begin), bisect_left(read, end)
                first = not span.depth and begin == span.begin
                joined = is_read and stop - inside < LARGE
                if is_read:
                    yield KernelCall(slice(inside, stop if joined else below), slice(begin, end), True, first)
                if not joined and below < stop:
                    yield KernelCall(slice(below, stop), slice(begin, end), False, first)

    def stops(self, device: torch.device) -> torch.Tensor:
        """Return (N,) int64, where the part of the trie that sees a token ends: token k is seen by k..stops[k]."""
        sizes = torch.tensor([span.end - span.begin for span in self.spans])
        return torch.tensor([span.stop for span in self.spans]).repeat_interleave(sizes).to(device)


def _runs(read: Sequence[int], span: NodeSpan) -> Iterator[tuple[int, int, bool]]:
    """Cut a node's tokens into runs (begin, end, whether in `read`); those in `read` have at most a piece's length."""
    index, begin = bisect_left(read, span.begin), span.begin
    while begin < span.end:
        following = read[index] if index < len(read) else span.end
        if following > begin:
            yield begin, min(following, span.end), False
            begin = following
            continue
        size = 1
        while size < PIECE and index + size < len(read) and read[index + size] == begin + size < span.end:
            size += 1
        yield begin, begin + size, True
        index, begin = index + size, begin + size


def unsupported_reason(model: PreTrainedModel | PeftModel) -> str | None:
    """Return the reason why the layers of this causal LM (wrapped by peft or not) cannot share prefixes, or None."""
    # `selfcheck` is the second line, behind the list of known families.
    causal = causal_lm(model)
    config = causal.config
    if (reason := unknown_layers(causal, HYBRIDS)) is not None:
        return reason
    if getattr(config, "attention_dropout", 0.0):
        return "its attention has dropout"
    if config._attn_implementation not in ("sdpa", IMPLEMENTATION):
        return f"its attention is '{config._attn_implementation}', not sdpa"
    return None


def last_parts(model: PreTrainedModel | PeftModel) -> tuple[torch.nn.Module, ...]:
    """Return the parts of a known causal LM's last layer (`unknown_layers`) that only tokens in `read` need."""
    # Keys and values of the last layer are needed for every token; queries, output projection and MLP only where
    # somebody reads the result. In a prompt-heavy pack that is a small part of the tokens.
    layer = causal_lm(model).model.layers[-1]
    if not hasattr(layer, "self_attn"):  # a recurrent layer
        return (layer.mlp,)
    return layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp


def install(model: PreTrainedModel | PeftModel) -> None:
    """Set a causal LM to the attention that knows packs; without a pack it is still SDPA."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    causal_lm(model).set_attn_implementation(IMPLEMENTATION)
    tree_states.install(causal_lm(model))


class AttentionModule(Protocol):
    """The attributes of a layer's attention module that are read."""

    layer_idx: int
    config: PreTrainedConfig


def attention(
    module: AttentionModule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: PrefixTree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention: (1, heads, N, D) queries to (1, N, heads, D); keys may have fewer heads."""
    if tree is None:
        output: torch.Tensor
        output, _ = sdpa_attention_forward(
            cast("torch.nn.Module", module),
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return output, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast, norms and rotary angles may have left queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cpu":
        # Only in the last layer: the layers before hand every token's state on to the keys of the next one.
        last = tree.read is not None and module.layer_idx == module.config.num_hidden_layers - 1
        if not last:
            return TreeAttention.apply(query, key, value, tree.kernel_calls, scale), None  # type: ignore[no-untyped-call]
        read = torch.tensor(tree.read)  # (Q,)
        # (1, Q, heads, D)
        rows = TreeAttention.apply(query[:, :, read], key, value, tree.kernel_calls_read, scale)  # type: ignore[no-untyped-call]
        # Back to N rows, the others zero: the residual stream keeps its shape, and nobody reads those rows.
        return rows.new_zeros(1, key.shape[2], *rows.shape[2:]).index_copy(1, read, rows), None
    return flex(query, key, value, tree, scale).transpose(1, 2), None


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic: a fixed shape would be compiled anew for every pack.
    kernel = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
    return cast("Callable[..., torch.Tensor]", kernel)


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PrefixTree, scale: float) -> torch.Tensor:
    """Attend by FlexAttention, (1, heads, N, D): the path on a GPU, whose kernels align a causal mask otherwise."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = query.device
    if device not in tree.masks:
        stops = tree.stops(device)

        def sees(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            # Depth-first order: the tokens below k are exactly those from k on to the end of its subtree.
            return (k <= q) & (q < stops[k])

        tree.masks[device] = create_block_mask(sees, None, None, tree.tokens, tree.tokens, device=str(device))
    kernel = _flex_kernel(device.type == "cuda")
    grouped = query.shape[1] != key.shape[1]
    # Below 128 tokens PyTorch takes its decoding kernel, which it cannot compile for shapes that change.
    options = {"FORCE_USE_FLEX_ATTENTION": True}
    mask = tree.masks[device]
    return kernel(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options)


class FunctionCtx(Protocol):
    """Autograd's context of both passes, with the attributes that the forward pass puts on it."""

    saved_tensors: tuple[torch.Tensor, ...]
    kernel_calls: KernelCalls
    scale: float

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep tensors for the backward pass."""


class TreeAttention(torch.autograd.Function):
    """The CPU path, on PyTorch's own flash kernels for CPUs.

    They align a causal mask at the upper left: query i sees keys 0..i, so queries beyond the last key see all of them,
    which is what tokens below a node do.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel_calls: KernelCalls,
        scale: float,
    ) -> torch.Tensor:
        """Attend (1, heads, Q, D) to (1, Q, heads, D); keys and values are (1, heads, N, D)."""
        size, heads, width = query.shape[2], query.shape[1], value.shape[-1]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        joined = value.new_empty(1, size, heads, width)
        out = joined.transpose(1, 2)  # (1, heads, Q, D), a view: what the kernels write is in the returned layout
        # (1, heads, Q) log-sum-exp of the scores so far, in float32 at least: in bfloat16 its rounding (1 in 256) would
        # shift the shares of the parts.
        lse = torch.empty(1, size, heads, dtype=torch.promote_types(value.dtype, torch.float32)).transpose(1, 2)
        for queries, keys, causal, first in kernel_calls():
            part, part_lse = kernel(query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale)
            if first:
                out[:, :, queries] = part
                lse[:, :, queries] = part_lse
            else:
                _join(out[:, :, queries], lse[:, :, queries], part, part_lse)
        ctx.save_for_backward(query, key, value, joined, lse)
        ctx.kernel_calls, ctx.scale = kernel_calls, scale
        return joined

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Return sums over the calls of the forward pass, each with the joined result."""
        query, key, value, joined, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        out, grad = joined.transpose(1, 2), grad.transpose(1, 2)
        for_query = torch.empty_like(query)  # (1, heads, Q, D); each row's first call writes it
        for_key, for_value = torch.zeros_like(key), torch.zeros_like(value)  # (1, kv heads, N, D)
        # The kernel's backward recomputes probabilities as exp(score - lse). Given the joined lse and output, each
        # part's are those of the full softmax, so the gradients of the parts add up (Ring Attention, arXiv 2310.01889).
        for queries, keys, causal, first in ctx.kernel_calls():
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
    """Join softmaxes over two sets of keys into that over their union, in place, by their log-sum-exps."""
    # exp(part_lse) / (exp(lse) + exp(part_lse)), without an exponential that could overflow. (1, heads, q)
    share = torch.sigmoid(part_lse - lse)
    out.lerp_(part, share.unsqueeze(-1).to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))
