"""Advantages and weights of groups with rewards, for all group-relative algorithms.

Third and last step of credit (rewards -> groups -> advantages -> weights).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mmrl.config.algo import GroupConfig
from mmrl.credit.entries import Group, Member
from mmrl.credit.loss_weights import LossSequence, Minibatches, per_token, two_level
from mmrl.credit.scored import ScoredRollout
from mmrl.errors import DataError


def compare(groups: Iterable[Group], algo: GroupConfig) -> list[Group]:
    """Compute A_i = (r_i - baseline) / (std + eps) per group, by `algo`'s eps, ddof, scale, std_over, baseline."""
    groups = list(groups)
    pooled = [member.reward.total for group in groups if not group.is_singleton for member in group.members]
    # `std_over=batch` divides by one deviation, over all rewards that are compared with any other.
    batch_std = std_of(pooled, algo.ddof) if algo.std_over == "batch" else None
    return [_compared(group, algo, batch_std) for group in groups]


def _compared(group: Group, algo: GroupConfig, batch_std: float | None) -> Group:
    rewards, size = [member.reward.total for member in group.members], len(group.members)
    if group.is_singleton:
        return replace(group, mean=rewards[0] if rewards else None)
    mean = math.fsum(rewards) / size
    std = std_of(rewards, algo.ddof) if batch_std is None else batch_std
    divisor = std if algo.scale is True else None
    if is_constant(rewards):
        return replace(group, mean=mean, std=divisor, constant=True, is_dropped=algo.drops_constant)
    # RLOO compares with the mean of the other G - 1: r - (S - r) / (G - 1) = (r - S / G) · G / (G - 1).
    factor = size / (size - 1) if algo.baseline == "leave_one_out" else 1.0
    if algo.scale is True:
        factor /= std + algo.eps
    elif algo.scale == "mean":
        # MaxRL: its expectation is the gradient of the logarithm of the mean reward. Rewards that differ and are not
        # negative have a mean above 0.
        if min(rewards) < 0:
            raise DataError(f"algo.scale: mean needs rewards of 0 or more; group '{group.id}' has {min(rewards):g}")
        factor /= mean
    members = tuple(replace(m, advantage=(m.reward.total - mean) * factor) for m in group.members)
    return replace(group, members=members, mean=mean, std=divisor)


def std_of(rewards: Sequence[float], ddof: int) -> float:
    """Return the standard deviation; 0 for equal numbers and for fewer than ddof + 1."""
    if len(rewards) <= ddof or is_constant(rewards):
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - ddof))


def is_constant(rewards: Sequence[float]) -> bool:
    """Return True if all rewards are equal, up to the rounding of averages."""
    spread = max(rewards) - min(rewards)
    # Backed-up means of equal outcomes may differ in their last bits; eps = 0 would blow that up to +-1.
    return spread <= 1e-12 * max(1.0, abs(max(rewards)), abs(min(rewards)))


def weigh(groups: Sequence[Group], algo: GroupConfig, minibatch: Minibatches = None) -> list[Group]:
    """Weigh tokens by 1 / (groups · G · |o|) for every member, or as `algo.loss_mean` says (GRPO, mmGRPO)."""

    def sequence(group: Group, member: Member) -> LossSequence:
        tokens = 0 if group.is_dropped else member.tokens(algo.left_out)
        frozen = not (tokens or group.is_dropped) and member.tokens() > 0
        return LossSequence(member.call.example, group.id, tokens, compared=not group.is_singleton, frozen=frozen)

    sequences = [sequence(group, member) for group in groups for member in group.members]
    return with_weights(groups, per_token(sequences, two_level(sequences, minibatch), algo, minibatch))


def weigh_rollouts(
    examples: Mapping[str, Sequence[ScoredRollout]],
    advantages: Mapping[str, Sequence[float]],
    algo: GroupConfig,
    minibatch: Minibatches = None,
) -> list[Group]:
    """Weigh rollouts as one sequence of the loss each, however their calls were compared: a group for each example.

    Args:
        advantages: example -> advantages of all its calls. Without any, it may count as not sampled.
    """
    groups = [
        Group(
            example,
            tuple(Member(rollout.path, rollout.outcome) for rollout in rollouts),
            is_dropped=algo.drops_constant and len(rollouts) > 1 and not any(advantages[example]),
        )
        for example, rollouts in examples.items()
    ]
    return weigh(groups, algo, minibatch)


def with_weights(groups: Sequence[Group], weights: Sequence[float]) -> list[Group]:
    """Return the groups with one of `weights` for each of their members, in order."""
    each = iter(weights)
    return [replace(group, members=tuple(replace(m, weight=next(each)) for m in group.members)) for group in groups]
