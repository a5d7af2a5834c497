"""Log-probabilities of scored tokens under a causal language model, logits computed nowhere else.

Part of `trainer`. The model's own forward is run, wrapper and head included (tied heads, biases, adapters, soft caps,
logit scales), so any Hugging Face causal LM works; only the rows that reach its head are chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.errors import MmrlError
from mmrl.trainer.packing import Pack

ENTROPY_CHUNK = 512
"""Positions whose entropy is computed at once; it needs a second float32 copy of their logits."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of N scored positions, in the order of `Pack.positions`."""

    logprobs: torch.Tensor
    """(N,), with gradient if enabled."""
    entropy: torch.Tensor | None
    """(N,) nats per token of the distribution at the sampling temperature; None unless asked for."""
    hidden: torch.Tensor
    """(N, H) what the head saw, detached."""


def score(
    model: torch.nn.Module, head: torch.nn.Module, pack: Pack, temperature: float, *, entropy: bool = False
) -> Scores:
    """log-softmax(logits / temperature) of the pack's targets, over the full vocabulary.

    Args:
        model: called as `model(input_ids=..., use_cache=False)`; may be wrapped (DDP, FSDP, peft).
        head: the module inside `model` that turns hidden states into logits (`get_output_embeddings()`).
        temperature: of sampling; > 0.
    """
    with _only(head, pack.positions) as seen:
        logits = model(input_ids=pack.input_ids, use_cache=False).logits
    if logits.numel() != pack.positions.numel() * logits.shape[-1]:
        raise MmrlError(
            f"model.path: {type(model).__name__} computes its logits outside its output head, "
            "so the trainer cannot choose the positions; expected a standard causal language model"
        )
    logits = logits.reshape(-1, logits.shape[-1])
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    # Not log_softmax: that keeps a second (N, V) tensor for the backward pass.
    total = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, pack.targets[:, None])[:, 0] - total
    return Scores(logprobs, _entropy(logits.detach(), total.detach()) if entropy else None, seen[0])


@contextmanager
def _only(head: torch.nn.Module, positions: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Inside, `head` sees just the hidden states at `positions` of the flattened (R, W) grid; yields them in a list."""
    seen: list[torch.Tensor] = []

    def select(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = args[0].reshape(-1, args[0].shape[-1])[positions]
        seen.append(hidden.detach())
        return (hidden[None], *args[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def _entropy(logits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    chunks = zip(logits.split(ENTROPY_CHUNK), total.split(ENTROPY_CHUNK), strict=True)
    return torch.cat([norm - (torch.softmax(part, dim=-1) * part).sum(-1) for part, norm in chunks])
