"""The self-check of packed tries: on the first real batch, a few calls packed and padded must agree.

Part of `trainer`; `trl_trainer` runs it once per process, before anything is trained on tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from accelerate.utils import DistributedType

from mmrl.engines.embedded.batch_rows import HALF_TOLERANCE, TOLERANCE, difference
from mmrl.engines.embedded.prefixes import common_prefix
from mmrl.errors import MmrlError
from mmrl.trainer.forwards import Forwards, module_names
from mmrl.trainer.objective import TrainCall, active
from mmrl.trainer.packing import Pack

SAMPLE_TOKENS = 1024
"""Tokens of the compared calls, all together (or two calls)."""
GRADIENT_NUMBERS = 2**26
"""Numbers of the compared gradients."""
# By the type that is computed in. Packed and padded forwards sum in another order, so they agree up to rounding only;
# a token that sees too much or too little is off by far more than these.
EXACT, FULL, HALF = (1e-6, 1 - 1e-6), (TOLERANCE, 0.999), (HALF_TOLERANCE, 0.95)
"""Difference of log-probabilities (in half precision the mean, else the largest) and least cosine of two gradients:
float64, float32, half precision."""


def check_tries(forwards: Forwards, calls: Sequence[TrainCall]) -> bool:
    """Compare log-probabilities and gradients of a few of `calls`; False where none of them would be trained.

    Raises:
        MmrlError: they differ.
    """
    trained = [train for train in calls if any(active(entry, forwards.settings.beta) for entry in train.entries)]
    compared = calls_to_compare(trained)
    if forwards.adapters is not None and compared:
        # One adapter: otherwise a difference of weights would pass for one of packing.
        adapter = forwards.adapters.by_module
        compared = [train for train in compared if adapter[train.call.module] == adapter[compared[0].call.module]]
    if not compared:
        return False
    modules = module_names([train.call for train in compared])
    packs = [forwards.make_packs(compared, modules, score_all=True, tries=tries) for tries in (True, False)]
    # Sharded gradients are not whole on any process, so only log-probabilities are compared there.
    sharded = forwards.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    (logprobs, gradient), (padded, padded_gradient) = (
        _measure(forwards, group, gradients=not sharded) for group in packs
    )
    half = forwards.policy.dtype in (torch.bfloat16, torch.float16) or forwards.accelerator.mixed_precision == "bf16"
    allowed, least = HALF if half else EXACT if forwards.policy.dtype == torch.float64 else FULL
    both = [torch.cat([side[name] for name in padded]).tolist() for side in (logprobs, padded)]
    gap = difference(*both, half=half)
    cosine = _cosine(gradient, padded_gradient)
    if not gap <= allowed or not cosine >= least:
        raise MmrlError(
            f"train.packing: on the first batch, packed and padded log-probabilities differ by {gap:.2g} "
            f"(expected at most {allowed:.2g}), the cosine of their gradients is {cosine:.6f} (expected at least "
            f"{least:.6f}); this model's layers cannot share prefixes: use train.packing=padded"
        )
    return True


def calls_to_compare(calls: Sequence[TrainCall]) -> list[TrainCall]:
    """Select a few calls with long shared prefixes: neighbours in lexicographic order around the longest one."""
    sampled = [train for train in calls if train.call.completion_ids]
    ordered = sorted(sampled, key=lambda train: (_ids(train), train.call.id))
    if len(ordered) < 2:
        return ordered
    shared = [common_prefix(_ids(train), _ids(following)) for train, following in pairwise(ordered)]
    fitting = [n for n, train in enumerate(ordered[:-1]) if len(_ids(train) + _ids(ordered[n + 1])) <= SAMPLE_TOKENS]
    first = max(fitting or range(len(shared)), key=lambda n: (shared[n], -n))
    compared, tokens = ordered[first : first + 2], len(_ids(ordered[first]) + _ids(ordered[first + 1]))
    for train in ordered[first + 2 :]:
        tokens += len(_ids(train))
        if tokens > SAMPLE_TOKENS:
            break
        compared.append(train)
    return compared


def _ids(train: TrainCall) -> tuple[int, ...]:
    return train.call.prompt_ids + train.call.completion_ids


def _measure(
    forwards: Forwards, packs: Sequence[Pack], *, gradients: bool
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return log-probabilities by call, and the gradient of a sum in which every token has another weight."""
    model = forwards.policy if gradients else forwards.wrapped
    model.eval()
    logprobs: dict[str, torch.Tensor] = {}
    total: list[torch.Tensor] = []
    for pack in packs:
        forwards.use_adapter(pack.to(forwards.device))
        with torch.set_grad_enabled(gradients), forwards.autocast():
            numbers = forwards.score(model, pack).logprobs  # (N,)
            parts = numbers.split([len(train.call.completion_ids) for train in pack.calls])
            logprobs |= {train.call.id: part.detach() for train, part in zip(pack.calls, parts, strict=True)}
            if gradients:
                # Rising weights: with equal ones, tokens that are swapped would cancel out.
                weights = [torch.linspace(1, 2, len(part)).to(part) / len(part) for part in parts]
                terms = [(weight * part).sum() for weight, part in zip(weights, parts, strict=True)]
                grads = torch.autograd.grad(torch.stack(terms).sum(), _compared(model), allow_unused=True)
                dense = [torch.zeros(()) if gradient is None else gradient.detach() for gradient in grads]
                total = dense if not total else [a + b for a, b in zip(total, dense, strict=True)]
    return logprobs, total


def _compared(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return trained parameters, as many from the front as `GRADIENT_NUMBERS` allow."""
    parameters, numbers = [], 0
    for parameter in model.parameters():
        if parameter.requires_grad and numbers + parameter.numel() <= GRADIENT_NUMBERS:
            parameters.append(parameter)
            numbers += parameter.numel()
    return parameters


def _cosine(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """Return the cosine of two gradients, all parameters together; 1 where both are zero or none was computed."""
    product = sum(float((a.double() * b.double()).sum()) for a, b in zip(first, second, strict=True))
    sizes = [sum(float(gradient.double().square().sum()) for gradient in side) for side in (first, second)]
    if not any(sizes):
        return 1.0
    return product / (sizes[0] * sizes[1]) ** 0.5 if all(sizes) else 0.0
