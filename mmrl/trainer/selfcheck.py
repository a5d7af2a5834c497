"""The trainer's part of the self-check: rows padded, packed and in training mode against each row alone.

Part of `trainer`; `trl_trainer` runs it once on made-up rows when it is built, and once on a few calls of the first
batch, before anything is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from mmrl.engines.embedded.batch_rows import HALF_TOLERANCE, TOLERANCE, difference
from mmrl.engines.embedded.prefixes import common_prefix
from mmrl.errors import ConfigError, MmrlError
from mmrl.models.selfcheck import (
    FLOOR,
    LEAST_TOKENS,
    Rows,
    Way,
    check_rows,
    drawn_adapters,
    evaluating,
    plain_logprobs,
    rounding_noise,
)
from mmrl.trainer.forwards import Forwards, module_names
from mmrl.trainer.objective import TrainCall, active
from mmrl.trainer.packing import Pack
from mmrl.trainer.sharding import shares_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PADDED, PACKED = "padded rows", "packed tries"
SAMPLE_TOKENS = 1024
"""Tokens of the compared calls, all together (or two calls)."""
GRADIENT_NUMBERS = 2**26
"""Numbers of the compared gradients."""
# By the type that is computed in. Packed and padded forwards sum in another order, so they agree up to rounding only;
# a token that sees too much or too little is off by far more than these.
EXACT, FULL, HALF = (1e-6, 1 - 1e-6), (TOLERANCE, 0.999), (HALF_TOLERANCE, 0.95)
"""Difference of log-probabilities (in half precision the mean, else the largest) and least cosine of two gradients:
float64, float32, half precision."""


def check_at_load(forwards: Forwards, tokenizer: PreTrainedTokenizerBase) -> list[Way]:
    """Compare padded rows, packed tries and training mode with the model's plain forward of each of two short rows.

    Returns:
        The ways that the trainer will take.

    Raises:
        ConfigError: one of them differs.
    """
    model, half = forwards.policy, _is_half(forwards)
    settings = model.config.get_text_config()
    limit = getattr(settings, "max_position_embeddings", None)
    rows = check_rows(tokenizer, settings.vocab_size, limit, half=half)
    module = next(iter(forwards.adapters.by_module)) if forwards.adapters is not None else ""
    calls = [TrainCall(call=row.call(number, module)) for number, row in enumerate(rows)]
    try:
        with drawn_adapters(model), evaluating(model):
            forwards.use_adapter(forwards.make_packs(calls[:1], [module], score_all=True)[0])

            def plain() -> Rows:
                with forwards.autocast():
                    return plain_logprobs(model, rows, forwards.settings.algo.temperature)

            if not all(math.isfinite(number) for row in plain() for number in row):
                raise ConfigError(
                    "model.path: log-probabilities of a short text are no finite numbers; are the weights?"
                )
            return _compare(forwards, calls, plain)[0]
    except MmrlError:
        raise
    except Exception as error:  # whatever the code of an architecture raises on rows that it is not made for
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        raise ConfigError(f"model.path: the trainer cannot compute with this model: {reason}") from error


def check_batch(forwards: Forwards, calls: Sequence[TrainCall]) -> float | None:
    """Compare a few of the first batch's `calls`, padded, packed and in training mode, with each call alone.

    Returns:
        What rounding alone makes of them (`rounding_noise`); None where nothing would be trained.

    Raises:
        ConfigError: they differ.
        MmrlError: packed and padded gradients differ.
    """
    compared = _compared_calls(forwards, calls)
    if not compared:
        return None
    draw = not shares_weights(forwards.accelerator)
    with drawn_adapters(forwards.policy, draw=draw), evaluating(forwards.policy):
        # Sharded weights are gathered by every process in each forward, so all of them make the same ones.
        _, noise = _compare(
            forwards, compared, lambda: [_scored(forwards, [train], tries=False)[0] for train in compared]
        )
    if forwards.tries:
        check_tries(forwards, compared)
    return noise


def _compare(forwards: Forwards, calls: Sequence[TrainCall], alone: Callable[[], Rows]) -> tuple[list[Way], float]:
    """Compare the trainer's ways with log-probabilities of each call alone; raises `ConfigError` where one differs.

    Also returns what rounding alone makes of these.
    """
    half, plain = _is_half(forwards), alone()
    tries = [False, True] if forwards.tries else [False]
    ways = [Way.compared(PACKED if way else PADDED, _scored(forwards, calls, tries=way), plain) for way in tries]
    training = _scored(forwards, calls, tries=forwards.tries, training=True)
    ways.append(Way.compared("training mode", training, plain))
    noise = rounding_noise(forwards.policy, alone, plain) if half else 0.0
    for way in ways:
        if fault := way.fault(half=half, noise=noise):
            raise ConfigError(
                f"model.path: the trainer cannot train this model: against the plain forward of one row, {fault} "
                "(model.selfcheck=false trains all the same)"
            )
    return ways, noise


def _scored(
    forwards: Forwards, calls: Sequence[TrainCall], *, tries: bool, training: bool = False
) -> list[list[float]]:
    """Return log-probabilities of calls of one adapter, computed together."""
    model = forwards.wrapped
    model.train(training)
    packs = forwards.make_packs(calls, module_names([train.call for train in calls]), score_all=True, tries=tries)
    found: dict[int, list[float]] = {}
    with torch.no_grad(), forwards.autocast():
        for pack in packs:
            forwards.use_adapter(pack.to(forwards.device))
            numbers = forwards.score(model, pack).logprobs.tolist()  # (N,)
            for train in pack.calls:
                count = len(train.call.completion_ids)
                found[id(train)], numbers = numbers[:count], numbers[count:]
    return [found[id(train)] for train in calls]


def _is_half(forwards: Forwards) -> bool:
    return forwards.policy.dtype in (torch.bfloat16, torch.float16) or forwards.accelerator.mixed_precision == "bf16"


def _compared_calls(forwards: Forwards, calls: Sequence[TrainCall]) -> list[TrainCall]:
    """Return a few of the calls that are trained, all of one adapter."""
    trained = [train for train in calls if any(active(entry, forwards.settings.beta) for entry in train.entries)]
    compared = calls_to_compare(trained)
    if forwards.adapters is not None and compared:
        # One adapter: otherwise a difference of weights would pass for one of packing.
        adapter = forwards.adapters.by_module
        compared = [train for train in compared if adapter[train.call.module] == adapter[compared[0].call.module]]
    return compared


def check_tries(forwards: Forwards, calls: Sequence[TrainCall]) -> bool:
    """Compare log-probabilities and gradients of a few of `calls`; False where none of them would be trained.

    Raises:
        MmrlError: they differ.
    """
    compared = _compared_calls(forwards, calls)
    if not compared:
        return False
    modules = module_names([train.call for train in compared])
    packs = [forwards.make_packs(compared, modules, score_all=True, tries=tries) for tries in (True, False)]
    # Sharded gradients are not whole on any process, so only log-probabilities are compared there.
    sharded = shares_weights(forwards.accelerator)
    (logprobs, gradient), (padded, padded_gradient) = (
        _measure(forwards, group, gradients=not sharded) for group in packs
    )
    half = _is_half(forwards)
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


def require_same_policy(gaps: Sequence[torch.Tensor], forwards: Forwards, noise: float) -> None:
    """Compare the engine's record of the first batch with the trainer's forwards; a collective.

    Args:
        gaps: differences of log-probabilities, by pack, before any update.
        noise: what rounding alone makes of the batch (`check_batch`).

    Raises:
        MmrlError: the engine serves other weights, or computes otherwise.
    """
    own = torch.cat([*gaps]) if gaps else torch.zeros(0)
    # By the median alone: an engine may have kernels of its own, and another precision than the trainer.
    median, allowed = float(own.median()) if len(own) else 0.0, max(FLOOR, noise)
    fault, enough = "", len(own) >= LEAST_TOKENS or not math.isfinite(median)
    if enough and not median <= allowed:
        fault = f"log-probabilities of the engine differ by {median:.2g} (in the median {allowed:.2g} is rounding)"
    # Processes have other packs, and all of them must stop.
    if float(forwards.reduce(torch.tensor(float(bool(fault)), device=forwards.device), "max")):
        raise MmrlError(
            f"engine: on the first batch, against the trainer's, {fault or 'those of another process differ'}; what is "
            "sampled is not what would be trained: look at model.dtype, engine.logprobs and the engine's version "
            "(model.selfcheck=false trains all the same)"
        )
