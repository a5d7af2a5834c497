"""What transformers says after loading weights: a weight that is not there is made at random, and nothing stops.

`judge` decides which of it is an error. Used by `load`, for the names in the files' headers (before a run directory is
made) and for the weights themselves.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

WRAPPERS = {
    "._orig_mod": "torch.compile",
    "._fsdp_wrapped_module": "FSDP",
    "._checkpoint_wrapped_module": "gradient checkpointing",
    ".module": "DDP or DeepSpeed",
    ".base_model.model": "peft",
    ".base_layer": "peft",
}
"""Parts of names that a wrapper adds, where a model is saved without taking it out of it."""
FIRST = 3
"""Names that a sentence gives."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' and peft's reports and bars of loading off the terminal: they are judged instead."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), without_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the bars of tensors that are loaded and of shards that are saved, which would tear the run's own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def judge(report: Mapping[str, Any], model: PreTrainedModel) -> tuple[str, str]:
    """Return what is wrong with loaded weights, and what is worth a line; empty for nothing.

    Args:
        report: transformers' `loading_info`: missing keys, less those that are tied or may be missing, and so on.
        model: what it was loaded into.
    """
    kind = type(model).__name__
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing:
        others = f"; these have {_named(unexpected, 'other')}" if unexpected else ""
        return f"{_named(missing, 'weight')} of {kind} {_are(missing)} not in its files and would be random{others}", ""
    if shapes := sorted(report["mismatched_keys"]):
        name, saved, wanted = shapes[0]
        others = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
        return f"{name} is {_size(saved)} in its files and {_size(wanted)} by config.json{others}", ""
    if report["error_msgs"]:
        return str(report["error_msgs"][0]), ""
    if not unexpected:
        return "", ""
    own = {_pattern(name) for name in model.state_dict()}
    beyond = [name for name in unexpected if _pattern(name) in own and not _predicts_further(name, model)]
    if beyond:
        return f"{_named(beyond, 'weight')} {_are(beyond)} of layers that config.json leaves out", ""
    if absent := [name for name in unexpected if _switched_off(name, model)]:
        return f"{_named(absent, 'weight')} {_are(absent)} of a part that config.json switches off", ""
    if strange := [name for name in unexpected if _inside_layers(name, model)]:
        return (
            f"{_named(strange, 'weight')} {_are(strange)} of parts that the layers of {kind} do not have; an adapter "
            "that was not merged, or another model_type?"
        ), ""
    return "", f"{kind} has no place for {_named(unexpected, 'of its weights', _groups(unexpected))}; left out"


def without_wrapper(names: Iterable[str]) -> tuple[list[str], Mapping[str, str]]:
    """Return the parts of names that wrappers have added, and each name without them."""
    found = [part for part in WRAPPERS if any(f"{part}." in f".{name}" for name in names)]
    parts = re.compile("|".join(re.escape(part) + r"(?=\.)" for part in found) or "(?!)")
    return found, {name: parts.sub("", f".{name}").removeprefix(".") for name in names}


def saved_inside(parts: Sequence[str]) -> str:
    """Return the sentence for weights whose names the parts of wrappers keep from being found."""
    names = [f"{part[1:]}." for part in parts]
    rename = "".join(f".replace('{name}', '')" for name in names)
    renamed = f"save_file({{n{rename}: w for n, w in load_file(FILE).items()}}, FILE, {{'format': 'pt'}})"
    instead = f"the model inside of it, or rename them (safetensors.torch): {renamed}"
    if any(WRAPPERS[part] == "peft" for part in parts):
        instead = "what merge_and_unload() returns, or give the adapter's own folder (policy=)"
    wrappers = " and ".join(dict.fromkeys(WRAPPERS[part] for part in parts))
    written = " and ".join(f"'{name}'" for name in names)
    return f"they were saved inside the wrapper of {wrappers}, with {written} in their names; save {instead}"


def quantised(weights: Mapping[str, Tensor], model: PreTrainedModel, scaled: bool) -> str:
    """Return the sentence for weights of a few bits, which a model would read as numbers; empty without any.

    Args:
        weights: those of the files, by name.
        scaled: those with a scale beside them are computed back.
    """
    own, prefix = dict(model.named_parameters()), f"{model.base_model_prefix}."
    names = [
        name
        for name, weight in weights.items()
        if (weight.dtype.itemsize == 1 or not weight.dtype.is_floating_point)
        and any(known in own for known in (name, prefix + name, name.removeprefix(prefix)))
        and not (scaled and any(f"{name}_{scale}" in weights for scale in ("scale_inv", "scale")))
    ]
    if not names:
        return ""
    kind = str(weights[names[0]].dtype).removeprefix("torch.")
    fault = "without a scale" if scaled else "and config.json says nothing of it"
    return f"{_named(names, 'weight')} {_are(names)} quantised ({kind}) {fault}; take the original"


def _pattern(name: str) -> str:
    """Return a name without its numbers, the same for all layers of a kind."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _predicts_further(name: str, model: PreTrainedModel) -> bool:
    """True for the layers behind the last one that predict tokens further ahead, which no generation needs."""
    config = model.config.get_text_config()
    layers, further = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return any(layers <= int(number) < layers + further for number in re.findall(r"(?<=\.)\d+(?=\.)", name))


def _switched_off(name: str, model: PreTrainedModel) -> bool:
    """True for the bias of a layer that is there and has none, and the like."""
    parent, _, leaf = name.rpartition(".")
    try:
        return getattr(model.get_submodule(parent), leaf, model) is None
    except AttributeError:
        return False


def _inside_layers(name: str, model: PreTrainedModel) -> bool:
    """True for the weight of a part that a part of one of the model's layers lacks: they were trained with it."""
    part, adapted, _ = name.partition(".lora_")
    if not adapted:
        if not name.endswith(".weight"):  # buffers and scales are no parts
            return False
        part = part.rpartition(".")[0].rpartition(".")[0]
    try:
        return re.search(r"\.\d+(\.|$)", part) is not None and model.get_submodule(part) is not None
    except AttributeError:
        return False


def _groups(names: Iterable[str]) -> list[str]:
    counts = Counter(name.partition(".")[0] if not name.startswith("model.") else _pattern(name) for name in names)
    return [f"{group} ({count})" if count > 1 else group for group, count in counts.items()]


def _named(names: Collection[str], what: str, shown: list[str] | None = None) -> str:
    """Return a number of names, and the first of them."""
    shown = list(names) if shown is None else shown
    first = ", ".join(shown[:FIRST]) + (", …" if len(shown) > FIRST else "")
    plural = what if len(names) == 1 or " " in what else f"{what}s"
    return f"{len(names)} {plural} ({first})"


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _size(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a number"
