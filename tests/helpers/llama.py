"""Small random Llamas."""

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


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
