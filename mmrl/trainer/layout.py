"""How the update lays out its tokens: prefix tries where the model can share them, else padded rows, aloud.

Part of `trainer`; between the config and `packing`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from mmrl.errors import ConfigError
from mmrl.trainer import tree_attention

LOG = logging.getLogger("mmrl.trainer")

CPU_TOKENS = 4096
"""Most tokens per pack on a CPU: more were not faster, and activations are most of its memory."""
GPU_TOKENS = 65536
LEAST_TOKENS = 512
CPU_SHARE, GPU_SHARE = 0.125, 0.4
"""Share of the device's memory that activations may take."""


def choose_packing(wanted: str, model: Any) -> bool:
    """Whether packs are tries, for `train.packing` = auto | trie | padded; sets the model's attention accordingly.

    Raises:
        ConfigError: tries were asked for and the model's layers cannot share.
    """
    if wanted == "padded":
        return False
    reason = tree_attention.why_not(model)
    if reason is None:
        tree_attention.prepare(model)
        return True
    if wanted == "trie":
        raise ConfigError(f"train.packing: got 'trie', which this model cannot do: {reason}; use auto or padded")
    LOG.warning("train.packing=auto: rows are padded (slower), since %s", reason)
    return False


def token_budget(wanted: int | None, model: Any, checkpointing: bool) -> int:
    """Tokens per pack: `train.microbatch_tokens`, or what the device's whole memory allows.

    Whole, not free: a resumed run must pack as it did before.
    """
    if wanted is not None:
        return wanted
    config, size = model.config.get_text_config(), model.dtype.itemsize
    if model.device.type == "cuda":
        memory, most = GPU_SHARE * torch.cuda.get_device_properties(model.device).total_memory, GPU_TOKENS
    else:
        memory, most = CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), CPU_TOKENS
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    # What a decoder layer keeps for its backward pass: about 12 tensors of its own width and 4 of the inner one.
    layer = size * (12 * hidden + 4 * inner)
    per_token = layer + layers * size * hidden if checkpointing else layers * layer
    fitting = int(memory / per_token) // LEAST_TOKENS * LEAST_TOKENS
    return max(LEAST_TOKENS, min(most, fitting))
