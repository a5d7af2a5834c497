"""Attention of packed prefix tries: every token sees the tokens on its path from the root, each key read once.

Part of `trainer`. The tokens of a pack lie in depth-first order, so what is below a node follows it without a gap, and
one causal call per node, with the queries of the node and of all below it against the keys of the node alone, covers
every (query, key) pair of the trie exactly once: nothing is masked away, and no key is copied. Large nodes are cut into
pieces, to the same effect. A token that sees several pieces gets several partial results, which `tree_kernels` joins.
In the last layer only tokens whose hidden state somebody reads are queries.

A window is counted along the path, by depth: a piece's keys then meet the queries below it that are near enough, whole
runs of them without a mask, those at the window's edge with one.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from mmrl.models import attending
from mmrl.models.attending import AttentionCall, NotPlain, attended_layers
from mmrl.models.load import HYBRIDS, causal_lm, unknown_layers
from mmrl.trainer import tree_states, varlen_attention
from mmrl.trainer.tree_kernels import FLASH, Kernel, KernelCall, TreeAttention, WrittenOut
from mmrl.trainer.tries import NodeSpan

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.nn.attention.flex_attention import AuxOutput, BlockMask
    from transformers import PreTrainedModel

    from mmrl.trainer.tree_states import TreeStates

LARGE, PIECE = 256, 256
"""On the CPU, a node that this many tokens see is attended to in pieces of at most so many keys: the kernels cut the
queries of a large call into blocks of 256 and compute a causal block whole, so smaller calls waste less."""


@dataclass
class PrefixTree:
    """The nodes of one pack, for the attention. N is the number of packed tokens."""

    spans: tuple[NodeSpan, ...]
    read: tuple[int, ...] | None = None
    """Tokens whose last hidden state is read, in rising order; None: all. Of others it is not computed on the CPU."""
    varlen: bool = False
    """On a GPU, by `varlen_attention` instead of FlexAttention."""
    masks: dict[tuple[torch.device, int | None], BlockMask] = field(default_factory=dict)
    """Block masks by device and window, made once per pack: every layer of a kind uses the same one."""
    windowed: dict[tuple[int, bool], list[KernelCall]] = field(default_factory=dict)
    """Calls by window, of all tokens or of those in `read`."""
    stretches: dict[tuple[torch.device, int | None], list[varlen_attention.VarlenCall]] = field(default_factory=dict)
    """Calls of the varlen kernel by device and window."""
    states: dict[torch.device, TreeStates] = field(default_factory=dict)
    """What recurrent layers use, by device, made once per pack."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend for one layer, (1, heads, N, D) to (1, N, heads, D)."""
        query, key, value = call.query, call.key, call.value
        window = None if call.window is None or call.window >= self.longest else call.window
        if self.on_gpu(query.device):
            return self.by_stretches(call, window) if self.varlen else flex(call, self, window).transpose(1, 2)
        # Only in the last layer: the layers before hand every token's state on to the keys of the next one.
        config = call.module.config.get_text_config()
        last = self.read is not None and call.module.layer_idx == config.num_hidden_layers - 1
        calls = self.kernel_calls_read if last else self.kernel_calls
        if window is not None:
            calls = functools.partial(self.calls_in_window, window, last)
        own = call.softcap is not None or value.shape[-1] != key.shape[-1]
        kernel: Kernel = WrittenOut(call.softcap) if own else FLASH
        if not last:
            return TreeAttention.apply(query, key, value, calls, call.scale, kernel, call.sinks)  # type: ignore[no-untyped-call,no-any-return]
        read = torch.tensor(self.read)  # (Q,)
        # (1, Q, heads, D)
        rows = TreeAttention.apply(query[:, :, read], key, value, calls, call.scale, kernel, call.sinks)  # type: ignore[no-untyped-call]
        # Back to N rows, the others zero: the residual stream keeps its shape, and nobody reads those rows.
        return rows.new_zeros(1, key.shape[2], *rows.shape[2:]).index_copy(1, read, rows)  # type: ignore[no-any-return]

    def on_gpu(self, device: torch.device) -> bool:
        """Return True where the kernels are not the CPU's."""
        return device.type != "cpu"

    def by_stretches(self, call: AttentionCall, window: int | None) -> torch.Tensor:
        """Attend by the varlen kernel, (1, heads, N, D) to (1, N, heads, D)."""
        place = (call.query.device, window)
        if place not in self.stretches:
            self.stretches[place] = varlen_attention.varlen_calls(self.spans, window, call.query.device)
        return varlen_attention.attend(call, self.stretches[place], varlen_attention.TorchVarlen())

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

    def calls_in_window(self, window: int, only_read: bool) -> Iterator[KernelCall]:
        """Yield calls for the pairs that are less than `window` tokens apart on their path.

        None is the first of its queries: what a token sees first depends on its depth.
        """
        if (window, only_read) not in self.windowed:
            self.windowed[window, only_read] = [*self._calls_in_window(window, only_read)]
        return iter(self.windowed[window, only_read])

    def _calls_in_window(self, window: int, only_read: bool) -> Iterator[KernelCall]:
        depths = self.depths(torch.device("cpu"))
        queries = torch.tensor(self.read, dtype=torch.int64) if only_read else torch.arange(self.tokens)
        places = queries.tolist()
        of_query = depths[queries]
        for span in self.spans:
            count = -(-(span.end - span.begin) // PIECE)
            cuts = [span.begin + (span.end - span.begin) * number // count for number in range(count + 1)]
            stop = bisect_left(places, span.stop)
            for begin, end in itertools.pairwise(cuts):
                keys = depths[begin:end]  # they rise by one
                inside, below = bisect_left(places, begin), bisect_left(places, end)
                if inside < below:
                    plain = below - inside == end - begin <= window
                    apart = of_query[inside:below].unsqueeze(1) - keys
                    mask = None if plain else (apart >= 0) & (apart < window)
                    yield KernelCall(slice(inside, below), slice(begin, end), plain, False, mask)
                # Of what is below the piece: 2 where a query sees all of it, 1 a part, 0 nothing.
                distance = of_query[below:stop] - keys[-1]
                kinds = (distance < window).int() + (distance + (end - begin - 1) < window).int()
                values, sizes = kinds.unique_consecutive(return_counts=True)
                at = below
                for kind, size in zip(values.tolist(), sizes.tolist(), strict=True):
                    run = slice(at, at + size)
                    at += size
                    if kind:
                        near = None if kind == 2 else of_query[run].unsqueeze(1) - keys < window
                        yield KernelCall(run, slice(begin, end), False, False, near)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest path."""
        return max((span.depth + span.end - span.begin for span in self.spans), default=0)

    def depths(self, device: torch.device) -> torch.Tensor:
        """Return (N,) int64, how many tokens come before each on its path."""
        parts = [torch.arange(span.depth, span.depth + span.end - span.begin) for span in self.spans]
        return torch.cat(parts).to(device)

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
    causal = causal_lm(model)
    if type(causal).__name__ in HYBRIDS:
        reason = unknown_layers(causal, HYBRIDS)
    else:
        try:
            attended_layers(model)
            reason = None
        except NotPlain as fault:
            reason = str(fault)
    dropout = getattr(causal.config, "attention_dropout", None)
    return "its attention has dropout" if reason is None and dropout else reason


def install(model: PreTrainedModel | PeftModel) -> None:
    """Set a causal LM to the layers that know packs; without a pack they are as before."""
    attending.install(model)
    if type(causal_lm(model)).__name__ in HYBRIDS:
        tree_states.install(causal_lm(model))


def last_parts(model: PreTrainedModel | PeftModel) -> tuple[torch.nn.Module, ...]:
    """Return the parts of a causal LM's last layer that only tokens in `read` need, where they are told apart."""
    # Keys and values of the last layer are needed for every token; queries, output projection and MLP only where
    # somebody reads the result. In a prompt-heavy pack that is a small part of the tokens.
    *_, layer = getattr(causal_lm(model).base_model, "layers", [None])
    attention = getattr(layer, "self_attn", None)
    parts = [getattr(attention, "q_proj", None), getattr(attention, "o_proj", None), getattr(layer, "mlp", None)]
    return tuple(part for part in parts if isinstance(part, torch.nn.Module))


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., object]:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic: a fixed shape would be compiled anew for every pack.
    kernel = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
    return cast("Callable[..., object]", kernel)


def flex(call: AttentionCall, tree: PrefixTree, window: int | None) -> torch.Tensor:
    """Attend by FlexAttention, (1, heads, N, D): the path on a GPU, whose kernels align a causal mask otherwise."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    device = call.query.device
    if (device, window) not in tree.masks:
        stops, depths, reach = tree.stops(device), tree.depths(device), window or tree.longest

        def below(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            # Depth-first order: the tokens below k are exactly those from k on to the end of its subtree.
            return (k <= q) & (q < stops[k])

        def near(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return below(batch, head, q, k) & (depths[q] - depths[k] < reach)

        seen = below if window is None else near
        tree.masks[device, window] = create_block_mask(seen, None, None, tree.tokens, tree.tokens, device=str(device))
    cap = call.softcap

    def capped(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    found = _flex_kernel(device.type == "cuda")(
        call.query,
        call.key,
        call.value,
        score_mod=None if cap is None else capped,
        block_mask=tree.masks[device, window],
        scale=call.scale,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
        # Below 128 tokens PyTorch takes its decoding kernel, which it cannot compile for shapes that change.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        return_aux=None if call.sinks is None else AuxRequest(lse=True),
    )
    if call.sinks is None:
        return cast("torch.Tensor", found)
    out, aux = cast("tuple[torch.Tensor, AuxOutput]", found)
    assert aux.lse is not None
    # One more part of each softmax, with the value 0.
    return out * torch.sigmoid(aux.lse - call.sinks[None, :, None]).unsqueeze(-1).to(out.dtype)
