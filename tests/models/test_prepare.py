"""A loaded model has no noise in training, and the attention that computes all of its config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DbrxConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    SeedOssConfig,
    Starcoder2Config,
)

from mmrl.config import ModelConfig
from mmrl.errors import ConfigError
from mmrl.models.load import TINY, load_model, skeleton, unknown_layers
from mmrl.models.save import write_merged
from mmrl.trainer.tree_attention import unsupported_reason
from tests.models.test_loading import SIZES, make

IDS = torch.arange(3, 39).reshape(2, 18)
NOISY: dict[str, PreTrainedConfig] = {
    "seed_oss": SeedOssConfig(**SIZES, head_dim=8, attention_dropout=0.2, residual_dropout=0.2),
    "starcoder2": Starcoder2Config(**SIZES, attention_dropout=0.2, residual_dropout=0.2, embedding_dropout=0.2),
    "phimoe": PhimoeConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.3, input_jitter_noise=0.2
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.3, attention_dropout=0.2),
    "gpt2, whole numbers": GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=1
    ),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.2, embd_pdrop=0.2),
    "dbrx": DbrxConfig(
        vocab_size=40,
        d_model=16,
        n_heads=2,
        n_layers=2,
        max_seq_len=64,
        resid_pdrop=0.2,
        attn_config={"attn_pdrop": 0.2, "kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.3},
    ),
}


@pytest.mark.parametrize("kind", NOISY)
def test_two_forwards_in_training_are_that_in_evaluation(kind: str, tmp_path: Path) -> None:
    """And that one is the plain model's: a number that it reads there too is none of noise."""
    model = make(tmp_path, NOISY[kind])
    loaded = load_model(model, "cpu").eval()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = plain(IDS).logits
    assert torch.allclose(loaded(IDS).logits, expected, atol=1e-6)
    assert not torch.equal(plain.train()(IDS).logits, expected), "without noise this shows nothing"
    loaded.train()
    for _ in range(2):
        assert torch.allclose(loaded(IDS).logits, expected, atol=1e-6)


def test_the_logits_of_routers_are_left_out(tmp_path: Path) -> None:
    """Their loss is never computed, and transformers' forward with them takes no packed row and no cache of others."""
    routed = MixtralConfig(**SIZES, head_dim=8, num_local_experts=4, sliding_window=None, output_router_logits=True)
    model = make(tmp_path, routed)
    assert AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).router_logits is not None, "else this shows nothing"
    loaded = load_model(model, "cpu")
    assert loaded(IDS).router_logits is None and not skeleton(model)[0].config.output_router_logits
    assert unsupported_reason(loaded) is None


BLOOM = BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
GEMMA2 = Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=2.0, initializer_range=0.5)
GPT_OSS = GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1)


@pytest.mark.parametrize(
    ("made", "chosen"),
    [
        (LlamaConfig(**SIZES), "sdpa"),
        (BLOOM, "eager"),
        (GPT_OSS, "eager"),
        (GEMMA2, "eager"),
        # Newer versions of transformers have no SDPA for the class, whose caps it passes over.
        (
            Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=None),
            "sdpa" if Gemma2ForCausalLM._supports_sdpa else "eager",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_auto_takes_the_attention_that_computes_all(made: PreTrainedConfig, chosen: str, tmp_path: Path) -> None:
    model = make(tmp_path, made)
    loaded = load_model(model, "cpu").eval()
    assert loaded.config._attn_implementation == skeleton(model)[0].config._attn_implementation == chosen
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert torch.allclose(loaded(IDS).logits, plain(IDS).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "wanted", "expected"),
    [
        (BLOOM, "sdpa", "got sdpa, which BloomForCausalLM does not have"),
        (GEMMA2, "sdpa", "got sdpa, which passes over attn_logit_softcapping of Gemma2ForCausalLM"),
        (BLOOM, "flash_attention_2", "got flash_attention_2, which BloomForCausalLM does not have"),
        (LlamaConfig(**SIZES), "flash_attention_3", r"package \(flash_attn_3\) is not installed here, or finds no GPU"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_an_attention_that_cannot_be_is_refused(
    made: PreTrainedConfig, wanted: str, expected: str, tmp_path: Path
) -> None:
    model = make(tmp_path, made).model_copy(update={"attention": wanted})
    for load in (skeleton, lambda model: load_model(model, "cpu")):
        with pytest.raises(ConfigError, match=rf"^model\.attention: .*{expected}"):
            load(model)


def test_a_chosen_attention_is_that_of_sampling_and_update(tmp_path: Path) -> None:
    """The native decoder and tries compute by SDPA, so they leave such a model to its own forward."""
    model = make(tmp_path)
    eager = model.model_copy(update={"attention": "eager"})
    assert unknown_layers(load_model(model, "cpu")) is None
    assert unknown_layers(load_model(eager, "cpu")) == "its attention is 'eager'"


def test_flash_attention_computes_in_16_bits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_flash_attn_2_available", lambda: True)
    model: ModelConfig = make(tmp_path).model_copy(update={"attention": "flash_attention_2"})
    with pytest.raises(ConfigError, match=r"model\.attention: .*16 bits alone, and model\.dtype=float32"):
        load_model(model, "cpu")


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9, "do_sample": True}),
        ({"temperature": 0.6, "do_sample": False}, {"do_sample": False}),
        ({"early_stopping": True, "output_scores": True}, {}),
        ({"pad_token_id": -1, "top_k": 4}, {"do_sample": True, "top_k": 4}),
    ],
)
def test_a_generation_config_that_transformers_does_not_save_is_made_one(
    given: dict[str, Any], saved: dict[str, Any], tmp_path: Path
) -> None:
    """A run would end at its first checkpoint, and a merge at its end."""
    base = shutil.copytree(TINY, tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], **given}))
    model = ModelConfig(name="x", path=str(base), dtype="float32")
    loaded = load_model(model, "cpu")
    loaded.save_pretrained(tmp_path / "checkpoint")
    wrapped: Any = get_peft_model(loaded, LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped.save_pretrained(tmp_path / "adapter")
    write_merged(str(base), tmp_path / "adapter", model, tmp_path / "merged")
    for folder in ("checkpoint", "merged"):
        written = json.loads((tmp_path / folder / "generation_config.json").read_text())
        names = {"temperature", "top_p", "top_k", "do_sample", "early_stopping", "output_scores", "pad_token_id"}
        assert {name: value for name, value in written.items() if name in names} == saved
        assert written["eos_token_id"] == [2]
