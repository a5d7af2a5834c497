"""Attention over parts of the keys, and what joins the parts into one softmax, forward and backward.

Under `tree_attention`, which says which queries meet which keys. A part's result comes with the log-sum-exp of its
scores; parts are joined by these. The backward pass gives every part the joined result (as ring attention does), so it
is exact as well: whatever computes a part recomputes probabilities as exp(score - joined log-sum-exp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 1024
"""Queries whose scores exist at once where they are written out."""


class KernelCall(NamedTuple):
    """Call of an attention kernel, (queries, D) against (keys, D) in each head."""

    queries: slice
    keys: slice
    causal: bool
    """Query i sees keys 0..i of this call; else all of them."""
    first: bool
    """No call before had these queries, so its result is written, not joined."""
    mask: Tensor | None = None
    """(queries, keys) bool, whether a query sees a key; each sees one at least. None: see `causal`."""


KernelCalls = Callable[[], Iterator[KernelCall]]
"""Called once in the forward pass and once in the backward pass."""


class Kernel(Protocol):
    """Attention of (1, heads, q, D) to (1, kv heads, k, D), with what its backward pass needs."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the result, (1, heads, q, D of values), and the scores' log-sum-exp, (1, heads, q)."""

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value; `out` and `lse` are those of all parts, joined."""


class Flash:
    """PyTorch's flash kernels for CPUs.

    They align a causal mask at the upper left: query i sees keys 0..i, so queries beyond the last key see all of them,
    which is what tokens below a node do.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(query, key, value, 0.0, causal, attn_mask=_added(mask, query), scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        added = _added(mask, query)
        one, two, three = kernel(grad, query, key, value, out, lse, 0.0, causal, attn_mask=added, scale=scale)
        return one, two, three


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask as what is added to scores."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, float("-inf"))


class WrittenOut:
    """The softmax in its single steps, for what no kernel has: capped scores, values of another size than keys.

    Args:
        softcap: c: a score s becomes c · tanh(s / c); None: as it is.
    """

    def __init__(self, softcap: float | None):
        self.softcap = softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        outs, sums = [], []
        for block in _blocks(query.shape[2]):
            scores, _ = self._scores(query[:, :, block], key, _seen(block, key.shape[2], causal, mask, query), scale)
            lse = scores.logsumexp(-1)
            outs.append(_by_group(scores.sub_(lse.unsqueeze(-1)).exp_(), value))
            sums.append(lse.flatten(1, 2))
        return torch.cat(outs, 2).to(value.dtype), torch.cat(sums, 2)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        heads = key.shape[1]
        for_query, for_key, for_value = (
            [],
            torch.zeros_like(key, dtype=lse.dtype),
            torch.zeros_like(value, dtype=lse.dtype),
        )
        for block in _blocks(query.shape[2]):
            seen = _seen(block, key.shape[2], causal, mask, query)
            scores, slope = self._scores(query[:, :, block], key, seen, scale)
            share = (scores - lse[:, :, block].unflatten(1, (heads, -1)).unsqueeze(-1)).exp_()  # (1, kv heads, g, q, k)
            rows = grad[:, :, block].unflatten(1, (heads, -1)).to(lse.dtype)  # (1, kv heads, g, q, D)
            inner = (rows * out[:, :, block].unflatten(1, (heads, -1))).sum(-1, keepdim=True)
            for_value += (share.transpose(-1, -2) @ rows).sum(2)
            for_scores = share.mul_(rows @ value.unsqueeze(2).transpose(-1, -2).to(lse.dtype) - inner)
            if slope is not None:
                for_scores.mul_(slope)
            for_query.append((for_scores @ key.unsqueeze(2).to(lse.dtype) * scale).flatten(1, 2))
            own = query[:, :, block].unflatten(1, (heads, -1)).to(lse.dtype)
            for_key += (for_scores.transpose(-1, -2) @ own).sum(2) * scale
        return torch.cat(for_query, 2).to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype)

    def _scores(self, query: Tensor, key: Tensor, seen: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
        """Return scores, (1, kv heads, heads / kv heads, q, k), and their slope where they are capped."""
        exact = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(1, (key.shape[1], -1)).to(exact)
        scores = grouped @ key.unsqueeze(2).transpose(-1, -2).to(exact) * scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, 1 - bent.square()
        if seen is not None:
            scores.masked_fill_(~seen, float("-inf"))
        return scores, slope


def _blocks(queries: int) -> list[slice]:
    return [slice(begin, min(begin + BLOCK, queries)) for begin in range(0, queries, BLOCK)]


def _seen(block: slice, keys: int, causal: bool, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return (queries of the block, keys) bool; None: all are seen."""
    if mask is not None:
        return mask[block]
    if not causal:
        return None
    at = torch.arange(block.start, block.stop, device=like.device)
    return torch.arange(keys, device=like.device) <= at[:, None]


def _by_group(share: Tensor, value: Tensor) -> Tensor:
    """Multiply (1, kv heads, g, q, k) with (1, kv heads, k, D) -> (1, heads, q, D)."""
    return (share @ value.unsqueeze(2).to(share.dtype)).flatten(1, 2)


class FunctionCtx(Protocol):
    """Autograd's context of both passes, with the attributes that the forward pass puts on it."""

    saved_tensors: tuple[Tensor, ...]
    kernel_calls: KernelCalls
    kernel: Kernel
    scale: float

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for the backward pass."""


FLASH = Flash()


class TreeAttention(torch.autograd.Function):
    """Attention of a pack on the CPU, by calls of a kernel."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel_calls: KernelCalls,
        scale: float,
        kernel: Kernel = FLASH,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend (1, heads, Q, D) to (1, Q, heads, D); keys and values are (1, kv heads, N, D), sinks (heads,)."""
        size, heads, width = query.shape[2], query.shape[1], value.shape[-1]
        # Zeros: a call that is not the first joins what is there.
        joined = value.new_zeros(1, size, heads, width)
        out = joined.transpose(1, 2)  # (1, heads, Q, D), a view: what the kernels write is in the returned layout
        # (1, heads, Q) log-sum-exp of the scores so far, in float32 at least: in bfloat16 its rounding (1 in 256) would
        # shift the shares of the parts.
        lse = joined.new_full((1, size, heads), float("-inf"), dtype=torch.promote_types(value.dtype, torch.float32))
        lse = lse.transpose(1, 2)
        if sinks is not None:  # one more part of each softmax, with the value 0
            lse.copy_(sinks[None, :, None].expand_as(lse))
        for queries, keys, causal, first, mask in kernel_calls():
            part = kernel.forward(query[:, :, queries], key[:, :, keys], value[:, :, keys], causal, mask, scale)
            if first and sinks is None:
                out[:, :, queries], lse[:, :, queries] = part
            else:
                join(out[:, :, queries], lse[:, :, queries], *part)
        ctx.save_for_backward(query, key, value, joined, lse, *([] if sinks is None else [sinks]))
        ctx.kernel_calls, ctx.kernel, ctx.scale = kernel_calls, kernel, scale
        return joined

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return sums over the calls of the forward pass, each with the joined result."""
        query, key, value, joined, lse, *rest = ctx.saved_tensors
        out, grad = joined.transpose(1, 2), grad.transpose(1, 2)
        # (1, heads, Q, D); a row's first call writes it, where it is known to be the first
        for_query = torch.zeros_like(query)
        for_key, for_value = torch.zeros_like(key), torch.zeros_like(value)  # (1, kv heads, N, D)
        # Given the joined lse and output, each part's probabilities are those of the full softmax, so the gradients of
        # the parts add up (Ring Attention, arXiv 2310.01889).
        for queries, keys, causal, first, mask in ctx.kernel_calls():
            gradients = ctx.kernel.backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                causal,
                mask,
                ctx.scale,
            )
            if first:
                for_query[:, :, queries] = gradients[0]
            else:
                for_query[:, :, queries] += gradients[0]
            for_key[:, :, keys].add_(gradients[1])
            for_value[:, :, keys].add_(gradients[2])
        return for_query, for_key, for_value, None, None, None, sink_gradient(grad, out, lse, *rest) if rest else None


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join softmaxes over two sets of keys into that over their union, in place, by their log-sum-exps."""
    # exp(part_lse) / (exp(lse) + exp(part_lse)), without an exponential that could overflow. (1, heads, q)
    share = torch.sigmoid(part_lse - lse)
    out.lerp_(part, share.unsqueeze(-1).to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return (heads,) gradients of sinks, from (1, heads, Q, D) gradient and result and the joined (1, heads, Q)."""
    # A sink's value is 0, so its score's gradient is its share times (0 - result · gradient).
    share = (sinks[None, :, None] - lse).exp()
    return (-share * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
