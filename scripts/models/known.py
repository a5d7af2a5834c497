"""What is known of architectures beside "right in every way": refused, and why; served without a cache.

Checked by tests/models/test_architectures.py against what is measured, so that a change shows.
"""

from __future__ import annotations

import transformers
from packaging.version import Version

NEW = Version(transformers.__version__) >= Version("5.24")
"""True for a version that is newer than the one of constraints.txt, where it differs."""
BOTH_WAYS = "its tokens see those after them"
DIFFERS = "the engine cannot serve this model: against its plain forward"

_REFUSED = {
    BOTH_WAYS: (
        "bert, bert-generation, big_bird, camembert, data2vec-text, electra, ernie, megatron-bert, rembert, roberta, "
        "roberta-prelayernorm, roc_bert, roformer, xlm, xlm-roberta, xlm-roberta-xl, xlnet, xmod"
    ),
    DIFFERS: "cpmant, prophetnet" + ", dory" * NEW,
    "are not in its files": "emu3",
    "its parts are no stack of layers": "blt",
}
REFUSED = {name: words for words, names in _REFUSED.items() for name in names.split(", ")}
"""Architecture -> words of its refusal."""
_NO_CACHE = (
    "bart, bigbird_pegasus, blenderbot, blenderbot-small, marian, mbart, mvp, pegasus, plbart, trocr, "
    "deepseek_v4, falcon_mamba, git, llama4, llama4_text, mamba, mamba2, minimax, minimax_m3_vl_text, moshi, "
    "nemotron_h, openai-gpt, qwen4_exp, qwen4_exp_text, recurrent_gemma, reformer, rwkv, whisper, xlstm"
)
NO_CACHE = frozenset(_NO_CACHE.split(", ")) - ({"mamba2", "qwen4_exp", "qwen4_exp_text"} if NEW else set())
"""Served by whole rows: their cache does not bear rows that leave or padding on the left, or they have none."""
PARTLY: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ["laguna", *["inkling2_loop_text", "inkling2_text"] * NEW], ("adapter", "this peft cannot load what it saves")
    ),
    "reformer": ("update", "the trainer cannot compute with this model"),
}
"""Architecture -> the first way that is refused, and words of it."""
