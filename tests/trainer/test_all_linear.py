"""`model.lora.targets=[all-linear]`: the same adapter on architectures that name their layers in other ways."""

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

from mmrl.config import AlgoConfig, LoraConfig, ModelConfig, TrainConfig
from mmrl.trainer.settings import Settings

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "llama": (
        LlamaConfig(**SIZES, intermediate_size=32),
        {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"},
    ),
    "gpt2": (GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2), {"c_attn", "c_proj", "c_fc"}),
    "neox": (
        GPTNeoXConfig(**SIZES, intermediate_size=32),
        {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_but_the_head_gets_an_adapter(name):
    from peft import get_peft_model

    config, layers = MODELS[name]
    model = AutoModelForCausalLM.from_config(config)
    section = ModelConfig(name="x", path="x", lora=LoraConfig(targets=("all-linear",)))
    lora = Settings(train=TrainConfig(), algo=AlgoConfig(name="x", beta=0.0), model=section, seed=0).lora(model)
    assert lora is not None and set(lora.target_modules) == layers
    adapted = {n.split(".lora_")[0] for n, p in get_peft_model(model, lora).named_parameters() if p.requires_grad}
    assert {part.rpartition(".")[2] for part in adapted} == layers


def test_all_linear_stands_alone():
    with pytest.raises(ValueError, match=r"expected all-linear alone"):
        LoraConfig(targets=("all-linear", "q_proj"))
