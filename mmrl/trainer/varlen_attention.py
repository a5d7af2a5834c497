"""Attention of packed tries by torch's varlen kernels, on a GPU: `train.packing=trie_varlen`, without FlexAttention.

Part of `trainer`. One call has the causal squares of all nodes; one for each level of forks has, of the nodes on it,
everything below a node against the node's keys. With a window one call is enough: each node's tokens against the last
of their path. Parts are joined by their log-sum-exps, and the backward pass gives every part the joined result
(`tree_kernels`): varlen_attn's own passes over the gradient of a log-sum-exp, so its autograd would be wrong here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from mmrl.trainer.tree_kernels import join, sink_gradient
from mmrl.trainer.tries import NodeSpan

if TYPE_CHECKING:
    from mmrl.models.attending import AttentionCall

ALL, CAUSAL = (-1, -1), (-1, 0)
"""Windows that hide nothing, and what comes after a query."""


class VarlenCall(NamedTuple):
    """Call of a kernel: S stretches of queries, each against its own stretch of keys, whose ends are aligned."""

    queries: Tensor | None
    """(q,) int64, packed tokens; None: all of them."""
    keys: Tensor | None
    """(k,) int64; None: all packed tokens."""
    query_ends: Tensor
    """(S + 1,) int32, from 0."""
    key_ends: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]
    """Keys that a query sees before and after the one it is aligned with; -1: all."""


class VarlenKernel(Protocol):
    """Attention of (q, heads, D) to (k, kv heads, D) by stretches."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the result, (q, heads, D), and the log-sum-exp, (heads, q)."""

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: VarlenCall,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value; `out` and `lse` are the joined ones."""


class TorchVarlen:
    """torch.nn.attention.varlen, on CUDA alone, in 16 bits."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel`."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        found = varlen_attn(
            query,
            key,
            value,
            call.query_ends,
            call.key_ends,
            call.longest_query,
            call.longest_key,
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=call.window,
            enable_gqa=True,
        )
        return cast("tuple[Tensor, Tensor]", found)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: VarlenCall,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel`."""
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of a dropout that there is not
        found = torch.ops.torch_attn._varlen_attn_backward(
            grad,
            query,
            key,
            value,
            out,
            lse,
            call.query_ends,
            call.key_ends,
            call.longest_query,
            call.longest_key,
            call.window == CAUSAL,
            unused,
            scale,
            list(call.window),
        )
        return cast("tuple[Tensor, Tensor, Tensor]", found)


def varlen_calls(spans: Sequence[NodeSpan], window: int | None, device: torch.device) -> list[VarlenCall]:
    """Return calls that cover each (query, key) pair of a pack once."""
    # A node and its ancestors, from the root; spans are in depth-first order.
    paths: list[tuple[NodeSpan, ...]] = []
    for span in spans:
        above = paths[-1] if paths else ()
        paths.append((*(node for node in above if node.stop > span.begin), span))
    own = [range(span.begin, span.end) for span in spans]
    if window is not None:
        keys = [_last(path, window - 1) for path in paths]
        return [_call(own, keys, (window - 1, 0), device)._replace(queries=None)]
    calls = [_call(own, own, CAUSAL, device)._replace(queries=None, keys=None)]
    for level in range(1, max(map(len, paths), default=0)):
        nodes = [path[-1] for path in paths if len(path) == level and path[-1].end < path[-1].stop]
        below = [range(node.end, node.stop) for node in nodes]
        calls.append(_call(below, [range(node.begin, node.end) for node in nodes], ALL, device))
    return calls


def _last(path: Sequence[NodeSpan], count: int) -> list[int]:
    """Return the tokens of a path's last node, and at most `count` of those before it."""
    *above, node = path
    before: list[int] = []
    for span in reversed(above):
        before[:0] = range(max(span.begin, span.end - (count - len(before))), span.end)
    return [*before, *range(node.begin, node.end)]


def _call(
    queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], window: tuple[int, int], device: torch.device
) -> VarlenCall:
    def ends(stretches: Sequence[Sequence[int]]) -> Tensor:
        sums = [0, *itertools.accumulate(map(len, stretches))]
        return torch.tensor(sums, dtype=torch.int32, device=device)

    def places(stretches: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([*itertools.chain.from_iterable(stretches)], device=device)

    longest = (max(map(len, queries)), max(map(len, keys)))
    return VarlenCall(places(queries), places(keys), ends(queries), ends(keys), *longest, window)


def attend(call: AttentionCall, calls: Sequence[VarlenCall], kernel: VarlenKernel) -> Tensor:
    """Attend (1, heads, N, D) to (1, N, heads, D)."""
    query, key, value = (part[0].transpose(0, 1) for part in (call.query, call.key, call.value))  # (N, heads, D)
    return VarlenAttention.apply(query, key, value, calls, call.scale, kernel, call.sinks)[None]  # type: ignore[no-untyped-call,no-any-return]


class FunctionCtx(Protocol):
    """Autograd's context of both passes, with the attributes that the forward pass puts on it."""

    saved_tensors: tuple[Tensor, ...]
    calls: Sequence[VarlenCall]
    kernel: VarlenKernel
    scale: float

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for the backward pass."""


class VarlenAttention(torch.autograd.Function):
    """Attention of a pack by calls of a varlen kernel."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: Sequence[VarlenCall],
        scale: float,
        kernel: VarlenKernel,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend (N, heads, D) to (N, heads, D); keys and values have (N, kv heads, D), sinks (heads,)."""
        exact = torch.promote_types(value.dtype, torch.float32)
        out = query.new_zeros(query.shape, dtype=exact).transpose(0, 1)[None]  # (1, heads, N, D)
        lse = out.new_full(out.shape[:3], float("-inf"))
        if sinks is not None:  # one more part of each softmax, with the value 0
            lse.copy_(sinks[None, :, None].expand_as(lse))
        for call in calls:
            part, part_lse = kernel.forward(
                _at(query, call.queries), _at(key, call.keys), _at(value, call.keys), call, scale
            )
            part, part_lse = part.transpose(0, 1)[None].to(exact), part_lse[None].to(exact)
            if call.queries is None:
                join(out, lse, part, part_lse)
                continue
            rows, sums = out[:, :, call.queries], lse[:, :, call.queries]
            join(rows, sums, part, part_lse)
            out[:, :, call.queries], lse[:, :, call.queries] = rows, sums
        joined = out[0].transpose(0, 1).to(value.dtype).contiguous()
        ctx.save_for_backward(query, key, value, joined, lse[0], *([] if sinks is None else [sinks]))
        ctx.calls, ctx.kernel, ctx.scale = calls, kernel, scale
        return joined

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return sums over the calls of the forward pass, each with the joined result."""
        query, key, value, out, lse, *sinks = ctx.saved_tensors
        # In float32 at least: a key of a long prompt gets a part from every level.
        found = [torch.zeros_like(part, dtype=lse.dtype) for part in (query, key, value)]
        for call in ctx.calls:
            sums = lse if call.queries is None else lse[:, call.queries].contiguous()
            rows, q, result = (_at(part, call.queries) for part in (grad, query, out))
            k, v = _at(key, call.keys), _at(value, call.keys)
            parts = ctx.kernel.backward(rows, q, k, v, result, sums, call, ctx.scale)
            for total, places, part in zip(found, (call.queries, call.keys, call.keys), parts, strict=True):
                if places is None:
                    total += part
                else:
                    total.index_add_(0, places, part.to(total.dtype))
        for_sinks = None
        if sinks:
            rows, result = (part.to(lse.dtype).transpose(0, 1)[None] for part in (grad, out))
            for_sinks = sink_gradient(rows, result, lse[None], sinks[0])
        inputs = [total.to(part.dtype) for total, part in zip(found, (query, key, value), strict=True)]
        return *inputs, None, None, None, for_sinks


def _at(part: Tensor, places: Tensor | None) -> Tensor:
    return part.contiguous() if places is None else part[places]
