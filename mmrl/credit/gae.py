"""Generalised advantage estimation, whitening and the KL term in the reward, for algorithms with a critic.

Third step of credit for the PPO family. Plain numbers; a sequence is a list of tokens, the terminal value is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmrl.errors import DataError
from mmrl.records import Call


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma·lam)^l · delta_{t+l}, delta_t = r_t + gamma·V_{t+1} - V_t, with V = 0 at the end.

    Args:
        rewards: one per token, length n.
        values: V_t, length n.
    """
    advantages = [0.0] * len(rewards)
    running, following = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        running = delta + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages


def whitening(values: Sequence[float]) -> tuple[float, float]:
    """(mean, factor) such that (A - mean) · factor is white: factor = 1 / sqrt(unbiased variance + 1e-8)."""
    if not values:
        return 0.0, 1.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, 1.0 / math.sqrt(variance + 1e-8)


def critic_values(call: Call, observed: bool) -> tuple[float, ...]:
    """The critic's values of a call, one per token that the estimation runs over.

    Args:
        observed: observation tokens included (`algo.obs=all`).

    Raises:
        DataError: there are none, or of another length; names the call.
    """
    return _exactly(call, "values", call.completion_tokens + (call.observation_tokens if observed else 0))


def kl_rewards(call: Call, beta: float) -> tuple[float, ...]:
    """-beta · (log-prob - reference log-prob) on each sampled token (k1).

    Raises:
        DataError: `logprobs` or `ref_logprobs` are missing or too short; names the call.
    """
    logprobs, reference = (_tokens(call, name) for name in ("logprobs", "ref_logprobs"))
    return tuple(beta * (ref - own) for own, ref in zip(logprobs, reference, strict=True))


def _tokens(call: Call, name: str) -> tuple[float, ...]:
    """The part of a per-token field that belongs to sampled tokens."""
    values = getattr(call, name)
    full = call.completion_tokens + call.observation_tokens
    if values is not None and len(values) == full:
        return tuple(values[: call.completion_tokens])
    return _exactly(call, name, call.completion_tokens)


def _exactly(call: Call, name: str, length: int) -> tuple[float, ...]:
    values = getattr(call, name)
    if values is None:
        critic = "a critic's value per token (journals of ppo, mt_ppo and mappo runs have them)"
        need = critic if name == "values" else "one per token for the KL term; or set algo.beta=0"
        raise DataError(f"call '{call.id}': {name}: missing, expected {need}")
    if len(values) != length:
        raise DataError(f"call '{call.id}': {name}: got {len(values)} numbers, expected {length}")
    return tuple(values)
