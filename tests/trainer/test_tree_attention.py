from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
)

from mmrl.errors import ConfigError
from mmrl.models.attending import IMPLEMENTATION, AttentionCall, attention, install
from mmrl.models.prepare import keep_still, switch_noise_off
from mmrl.trainer import tree_attention
from mmrl.trainer.choice import choose_packing
from mmrl.trainer.logprobs import score
from mmrl.trainer.packing import make_packs
from mmrl.trainer.tree_attention import PrefixTree, flex, unsupported_reason
from mmrl.trainer.tree_kernels import TreeAttention
from mmrl.trainer.tries import build_tries, flatten
from scripts.models.architectures import architectures
from scripts.models.architectures import tiny_model as architecture
from tests.helpers.trainer_cases import make_calls, tiny_model
from tests.trainer.test_tries import sequences


def tree_of(rows: list[tuple[int, ...]]) -> PrefixTree:
    return PrefixTree(flatten(build_tries(rows), rows).spans)


def inputs(tokens: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    many = [heads * groups, heads, heads]
    return [torch.randn(1, tokens, count, 8, dtype=dtype).transpose(1, 2).requires_grad_() for count in many]


def mask(tree: PrefixTree) -> torch.Tensor:
    """(N, N) bool: whether the row's token sees the column's."""
    at = torch.arange(tree.tokens)
    return (at[None] <= at[:, None]) & (at[:, None] < tree.stops(torch.device("cpu"))[None])


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PrefixTree, scale: float) -> torch.Tensor:
    """The attention of a pack by one masked call, (1, heads, N, D)."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask(tree), scale=scale, enable_gqa=True
    )


@given(sequences(), st.integers(1, 3), st.integers(1, 3), st.sampled_from([(384, 256), (0, 1), (0, 5), (14, 3)]))
def test_equals_one_masked_call(rows: list[tuple[int, ...]], heads: int, groups: int, cut: tuple[int, int]) -> None:
    # Repeated beginnings, so that there is something to share.
    tree = tree_of([(*[7] * 12, *row) for row in rows] + [(8, *row) for row in rows])
    with patch.multiple(tree_attention, LARGE=cut[0], PIECE=cut[1]):
        _equals_one_masked_call(tree, heads, groups)


def _equals_one_masked_call(tree: PrefixTree, heads: int, groups: int) -> None:
    query, key, value = inputs(tree.tokens, heads, groups)
    expected = masked(query, key, value, tree, 0.3).transpose(1, 2)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    found = TreeAttention.apply(query, key, value, tree.kernel_calls, 0.3)
    assert torch.allclose(found, expected, atol=1e-12)
    for one, two in zip(torch.autograd.grad(found, (query, key, value), grad), expected_grads, strict=True):
        assert torch.allclose(one, two, atol=1e-11)


def test_a_long_trie_crosses_the_kernels_blocks() -> None:
    rows = [(*[7] * 700, branch, *[branch] * (100 + 90 * branch)) for branch in range(4)]
    _equals_one_masked_call(tree_of(rows), 1, 2)


@given(sequences(), st.integers(0, 20), st.integers(1, 6), st.data())
def test_calls_of_the_kernel_cover_each_pair_once(
    rows: list[tuple[int, ...]], large: int, piece: int, data: st.DataObject
) -> None:
    tree = tree_of([(*[7] * 12, *row) for row in rows])
    tree.read = tuple(sorted(data.draw(st.sets(st.integers(0, tree.tokens - 1)))))
    for calls, queried in ((tree.kernel_calls, tuple(range(tree.tokens))), (tree.kernel_calls_read, tree.read)):
        seen = torch.zeros(len(queried), tree.tokens, dtype=torch.long)
        met = torch.zeros(len(queried), dtype=torch.bool)
        with patch.multiple(tree_attention, LARGE=large, PIECE=piece):
            for queries, keys, causal, first, _ in calls():
                assert bool(met[queries].any()) != first and (first or bool(met[queries].all()))
                met[queries] = True
                pairs = torch.ones_like(seen[queries, keys])
                assert pairs.numel()
                seen[queries, keys] += pairs.tril() if causal else pairs
        assert torch.equal(seen, mask(tree).long()[list(queried)])


Module: Any = torch.nn.Module


class Layer(Module):
    """What attention is told of the layer that calls it."""

    def __init__(self, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.config = LlamaConfig(num_hidden_layers=3)


@given(sequences(), st.sampled_from([(384, 256), (0, 2), (9, 3)]), st.data())
def test_the_last_layer_attends_for_tokens_that_are_read(
    rows: list[tuple[int, ...]], cut: tuple[int, int], data: st.DataObject
) -> None:
    tree = tree_of([(*[7] * 12, *row) for row in rows] + [(8, *row) for row in rows])
    tree.read = tuple(sorted(data.draw(st.sets(st.integers(0, tree.tokens - 1), min_size=1))))
    query, key, value = inputs(tree.tokens, 2, 2)
    expected = masked(query, key, value, tree, 0.3).transpose(1, 2)
    read = torch.zeros(1, tree.tokens, 1, 1, dtype=torch.bool)
    read[:, list(tree.read)] = True
    grad = torch.randn_like(expected) * read
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    with patch.multiple(tree_attention, LARGE=cut[0], PIECE=cut[1]):
        whole, _ = attention(Layer(1), query, key, value, None, scaling=0.3, tree=tree)
        found, _ = attention(Layer(2), query, key, value, None, scaling=0.3, tree=tree)
        grads = torch.autograd.grad(found, (query, key, value), grad)
    assert torch.allclose(whole, expected, atol=1e-12)
    assert torch.allclose(found, expected * read, atol=1e-12)
    for one, two in zip(grads, expected_grads, strict=True):
        assert torch.allclose(one, two, atol=1e-11)


def test_joins_of_very_different_sizes_stay_finite() -> None:
    rows = [(*[7] * 40, branch, *[branch] * 30) for branch in range(3)]
    tree = tree_of(rows)
    query, key, value = inputs(tree.tokens, 2, 1, torch.float32)
    with torch.no_grad():
        key[:, :, :40] *= 60
    found = TreeAttention.apply(query, key, value, tree.kernel_calls, 1.0)
    assert torch.allclose(found, masked(query, key, value, tree, 1.0).transpose(1, 2), atol=1e-4)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention compiled as on a GPU, by the C++ kernel of PyTorch's compiler, which has a forward pass alone."""
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    # Per test anew: compiled for a second length, torch 2.13 writes C++ that g++ refuses (`cur_qSplitSize`).
    torch.compiler.reset()
    kernel = tree_attention._flex_kernel.__wrapped__(True)
    if sys.version_info < (3, 12):  # setuptools, which inductor imports, refuses a distutils that is loaded already
        monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")
    monkeypatch.setattr(tree_attention, "_flex_kernel", lambda on_cuda: kernel)
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kernel", [pytest.param("compiled", marks=pytest.mark.slow), "plain"])  # a minute of g++
def test_flex_attention_sees_the_same_pairs(kernel: str, request: pytest.FixtureRequest) -> None:
    """The GPU path's mask, over several of its blocks of 128 tokens."""
    if kernel == "compiled":
        request.getfixturevalue("compiled")
    tree = tree_of([(*[7] * 150, branch, *[branch] * (10 + branch)) for branch in range(3)] + [(9,) * 20])
    query, key, value = (tensor.detach().float() for tensor in inputs(tree.tokens, 2, 2))
    call = AttentionCall(Layer(0), query, key, value, 0.3, window=None, softcap=None, sinks=None)
    with torch.no_grad():
        assert torch.allclose(flex(call, tree, None), masked(query, key, value, tree, 0.3), atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_a_pack_by_compiled_flex_attention_has_the_padded_log_probabilities() -> None:
    """The GPU's forward of a whole model, on a CPU."""

    def logprobs(tries: bool) -> dict[str, torch.Tensor]:
        found = {}
        for pack in make_packs(
            make_calls(), 10**6, beta=0.0, modules=["a", "b"], dtype=torch.float32, score_all=True, tries=tries
        ):
            scored = score(policy, policy.get_output_embeddings(), pack, 1.0).logprobs
            found |= {train.call.id: scored[pack.of_call == number] for number, train in enumerate(pack.calls)}
        return found

    policy = tiny_model()
    with torch.no_grad():
        padded = logprobs(False)
        install(policy)
        with patch.object(PrefixTree, "attend", lambda tree, call: flex(call, tree, None).transpose(1, 2)):
            packed = logprobs(True)
    assert padded.keys() == packed.keys() and padded
    for name, expected in padded.items():
        assert torch.allclose(packed[name], expected, atol=1e-5)


def test_without_a_tree_it_is_sdpa() -> None:
    plain, prepared = tiny_model(), tiny_model()
    install(prepared)
    assert prepared.config._attn_implementation == IMPLEMENTATION
    ids = torch.randint(2, 40, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for kwargs in ({}, {"attention_mask": mask}):
        assert torch.equal(plain(ids, **kwargs).logits, prepared(ids, **kwargs).logits)
    assert IMPLEMENTATION not in prepared.config.to_json_string()


def test_mixed_types_under_autocast_are_joined() -> None:
    tree = tree_of([(7,) * 9])
    query, key, value = inputs(9, 1, 1, torch.float32)
    out, _ = attention(Layer(0), query, key, value.bfloat16(), None, scaling=0.3, tree=tree)
    assert out.dtype == torch.bfloat16


def make_model(kind: str) -> Any:
    if kind in architectures():
        return architecture(kind)
    model = tiny_model("llama")
    if kind == "eager":
        model.set_attn_implementation("eager")
    if kind == "dropout":
        model.config.attention_dropout = 0.1
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bloom", "BloomForCausalLM has layers that mix tokens otherwise than by one attention each"),
        ("jamba", "JambaForCausalLM has layers that mix tokens otherwise"),
        ("hrm_text", "HrmTextForCausalLM has layers that mix tokens otherwise"),  # the same layers, several times
        ("llama4_text", "its tokens do not see all tokens before them, or all of a window"),
        ("bert", "its tokens do not see all tokens before them"),
        ("moshi", "MoshiForCausalLM does not tell its attention what it is called with"),
        ("inkling_text", "its attention has position_bias"),
        ("deepseek_v32", "its attention has indices"),
        ("llama, dynamic rope", "its position encoding 'dynamic' depends on the length"),
        ("phi3, longrope", "its position encoding 'longrope' depends on the length"),
        ("eager", "its attention is 'eager'"),
        ("dropout", "its attention has dropout"),
    ],
)
def test_models_whose_layers_cannot_share_are_known(kind: str, reason: str) -> None:
    made = make_model(kind)
    before = made.config._attn_implementation
    if kind in architectures() and type(made)._supports_sdpa:
        made.set_attn_implementation(before := "sdpa")
    assert reason in (unsupported_reason(made) or "")
    assert made.config._attn_implementation == before


def test_the_usual_families_can_share() -> None:
    assert unsupported_reason(tiny_model("llama")) is unsupported_reason(tiny_model("qwen3")) is None


@pytest.mark.parametrize("kind", ["zaya", "falcon_h1"])
def test_what_attention_does_not_show_is_tried(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A convolution and a state beside an attention that is plain."""
    made = architecture(kind)
    switch_noise_off(made.config)
    keep_still(made)
    made.set_attn_implementation("sdpa")
    assert unsupported_reason(made) is None
    assert not choose_packing("auto", made)
    assert "train.packing=auto: rows are padded (slower), since" in caplog.text
    with pytest.raises(ConfigError, match=r"train\.packing: got 'trie', which this model cannot do: "):
        choose_packing("trie", made)
