"""LoRA adapters: loading a saved one, all of it or not at all; and what a new one is put on.

Used by `load` and by the trainer. peft passes over what does not fit with a warning at most, so it is looked at here.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mmrl.config.schema import LoraConfig
from mmrl.errors import ConfigError, reason_of
from mmrl.models.headers import file_weights
from mmrl.models.report import FIRST, quiet

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

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
    from peft import get_peft_model, get_peft_model_state_dict

    wrapped: PeftModel | None = None
    for name, folder in folders.items():
        (config, names), what = _saved(folder), f"policy: the adapter {folder}"
        if model.device.type == "meta":  # some beginnings of adapters are computed of the base's numbers
            config.init_lora_weights = True
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
        # Biases of the base, which it does not look for.
        saved = get_peft_model_state_dict(wrapped, adapter_name=name, save_embedding_layers=False)
        missing += [key for key in saved if key.endswith(".bias") and ".lora_" not in key and key not in names]
        for keys, fault in ((missing, "lacks"), (found.unexpected_keys, "has, beside those that fit,")):
            if keys:
                first = ", ".join(key.removeprefix("base_model.model.") for key in sorted(keys)[:FIRST])
                raise ConfigError(f"{what} {fault} {len(keys)} of the weights of {_kind(model)} ({first})")
    assert wrapped is not None
    return wrapped


def _saved(folder: str) -> tuple[PeftLoraConfig, Collection[str]]:
    """Return the config of a saved adapter and the names of its weights."""
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
        names = file_weights(file).keys()
    except ConfigError as error:
        raise ConfigError(f"policy: {error}") from None
    config.inference_mode = True
    return config, names


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

    def peft_config(self, lora: LoraConfig, *, dropout: bool = True) -> PeftLoraConfig:
        """Return peft's config of the new adapter."""
        from peft import LoraConfig as PeftLoraConfig

        return PeftLoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout if dropout else 0.0,
            target_modules=self.modules,
            target_parameters=self.parameters or None,
            exclude_modules=self.excluded,
            task_type="CAUSAL_LM",
        )


def check_new_adapter(model: PreTrainedModel, lora: LoraConfig) -> str:
    """Put a new adapter on `model`, which may be on the meta device and is changed. Returns what is left out, in words.

    Raises:
        ConfigError: as `targets_of`; an adapter that could be trained and saved, and not loaded again.
    """
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    targets, kind = targets_of(model, lora), type(model).__name__
    with quiet():
        wrapped = get_peft_model(model, targets.peft_config(lora))
        # Of some architectures peft renames weights as it loads them, to names that are not there.
        found: Any = set_peft_model_state_dict(wrapped, get_peft_model_state_dict(wrapped))
    if strange := found.unexpected_keys:
        raise ConfigError(
            f"model.lora.targets: this peft cannot load what it saves of {kind} ({', '.join(strange[:FIRST])}, …); "
            "leave these layers out of the targets"
        )
    return targets.warning


def targets_of(model: PreTrainedModel, lora: LoraConfig) -> Targets:
    """Find `model.lora.targets` in a model, which may be on the meta device.

    Linear layers and experts of its text part: other parts (of images, sounds) have no gradient here. Routers get none
    but by name: which experts compute a token would differ between sampler and update.

    Raises:
        ConfigError: a name stands for nothing in the model, or for experts, with a dropout that peft does not have.
    """
    linear, experts = _linear_layers(model), experts_of(model)
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


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the linear layers of the text part that an adapter can be put on, by name; the head is none.

    An adapter works where its layer is called. So none of a layer whose weight is also read without a call, of two that
    share a weight, and of one that computes something else than a product.
    """
    import torch
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from transformers.pytorch_utils import Conv1D

    head, modules = model.get_output_embeddings(), _text_modules(model)
    linear = {name: part for name, part in modules.items() if isinstance(part, torch.nn.Linear | Conv1D)}
    places = Counter(id(part.weight) for part in linear.values())
    found = []
    for name, part in linear.items():
        # A router of a class of its own gives more than one result, on which no adapter can be put.
        if part is head or "Router" in type(part).__name__ or places[id(part.weight)] > 1 or not _is_product(part):
            continue
        if _leaf(name) in _read_weights(type(modules.get(name.rpartition(".")[0], model)).__mro__):
            continue
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, _leaf(name))
        except ValueError:  # a layer whose weight a kernel reads without calling it
            continue
        found.append(name)
    return found


def _is_product(layer: nn.Linear | Conv1D) -> bool:
    """Return whether a layer's result has the shape of a matrix product: one of a class of its own may be another."""
    import torch
    from transformers.pytorch_utils import Conv1D

    weights = {name: torch.empty_like(weight, device="meta") for name, weight in layer.named_parameters()}
    width_in, width_out = weights["weight"].shape if isinstance(layer, Conv1D) else weights["weight"].shape[::-1]
    try:
        result = torch.func.functional_call(layer, weights, torch.empty(5, width_in, device="meta"))
    except (RuntimeError, IndexError):  # of another number of dimensions
        return False
    return bool(result.shape == (5, width_out))


@cache
def _read_weights(classes: tuple[type, ...]) -> frozenset[str]:
    """Return the layers whose weight the code of a class and its bases reads itself (in a kernel, clamped), by name."""
    # A look at its type is none, nor a slice: with those Bloom computes what its calls do, bit for bit as in training.
    code = "".join(inspect.getsource(part) for part in classes if part.__module__.startswith("transformers.models"))
    return frozenset(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)|\[)", code))


def experts_of(model: PreTrainedModel) -> list[str]:
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
            f"model.lora.targets: an adapter can be put on no layer of {type(model).__name__} called "
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
