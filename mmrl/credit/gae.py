"""Credit with a critic: rewards per token, generalised advantage estimation, whitening, returns (PPO family).

From scored rollouts or calls to entries. Plain numbers; a sequence is a list of tokens, the terminal value is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmrl.credit.entries import Credit, Entry
from mmrl.errors import DataError
from mmrl.records import Call


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma·lam)^l · delta_{t+l}, delta_t = r_t + gamma·V_{t+1} - V_t, with V = 0 at the end.

    Args:
        rewards: one per token, length n.
        values: V_t, length n.
    """
    advantages = [0.0] * len(rewards)
    # Backwards in one pass: A_t = delta_t + gamma·lam·A_{t+1}. Nothing is bootstrapped after the last token.
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
    # `fsum`: exact in any order, so how rollouts were distributed over processes changes no bit.
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
    length = call.completion_tokens + (call.observation_tokens if observed else 0)
    return _exactly(call, "values", call.values, length)


def kl_rewards(call: Call, beta: float) -> tuple[float, ...]:
    """-beta · (log-prob - reference log-prob) on each sampled token (k1).

    Raises:
        DataError: `logprobs` or `ref_logprobs` are missing or too short; names the call.
    """
    logprobs, reference = _sampled(call, "logprobs", call.logprobs), _sampled(call, "ref_logprobs", call.ref_logprobs)
    return tuple(beta * (ref - own) for own, ref in zip(logprobs, reference, strict=True))


def _sampled(call: Call, name: str, values: tuple[float, ...] | None) -> tuple[float, ...]:
    """The part of a per-token field that belongs to sampled tokens, whether or not it goes on over observations."""
    if values is not None and len(values) == call.completion_tokens + call.observation_tokens:
        return values[: call.completion_tokens]
    return _exactly(call, name, values, call.completion_tokens)


def _exactly(call: Call, name: str, values: tuple[float, ...] | None, length: int) -> tuple[float, ...]:
    if values is None:
        critic = "a critic's value per token (journals of ppo, mt_ppo and mappo runs have them)"
        need = critic if name == "values" else "one per token for the KL term; or set algo.beta=0"
        raise DataError(f"call '{call.id}': {name}: missing, expected {need}")
    if len(values) != length:
        raise DataError(f"call '{call.id}': {name}: got {len(values)} numbers, expected {length}")
    return values


@dataclass(frozen=True, slots=True)
class EstimatedCall:
    """One call's tokens in an estimation: sampled tokens first, then its observation tokens where those take part."""

    call: Call
    parts: Mapping[str, float]
    rewards: tuple[float, ...]
    values: tuple[float, ...]
    advantages: tuple[float, ...]
    weight: float
    """Of each sampled token."""


def critic_credit(name: str, estimated: Sequence[EstimatedCall], whiten: str) -> Credit:
    """Entries of all calls.

    Args:
        whiten: `trained` (over sampled tokens), `all` (observation tokens too) or `none`. Returns always use the
            advantages before whitening.
    """
    raw = [
        a for s in estimated for a in (s.advantages if whiten == "all" else s.advantages[: s.call.completion_tokens])
    ]
    # Whitened over the batch and not per example: with one rollout each, an example has nothing to compare with.
    mean, factor = (0.0, 1.0) if whiten == "none" else whitening(raw)
    entries = []
    for own in estimated:
        tokens = own.call.completion_tokens
        advantages = own.advantages[:tokens]
        entries.append(
            Entry(
                call=own.call.id,
                reward=math.fsum(own.rewards),
                parts=own.parts,
                advantages=tuple((advantage - mean) * factor for advantage in advantages),
                weights=(own.weight,) * tokens,
                # The critic's target is A + V before whitening, which rescales what the policy sees and no value.
                returns=tuple(a + v for a, v in zip(advantages, own.values[:tokens], strict=True)),
                raw_advantages=advantages,
                token_rewards=own.rewards[:tokens],
            )
        )
    return Credit(algo=name, entries=tuple(entries), metrics=_explained(entries))


def _explained(entries: Sequence[Entry]) -> dict[str, float]:
    """Share of the returns' variance that the critic's values explain: 1 is a perfect critic, 0 a constant one."""
    returns = [r for entry in entries for r in entry.returns or ()]
    errors = [a for entry in entries for a in entry.raw_advantages or ()]
    # Constant returns have nothing to explain, and the share would be divided by rounding errors.
    spread = _variance(returns)
    return {"credit/explained_variance": 1.0 - _variance(errors) / spread} if spread > 1e-12 else {}


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / max(len(values), 1)
    return math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1)
