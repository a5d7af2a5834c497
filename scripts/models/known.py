"""What is known of architectures beside "right in every way": refused, and why; served without a cache; at fault.

Checked by tests/models/test_architectures.py against what is measured, so that a change shows.
"""

from __future__ import annotations

BOTH_WAYS = "its tokens see those after them"
DIFFERS = "the engine cannot serve this model: against its plain forward"

_REFUSED = {
    BOTH_WAYS: (
        "bert, bert-generation, big_bird, camembert, data2vec-text, electra, ernie, megatron-bert, rembert, roberta, "
        "roberta-prelayernorm, roc_bert, roformer, xlm, xlm-roberta, xlm-roberta-xl, xlnet, xmod"
    ),
    DIFFERS: "cpmant, doge, prophetnet",
    "are not in its files": "emu3",
}
REFUSED = {name: words for words, names in _REFUSED.items() for name in names.split(", ")}
"""Architecture -> words of its refusal."""
_NO_CACHE = (
    "bart, bigbird_pegasus, blenderbot, blenderbot-small, marian, mbart, mvp, pegasus, plbart, trocr, "
    "blt, deepseek_v4, falcon_mamba, git, llama4, llama4_text, mamba, mamba2, minimax, minimax_m3_vl_text, moshi, "
    "nemotron_h, openai-gpt, qwen4_exp, qwen4_exp_text, recurrent_gemma, reformer, rwkv, whisper, xlstm"
)
NO_CACHE = frozenset(_NO_CACHE.split(", "))
"""Served by whole rows: their cache does not bear rows that leave or padding on the left, or they have none."""
FAULTS: dict[str, tuple[str, str]] = {
    "blt": ("update, adapter", "its config has no hidden_size"),
    "deepseek_v4": ("adapter", "o_a_proj is a linear layer with a forward of its own"),
    "falcon_mamba": ("adapter", "dt_proj's weight is read without a call"),
    "gemma3n_text": ("adapter", "correction_coefs' weight is read without a call in training"),
    "jamba": ("adapter", "dt_proj's weight is read without a call"),
    "laguna": ("adapter", "peft renames shared_experts when it loads a saved adapter"),
    "longcat_flash": ("adapter", "classifier's weight is read without a call"),
    "mamba": ("adapter", "dt_proj's weight is read without a call"),
    "mllama": ("engine, update, adapter", "its text config is no class of its own"),
    "reformer": ("update, adapter", "trains on rows of one length alone, and says so with a traceback"),
    "zamba": ("adapter", "one layer at several places is merged once for each"),
    "zamba2": ("adapter", "one layer at several places is merged once for each"),
}
"""Architecture -> ways that are wrong or end in a traceback, and why."""
