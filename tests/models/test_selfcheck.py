"""The self-check: what passes as rounding, what it finds, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM

from mmrl.config import LoraConfig, ModelConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.embedded.hf_loop import HFLoop, WholeRows
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.errors import ConfigError, LengthFailure, MmrlError
from mmrl.models.selfcheck import (
    CheckRow,
    Way,
    check_rows,
    drawn_adapters,
    evaluating,
    logprobs_of,
    plain_logprobs,
    rounding_noise,
)
from tests.helpers.engines import VOCABULARY, generate, model, request, tokenizer
from tests.helpers.trainer_cases import (
    LORA,
    make_calls,
    make_trainer,
    sampled,
    tiny_model,
    tiny_tokenizer,
    train_call,
    with_changes,
)

CHECKED = ModelConfig(name="x", path="x")


def engine(policy: Any, loop: Any = "auto") -> TransformersEngine:
    """An engine that checks itself when it is built."""
    return TransformersEngine(
        policy, tokenizer(), TransformersConfig(loop=loop), EngineSetup(threads=1, weights=CHECKED)
    )


@pytest.mark.parametrize(
    ("half", "gap", "tokens", "noise", "wrong"),
    [
        (False, 9e-5, 1, 0.0, False),
        (False, 2e-4, 1, 0.0, True),
        (False, math.nan, 1, 0.0, True),
        (True, 0.019, 64, 0.0, False),
        (True, 0.021, 64, 0.0, True),
        (True, 0.021, 63, 0.0, False),  # of so few tokens a median says nothing
        (True, 0.021, 64, 0.006, False),  # four times what one rounding does
        (True, 0.025, 64, 0.006, True),
        (True, math.nan, 3, 0.0, True),
    ],
)
def test_what_passes_as_rounding(half: bool, gap: float, tokens: int, noise: float, wrong: bool) -> None:
    way = Way.compared("it", [[-1.0] * tokens], [[-1.0 + gap] * tokens])
    assert bool(way.fault(half=half, noise=noise)) == wrong


def test_a_rounding_says_how_far_half_precision_is_from_float32() -> None:
    policy = model()
    rows = check_rows(tokenizer(), VOCABULARY, None, half=True)
    exact = plain_logprobs(policy, rows)
    rounded = plain_logprobs(policy.to(torch.bfloat16), rows)
    gap = Way.compared("", rounded, exact).rms
    noise = rounding_noise(policy, lambda: plain_logprobs(policy, rows), rounded)
    assert gap > 0.005
    assert gap / 4 < noise < 4 * gap
    # Nothing of it stays.
    assert plain_logprobs(policy, rows) == rounded


@pytest.mark.parametrize(("gap", "half"), [(0.1, False), (3.0, True)])
def test_one_token_among_a_hundred_tells_in_float32_and_if_it_is_far_off_in_half_precision(
    gap: float, half: bool
) -> None:
    way = Way.compared("it", [[-1.0] * 99, [-2.0]], [[-1.0] * 99, [-2.0 - gap]])
    assert way.tokens == 100 and (way.largest, way.rms) == pytest.approx((gap, gap / 10))
    assert f"it differ by {gap:.2g} (at most 0.0001 is rounding)" in way.fault(half=False)
    assert bool(way.fault(half=True)) == half


@pytest.mark.parametrize("unseen", [0, 1])
def test_in_half_precision_one_unseen_token_is_told_from_rounding(unseen: int) -> None:
    """By the median it is not: most tokens do not need it."""
    policy = model().to(torch.bfloat16)
    rows = check_rows(tokenizer(), VOCABULARY, None, half=True)
    plain = plain_logprobs(policy, rows)
    found = []
    for row in rows:
        ids, first = row.prompt_ids + row.completion_ids, len(row.prompt_ids)
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        mask[first:, first - unseen : first] = -torch.inf
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([ids]), attention_mask=mask[None, None].to(torch.bfloat16)).logits
        found.append(logprobs_of(logits[0, first - 1 : -1], row.completion_ids))
    noise = rounding_noise(policy, lambda: plain_logprobs(policy, rows), plain)
    assert bool(Way.compared("it", found, plain).fault(half=True, noise=noise)) == bool(unseen)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("context", [None, 40, 8])
def test_the_rows_have_unlike_lengths_begin_alike_and_fit(half: bool, context: int | None) -> None:
    short, long = check_rows(tokenizer(), VOCABULARY, context, half=half)
    whole = [row.prompt_ids + row.completion_ids for row in (short, long)]
    assert whole[0][:8] == whole[1][:8]
    assert whole[0] != whole[1][: len(whole[0])] or context == 8
    assert all(row.prompt_ids and row.completion_ids for row in (short, long))
    assert all(len(ids) <= (context or math.inf) for ids in whole)
    if context is None:
        assert len(whole[0]) < len(whole[1])
        assert not half or len(short.completion_ids + long.completion_ids) >= 64


def test_rows_of_a_tokenizer_without_letters_differ_too() -> None:
    blank = tiny_tokenizer()  # every word is unknown to it
    short, _ = check_rows(blank, VOCABULARY, None, half=False)
    assert len(set(short.prompt_ids)) > 8


def test_adapters_are_drawn_and_put_back() -> None:
    trained = with_lora(dropout=0.3)
    before = {name: weight.clone() for name, weight in trained.named_parameters()}
    modes, state = [part.training for part in trained.modules()], torch.get_rng_state()
    row = [CheckRow((5, 6, 7), (8, 9))]
    with drawn_adapters(trained), evaluating(trained):
        drawn = plain_logprobs(trained, row)
        trained.train()
        assert plain_logprobs(trained, row) == drawn
        with torch.no_grad():  # no dropout: two training-mode forwards are equal
            ids = torch.tensor([[5, 6, 7, 8]])
            assert torch.equal(trained(input_ids=ids).logits, trained(input_ids=ids).logits)
    assert plain_logprobs(trained, row) != drawn
    assert all(torch.equal(before[name], weight) for name, weight in trained.named_parameters())
    assert [part.training for part in trained.modules()] == modes
    assert torch.equal(state, torch.get_rng_state())


def with_lora(dropout: float) -> Any:
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    return get_peft_model(model(), PeftLora(r=4, lora_dropout=dropout, target_modules=["q_proj", "down_proj"]))


def test_a_cache_that_does_not_bear_padding_is_left_out_aloud(caplog: pytest.LogCaptureFixture) -> None:
    """A model whose learned positions count padding: right by whole rows, and only by them."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)).eval()
    forward = policy.forward

    def counting(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **options: Any) -> Any:
        return forward(input_ids=input_ids, attention_mask=attention_mask, **options)

    policy.forward = counting
    with caplog.at_level(logging.WARNING, "mmrl.engines"):
        served = engine(policy, "hf")
    assert "log-probabilities of generation by the model's own forward differ by" in caplog.text
    assert isinstance(served.decoder.loops[""], WholeRows)
    assert served.ways[0].name == "generation without a cache"
    asked = [request([5, 6, 7, 8], 0, max_tokens=3), request([9, 8], 1, max_tokens=7), request([4], 2, max_tokens=5)]
    for one, made in zip(asked, generate(served, asked), strict=True):
        (expected,) = plain_logprobs(policy, [CheckRow(one.prompt_ids, made.ids)])
        assert made.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_model_that_sees_what_comes_after_is_refused_by_engine_and_trainer(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    bert = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, initializer_range=0.3, **sizes)).eval()
    with pytest.raises(
        ConfigError, match=r"^model\.path: the engine cannot serve .* generation without a cache differ"
    ):
        engine(bert)
    with pytest.raises(ConfigError, match=r"^model\.path: the trainer cannot train .* of padded rows differ by"):
        make_trainer(tmp_path, bert)


