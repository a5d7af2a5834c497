"""The self-check of packed tries: on the first real batch, a few calls packed and padded must agree.

Part of `trainer`; `trl_trainer` runs it once per process, before anything is trained on tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from accelerate.utils import DistributedType

from mmrl.errors import MmrlError
from mmrl.trainer.forwards import Forwards
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.packing import Pack

SAMPLE_TOKENS = 1024
"""Tokens of the compared calls, all together (or two calls)."""
GRADIENT_NUMBERS = 2**26
"""Numbers of the compared gradients."""
LOGPROB_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
COSINE = {torch.float64: 1 - 1e-6, torch.float32: 0.999}
HALF_LOGPROB_TOLERANCE, HALF_COSINE = 0.3, 0.95
"""In half precision; elsewhere a difference of rounding is orders of magnitude below these."""


def compare(trainer: Forwards, calls: Sequence[TrainCall]) -> bool:
    """Compare log-probabilities and gradients of a few of `calls`; False where none of them would be trained.

    Raises:
        MmrlError: they differ.
    """
    chosen = sample([call for call in calls if any(entry.active(trainer.settings.beta) for entry in call.entries)])
    if trainer.adapters is not None and chosen:
        chosen = [call for call in chosen if trainer.adapters.adapter(call) == trainer.adapters.adapter(chosen[0])]
    if not chosen:
        return False
    modules = list(dict.fromkeys(call.module for call in chosen))
    packs = [trainer._make_packs(chosen, modules, score_all=True, tries=tries) for tries in (True, False)]
    sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    (logprobs, gradient), (padded, padded_gradient) = (_measure(trainer, one, gradients=not sharded) for one in packs)
    kind = torch.float64 if trainer.policy.dtype == torch.float64 else torch.float32
    half = trainer.policy.dtype in (torch.bfloat16, torch.float16) or trainer.accelerator.mixed_precision == "bf16"
    allowed = HALF_LOGPROB_TOLERANCE if half else LOGPROB_TOLERANCE[kind]
    difference = max(float((logprobs[name] - padded[name]).abs().max()) for name in padded)
    cosine, least = _cosine(gradient, padded_gradient), HALF_COSINE if half else COSINE[kind]
    if not difference <= allowed or not cosine >= least:
        raise MmrlError(
            f"train.packing: on the first batch, packed and padded log-probabilities differ by {difference:.2g} "
            f"(expected at most {allowed:.2g}), the cosine of their gradients is {cosine:.6f} (expected at least "
            f"{least:.6f}); this model's layers cannot share prefixes: use train.packing=padded"
        )
    return True


def sample(calls: Sequence[TrainCall]) -> list[TrainCall]:
    """A few calls that share what they can: neighbours in lexicographic order around the longest shared prefix."""
    ordered = sorted((call for call in calls if call.completion_ids), key=lambda call: (_ids(call), call.id))
    if len(ordered) < 2:
        return ordered
    shared = [_shared(_ids(left), _ids(right)) for left, right in pairwise(ordered)]
    fitting = [n for n, call in enumerate(ordered[:-1]) if len(_ids(call) + _ids(ordered[n + 1])) <= SAMPLE_TOKENS]
    at = max(fitting or range(len(shared)), key=lambda n: (shared[n], -n))
    chosen, tokens = ordered[at : at + 2], len(_ids(ordered[at]) + _ids(ordered[at + 1]))
    for call in ordered[at + 2 :]:
        tokens += len(_ids(call))
        if tokens > SAMPLE_TOKENS:
            break
        chosen.append(call)
    return chosen


def _ids(call: TrainCall) -> tuple[int, ...]:
    return call.prompt_ids + call.completion_ids


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _measure(
    trainer: Forwards, packs: Sequence[Pack], *, gradients: bool
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities by call, and the gradient of a sum in which every token has another weight."""
    model = trainer.policy if gradients else trainer.model_wrapped
    model.eval()
    found: dict[str, torch.Tensor] = {}
    total: list[torch.Tensor] = []
    for pack in packs:
        pack.to(trainer.args.device)
        context = torch.enable_grad() if gradients else torch.no_grad()
        with context, trainer._with_adapter(pack), trainer.compute_loss_context_manager():
            numbers = trainer._score(model, pack).logprobs
            parts = numbers.split([len(call.completion_ids) for call in pack.calls])
            found |= {call.id: part.detach() for call, part in zip(pack.calls, parts, strict=True)}
            if gradients:
                weights = [torch.linspace(1, 2, len(part)).to(part) / len(part) for part in parts]
                loss = sum((weight * part).sum() for weight, part in zip(weights, parts, strict=True))
                made = torch.autograd.grad(loss, _compared(model), allow_unused=True)
                kept = [torch.zeros(()) if one is None else one.detach() for one in made]
                total = kept if not total else [a + b for a, b in zip(total, kept, strict=True)]
    return found, total


def _compared(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Trained parameters, as many from the front as `GRADIENT_NUMBERS` allow."""
    found, numbers = [], 0
    for parameter in model.parameters():
        if parameter.requires_grad and numbers + parameter.numel() <= GRADIENT_NUMBERS:
            found.append(parameter)
            numbers += parameter.numel()
    return found


def _cosine(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Of two gradients, all parameters together; 1 where both are zero or none was asked for."""
    product = sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right, strict=True))
    sizes = [sum(float(one.double().square().sum()) for one in side) for side in (left, right)]
    if not any(sizes):
        return 1.0
    return product / (sizes[0] * sizes[1]) ** 0.5 if all(sizes) else 0.0
