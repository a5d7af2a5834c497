"""LoRA adapters: loading a saved one, all of it or not at all; and what a new one is put on.

Used by `load` and by the trainer. peft passes over what does not fit with a warning at most, so it is looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mmrl.config.schema import LoraConfig
from mmrl.errors import ConfigError, reason_of
from mmrl.models.headers import file_weights
from mmrl.models.report import FIRST, quiet

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import nn
    from transformers import PreTrainedModel

FILES = ("adapter_model.safetensors", "adapter_model.bin")
OF_EXPERTS = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}
"""Projection of one expert -> the stacked weights of all experts that it is a part of."""
RENAMED = (*OF_EXPERTS, "down_proj", "gate")
"""Targets that peft takes for the experts' in a mixture of experts, whatever else is called so."""
ROUTERS = ("gate", "router")
NO_DROPOUT = (
    "peft has no dropout before the adapter of experts, so they get none; set model.lora.dropout=0 to train them"
)


# -- a saved adapter ---------------------------------------------------------------------------------------------------


def with_adapters(model: PreTrainedModel, folders: Mapping[str, str]) -> PeftModel:
    """Return `model` with saved adapters, the first one active; on the meta device, only names and shapes count.

    Args:
        folders: name -> folder.

    Raises:
        ConfigError: an adapter of another kind, or one that does not fit the model in all of its weights.
    """
    from peft import get_peft_model

    wrapped: PeftModel | None = None
    for name, folder in folders.items():
        config, what = _saved_config(folder), f"policy: the adapter {folder}"
        try:
            with quiet():
                if wrapped is None:
                    wrapped = cast("PeftModel", get_peft_model(model, config, adapter_name=name))
                else:
                    wrapped.add_adapter(name, config)
                found = wrapped.load_adapter(folder, adapter_name=name, torch_device="cpu")
        except Exception as error:  # of peft, torch and safetensors
            raise ConfigError(f"{what} does not fit {_kind(model)}: {reason_of(error)}") from error
        # peft takes a key for this adapter's where the name is anywhere in it.
        missing = [key for key in found.missing_keys if re.search(rf"\.lora_\w+\.{re.escape(name)}(\.|$)", key)]
        for keys, fault in ((missing, "lacks"), (found.unexpected_keys, "has, beside those that fit,")):
            if keys:
                first = ", ".join(key.removeprefix("base_model.model.") for key in sorted(keys)[:FIRST])
                raise ConfigError(f"{what} {fault} {len(keys)} of the weights of {_kind(model)} ({first})")
    assert wrapped is not None
    return wrapped


def _saved_config(folder: str) -> PeftConfig:
    """Return the config of a saved adapter, whose files were looked at."""
    from peft import LoraConfig, PeftConfig

    try:
        config = PeftConfig.from_pretrained(folder)
    except Exception as error:
        raise ConfigError(f"policy: {folder}/adapter_config.json cannot be read: {reason_of(error)}") from error
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"policy: {folder} is an adapter of the kind {config.peft_type.value}, expected LORA")
    file = next((Path(folder) / name for name in FILES if (Path(folder) / name).exists()), None)
    if file is None:
        raise ConfigError(f"policy: {folder} has no weights of its adapter, expected {FILES[0]}")
    try:
        file_weights(file)
    except ConfigError as error:
        raise ConfigError(f"policy: {error}") from None
    config.inference_mode = True
    return config


def _kind(model: PreTrainedModel) -> str:
    return f"its base, a {type(model).__name__}"


# -- a new adapter -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a new adapter is put on, in peft's words."""

    modules: list[str]
    """Ends of the names of linear layers."""
    parameters: list[str]
    """Ends of the names of other weights: of experts, stacked."""
    excluded: str | None
    """Pattern of layers with such names that get none."""
    described: str
    """The share of the weights that it reaches, and which it leaves out."""
    warning: str
    """What nobody expects to be left out; empty for nothing."""


