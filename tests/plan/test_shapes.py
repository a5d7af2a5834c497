"""Sizes of models that others made, against what their makers publish and what is built of them."""

import json
from typing import Any

import pytest
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    Gemma3Config,
    Gemma4Config,
    GPT2Config,
    GptOssConfig,
    MambaConfig,
    MixtralConfig,
    Qwen3_5MoeConfig,
    Qwen3MoeConfig,
)

from mmrl.cli import main
from mmrl.config.schema import LoraConfig, ModelConfig
from mmrl.models.adapter import targets_of
from mmrl.plan.shapes import shape_of
from tests.models.test_adapter import MIXTURES


def shape(folder, config, lora=None):
    config.save_pretrained(folder)
    return shape_of(ModelConfig(name="hf", path=str(folder), lora=lora))


QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        # Their model cards: all, and those that a token is multiplied with, input embeddings left out.
        (Qwen3MoeConfig(**QWEN3_30B), 30.5, 3.0),
        (MixtralConfig(), 46.7, 12.7),
        (GptOssConfig(), 116.8, 5.1),
        (DeepseekV3Config(), 671.0, 36.6),
        (FalconConfig(), 6.9, 6.9),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else str(value),
)
def test_sizes_are_those_that_are_published(tmp_path, config, billions, active):
    found = shape(tmp_path, config)
    assert found.parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert (found.block_parameters + found.vocab * found.hidden) / 1e9 == pytest.approx(active, abs=0.12)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
OTHERS = {
    **MIXTURES,
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64),
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "gemma3": Gemma3Config(text_config={**SIZES, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma4": Gemma4Config(
        text_config={**SIZES, "num_key_value_heads": 2, "head_dim": 8, "vocab_size_per_layer_input": 64}
    ),
    "qwen3_5_moe": Qwen3_5MoeConfig(text_config={**SIZES, "num_experts": 8, "moe_intermediate_size": 8}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_memory_is_that_of_all_weights_and_adapters_of_the_text_part(name, tmp_path):
    lora = LoraConfig(r=2, alpha=4, dropout=0, targets=("all-linear",))
    found = shape(tmp_path, OTHERS[name], lora)
    model = AutoModelForCausalLM.from_config(OTHERS[name])
    texts = {*model.get_decoder().parameters(), model.get_output_embeddings().weight}
    weights = sum(weight.numel() for weight in texts)
    adapted = get_peft_model(model, targets_of(model, lora).peft_config(lora))
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert found.lora_parameters(lora.r, lora.targets) == trained
    # Of the width of an MLP that costs as much, the rounding.
    assert found.parameters == pytest.approx(weights, abs=1.5 * found.layers * found.hidden)


def test_a_plan_counts_what_a_mixture_keeps_and_what_it_computes(tmp_path, capsys):
    config = MIXTURES["mixtral"]
    config.save_pretrained(tmp_path)
    words = [
        "plan",
        "model=hf",
        f"model.path={tmp_path}",
        "device=h100",
        "lengths=rewriter:10/2,reranker:50/3,answerer:30/4",
    ]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == shape_of(ModelConfig(name="hf", path=str(tmp_path))).parameters


def test_a_teacher_gets_no_adapter_and_needs_none_of_its_targets(tmp_path, capsys, random_model):
    OTHERS["gpt2"].save_pretrained(tmp_path)
    words = [
        "plan",
        "model=hf",
        f"model.path={random_model}",
        "model.lora={r: 2, alpha: 4, targets: [q_proj]}",
        "algo=grpo",
    ]
    words += ["lengths=rewriter:10/2,reranker:50/3,answerer:30/4", f"algo.distill={{answerer: '{tmp_path}'}}", "--json"]
    assert main(words) == 0, capsys.readouterr().err
    assert "teachers" in capsys.readouterr().out
