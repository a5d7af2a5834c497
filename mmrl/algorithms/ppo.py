"""The algorithms with a critic: PPO and MT-PPO (arXiv 2505.11821, Sec. 4), and MAPPO, a baseline of arXiv 2506.02718.

    delta_t = r_t + gamma · V_{t+1} - V_t;  A_t = sum over l of (gamma · lambda)^l · delta_{t+l};  returns = A + V
    trained on: A whitened over the batch; weight = 1 / trained tokens of the step

`ppo` estimates over a rollout's tokens and puts the outcome on the last; `mt_ppo` adds each turn's reward on the last
token of the turn; `mappo` estimates within each call. Use `mt_ppo` where a task can judge turns; `ppo` where only the
outcome is known and a critic is affordable; `mappo` to compare group-relative credit with a critic on multi-module
programs, at the price of a second model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from typing_extensions import override

from mmrl import rng
from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import CriticConfig, MappoConfig, TurnCriticConfig
from mmrl.credit.backward import EstimatedCall, backward, critic_credit, critic_values, gae, kl_rewards
from mmrl.credit.entries import Credit, Reward
from mmrl.credit.loss_weights import LossSequence, Minibatches, per_token, two_level
from mmrl.credit.scored import ScoredRollout, by_example
from mmrl.records import Call, Forest
from mmrl.rollout import plans

CriticT = TypeVar("CriticT", bound=CriticConfig, contravariant=True)


class CriticAlgorithm(Algorithm[CriticT]):
    """One rollout per example, judged by a critic."""

    needs_critic = True

    @override
    def plan(self, algo: CriticT, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        return plans.independent(1)


class Ppo(CriticAlgorithm[TurnCriticConfig]):
    """PPO with a rollout's calls in order as one sequence."""

    def __init__(self, name: str, turns: bool):
        self.name = name
        self.needs_turn_rewards = turns

    @override
    def credit(self, forest: Forest, algo: TurnCriticConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        rollouts = [rollout for samples in by_example(forest).values() for rollout in samples]
        sequences = [
            LossSequence(r.rollout.example, r.rollout.example, sum(c.completion_tokens for c in r.path))
            for r in rollouts
        ]
        weights = per_token(sequences, two_level(sequences, minibatch), algo, minibatch)
        pairs = zip(rollouts, weights, strict=True)
        estimated = [call for rollout, weight in pairs for call in self._estimated(rollout, algo, weight)]
        return critic_credit(self.name, estimated, algo.whiten, getattr(algo, "whiten_within", "batch") == "turn")

    def _estimated(self, scored: ScoredRollout, algo: TurnCriticConfig, weight: float) -> list[EstimatedCall]:
        """Place the rewards, estimate over the rollout's tokens, and cut the result at the calls."""
        observed = algo.obs == "all"
        lengths = [call.completion_tokens + (call.observation_tokens if observed else 0) for call in scored.path]
        # A rollout's calls lie one after the other in the estimation; `starts` says where each begins.
        starts = [0, *accumulate(lengths)]
        total = starts.pop()
        rewards = [0.0] * total
        parts: list[dict[str, float]] = [{} for _ in scored.path]
        for index, (call, start) in enumerate(zip(scored.path, starts, strict=True)):
            last = call is scored.path[-1]
            if algo.kl == "reward" and algo.beta:
                # Observation tokens, where they take part, have no KL term: the policy did not choose them.
                terms = kl_rewards(call, algo.beta)
                rewards[start : start + len(terms)] = [r + k for r, k in zip(rewards[start:], terms, strict=False)]
                parts[index]["kl"] = sum(terms)
            amount = scored.reward if last else (call.turn_reward or 0.0) if self.needs_turn_rewards else 0.0
            if last or self.needs_turn_rewards:
                parts[index]["outcome" if last else "turn"] = amount
            end = start + (lengths[index] if algo.position == "turn_end" else call.completion_tokens)
            if total:  # a turn without tokens leaves its reward on the token before it
                rewards[max(end - 1, 0)] += amount
        values = [value for call in scored.path for value in critic_values(call, observed)]
        advantages = gae(rewards, values, algo.gamma, algo.gae_lambda)
        return [
            EstimatedCall(call, part, tuple(rewards[s:e]), tuple(values[s:e]), tuple(advantages[s:e]), weight)
            for call, part, s, e in zip(scored.path, parts, starts, [*starts[1:], total], strict=True)
        ]


class Mappo(CriticAlgorithm[MappoConfig]):
    """PPO with each call a sequence of its own; one critic for all modules.

    A call's reward, shared outcome + R_spe, is on its last token; the terminal value is 0, and nothing is bootstrapped
    from the next module.
    """

    name = "mappo"

    @override
    def credit(self, forest: Forest, algo: MappoConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        rewards = backward(forest, algo)
        calls = [forest.calls[call_id] for call_id in rewards]
        # Every trained token weighs the same by default (`loss_mean=token`), whichever agent wrote it.
        tokens = [0 if call.module in algo.left_out else call.completion_tokens for call in calls]
        sequences = [LossSequence(call.example, call.example, count) for call, count in zip(calls, tokens, strict=True)]
        weights = per_token(sequences, two_level(sequences, minibatch), algo, minibatch)
        estimated = [_within_call(call, rewards[call.id], algo, w) for call, w in zip(calls, weights, strict=True)]
        return critic_credit(self.name, estimated, algo.whiten)


def _within_call(call: Call, reward: Reward, algo: MappoConfig, weight: float) -> EstimatedCall:
    """Estimate by GAE within one call; a call without tokens has no place for its reward."""
    parts = dict(reward.parts)
    token_rewards = [0.0] * call.completion_tokens
    if algo.kl == "reward" and algo.beta:
        token_rewards = list(kl_rewards(call, algo.beta))
        parts["kl"] = sum(token_rewards)
    # The shared outcome comes to every agent in full: the paper's baseline bootstraps nothing between modules.
    if token_rewards:
        token_rewards[-1] += reward.total
    values = critic_values(call, observed=False)
    advantages = gae(token_rewards, values, algo.gamma, algo.gae_lambda)
    return EstimatedCall(call, parts, tuple(token_rewards), values, tuple(advantages), weight)
