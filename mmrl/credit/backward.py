"""Credit that is passed backwards: rewards up a tree of calls, advantages along the tokens of a call.

`backward` is the first step for programs of several modules (MHGPO, MAPPO): from the outcome of rollouts and module
penalties to one number per call. A rollout without a reward (it failed for reasons outside the policy) passes nothing
on, so a call none of whose descendants is scored has no reward either and is left out of everything that follows.

`gae` and what is around it is credit with a critic (PPO, MAPPO, MT-PPO): rewards per token, generalised advantage
estimation, whitening, returns. Plain numbers; a sequence is a list of tokens, the terminal value is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mmrl import rng
from mmrl.config.algo import MappoConfig, MhgpoConfig
from mmrl.credit.entries import Credit, Entry, Reward
from mmrl.credit.scored import by_example, scored_rollouts
from mmrl.errors import DataError
from mmrl.records import Call, Forest


def backward(forest: Forest, algo: MhgpoConfig | MappoConfig, seed: int = 0) -> dict[str, Reward]:
    """Propagate rewards up trees (MHGPO, arXiv 2506.02718, Eq. 4): R = Aggr over successors + c · R_spe.

    A call's successors are its child calls and the rollouts that end at it. c is `algo.penalty_scale` (0 for
    `algo.penalties=false`). `algo.propagate=shared` leaves a penalty with its own call; `full` passes it on to the
    calls before. MAPPO's rollouts share nothing, so each of their calls has one successor.

    Args:
        seed: run seed, for `algo.aggregate=random`.

    Returns:
        Call id -> reward, with parts `shared` and `penalty`; in the order of the forest's calls.
    """
    aggregate, propagate = getattr(algo, "aggregate", "mean"), getattr(algo, "propagate", "shared")
    rewards: dict[str, Reward] = {}
    values = tree_values(forest) if aggregate == "tree_value" else {}

    def passed(call: Call, successors: Sequence[float]) -> float:
        key = (seed, forest.step, "aggregate", call.id)
        shared = values[call.id] if values else _aggregate(successors, aggregate, key)
        # A penalty belongs to the call that earned it. `full` charges the calls before as well, which led up to it.
        penalty = (algo.penalty_scale or {}).get(call.module, 1.0) * call.penalty if algo.penalties else 0.0
        rewards[call.id] = Reward(shared + penalty, {"shared": shared, "penalty": penalty})
        return shared + penalty if propagate == "full" else shared

    return {call_id: rewards[call_id] for call_id in passed_up(forest, passed)}


def passed_up(forest: Forest, passed: Callable[[Call, Sequence[float]], float]) -> dict[str, float]:
    """Pass numbers up the trees: of a call what `passed` makes of its successors' (calls, and rollouts that end at it).

    Returns:
        Call id -> number, in the order of the forest's calls; without calls through which no scored rollout goes.
    """
    ending: dict[str, list[float]] = {}
    for scored in scored_rollouts(forest):
        ending.setdefault(scored.path[-1].id, []).append(scored.reward)
    found: dict[str, float] = {}
    # Parents come first in a forest, so the reverse order sees every successor before the calls above it.
    for call in reversed(list(forest.calls.values())):
        successors = ending.get(call.id, []) + [found[child] for child in forest.children[call.id] if child in found]
        # Else every rollout through this call was dropped: there is nothing to pass up.
        if successors:
            found[call.id] = passed(call, successors)
    return {call_id: found[call_id] for call_id in forest.calls if call_id in found}


def _aggregate(values: Sequence[float], method: str, key: rng.Key) -> float:
    """Aggregate by `mean`, `max`, `min` or `random`: a successor with a reward, drawn by a key of the call."""
    # Also with `random`: nothing is drawn, so a single successor never depends on the seed.
    if len(values) == 1:
        return values[0]
    if method == "random":
        return rng.stream(*key).choice(values)
    aggregates: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "max": max, "min": min}
    return aggregates[method](values)


def tree_values(forest: Forest) -> dict[str, float]:
    """Return TreeRL's value of a step (arXiv 2506.11902): (V(n) - V(parent)) + (V(n) - V(root)), for each call n.

    V is the mean, over the rollouts through a call, of R minus the mean R of the example's other rollouts; V(root) = 0.
    """
    sums, counts = dict.fromkeys(forest.calls, 0.0), dict.fromkeys(forest.calls, 0)
    for rollouts in by_example(forest).values():
        total, other_count = math.fsum(rollout.reward for rollout in rollouts), max(len(rollouts) - 1, 1)
        for rollout in rollouts:
            # Alone it is compared with nothing.
            gain = rollout.reward - (total - rollout.reward) / other_count if len(rollouts) > 1 else 0.0
            for call in rollout.path:
                sums[call.id] += gain
                counts[call.id] += 1
    value = {call_id: sums[call_id] / count for call_id, count in counts.items() if count}
    parents = {call_id: forest.calls[call_id].parent for call_id in value}
    return {call_id: 2 * v - (value[parent] if (parent := parents[call_id]) else 0.0) for call_id, v in value.items()}


def discounted(values: Sequence[float], factor: float) -> list[float]:
    """Return the sum over l >= k of factor^(l-k) · values_l, for each k."""
    sums, running = [], 0.0
    for value in reversed(values):
        running = value + factor * running
        sums.append(running)
    return sums[::-1]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Compute A_t = sum over l of (gamma·lam)^l · delta_{t+l}, delta_t = r_t + gamma·V_{t+1} - V_t; V = 0 at the end.

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
    """Return (mean, factor) such that (A - mean) · factor is white: factor = 1 / sqrt(unbiased variance + 1e-8)."""
    if not values:
        return 0.0, 1.0
    # `fsum`: exact in any order, so how rollouts were distributed over processes changes no bit.
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, 1.0 / math.sqrt(variance + 1e-8)


def critic_values(call: Call, observed: bool) -> tuple[float, ...]:
    """Return the critic's values of a call, one per token that the estimation runs over.

    Args:
        observed: observation tokens included (`algo.obs=all`).

    Raises:
        DataError: there are none, or of another length; names the call.
    """
    length = call.completion_tokens + (call.observation_tokens if observed else 0)
    return _exactly(call, "values", call.values, length)


def kl_rewards(call: Call, beta: float) -> tuple[float, ...]:
    """Return -beta · (log-prob - reference log-prob) on each sampled token (k1).

    Raises:
        DataError: `logprobs` or `ref_logprobs` are missing or too short; names the call.
    """
    logprobs, reference = _sampled(call, "logprobs", call.logprobs), _sampled(call, "ref_logprobs", call.ref_logprobs)
    return tuple(beta * (ref - logprob) for logprob, ref in zip(logprobs, reference, strict=True))


def _sampled(call: Call, name: str, values: tuple[float, ...] | None) -> tuple[float, ...]:
    """Return a per-token field's part on sampled tokens, whether or not it goes on over observations."""
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
    """Tokens of a call in an estimation: sampled tokens first, then its observation tokens where those take part."""

    call: Call
    parts: Mapping[str, float]
    rewards: tuple[float, ...]
    values: tuple[float, ...]
    advantages: tuple[float, ...]
    weight: float
    """Loss weight of each sampled token."""


