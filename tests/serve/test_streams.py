"""Streams of models whose special tokens mark parts of a reply: thoughts are no text, in pieces as in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmrl.engines.base import Completion, Engine, Request
from mmrl.serve.policy import ServedPolicy, _Running
from mmrl.serve.protocol import ChatRequest

SPECIAL = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>"),
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>"),
)
GPT_OSS = ("gptoss", "<|return|>")
THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEMOTRON = ("nemotron_3_nano", "<|im_end|>")
QWEN_THINKS = ("qwen3_5_think", "<|im_end|>")
"""Both open thoughts with the prompt, and of the first nobody knows whether it thinks until it has ended."""
QWEN = ("qwen3", "<|im_end|>")


def byte_tokenizer(template: str, end: str) -> Any:
    """A token for each byte, beside special tokens, and a published chat template."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    loaded = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token="<|endoftext|>")
    loaded.chat_template = (Path(trl.__file__).parent / f"chat_templates/{template}.jinja").read_text()
    return loaded


class Says(Engine):
    """Samples these ids."""

    def __init__(self, ids: Sequence[int]):
        self.ids = tuple(ids)

    async def generate(self, request: Request) -> Completion:
        for token in self.ids:
            if request.on_token is not None:
                request.on_token(token)
                await asyncio.sleep(0)
        return Completion(ids=self.ids, logprobs=None, finish="eos")


@pytest.mark.parametrize(
    ("model", "reply", "text", "pieces"),
    [
        (GPT_OSS, f"{THOUGHT}Lyon?<|end|><|start|>assistant{FINAL}Paris<|return|>", "Paris", False),
        (GPT_OSS, f"{FINAL}Paris<|return|>", "Paris", False),
        (GPT_OSS, f"{THOUGHT}Lyon? No, it is", "", False),
        (NEMOTRON, "Lyon? No.</think>Paris<|im_end|>", "Paris", False),
        (QWEN_THINKS, "Lyon? No.</think>Paris<|im_end|>", "Paris", False),
        (QWEN_THINKS, "Lyon? No, it is", "", False),
        (QWEN, "<think>\nLyon?\n</think>\n\nParis<|im_end|>", "Paris", False),
        (QWEN, "Paris<|im_end|>", "Paris", True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_thoughts_are_not_in_the_text(model: tuple[str, str], reply: str, text: str, pieces: bool) -> None:
    tokenizer = byte_tokenizer(*model)
    served = ServedPolicy(Says(tokenizer(reply, add_special_tokens=False).input_ids), tokenizer)

    async def read(stream: bool) -> tuple[list[str], str]:
        asked = {"model": "policy", "messages": [{"role": "user", "content": "The capital?"}], "stream": stream}
        running = _Running(served, ChatRequest.model_validate(asked), "")
        sent = [piece async for piece in running.pieces()] if stream else []
        return sent, (await running.task).answers[0].text

    assert asyncio.run(read(False)) == ([], text)
    sent, whole = asyncio.run(read(True))
    assert "".join(sent) == whole == text and (len(sent) > 1) == pieces
