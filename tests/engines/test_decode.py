"""The own decode loop against the model's own forward, by architecture; its choice, its self-check, its rows."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mmrl.config import ModelConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup, Request, Sampling
from mmrl.engines.embedded import shared_prefix
from mmrl.engines.embedded.batch_rows import BatchRow
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.errors import ConfigError
from tests.helpers.engines import VOCABULARY, generate, model, request, tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def randomised(policy: Any) -> Any:
    """Norms and biases start as ones and zeros: make them count."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return policy.eval()


def adapted(policy: Any, *targets: str, **settings: Any) -> Any:
    return get_peft_model(policy, LoraConfig(r=4, target_modules=list(targets), **settings))


ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
BIASED: dict[str, Any] = {**SMALL, "attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama3-bias": lambda: LlamaForCausalLM(LlamaConfig(**BIASED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None, head_dim=8)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: model(tie_word_embeddings=False),
    "one-layer": lambda: model(num_hidden_layers=1, num_key_value_heads=4),
    "lora": lambda: adapted(model(), "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", lora_alpha=6),
    "lora-bfloat16": lambda: adapted(model(scale=0.1).to(torch.bfloat16), "k_proj", "up_proj", "down_proj"),
}


def build(name: str) -> Any:
    torch.manual_seed(1)
    return randomised(MODELS[name]())


def row(prompt: Sequence[int]) -> BatchRow:
    asked = Request(prompt_ids=tuple(prompt), sampling=Sampling(max_tokens=99))
    return BatchRow(request=asked, limit=99, uniforms=np.zeros(99))


def plain(policy: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return policy(torch.tensor([list(ids)])).logits[0, -1].float()


def assert_logits_of(
    policy: torch.nn.Module, rows: Sequence[Sequence[int]], found: Any, tolerance: float = 1e-4
) -> None:
    """Logits after rows are those of the model's own forward of each."""
    for ids, logits in zip(rows, found, strict=True):
        torch.testing.assert_close(logits, plain(policy, ids), atol=tolerance, rtol=tolerance)


def own_loop(policy: torch.nn.Module) -> Any:
    served = TransformersEngine(policy, tokenizer(), TransformersConfig(loop="own"), EngineSetup(threads=1))
    return served.decoder.loops[""]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lora-bfloat16"])
def test_logits_equal_the_models_forward(name: str) -> None:
    policy = build(name)
    own = own_loop(policy)
    assert isinstance(own, NativeLoop)
    dice = random.Random(0)
    rows = [[dice.randrange(VOCABULARY) for _ in range(n)] for n in (1, 40, 7, 90, 7, 33)]
    rows.insert(3, list(rows[1]))
    with torch.no_grad():
        own.start()
        made = own.prefill([row(prompt) for prompt in rows])
        for _ in range(70):  # past a growth of the cache
            for ids, logits in zip(rows, made, strict=True):
                ids.append(int(logits.argmax()))
            made = own.step([ids[-1] for ids in rows])
    assert_logits_of(policy, rows, made, 2e-4)


def test_half_precision_lora_is_applied_beside_the_weights() -> None:
    policy = build("lora-bfloat16")
    own = NativeLoop(policy)
    with torch.no_grad():
        own.start()
        first = own.prefill([row(range(5, 30))])
        second = own.step([7])
    exact = build("lora-bfloat16").float()
    for logits, ids in ((first[0], [*range(5, 30)]), (second[0], [*range(5, 30), 7])):
        ours = (logits.float().log_softmax(-1) - plain(exact, ids).log_softmax(-1)).abs().max()
        theirs = (plain(policy, ids).log_softmax(-1) - plain(exact, ids).log_softmax(-1)).abs().max()
        assert ours < 2 * theirs + 0.02


def come_and_go(
    dice: random.Random,
    draw: Callable[[], list[list[int]]],
    policy: Any = None,
    forks: bool = False,
    loop: Callable[[Any], Any] = NativeLoop,
) -> None:
    """Any sequence of joining, leaving and decoding leaves each row with the logits it has alone.

    Args:
        draw: prompts of rows that join together, each a list of its own.
        forks: rows that join may also go on from what a row holds by then.
    """
    policy = model(seed=3) if policy is None else policy
    own = loop(policy)
    rows: list[list[int]] = []
    last: list[torch.Tensor] = []
    with torch.no_grad():
        own.start()
        for _ in range(dice.randint(3, 8)):
            if not rows or dice.random() < 0.5:
                new = draw()
                new += [[*ids, dice.randrange(VOCABULARY)] for ids in dice.sample(rows, min(len(rows), 2)) if forks]
                dice.shuffle(new)
                last += list(own.prefill([row(prompt) for prompt in new]))
                rows += new
            if len(rows) > 1 and dice.random() < 0.6:
                indices = sorted(dice.sample(range(len(rows)), dice.randint(1, len(rows))))
                order = own.keep(indices)
                assert sorted(order) == indices
                rows, last = [rows[i] for i in order], [last[i] for i in order]
            for _ in range(dice.randint(0, 3)):
                tokens = [dice.randrange(VOCABULARY) for _ in rows]
                for ids, token in zip(rows, tokens, strict=True):
                    ids.append(token)
                last = list(own.step(tokens))
    assert_logits_of(policy, rows, last)


@settings(max_examples=65, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_rows_that_come_and_go_have_the_logits_that_they_have_alone(seed: int, together: bool) -> None:
    """Whatever they share (a header, a whole prompt, nothing), also where they read it together."""
    dice = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        if together:
            patch.setattr(shared_prefix, "LEAST_TOKENS", 8)
            patch.setattr(shared_prefix, "LEAST_BYTES", {"cpu": 1})
        come_and_go(dice, headed(dice))


def headed(dice: random.Random) -> Callable[[], list[list[int]]]:
    """Draws prompts that share headers, end within one, or are the same."""
    headers = [[dice.randrange(VOCABULARY) for _ in range(dice.randint(20, 60))] for _ in range(2)]

    def draw() -> list[list[int]]:
        # a prompt may be a header itself, or end within it
        tails = [[dice.randrange(VOCABULARY) for _ in range(dice.randint(0, 12))] for _ in range(3)]
        new = [[*dice.choice(headers), *tail][: dice.choice((None, 18))] for tail in tails]
        return new + [list(new[0]) for _ in range(dice.randint(0, 3))]

    return draw


def test_a_pass_wider_than_the_rows_that_it_begins() -> None:
    """Eight rows read 600 tokens that they hold together, so the cache has room for the 480 of one other row alone."""
    dice = random.Random(0)
    policy = model(max_position_embeddings=1024)
    together, alone = ([dice.randrange(VOCABULARY) for _ in range(n)] for n in (600, 480))
    own = NativeLoop(policy)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(shared_prefix, "LEAST_BYTES", {"cpu": 200_000})
        own.start()
        logits = own.prefill([*(row(together) for _ in range(8)), row(alone)])
    assert_logits_of(policy, [*[together] * 8, alone], logits, 2e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([1, 100_000]))
def test_trees_of_long_prompts_have_the_logits_of_the_models_forward(seed: int, adapter: bool, least: int) -> None:
    """Shared prefixes of up to 1,200 tokens, ragged ends, rows that join later and go on from others."""
    dice = random.Random(seed)
    policy = model(max_position_embeddings=2048, seed=3)
    if adapter:
        policy = randomised(adapted(policy, "q_proj", "v_proj", "up_proj"))
    trunk = [dice.randrange(VOCABULARY) for _ in range(1200)]

    def draw() -> list[list[int]]:
        new = []
        for _ in range(dice.randint(1, 3)):
            shared = dice.choice((0, 64, 480, 600, 1199, 1200))
            tail = [dice.randrange(VOCABULARY) for _ in range(dice.choice((1, 7, 130, 480)))]
            new += [[*trunk[:shared], *tail] for _ in range(dice.choice((1, 1, 8)))]
        return new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "LEAST_BYTES", {"cpu": least})
        come_and_go(dice, draw, policy, forks=True)


@pytest.mark.parametrize("count", [1, 8])
def test_a_long_prefix_of_many_rows_is_held_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", {"cpu": 200_000})  # this model: 128 bytes a token and layer
    policy = model(max_position_embeddings=1024)
    own = NativeLoop(policy)
    header = [2 + i % 90 for i in range(600)]
    prompts = [[*header, 5, i] for i in range(count)] + [[7] * 40]
    with torch.no_grad():
        own.start()
        own.prefill([row(prompt) for prompt in prompts])
        logits = own.step([3] * len(prompts))
    assert bool(own._groups) == (count == 8)
    assert (own._cache[0].shape[3] < 200) == (count == 8)
    assert_logits_of(policy, [[*ids, 3] for ids in prompts], logits)


def test_places_of_rows_that_have_left_go_where_the_others_grow() -> None:
    policy = model(max_position_embeddings=1024)
    own = NativeLoop(policy)
    prompts = [[2 + i, 3, 4] for i in range(40)]
    long = [2 + i % 90 for i in range(300)]
    with torch.no_grad():
        own.start()
        own.prefill([row(prompt) for prompt in prompts])
        own.keep([7, 30])
        own.prefill([row(long)])
        logits = own.step([3] * 3)
    assert own._cache[0].shape[1] == 3
    assert_logits_of(policy, [[*ids, 3] for ids in (prompts[7], prompts[30], long)], logits)


def forwarded(own: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the segments that are forwarded from now on."""
    seen: list[int] = []
    forward = own._forward_segments

    def counting(segments: Any, *rest: Any) -> torch.Tensor:
        seen.extend(len(segment.ids) - segment.start for segment in segments)
        return forward(segments, *rest)

    monkeypatch.setattr(own, "_forward_segments", counting)
    return seen


def test_equal_prompts_and_a_shared_header_are_forwarded_once_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = model()
    own = NativeLoop(policy)
    seen = forwarded(own, monkeypatch)
    header = [2 + i % 90 for i in range(100)]
    with torch.no_grad():
        own.start()
        own.prefill([row([*header, 7, i]) for i in (0, 1, 2, 3, 3)])
        assert sorted(seen) == [1, 1, 1, 1, 101]
        logits = own.prefill([row([*header, 9, 9, 9])])[0]
        assert sum(seen) == 105 + 3
    torch.testing.assert_close(logits, plain(policy, [*header, 9, 9, 9]), atol=1e-4, rtol=1e-4)


def test_a_later_turn_goes_on_from_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = model()
    later_turns(policy, NativeLoop(policy), monkeypatch)


def later_turns(policy: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn but the first two forwards what is new alone."""
    seen = forwarded(own, monkeypatch)
    dice = random.Random(0)
    ids = [dice.randrange(VOCABULARY) for _ in range(70)]
    with torch.no_grad():
        own.start()
        for turn in range(4):
            one = row(ids)
            seen.clear()
            logits = own.prefill([one])[0]
            torch.testing.assert_close(logits, plain(policy, ids), atol=1e-4, rtol=1e-4)
            if turn > 1:  # the first continued turn teaches it
                assert sum(seen) == 11  # the newest sampled token and ten from the tool
            for _ in range(5):
                one.ids.append(dice.randrange(VOCABULARY))
                if len(one.ids) < 5:
                    own.step([one.ids[-1]])
            own.keep([])
            ids = [*ids, *one.ids, *(dice.randrange(VOCABULARY) for _ in range(10))]


def test_switching_an_adapter_off_is_seen() -> None:
    policy = build("lora")
    served = TransformersEngine(policy, tokenizer(), TransformersConfig(loop="own"), EngineSetup(threads=1))
    asked = [request([5, 6, 7], 0, temperature=0.0)]
    with_adapter = generate(served, asked)[0]
    with policy.disable_adapter():
        without = generate(served, asked)[0]
        assert without.logprobs[0] == pytest.approx(float(plain(policy, [5, 6, 7]).log_softmax(-1).max()), abs=2e-5)
    assert without.logprobs != with_adapter.logprobs
    assert generate(served, asked)[0] == with_adapter


def test_unknown_architecture_falls_back_aloud(caplog: pytest.LogCaptureFixture) -> None:
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64)).eval()
    with caplog.at_level(logging.WARNING, "mmrl.engines"):
        served = TransformersEngine(policy, tokenizer(), TransformersConfig(), EngineSetup(threads=1))
    assert len([record for record in caplog.records if record.name == "mmrl.engines"]) == 1
    assert "GPT2LMHeadModel is not one of LlamaForCausalLM" in caplog.text
    made = generate(served, [request([5] * 60, 0, max_tokens=50)])[0]
    assert len(made.ids) <= 4  # the model's own limit of 64 positions
    with pytest.raises(ConfigError, match=r"engine.loop: got 'own', which cannot serve this model: GPT2LMHeadModel"):
        own_loop(policy)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: model(use_sliding_window=True, sliding_window=8, max_window_layers=1), "whole context"),
        (lambda: model(hidden_act="gelu"), "activation is 'gelu'"),
        (lambda: model(rope_parameters=DYNAMIC), "'dynamic' depends"),
        (lambda: adapted(model(), "q_proj", use_dora=True), "DoRA"),
    ],
    ids=range(4),
)
def test_variants_it_does_not_know_are_refused(made: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        own_loop(made())


CHECKED = ModelConfig(name="x", path="x")
"""Lets the engine check itself before its first request."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_the_own_loop_gets_wrong_is_served_by_its_own_forward(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    class Twisted(torch.nn.Module):  # a norm that the loop takes for an ordinary one
        def __init__(self, norm: Any):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x / x.norm(dim=-1, keepdim=True)

    policy = model().to(dtype)
    policy.model.norm = Twisted(policy.model.norm)
    asked = [request([5, 6, 7], 0), request([8, 9], 1)]
    with caplog.at_level(logging.WARNING, "mmrl.engines"):
        served = TransformersEngine(policy, tokenizer(), TransformersConfig(), EngineSetup(threads=1, weights=CHECKED))
        assert "log-probabilities of the native decoder differ by" in caplog.text
        made = generate(served, asked)
    expected = generate(
        TransformersEngine(policy, tokenizer(), TransformersConfig(loop="hf"), EngineSetup(threads=1)), asked
    )
    assert made == expected


@pytest.mark.parametrize(("dtype", "warns"), [(torch.float32, True), (torch.bfloat16, False)])
def test_an_unlikely_token_decides_in_float32_alone(
    dtype: torch.dtype, warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NativeLoop.prefill

    def rounded(self: NativeLoop, rows: Sequence[Any]) -> torch.Tensor:
        logits = right(self, rows)
        logits[:, 7] -= 0.6  # as seen of SmolLM2-135M in bfloat16
        return logits

    monkeypatch.setattr(NativeLoop, "prefill", rounded)
    served = TransformersEngine(model().to(dtype), tokenizer(), TransformersConfig(), EngineSetup(threads=1))
    with caplog.at_level(logging.WARNING, "mmrl.engines"):
        generate(served, [request([5, 6, 7], 0)])
    assert ("the native decoder differ by 0.6" in caplog.text) == bool(caplog.records) == warns


def test_the_self_check_accepts_a_good_model_quietly(caplog: pytest.LogCaptureFixture) -> None:
    policy = model()
    policy.train()
    served = TransformersEngine(policy, tokenizer(), TransformersConfig(), EngineSetup(threads=1))
    with caplog.at_level(logging.WARNING, "mmrl.engines"):
        generate(served, [request([5, 6, 7], 0)])
    assert not caplog.records
    assert isinstance(served.decoder.loops[""], NativeLoop)
    assert policy.training


@pytest.mark.parametrize(("parameters", "expected"), [(1_000, {1}), (10**9, {2})])
def test_threads_follow_from_shapes_and_are_put_back(parameters: int, expected: set[int]) -> None:
    torch.set_num_threads(1)
    served = TransformersEngine(model(), tokenizer(), TransformersConfig(), EngineSetup(threads=2))
    served.decoder.parameters = parameters
    used: set[int] = set()
    loop = served.decoder.loops[""]
    step, prefill = loop.step, loop.prefill
    loop.step = lambda tokens: (used.add(torch.get_num_threads()), step(tokens))[1]
    loop.prefill = lambda rows: (used.add(torch.get_num_threads()), prefill(rows))[1]
    generate(served, [request([5, 6], 0)])
    assert used == expected
    assert torch.get_num_threads() == 1
