"""The tiny model's tokenizer: byte-level BPE whose tokens suit a world of stock phrases and invented names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmrl.tasks.base import Demonstration
from scripts.tiny_model.mini.world import make_world

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
PIECES = r" ?(?!\p{Lu})\p{L}+(?: (?!\p{Lu})\p{L}+)* ?|\p{Lu}\p{L}*|\p{N}| ?[^\s\p{L}\p{N}]+ ?|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Pieces that merges may not cross: a run of small words is one piece (stock phrases become single tokens, which halves
prompts), a capitalised word is one without its space (a name is the same tokens wherever it stands), a digit is one."""


def load_or_train_tokenizer(
    folder: Path, demonstrations: Sequence[Demonstration], worlds: Sequence[int], size: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over documents and one in twenty demonstrations; any text can be encoded."""
    if (folder / "tokenizer.json").exists():
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
        return tokenizer
    texts = [text for seed in worlds for d in make_world(seed).documents for text in (d.title, d.text)]
    for demonstration in demonstrations[::20]:
        texts += [message["content"] for message in demonstration.messages] + [demonstration.completion]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
