"""Small models and tokenizers for the engine tests, made on the spot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mmrl.engines.base import Completion, Request, Sampling

VOCABULARY = 96
EOS = 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, plus a few longer pieces; decoding joins pieces."""
    pieces = [chr(code) for code in range(32, 120)] + ["ab", "bc</", "sea", "rch>"]
    words = {"<pad>": 0, "<eos>": EOS, **{piece: index + 2 for index, piece in enumerate(pieces)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


def model(seed: int = 0, scale: float = 0.4, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3; `scale` is the weights' deviation: larger makes sharper distributions."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": scale,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).eval()


def request(prompt: Sequence[int], order: int = 0, **sampling: Any) -> Request:
    """A request with a seed that follows from its order."""
    settings = {"max_tokens": 12, "seed": 1000 + order, **sampling}
    return Request(prompt_ids=tuple(prompt), sampling=Sampling(**settings), order=(order,))


def generate(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    """All requests at once, each as a live program of its own."""

    async def program(one: Request) -> Completion:
        try:
            return await engine.generate(one)
        finally:
            engine.leave()

    async def everything() -> list[Completion]:
        for _ in requests:
            engine.enter()
        return list(await asyncio.gather(*(program(one) for one in requests)))

    return asyncio.run(everything())
