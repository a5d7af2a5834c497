"""Windows, caps and sinks on packed tries: the attention against one written-out softmax, and families against padding.

A window is counted along a token's path, so the reference has the distance of depths, not of places in the pack.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mmrl.models.attending import AttentionCall
from mmrl.trainer import logprobs, tree_attention, tree_kernels
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.selfcheck import check_tries
from mmrl.trainer.tree_attention import PrefixTree, flex
from tests.helpers.trainer_cases import LORA, SIZES, assert_close, gradients, make_trainer, sampled
from tests.trainer.test_tree_attention import Layer, mask, tree_of
from tests.trainer.test_tries import sequences
from tests.trainer.test_tries_update import forests, shared_calls

HEADS, GROUPS = 2, 2


def made_call(tree: PrefixTree, window: int | None, cap: float | None, sinks: bool, wide: int = 8) -> AttentionCall:
    """The call of a layer, with random float64 inputs that take gradients; `wide`: size of values."""
    torch.manual_seed(tree.tokens)
    sizes = [(HEADS * GROUPS, 8), (HEADS, 8), (HEADS, wide)]
    query, key, value = (
        torch.randn(1, tree.tokens, *size, dtype=torch.float64).transpose(1, 2).requires_grad_() for size in sizes
    )
    sink = torch.randn(HEADS * GROUPS, dtype=torch.float64).requires_grad_() if sinks else None
    return AttentionCall(Layer(0), query, key, value, 0.6, window, cap, sink)


def written_out(call: AttentionCall, tree: PrefixTree) -> torch.Tensor:
    """(1, N, heads, D): every pair of tokens, those that do not see each other masked."""
    depths = tree.depths(torch.device("cpu"))
    seen = mask(tree)
    if call.window is not None:
        seen = seen & (depths[:, None] - depths[None] < call.window)
    key, value = (part.repeat_interleave(GROUPS, 1) for part in (call.key, call.value))
    scores = call.query @ key.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks[None, :, None, None].expand(1, -1, tree.tokens, 1)
        return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def assert_same(call: AttentionCall, tree: PrefixTree, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Results and gradients of all inputs are equal."""
    inputs = [part for part in (call.query, call.key, call.value, call.sinks) if part is not None]
    grad = torch.randn_like(expected)
    if tree.read is not None:
        keep = torch.zeros(1, tree.tokens, 1, 1, dtype=torch.bool)
        keep[:, list(tree.read)] = True
        grad, expected = grad * keep, expected * keep
    assert torch.allclose(found, expected, atol=1e-11)
    pairs = zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for one, two in pairs:
        assert torch.allclose(one, two, atol=1e-10)


@settings(max_examples=150)
@given(
    sequences(),
    st.one_of(st.none(), st.integers(1, 30)),
    st.one_of(st.none(), st.just(1.5)),
    st.booleans(),
    st.sampled_from([8, 5]),
    st.sampled_from([256, 1, 5, 3]),
    st.data(),
)
def test_every_layer_equals_one_written_out_softmax(
    rows: list[tuple[int, ...]], window: int | None, cap: float | None, sinks: bool, wide: int, piece: int, data: Any
) -> None:
    tree = tree_of([(*[7] * 12, *row) for row in rows] + [(8, *row) for row in rows])
    call = made_call(tree, window, cap, sinks, wide)
    if data.draw(st.booleans()):
        tree.read = tuple(sorted(data.draw(st.sets(st.integers(0, tree.tokens - 1), min_size=1))))
        call.module.layer_idx = 2  # the last one
    with patch.multiple(tree_attention, PIECE=piece, LARGE=piece), patch.object(tree_kernels, "BLOCK", 7):
        assert_same(call, tree, tree.attend(call), written_out(call, tree))


@pytest.mark.parametrize("window", [40, 300, 700, 2000])
def test_long_tries_cross_pieces_and_windows(window: int) -> None:
    tree = tree_of([(*[7] * 700, branch, *[branch] * (100 + 90 * branch)) for branch in range(4)])
    call = made_call(tree, window, None, sinks=True)
    assert_same(call, tree, tree.attend(call), written_out(call, tree))


@given(sequences(), st.integers(1, 30), st.integers(1, 6), st.booleans(), st.data())
def test_calls_in_a_window_cover_each_pair_once(
    rows: list[tuple[int, ...]], window: int, piece: int, only_read: bool, data: st.DataObject
) -> None:
    tree = tree_of([(*[7] * 12, *row) for row in rows])
    tree.read = tuple(sorted(data.draw(st.sets(st.integers(0, tree.tokens - 1)))))
    queried = list(tree.read) if only_read else list(range(tree.tokens))
    depths = tree.depths(torch.device("cpu"))
    seen = torch.zeros(len(queried), tree.tokens, dtype=torch.long)
    with patch.object(tree_attention, "PIECE", piece):
        for queries, keys, causal, _, part in tree.calls_in_window(window, only_read):
            pairs = torch.ones_like(seen[queries, keys]) if part is None else part.long()
            assert pairs.any(-1).all(), "a query that sees none of a part's keys"
            seen[queries, keys] += pairs.tril() if causal else pairs
    expected = mask(tree) & (depths[:, None] - depths[None] < window)
    assert torch.equal(seen, expected.long()[queried])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [None, 1, 20, 170])
