"""Weights from the trainer's model to a folder that a server can load, and the probe that shows whether it did.

Between a model in this process and the vLLM engines.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.engines.embedded.hf_loop import using

TOLERANCE = 1e-3
HALF_TOLERANCE = 0.3
"""Largest difference of two log-probabilities that rounding explains: float32, and half precision."""


def adapter_names(model: Any, adapters: Iterable[str] | None) -> list[str]:
    """Names of the model's adapters that speak: `adapters`, or the active one; empty without peft."""
    if not hasattr(model, "peft_config"):
        return []
    return sorted(set(adapters)) if adapters is not None else [model.active_adapters[0]]


def save_weights(
    model: Any, names: Sequence[str], folder: Path, state: Mapping[str, Any] | None = None
) -> dict[str, Path]:
    """Write the adapters `names`, or all weights when there are none, below `folder`, atomically.

    Args:
        state: the model's weights by name, where it does not hold them whole itself.

    Returns:
        Adapter name -> its folder; "" -> `folder` for full weights.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    if not names:
        model.save_pretrained(str(temporary), state_dict=state)
        temporary.rename(folder)
        return {"": folder}
    # peft looks on the hub for the base's vocabulary unless it is told that no embedding was trained.
    model.save_pretrained(str(temporary), selected_adapters=list(names), save_embedding_layers=False, state_dict=state)
    temporary.rename(folder)
    return {name: folder if name == "default" else folder / name for name in names}


@torch.no_grad()
def probe_logprobs(model: Any, ids: Sequence[int], adapter: str | None) -> list[float]:
    """log-softmax of each of `ids` but the first, given those before it; length T - 1."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with using(model, adapter):
            device = next(model.parameters()).device
            tokens = torch.tensor([list(ids)], device=device)
            scores = model(input_ids=tokens).logits[0, :-1].float().log_softmax(dim=-1)
        return scores.gather(1, tokens[0, 1:, None]).squeeze(1).tolist()
    finally:
        for module in training:
            module.training = True


def tolerance(model: Any) -> float:
    """How far the server's probe may be from ours."""
    half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters())
    return HALF_TOLERANCE if half else TOLERANCE