class Noisy(torch.nn.Module):
    """A layer with noise of its own, as some architectures have it."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return torch.nn.functional.dropout(y, 0.1, self.training)


def test_noise_in_training_mode_is_refused_and_an_adapters_dropout_is_not(tmp_path: Path) -> None:
    noisy = tiny_model()
    noisy.model.layers[1].mlp = Noisy(noisy.model.layers[1].mlp)
    with pytest.raises(ConfigError, match="log-probabilities of training mode differ by"):
        make_trainer(tmp_path, noisy)
    made = make_trainer(tmp_path, lora=LoraConfig(r=4, alpha=8, dropout=0.5))
    assert [way.name for way in made.ways] == ["padded rows", "packed tries", "training mode"]
    assert all(way.largest < 1e-5 for way in made.ways)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    broken = tiny_model()
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    with pytest.raises(ConfigError, match="no finite numbers"):
        make_trainer(tmp_path, broken)


@pytest.mark.parametrize(("shift", "count", "refused"), [(0.5, 40, True), (0.5, 2, False), (0.001, 40, False)])
def test_another_policys_record_ends_a_run_before_its_first_update(
    tmp_path: Path, shift: float, count: int, refused: bool
) -> None:
    trainer: Any = None

    def recorded(step: int) -> Any:
        calls = make_calls(count)
        known = trainer.forwards.policy_logprobs(sampled(calls))
        return [
            with_changes(call, logprobs=tuple(number - shift for number in row))
            for call, row in zip(calls, known, strict=True)
        ]

    trainer = make_trainer(tmp_path, calls=recorded, lora=LORA)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    if not refused:
        trainer.train()
        return
    with pytest.raises(MmrlError, match=r"^engine: on the first batch, .* of the engine differ by 0\.5"):
        trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in trainer.model.named_parameters())


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    bert = BertLMHeadModel(BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    assert make_trainer(tmp_path, bert, selfcheck=False).ways == []
    off = EngineSetup(threads=1, weights=CHECKED.model_copy(update={"selfcheck": False}))
    served = TransformersEngine(model(), tokenizer(), TransformersConfig(loop="hf"), off)
    assert served.ways == [] and isinstance(served.decoder.loops[""], HFLoop)


def longrope() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    config = Phi3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        rope_parameters={**rope, "original_max_position_embeddings": 32, "factor": 8.0},
        initializer_range=0.3,
        pad_token_id=0,
        **sizes,
    )
    return Phi3ForCausalLM(config).eval()


def test_rows_on_both_sides_of_longropes_border_share_no_forward(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Phi 3 and 4 encode all rows of a forward by its longest one: a short row must not depend on its company."""
    policy = longrope()
    rows = [CheckRow(tuple(range(2, 2 + n)), tuple(range(40, 48))) for n in (12, 50, 20, 24, 60)]
    calls = [
        train_call(id=str(n), module="a", prompt_ids=row.prompt_ids, completion_ids=row.completion_ids).call
        for n, row in enumerate(rows)
    ]
    made = make_trainer(tmp_path, policy).forwards.policy_logprobs(calls)
    for row, expected in zip(made, plain_logprobs(policy, rows), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    with caplog.at_level(logging.WARNING, "mmrl.engines"):
        served = engine(policy)
    assert "task.max_context: contexts end at 32 tokens" in caplog.text
    (whole,) = generate(served, [request(range(2, 30), 0, max_tokens=99)])
    assert len(whole.ids) <= 4
    with pytest.raises(LengthFailure, match="leaves no room in a context of 32 tokens"):
        asyncio.run(served.generate(request(range(2, 40))))