@pytest.mark.parametrize(("cap", "sinks"), [(None, False), (1.5, False), (None, True)])
def test_flex_attention_has_windows_caps_and_sinks(window: int | None, cap: float | None, sinks: bool) -> None:
    """The GPU path, over several of its blocks of 128 tokens."""
    tree = tree_of([(*[7] * 150, branch, *[branch] * (10 + branch)) for branch in range(3)] + [(9,) * 20])
    call = made_call(tree, window, cap, sinks)
    for part in (call.query, call.key, call.value):
        part.requires_grad_(False)  # it has no backward pass on a CPU
    assert torch.allclose(flex(call, tree, window).transpose(1, 2), written_out(call, tree), atol=1e-6)


WINDOW = 6
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, Callable[[int], Any]] = {
    "gemma2": lambda w: Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES | MIXED, head_dim=8, sliding_window=w, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
        )
    ),
    "gemma3": lambda w: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES | MIXED, head_dim=8, sliding_window=w)),
    "mistral": lambda w: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=w)),
    "ministral": lambda w: MinistralForCausalLM(MinistralConfig(**SIZES | MIXED, head_dim=8, sliding_window=w)),
    "olmo3": lambda w: Olmo3ForCausalLM(Olmo3Config(**SIZES | MIXED, sliding_window=w, pad_token_id=0)),
    "cohere2": lambda w: Cohere2ForCausalLM(
        Cohere2Config(**SIZES | MIXED, sliding_window=w, logit_scale=0.5, bos_token_id=1, eos_token_id=1)
    ),
    "qwen3": lambda w: Qwen3ForCausalLM(
        Qwen3Config(**SIZES | MIXED, head_dim=8, use_sliding_window=True, sliding_window=w)
    ),
    "gpt_oss": lambda w: GptOssForCausalLM(
        GptOssConfig(
            **SIZES | MIXED,
            head_dim=8,
            sliding_window=w,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ),
}


def family(name: str, window: int) -> Any:
    torch.manual_seed(3)
    made = FAMILIES[name](window)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.dim() == 1:  # norms, biases and sinks that are not as they begin
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "norm" not in parameter_name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    if not made._supports_sdpa or name == "gemma2":
        made.set_attn_implementation("eager")
    return made.eval()


def both(trainer: Any, calls: list[TrainCall]) -> tuple[list[Any], list[Any]]:
    """Log-probabilities, loss and gradients by padded rows and by tries."""
    found = []
    for tries in (False, True):
        trainer.forwards.tries = tries
        found.append([trainer.forwards.policy_logprobs(sampled(calls)), *gradients(trainer, calls, 10**6)])
    return found[0], found[1]


@pytest.mark.parametrize("window", [3, WINDOW, 25, 500])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_log_probabilities_and_gradients_are_those_of_padded_rows(
    name: str, window: int, tmp_path: Path
) -> None:
    """Windows shorter than a branch, than the prefix, and longer than everything; prompts of 30 tokens are shared."""
    trainer = make_trainer(tmp_path, family(name, window), packing="trie")
    padded, packed = both(trainer, shared_calls())
    for one, two in zip(packed[0], padded[0], strict=True):
        assert one == pytest.approx(two, abs=2e-5)
    assert packed[1] == pytest.approx(padded[1], abs=1e-5)
    assert_close(packed[2], padded[2], 2e-4)


@pytest.fixture(scope="module", params=["gemma2", "olmo3"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(tmp_path_factory.mktemp("windows"), family(request.param, WINDOW), packing="trie")


@settings(max_examples=15)
@given(forests())
def test_any_calls_give_the_numbers_of_padded_rows(windowed: Any, calls: list[TrainCall]) -> None:
    padded, packed = both(windowed, calls)
    for one, two in zip(packed[0], padded[0], strict=True):
        assert one == pytest.approx(two, abs=1e-4)
    assert packed[1] == pytest.approx(padded[1], abs=1e-4)
    assert_close(packed[2], padded[2], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral", "gpt_oss"])
def test_the_self_check_agrees(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert check_tries(make_trainer(tmp_path, family(name, WINDOW).to(dtype)).forwards, shared_calls())


def test_an_adapter_and_layers_that_are_computed_again(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, family("gemma2", WINDOW), packing="trie", lora=LORA, checkpointing=True)
    padded, packed = both(trainer, shared_calls())
    assert packed[1] == pytest.approx(padded[1], abs=1e-5)
    assert_close(packed[2], padded[2], 2e-4)


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "olmo3"])
def test_what_follows_the_head_is_computed_in_chunks_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap and a scale of the logits, under chunks of seven positions that the backward pass computes again."""
    monkeypatch.setattr(logprobs, "CHUNK", 40 * 7)
    padded, packed = both(make_trainer(tmp_path, family(name, WINDOW), packing="trie"), shared_calls())
    assert packed[1] == pytest.approx(padded[1], abs=1e-5)
    assert_close(packed[2], padded[2], 2e-4)