def critic_credit(name: str, estimated: Sequence[EstimatedCall], whiten: str, apart: bool = False) -> Credit:
    """Whiten the advantages and make an entry for each call.

    Args:
        whiten: `trained` (over sampled tokens), `all` (observation tokens too) or `none`. Returns always use the
            advantages before whitening.
        apart: last turns are whitened by themselves, and so are those before them.
    """
    raw: dict[bool, list[float]] = {False: [], True: []}
    # What is out of the loss has weight 0, and values that no critic was trained for.
    for call in (call for call in estimated if call.weight):
        counted = call.advantages if whiten == "all" else call.advantages[: call.call.completion_tokens]
        raw[apart and "outcome" in call.parts].extend(counted)
    # Whitened over the batch and not per example: with one rollout each, an example has nothing to compare with.
    scales = {last: (0.0, 1.0) if whiten == "none" else whitening(values) for last, values in raw.items()}
    entries = []
    for call in estimated:
        mean, factor = scales[apart and "outcome" in call.parts]
        tokens = call.call.completion_tokens
        advantages = call.advantages[:tokens]
        entries.append(
            Entry(
                call=call.call.id,
                reward=math.fsum(call.rewards),
                parts=call.parts,
                advantages=tuple((advantage - mean) * factor for advantage in advantages),
                weights=(call.weight,) * tokens,
                # The critic's target is A + V before whitening, which rescales what the policy sees and no value.
                returns=tuple(a + v for a, v in zip(advantages, call.values[:tokens], strict=True)),
                raw_advantages=advantages,
                token_rewards=call.rewards[:tokens],
            )
        )
    return Credit(algo=name, entries=tuple(entries), metrics=_explained(entries))


def _explained(entries: Sequence[Entry]) -> dict[str, float]:
    """Compute the share of the returns' variance that the values explain: 1 for a perfect critic, 0 for a constant."""
    trained = [entry for entry in entries if any(entry.weights)]
    returns = [r for entry in trained for r in entry.returns or ()]
    errors = [a for entry in trained for a in entry.raw_advantages or ()]
    # Constant returns have nothing to explain, and the share would be divided by rounding errors.
    spread = _variance(returns)
    return {"credit/explained_variance": 1.0 - _variance(errors) / spread} if spread > 1e-12 else {}


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / max(len(values), 1)
    return math.fsum((value - mean) ** 2 for value in values) / max(len(values), 1)
