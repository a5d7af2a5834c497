"""Tiny random models of gated delta nets beside attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", EXPERTS),
    "qwen3_next": ("qwen3_next", EXPERTS),
    "olmo_hybrid": ("olmo_hybrid", {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}),
}
"""By name: type, and fields beside `SIZES`."""


def hybrid_model(kind: str, vocabulary: int, seed: int = 0, **fields: Any) -> Any:
    """A random model in evaluation mode, whose states last: as initialised they forget within a token or two."""
    torch.manual_seed(seed)
    name, more = HYBRIDS[kind]
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **{**SIZES, "vocab_size": vocabulary, **more, **fields})
    )
    for layer in made.model.layers:
        if hasattr(layer, "linear_attn"):
            torch.nn.init.uniform_(layer.linear_attn.A_log, -5, -1)
    return made.eval()
