"""The config of a model before it is built: no noise in its forwards, an attention that computes all of it.

Refuses what no causal language model of transformers can be trained from. Used by `load`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmrl.config import ModelConfig
from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

NOISE = re.compile("drop|jitter|noise")
"""In the name of a number of a config: noise of the forwards in training."""
READ_ALWAYS = (("phimoe", "router_jitter_noise"),)
"""Model and number with such a name that its forwards read in evaluation too: how near experts count as equal."""
CAP = re.compile("att.*cap")
"""In the name of a number: a cap of attention's logits, which SDPA passes over without a word."""
NOT_CAUSAL_BY_SDPA = ("doge",)
"""Models whose mask of their own is dropped by transformers' SDPA, so that tokens see those after them."""
BOTH_WAYS = (
    ("is_decoder", False),
    ("is_causal", False),
    ("causal", False),
    ("attn_type", "bi"),
    ("use_bidirectional_attention", True),
    ("use_bidirectional_attention", "all"),
)
"""Values of a config with which a token sees those after it too."""
ALWAYS_CAUSAL = ("gpt_neox", "gpt_neox_japanese")
"""Models that pass over `is_decoder`."""


COMPUTED_BACK = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Kinds of quantised weights that are plain numbers again once they are loaded, and transformers' class of each."""


def quantised_by(config: PreTrainedConfig) -> str:
    """Return the method by which a model's weights are quantised, and how far; empty for plain weights."""
    found: Mapping[str, object] = getattr(config, "quantization_config", None) or {}
    if not found:
        return ""
    bits = found.get("bits") or (4 if found.get("load_in_4bit") else None)
    return f"{found.get('quant_method') or 'by an unnamed method'}{f', {bits} bits' if bits else ''}"


def computed_back(config: PreTrainedConfig) -> dict[str, object]:
    """Return the option with which transformers loads quantised weights as plain ones; none for plain ones."""
    import transformers

    name = COMPUTED_BACK.get(quantised_by(config))
    return {} if name is None else {"quantization_config": getattr(transformers, name)(dequantize=True)}


def refuse_config(config: PreTrainedConfig, path: str) -> None:
    """Refuse what a config alone shows to be no causal language model, or none that can be trained.

    Raises:
        ConfigError: quantised weights, an encoder, an encoder-decoder, or a class that transformers does not have.
    """
    from transformers import AutoModelForCausalLM

    kind = f"model.path: '{path}' is a model of the kind {config.model_type}"
    if (method := quantised_by(config)) and method not in COMPUTED_BACK:
        raise ConfigError(
            f"model.path: the weights of '{path}' are quantised ({method}), and mmrl trains and samples in bfloat16 or "
            f"float32; expected the model that they were made from, or one of {', '.join(COMPUTED_BACK)}"
        )
    if config.is_encoder_decoder:
        raise ConfigError(f"{kind}, an encoder with a decoder; expected a causal language model")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{kind}, of which transformers has no causal language model")
    text = config.get_text_config()
    if missing := [name for name in ("hidden_size", "num_hidden_layers") if not hasattr(text, name)]:
        raise ConfigError(f"{kind}, whose config has no {' and no '.join(missing)}: its parts are no stack of layers")
    if text.model_type in ALWAYS_CAUSAL:
        return
    for name, value in BOTH_WAYS:
        if getattr(text, name, None) == value:
            raise ConfigError(
                f"{kind}, with {name}={str(value).lower()} in its config.json: its tokens see those after them, so it "
                "cannot generate token by token; expected a causal language model"
            )


def switch_noise_off(config: PreTrainedConfig) -> None:
    """Set every dropout and jitter of a config to 0, in place, before a model copies them.

    The loss's ratio compares log-probabilities of one policy, so forwards are deterministic.
    """
    for name, value in vars(config).items():
        if hasattr(value, "get_text_config"):
            switch_noise_off(value)
        # A whole number too: JSON writes 1.0 as 1. A truth value says where, not how much.
        elif type(value) in (float, int) and NOISE.search(name) and (config.model_type, name) not in READ_ALWAYS:
            setattr(config, name, type(value)(0))


def keep_still(model: PreTrainedModel) -> None:
    """Switch off the noise of a built model that no number of its config stands for."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif any(hasattr(module, name) for _, name in READ_ALWAYS):
            # It draws experts at random in training: in evaluation mode it takes the likeliest, as the sampler does.
            module.register_forward_pre_hook(lambda router, _: router.eval() and None)


def make_savable(generation: GenerationConfig) -> None:
    """Change what transformers loads of a generation config and refuses to save, as a temperature without `do_sample`.

    mmrl samples by the config of the run, and reads the ends of a turn alone.
    """
    found = _unsavable(generation)
    if found and generation.do_sample is None:
        generation.do_sample = True
        if _unsavable(generation) == found:  # none of them is of sampling
            generation.do_sample = None
    for name in _unsavable(generation):
        setattr(generation, name, None)


def _unsavable(generation: GenerationConfig) -> list[str]:
    """Return the names of the values that a generation config is not saved with."""
    try:
        generation.validate(strict=True)
    except ValueError as error:  # a line for each
        return re.findall(r"^- `(\w+)`: ", str(error), re.MULTILINE)
    return []


def _cap(config: PreTrainedConfig) -> str | None:
    """Return the name of a cap of attention's logits that a config sets."""
    numbers = {n: v for n, v in vars(config.get_text_config()).items() if isinstance(v, int | float) and v > 0}
    return next(filter(CAP.search, numbers), None)


def exact_by_sdpa(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> bool:
    """Return True if transformers' SDPA computes all of the attention of a class with this config."""
    return bool(kind._supports_sdpa) and _cap(config) is None and config.model_type not in NOT_CAUSAL_BY_SDPA


def attention_fault(attention: str, dtype: str) -> str:
    """Return why no model computes with a value of `model.attention` here, in words; empty: its class decides."""
    if attention not in ("flash_attention_2", "flash_attention_3"):
        return ""
    from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

    available = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    if not available[attention]():
        return f"whose package ({attention.replace('attention', 'attn')}) is not installed here, or finds no GPU"
    return "which computes in 16 bits alone, and model.dtype=float32" if dtype == "float32" else ""


def matmul_fault(matmul: str, dtype: str, device: str) -> str:
    """Return why weights cannot be multiplied by a value of `model.matmul`, in words; empty: they can."""
    if matmul != "onednn" or (dtype in ("auto", "float32") and device != "cuda"):
        return ""
    other = f"hardware.device={device}" if device == "cuda" else f"model.dtype={dtype}"
    return f"which computes float32 on a CPU, beside {other}"


def choose_attention(config: PreTrainedConfig, kind: type[PreTrainedModel], model: ModelConfig) -> str:
    """Return the attention that a class computes all of a config with, or the one that the user wants.

    Args:
        kind: the class that the config's model is of.

    Raises:
        ConfigError: one that the class does not have, or that passes over a part of the config.
    """
    capped = _cap(config)
    wanted = model.attention
    if wanted == "auto":
        return "sdpa" if exact_by_sdpa(config, kind) else "eager"
    has = {"eager": True, "sdpa": kind._supports_sdpa}
    fault = "" if has.get(wanted, kind._supports_flash_attn) else f"which {kind.__name__} does not have"
    if wanted == "sdpa" and capped is not None:
        fault = f"which passes over {capped} of {kind.__name__}"
    if fault := fault or attention_fault(wanted, model.dtype):
        raise ConfigError(f"model.attention: got {wanted}, {fault}; expected auto, or another one")
    return wanted
