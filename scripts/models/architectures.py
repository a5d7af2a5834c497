"""Tiny random instances of every architecture that the installed transformers maps for causal language models.

A config is derived from its class: fields that are sizes get small ones, lists with an entry per layer hold each kind
of entry, windows are shorter than the rows that are compared, and noise (dropout, jitter) and caps that a family can
have are on. `EXTRA` has what cannot be derived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mmrl.models.load import NO_CODE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 288
HIDDEN, HEADS, KEYS, HEAD_DIM, LAYERS, CONTEXT, WINDOW = 64, 4, 2, 16, 4, 128, 8
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Ids of the tokenizer that lies beside each model."""

SIZES: list[tuple[str, Any]] = [
    (r"(decoder_|unpadded_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|lru_width|word_embed_proj_dim", HIDDEN),
    (r"(input|output)_embedding_size|adapter_(in_dim|out_dim|input_size)", HIDDEN),
    (r"(num_hidden_|num_|n_|decoder_|num_decoder_)layers?|n_layer|num_blocks", LAYERS),
    (r"(encoder_|num_encoder_)layers|depth", 2),
    (r"(num_attention|n|num|decoder_attention|encoder_attention|attention|num_(en|de)coder_attention)_heads?", HEADS),
    (r"n_heads|swa_num_attention_heads", HEADS),
    (r"num_key_value_heads|num_kv_heads|swa_num_key_value_heads|num_query_groups", KEYS),
    (r"head_dim|swa_head_dim|dim_head|d_head|kv_channels|attention_head_size|global_head_dim", HEAD_DIM),
    (r"(dense_)?intermediate_size(_mlp)?|(encoder_|decoder_|expert_)?ffn(_hidden)?_(dim|size)|d_inner|dff|dim_ff", 96),
    (r"feed_forward_size|block_ff_dim", 96),
    (r"(moe|shared_expert|shared|moe_shared_expert)_intermediate_size|expert_ffn_hidden_size", 32),
    (r"(moe_num|num_local|num|n_routed)_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"kv_lora_rank|o_lora_rank", 16),
    (r"q_lora_rank", 24),
    (r"qk_(rope|nope)_head_dim", 8),
    (r"v_head_dim", 16),
    (r"index_topk", 6),
    # So many that no two keys are both 0 to all of them: what is chosen of equal keys depends on the row's length.
    (r"index_n_heads", 32),
    (r"index_head_dim", 16),
    (r"index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 16),
    (r"n_group", 2),
    (r"topk_group", 1),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"(mamba_)?chunk_size|block_size", 8),
    (r"linear_(key|value)_head_dim|linear_head_dim", 8),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"(max|original_max)_(target_)?position(_embedding)?s|n_positions|n_ctx|max_seq_len|context_length", CONTEXT),
    (r"max_sequence_length|model_max_length|max_position_embeddings", CONTEXT),
    (r"sliding_window(_size)?|attention_window_size|window_size|attention_chunk_size", WINDOW),
    (r"local_attention", 2 * WINDOW),
    (r"floor_scale", WINDOW),
    (r"attn_logit_softcapping", 2.0),
    (r"final_logit_softcapping|logits_soft_cap|output_logit_soft_cap", 5.0),
    (r"rotary_dim", 8),
]
"""Names of config fields (a pattern of the whole name), and the value of a tiny model."""
NOISE = r".*(drop|jitter).*"
"""Names of numbers that make forwards random in training."""
MULTIPLIERS = r"(embedding|residual|attention|lm_head|key|attention_(in|out)|ssm_(in|out)|logits?)_(multiplier|scaling)"
"""Names of numbers that scale a part of a model, and are 1 where a class leaves them out."""
PER_LAYER = r"layer_types|mlp_layer_types|indexer_types|.*_per_layer|layer_rope_theta|layers_block_type"
"""Names of lists with an entry per layer."""

GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 2 * HEAD_DIM,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 16,
    "head_dim": HEAD_DIM,
    "num_key_value_heads": KEYS,
}
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "intermediate_size": [96] * 6,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
}
QWEN4: dict[str, Any] = {
    "indexer_n_heads": 32,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
EXTRA: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 500,
        "patcher_config": {"vocab_size": 260},
        "encoder_config": {"vocab_size": 260, "hidden_size_global": HIDDEN},
        "decoder_config": {"vocab_size": 260, "hidden_size_global": HIDDEN},
        "global_config": {},
    },
    "cohere_compass_text": {
        "layer_types": MIXED,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KEYS, "rope_theta": 10000.0, "clip_qkv": 1.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {
        "layer_types": MIXED,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
    },
    "emu3": {
        "vocabulary_map": {"<image>": VOCABULARY - 1},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "codebook_size": 64},
    },
    "falcon_h1": {"mamba_d_ssm": 2 * HIDDEN, "mamba_d_head": HEAD_DIM},
    "gemma3n_text": GEMMA3N,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "attention_layers": ["global", "local"] * 2},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "granitemoehybrid": {"layer_types": LINEAR, "shared_intermediate_size": 32},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "inkling_text": {"logits_mup_width_multiplier": 1.25},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3},
    "laguna": {"layer_types": MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mellum": {"layer_types": MIXED},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "got_ocr2": {"vision_config": {"mlp_dim": 96, "output_channels": 16, "image_size": 64, "global_attn_indexes": [1]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "num_layers": 2, "num_hidden_layers": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48]},
    "roc_bert": {"shape_vocab_size": VOCABULARY, "pronunciation_vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
}
"""Model type -> fields beside those that are derived; those of a nested config by its name."""
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [4.0] * (HEAD_DIM // 2),
    "original_max_position_embeddings": CONTEXT // 2,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, is_decoder": ("bert", {"is_decoder": True}),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": CONTEXT}),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}),
}
"""Models of a type with another config, which are computed in another way: name -> type, and its fields."""
BEYOND: dict[str, str] = {
    "gemma3n": "its towers need the package timm",
    "gemma4_assistant": "drafts tokens from another model's hidden states",
    "gemma4_unified_assistant": "drafts tokens from another model's hidden states",
    "musicgen": "writes several streams of audio codes",
    "musicgen_melody": "writes several streams of audio codes",
}
"""Model types of which no instance can be built or compared here, and why."""


def model_types() -> list[str]:
    """List the model types that transformers loads as causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def architectures() -> list[str]:
    """List what can be built here: model types and variants."""
    return sorted({*model_types(), *VARIANTS} - set(BEYOND))


def tiny_config(architecture: str) -> PreTrainedConfig:
    """Return the config of a tiny instance of a model type or variant."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, fields = VARIANTS.get(architecture, (architecture, {}))
    return _tiny(CONFIG_MAPPING[model_type], EXTRA.get(model_type, {}) | fields)


def _tiny(kind: type[PreTrainedConfig], extra: Mapping[str, Any]) -> PreTrainedConfig:
    default = kind()
    fields: dict[str, Any] = {}
    for name, value in _fields(default).items():
        if name in kind.sub_configs:
            if value is not None:
                fields[name] = _tiny(type(value), extra.get(name, {}))
        elif (small := _small(name, value, default)) is not None:
            fields[name] = small
    fields |= {name: value for name, value in extra.items() if name not in kind.sub_configs}
    return kind(**fields)


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that the config's own class has, with their values."""
    values, names = vars(config), sorted(type(config).__dataclass_fields__)
    return {name: values.get(config.attribute_map.get(name, name)) for name in names if name[0] != "_"}


def _small(name: str, value: Any, config: PreTrainedConfig) -> Any:
    """Return the value of a tiny model for a field, or None to leave its class the choice."""
    if name in ENDS:
        return ENDS[name]
    if name in ("num_key_value_heads", "head_dim"):
        # Latent attention derives both from other sizes.
        own = {"num_key_value_heads": KEYS, "head_dim": HEAD_DIM}
        latent = {"num_key_value_heads": HEADS, "head_dim": None}
        return (latent if "kv_lora_rank" in type(config).__dataclass_fields__ else own)[name]
    if value is None or isinstance(value, bool):
        return None
    if re.fullmatch(PER_LAYER, name) and isinstance(value, (list, tuple)):
        return cycled(value)
    if isinstance(value, float) and re.fullmatch(NOISE, name):
        return 0.1
    if isinstance(value, (int, float)):
        if re.fullmatch(MULTIPLIERS, name) and value == 1:
            return 1.25
        for pattern, small in SIZES:
            if re.fullmatch(pattern, name):
                return small if isinstance(value, float) or small == VOCABULARY else min(small, value) or None
    return None


def cycled(values: Any) -> list[Any]:
    """Return as many entries as a tiny model has layers, with each different one of `values` among them."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return [kinds[layer % len(kinds)] for layer in range(LAYERS)]


def tiny_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model in float32 whose distributions are neither flat nor sharp."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    # Saved as such models are published: with the towers that the text class leaves out.
    config = tiny_config(architecture)
    whole = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    torch.manual_seed(seed)
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, attn_implementation="eager", **NO_CODE)
    stir(model, seed)
    model.eval()
    return model


@torch.no_grad()
def stir(model: torch.nn.Module, seed: int) -> None:
    """Draw weights anew, so that every part of the model has a part in its log-probabilities."""
    draw = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=draw, dtype=torch.float32)

    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if not parameter.is_floating_point():
            continue
        if last in ("A_log", "dt_bias", "D", "time_decay", "time_first", "recurrent_param"):
            parameter.add_(0.1 * noise(parameter))  # decays: near where the family begins
        elif parameter.dim() >= 2:
            parameter.copy_(0.12 * noise(parameter))
        elif last == "weight" or "norm" in last:
            parameter.add_(0.2 * noise(parameter))  # around 1, or 0 where a family counts from there
        else:
            parameter.copy_(0.2 * noise(parameter))
