"""GGUF files as llama.cpp writes them, of small random Llamas; by the package `gguf`."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mmrl.models.gguf import package


def llama_like(folder, source, template=None):
    """A small random Llama with the tokenizer of `source` and its chat template, or another one, as a folder."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = template or tokenizer.chat_template
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_gguf(path, source, *, quant=None, eos="<|im_end|>", **facts):
    """A GGUF file of the model in the folder `source`, quantised as `quant` says where a row is long enough."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    config, weights = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    saved = json.loads((Path(source) / "tokenizer.json").read_text())["model"]
    tokens = [tokenizer.convert_ids_to_tokens(n) for n in range(config.vocab_size)]
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    gguf = package()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else config.hidden_size // heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(facts.pop("kind", "gpt2"))
    writer.add_tokenizer_pre(facts.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"]]
    writer.add_token_merges(facts.pop("merges", merges))
    writer.add_eos_token_id(tokens.index(eos))
    if facts.pop("template", True):
        writer.add_chat_template(tokenizer.chat_template)
    for name, value in facts.pop("more", {}).items():
        writer.add_uint32(name, value) if isinstance(value, int) else writer.add_string(name, value)
    for name, target in _names(config, facts.pop("drop", ())).items():
        value = weights[target]
        if target.endswith(("q_proj.weight", "k_proj.weight")):
            of = heads if "q_proj" in target else keys  # as llama.cpp writes it
            value = value.reshape(of, 2, value.shape[0] // of // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if quant and value.ndim == 2 and value.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType[quant]
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    assert not facts
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _names(config, dropped):
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for n in range(config.num_hidden_layers):
        names |= {f"blk.{n}.{a}.weight": f"model.layers.{n}.{b}.weight" for a, b in parts.items()}
    return {name: target for name, target in names.items() if name not in dropped}
