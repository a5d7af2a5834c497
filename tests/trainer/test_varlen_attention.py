"""Tries by stretches of torch's varlen attention: split, join and gradient, on a kernel that is written out.

`varlen_attn` has no CPU kernel; `scripts/gpu_check.py` runs it where there is a GPU.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

from mmrl.errors import ConfigError
from mmrl.trainer import choice, varlen_attention
from mmrl.trainer.tree_attention import PrefixTree
from mmrl.trainer.tree_kernels import WrittenOut
from mmrl.trainer.varlen_attention import TorchVarlen, VarlenCall, attend, varlen_calls
from tests.helpers.trainer_cases import assert_close, gradients, make_trainer, tiny_model
from tests.trainer.test_tree_attention import mask, tree_of
from tests.trainer.test_tree_windows import assert_same, family, made_call, written_out
from tests.trainer.test_tries import sequences
from tests.trainer.test_tries_update import shared_calls


class Stretches:
    """The kernel's signature and meaning, a stretch at a time."""

    def _each(self, call: VarlenCall) -> Any:
        ends = (itertools.pairwise(ends.tolist()) for ends in (call.query_ends, call.key_ends))
        for (begin, end), (first, last) in zip(*ends, strict=True):
            # A query is aligned with the key that is as far from the end.
            ahead = torch.arange(last - first) - (torch.arange(end - begin)[:, None] + (last - first) - (end - begin))
            left, right = (10**9 if reach < 0 else reach for reach in call.window)
            yield slice(begin, end), slice(first, last), (ahead <= right) & (-ahead <= left)

    def forward(self, query: Any, key: Any, value: Any, call: VarlenCall, scale: float) -> Any:
        assert call.longest_query == int(call.query_ends.diff().max())
        assert call.longest_key == int(call.key_ends.diff().max())
        assert call.query_ends.dtype == call.key_ends.dtype == torch.int32
        outs, sums = [], []
        for queries, keys, seen in self._each(call):
            q, k, v = (part.transpose(0, 1)[None] for part in (query[queries], key[keys], value[keys]))
            out, lse = WrittenOut(None).forward(q, k, v, False, seen, scale)
            outs.append(out[0].transpose(0, 1))
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, 1)

    def backward(self, grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, call: VarlenCall, scale: float) -> Any:  # fmt: skip  # noqa: E501
        found = [[], [], []]  # type: list[list[torch.Tensor]]
        for queries, keys, seen in self._each(call):
            taken = (grad[queries], query[queries], key[keys], value[keys], out[queries])
            g, q, k, v, o = (part.transpose(0, 1)[None] for part in taken)
            gradients = WrittenOut(None).backward(g, q, k, v, o, lse[None, :, queries], False, seen, scale)
            for several, one in zip(found, gradients, strict=True):
                several.append(one[0].transpose(0, 1))
        return tuple(torch.cat(several) for several in found)


@settings(max_examples=100)
@given(sequences(), st.one_of(st.none(), st.integers(1, 30)), st.booleans())
def test_stretches_joined_equal_one_written_out_softmax(
    rows: list[tuple[int, ...]], window: int | None, sinks: bool
) -> None:
    tree = tree_of([(*[7] * 12, *row) for row in rows] + [(8, *row) for row in rows])
    call = made_call(tree, window, None, sinks)
    calls = varlen_calls(tree.spans, window, torch.device("cpu"))
    assert_same(call, tree, attend(call, calls, Stretches()), written_out(call, tree))


@given(sequences())
def test_a_pack_has_a_call_and_one_for_each_level_of_forks(rows: list[tuple[int, ...]]) -> None:
    tree = tree_of([(*[7] * 12, *row) for row in rows])
    calls = varlen_calls(tree.spans, None, torch.device("cpu"))
    depths = [sum(other.begin <= span.begin < other.stop for other in tree.spans) for span in tree.spans]
    assert len(calls) == max(depths)
    seen = torch.zeros(tree.tokens, tree.tokens, dtype=torch.long)
    everything = torch.arange(tree.tokens)
    for call in calls:
        for queries, keys, part in Stretches()._each(call):
            at = [everything[one] if places is None else places[one] for places, one in ((call.queries, queries), (call.keys, keys))]  # fmt: skip  # noqa: E501
            seen[at[0][:, None], at[1]] += part.long()
    assert torch.equal(seen, mask(tree).long())


def test_torchs_kernel_is_called_as_it_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments by its own signatures; what it computes is for a GPU to show."""
    tree = tree_of([(7,) * 6 + (1, 2), (7,) * 6 + (3,)])
    call = made_call(tree, None, None, sinks=False)
    asked: list[inspect.BoundArguments] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        asked.append(inspect.signature(original).bind(*args, **kwargs))
        given = asked[-1].arguments
        assert given["return_aux"].lse and given["enable_gqa"]
        stretch = VarlenCall._make([None, None, *args[3:7], kwargs["window_size"]])
        query, key, value = args[:3]
        return Stretches().forward(query, key, value, stretch, kwargs["scale"])

    def backward(*args: Any) -> Any:
        assert len(args) == len(names)
        given = dict(zip(names, args, strict=True))
        assert given["is_causal"] == (given["window_size"] == [-1, 0])
        window = tuple(given["window_size"])
        stretch = VarlenCall._make(
            [None, None, *(given[n] for n in ("cu_seq_q", "cu_seq_k", "max_q", "max_k")), window]
        )
        g, q, k, v, out, lse = (given[name] for name in ("grad_out", "query", "key", "value", "out", "lse"))
        return Stretches().backward(g, q, k, v, out, lse, stretch, given["scale"])

    original = varlen.varlen_attn
    names = [argument.name for argument in torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments]
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    calls = varlen_calls(tree.spans, None, torch.device("cpu"))
    assert_same(call, tree, attend(call, calls, TorchVarlen()), written_out(call, tree))
    assert len(asked) == 2


@pytest.mark.parametrize(("kind", "reason"), [("qwen3", "is for CUDA"), ("bloom", "BloomForCausalLM has layers")])
def test_it_is_refused_where_it_cannot_run(kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.packing: got 'trie_varlen', .*{reason}"):
        make_trainer(tmp_path, tiny_model(kind), packing="trie_varlen")


def test_a_whole_update_by_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the kernel."""
    found = []
    for packing in ("padded", "trie_varlen"):
        monkeypatch.setattr(choice, "_varlen_fault", lambda model: None)
        monkeypatch.setattr(PrefixTree, "on_gpu", lambda tree, device: True)
        monkeypatch.setattr(varlen_attention, "TorchVarlen", Stretches)
        trainer = make_trainer(tmp_path / packing, family("mistral", 6), packing=packing)
        found.append(gradients(trainer, shared_calls(), 10**6)[1])
    assert_close(found[1], found[0], 2e-4)