def targets_of(model: PreTrainedModel, lora: LoraConfig) -> Targets:
    """Find `model.lora.targets` in a model, which may be on the meta device.

    Linear layers and experts of its text part: other parts (of images, sounds) have no gradient here. Routers get none
    but by name: which experts compute a token would differ between sampler and update.

    Raises:
        ConfigError: a name stands for nothing in the model, or for experts, with a dropout that peft does not have.
    """
    linear, experts = _linear_layers(model), _experts(model)
    no_dropout = bool(experts) and lora.dropout > 0
    if lora.everywhere:
        chosen = [name for name in linear if not (experts and _leaf(name) in ROUTERS)]
        stacked = [] if no_dropout else list(experts)
        if no_dropout:
            chosen = [name for name in chosen if _leaf(name) not in RENAMED]
    else:
        chosen = [name for name in linear if any(_ends(name, target) for target in lora.targets)]
        wanted = {target: OF_EXPERTS.get(target, target) for target in lora.targets}
        stacked = [name for name in experts if any(_ends(name, target) for target in wanted.values())]
        _refuse_unknown(model, lora, [*linear, *experts], wanted)
        if no_dropout and (stacked or any(_leaf(name) in RENAMED for name in chosen)):
            raise ConfigError(
                f"model.lora.dropout: got {lora.dropout:g}, and peft has no dropout before the adapter of experts "
                f"({', '.join(dict.fromkeys(map(_leaf, stacked)))}); set it to 0, or leave them out of the targets"
            )
    # In a mixture of experts peft would take these names for the experts' alone.
    by_weight = [name for name in chosen if experts and _leaf(name) in RENAMED]
    chosen = [name for name in chosen if name not in by_weight]
    if lora.everywhere:
        modules = sorted({_leaf(name) for name in chosen})
    else:
        modules = [target for target in lora.targets if any(_ends(name, target) for name in chosen)]
    matched = [name for name, _ in model.named_modules() if any(_ends(name, target) for target in modules)]
    parameters = [*stacked, *(f"{name}.weight" for name in by_weight)]
    return Targets(
        modules=modules,
        parameters=_short(parameters, [name for name, _ in model.named_parameters()]),
        excluded=_pattern([name for name in matched if name not in chosen]),
        described=_describe(model, {*parameters, *(f"{name}.weight" for name in chosen)}),
        warning=NO_DROPOUT if no_dropout and lora.everywhere else "",
    )


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers of the text part by name, whatever its architecture calls them; the head is none."""
    import torch
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    found: dict[str, nn.Module] = {}
    for name, part in _text_modules(model).items():
        # A router of a class of its own gives more than one result, on which no adapter can be put.
        if isinstance(part, torch.nn.Linear | Conv1D) and part is not head and "Router" not in type(part).__name__:
            try:
                _check_lora_target_modules_mamba(LoraConfig(), model, _leaf(name))
            except ValueError:  # a layer whose weight a kernel reads without calling it
                continue
            found[name] = part
    return found


def _experts(model: PreTrainedModel) -> list[str]:
    """Return the names of the experts' stacked weights, (experts, …, …)."""
    return [
        f"{name}.{own}"
        for name, part in _text_modules(model).items()
        if "Expert" in type(part).__name__
        for own, parameter in part.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def _text_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of the part that reads and writes text, with its place in the whole model in their names."""
    decoder = model.get_decoder()
    modules = dict(model.named_modules())
    # Of some classes it is the head.
    inner = decoder is not model.get_output_embeddings()
    prefix = next((name for name, part in modules.items() if part is decoder and inner), "")
    return {name: part for name, part in modules.items() if not prefix or name.startswith(f"{prefix}.")}


def _refuse_unknown(model: PreTrainedModel, lora: LoraConfig, names: Iterable[str], wanted: Mapping[str, str]) -> None:
    """Refuse a target that stands for nothing: peft passes over it as long as another one is there."""
    known = list(names)
    missing = [
        target for target in lora.targets if not any(_ends(name, t) for name in known for t in (target, wanted[target]))
    ]
    if missing:
        raise ConfigError(
            f"model.lora.targets: {type(model).__name__} has no linear layer below its output head called "
            f"{', '.join(missing)}; expected some of {', '.join(dict.fromkeys(map(_leaf, known)))}"
        )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _short(chosen: Collection[str], names: Collection[str]) -> list[str]:
    """Return the ends of names that stand for the chosen ones alone: of two parts, or whole."""
    result = set()
    for name in chosen:
        end = ".".join(name.split(".")[-3 if name.endswith(".weight") else -2 :])
        alone = all(other in chosen for other in names if _ends(other, end))
        result.add(end if alone else name)
    return sorted(result)


def _pattern(names: Collection[str]) -> str | None:
    """Return a pattern for names alone; None without any."""
    # One for all layers of a kind: their numbers do not matter.
    kinds = dict.fromkeys(re.sub(r"(?<=\\.)\d+(?=\\.)", r"\\d+", re.escape(name)) for name in names)
    return "|".join(kinds) or None


def _describe(model: PreTrainedModel, reached: Collection[str]) -> str:
    """Return the share of the weights that an adapter reaches, and the names of the matrices that it leaves out."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    share = sum(size for name, size in sizes.items() if name in reached) / sum(sizes.values())
    rest = [name for name, p in model.named_parameters() if name not in reached and p.ndim > 1]
    kinds = dict.fromkeys(re.sub(r"^(.*\.\d+|model)\.", "", name).removesuffix(".weight") for name in rest)
    left = f"; not {', '.join(kinds)}" if kinds else ""
    return f"reaches {share:.1%} of the weights{left}"
