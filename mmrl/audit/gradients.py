"""Policy gradients as flat vectors: a row's own, and the reference that they are compared with.

Part of `audit`. Both go through the trainer's packs and its one objective, at the weights that sampled, so the ratio
is 1: nothing is clipped, and KL term, truncated importance sampling and critic have no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from mmrl.audit.settings import BLOCKS
from mmrl.config import AlgoConfig
from mmrl.credit.entries import Entry
from mmrl.errors import MmrlError
from mmrl.records import Forest, Rollout
from mmrl.system.files import atomic_write
from mmrl.trainer.forwards import module_names
from mmrl.trainer.objective import TrainCall, token_loss

if TYPE_CHECKING:
    from peft import PeftModel

    from mmrl.trainer.forwards import Forwards

_CHUNK = 2**18
"""Numbers of a vector that are in float64 at once."""


def gradient(forwards: Forwards, calls: Sequence[TrainCall]) -> torch.Tensor:
    """Compute -d loss / d theta of the objective at ratio 1: the ascent direction, over all trained weights.

    Whatever `algo.loss` is: they differ in what they bound, which is nothing yet.

    Dropout of adapters is off: the gradient is that of the policy which sampled. No weight has a `.grad` afterwards.

    Args:
        calls: with the entries of one optimizer step; 0 where none has an advantage and a weight.

    Returns:
        (P,) float32 on the CPU: the weights in the model's order, with weights per module adapter by adapter.

    Raises:
        MmrlError: the gradient is not finite.
    """
    parameters = _trained(forwards)
    for parameter in parameters:
        parameter.grad = None
    without_noise(forwards)
    for pack in forwards.make_packs(calls, module_names([train.call for train in calls])):
        pack.to(forwards.device)
        forwards.use_adapter(pack)
        with forwards.autocast():
            scores = forwards.score(forwards.wrapped, pack)
        logprobs = scores.logprobs[pack.entry_index]
        clip = forwards.settings.algo.clip  # without effect: the ratio is 1, log-probabilities being over themselves
        result = token_loss(
            logprobs,
            logprobs.detach(),
            None,
            pack.advantages,
            pack.weights,
            clip,
            None,
            beta=0.0,
        )
        result.loss.backward()
    forwards.policy.eval()
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        if parameter.grad is not None:
            part.copy_(parameter.grad.flatten()).neg_()
            parameter.grad = None
    if not math.isfinite(float(flat.sum())):
        raise MmrlError("the policy's gradient is not finite; expected a policy that can be trained")
    return flat


def _trained(forwards: Forwards) -> list[torch.nn.Parameter]:
    """Return the weights that an update of the policy moves; a critic's adapter takes no gradients while idle."""
    policy, adapters = forwards.policy, forwards.adapters
    if adapters is not None:
        # Not by `requires_grad`, which peft gives to the active adapter alone.
        peft = cast("PeftModel", policy)
        return [weight for name in adapters.trained for weight in adapters.parameters(peft, name).values()]
    return [weight for weight in policy.parameters() if weight.requires_grad]


def without_noise(forwards: Forwards) -> None:
    """Switch noise off, and gradient checkpointing on where the config has it: models have it in training mode alone.

    transformers enables it when training starts, which an audit never does.
    """
    policy, checkpointing = forwards.policy, forwards.settings.model.gradient_checkpointing
    policy.train(checkpointing)
    if checkpointing:
        policy.gradient_checkpointing_enable(forwards.trainer.args.gradient_checkpointing_kwargs)
        for part in policy.modules():
            if isinstance(part, torch.nn.Dropout):
                part.eval()


def reference_calls(forest: Forest, outcomes: Mapping[str, float], frozen: Collection[str] = ()) -> list[TrainCall]:
    """Put each call of independent rollouts into the loss with its rollout's outcome less that of the others.

    The gradient is the mean over examples of the mean over rollouts of (R - mean of the example's others) · the sum
    of grad log pi over all tokens: unbiased, whatever lengths and numbers of calls are. An example with a single
    outcome is left out.

    Args:
        outcomes: rollout id -> outcome; a rollout without one failed from an outside cause and is left out.
        frozen: modules out of the loss.
    """
    examples: dict[str, list[Rollout]] = {}
    for rollout in forest.rollouts:
        # One that failed before its first call has no gradient, yet is one of the policy's rollouts.
        if rollout.id in outcomes:
            examples.setdefault(rollout.example, []).append(rollout)
    compared = [rollouts for rollouts in examples.values() if len(rollouts) > 1]
    calls = []
    for rollouts in compared:
        total, count = math.fsum(outcomes[rollout.id] for rollout in rollouts), len(rollouts)
        for rollout in rollouts:
            outcome = outcomes[rollout.id]
            advantage, weight = outcome - (total - outcome) / (count - 1), 1 / (count * len(compared))
            for call in forest.path(rollout):
                if call.module not in frozen:
                    tokens = call.completion_tokens
                    entry = Entry(
                        call=call.id, reward=outcome, advantages=(advantage,) * tokens, weights=(weight,) * tokens
                    )
                    calls.append(TrainCall(call=call, entries=(entry,)))
    return calls


def length_unit(algo: AlgoConfig) -> float | None:
    """Return what a row's gradient is multiplied by to compare its length with the reference's: `algo.loss_length`.

    None where lengths do not compare: advantages over a deviation, or tokens weighed by lengths of the batch.
    """
    divided = getattr(algo, "scale", False) is not False or getattr(algo, "whiten", "none") != "none"
    return None if divided or algo.loss_mean != "constant" or algo.loss_length is None else float(algo.loss_length)


@dataclass(frozen=True, slots=True)
class Projection:
    """All that alignment needs of a gradient g."""

    norm2: float
    """<g, g>"""
    products: tuple[float, ...]
    """<g, b> for each block b of the reference."""


class Reference:
    """The reference gradient: one vector for each block of rollouts, in files, since memory need not hold them.

    Blocks have rollouts of their own, none of which any row has been credited on.
    """

    def __init__(self, folder: Path, blocks: int = BLOCKS):
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"block-{block:02d}.f32" for block in range(blocks)]

    def put(self, block: int, vector: torch.Tensor) -> None:
        """Write a block's vector, (P,) float32: all of it or nothing."""
        atomic_write(self.files[block], vector.numpy().tobytes())

    def gram(self) -> list[list[float]]:
        """Return the inner products of all blocks with each other."""
        total = np.zeros((len(self.files), len(self.files)))
        for start in range(0, self.files[0].stat().st_size // 4, _CHUNK):
            rows = np.stack([self._part(block, start) for block in range(len(self.files))])
            total += rows @ rows.T
        gram: list[list[float]] = total.tolist()
        return gram

    def project(self, vector: torch.Tensor) -> Projection:
        """Return a gradient's inner products, with itself and with each block."""
        norm2, products = 0.0, np.zeros(len(self.files))
        for start in range(0, len(vector), _CHUNK):
            part = vector[start : start + _CHUNK].double().numpy()
            norm2 += float(part @ part)
            products += [self._part(block, start) @ part for block in range(len(self.files))]
        return Projection(norm2, tuple(products.tolist()))

    def _part(self, block: int, start: int) -> np.ndarray:
        """Read a chunk of a block, as float64; not mapped, so that no more of a file than this is in memory."""
        return np.fromfile(self.files[block], np.float32, _CHUNK, offset=4 * start).astype(np.float64)
