"""Loss weights: the share of an optimizer step that each sequence has, and its division over tokens.

Last step of credit (rewards -> groups -> advantages -> weights). Within an optimizer step the weights of all tokens sum
to 1 for the `seq` and `token` means, less the shares that are counted in a denominator but left out of the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from mmrl.config.algo import AlgoConfig

Minibatches = Mapping[str, int] | None
"""Example id -> mini-batch index; None: all examples in one."""


@dataclass(frozen=True, slots=True)
class LossSequence:
    """A sequence of the loss, whose tokens |o| counts in a paper's formula: a call, or all calls of a rollout."""

    example: str
    slot: Hashable
    """Group that it is averaged within, or (MHGPO, Eq. 6) slot of an example."""
    tokens: int
    """|o|: trained tokens; 0 where it counts as not sampled."""
    compared: bool = True
    """False: its share is counted and lost (a group of one)."""
    frozen: bool = False
    """True: all its tokens are of modules out of the loss. Its group counts: freezing it changes no other group."""

    @property
    def counts(self) -> bool:
        """True if it has weight."""
        return self.compared and self.tokens > 0


def two_level(sequences: Sequence[LossSequence], minibatch: Minibatches = None) -> list[float]:
    """Compute shares 1 / (slots · sequences of the slot): mean over groups of the mean within (GRPO, mmGRPO).

    Sequences without a token take no share from the others, but for the groups of frozen ones. Returns the shares;
    0 where it has no weight.
    """
    steps = [minibatch_of(sequence.example, minibatch) for sequence in sequences]
    filled = {
        (step, sequence.slot)
        for step, sequence in zip(steps, sequences, strict=True)
        if sequence.tokens or sequence.frozen
    }
    slots = Counter(step for step, _ in filled)
    sizes = Counter((sequence.example, sequence.slot) for sequence in sequences if sequence.counts)
    return [
        1.0 / (slots[step] * sizes[sequence.example, sequence.slot]) if sequence.counts else 0.0
        for step, sequence in zip(steps, sequences, strict=True)
    ]


def per_token(
    sequences: Sequence[LossSequence], shares: Sequence[float], algo: AlgoConfig, minibatch: Minibatches = None
) -> list[float]:
    """Return the weight of each token of each sequence, as `algo.loss_mean` says.

    `seq` divides a share by |o|; `token` gives every token of the optimizer step the same weight; `constant` divides a
    share by `algo.loss_length` (L_max; None: the longest sequence). Only sequences with a positive share have weight.
    """
    if algo.loss_mean == "token":
        steps = [minibatch_of(sequence.example, minibatch) for sequence in sequences]
        totals: Counter[int] = Counter()
        for step, sequence, share in zip(steps, sequences, shares, strict=True):
            totals[step] += sequence.tokens if share else 0
        return [1.0 / totals[step] if share else 0.0 for step, share in zip(steps, shares, strict=True)]
    # Dr.GRPO: a length that no sequence chooses, so that long answers are not paid less per token.
    longest = algo.loss_length or max((sequence.tokens for sequence in sequences), default=1)
    return [
        share / (sequence.tokens if algo.loss_mean == "seq" else longest) if share else 0.0
        for sequence, share in zip(sequences, shares, strict=True)
    ]


def minibatch_of(example: str, minibatch: Minibatches) -> int:
    """Return the index of an example's mini-batch."""
    return 0 if minibatch is None else minibatch[example]
