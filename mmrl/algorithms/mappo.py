"""MAPPO as the baseline of arXiv 2506.02718: one critic for all modules, advantages within each call.

    reward of a call: (shared outcome + R_spe) on its last token, minus beta · (log-prob - reference) per token
    A by GAE within the call, terminal value 0, nothing bootstrapped from the next module; whitened over the batch
    weight = 1 / trained tokens of the step

Use it to compare group-relative credit with a critic on multi-module programs, at the price of a second model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl import rng
from mmrl.config import AlgoConfig
from mmrl.config.algo import MappoConfig
from mmrl.credit.backward import backward
from mmrl.credit.entries import Credit, Reward
from mmrl.credit.gae import EstimatedCall, critic_credit, critic_values, gae, kl_rewards
from mmrl.credit.loss_weights import Unit, per_token, two_level
from mmrl.records import Call, Forest
from mmrl.rollout import plans


class Mappo:
    """One rollout per example, each call a sequence of its own."""

    name = "mappo"
    needs_turn_rewards = False
    needs_critic = True

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Fits every program."""
        return []

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """One rollout."""
        return plans.independent(1)

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = MappoConfig.of(algo)
        rewards = backward(forest, algo)
        calls = [forest.calls[call_id] for call_id in rewards]
        # Every trained token weighs the same by default (`loss_mean=token`), whichever agent wrote it.
        units = [Unit(call.example, call.example, call.completion_tokens) for call in calls]
        weights = per_token(units, two_level(units, minibatch), algo, minibatch)
        estimated = [_estimated(call, rewards[call.id], algo, w) for call, w in zip(calls, weights, strict=True)]
        return critic_credit(self.name, estimated, algo.whiten)


def _estimated(call: Call, reward: Reward, algo: MappoConfig, weight: float) -> EstimatedCall:
    """GAE within one call; a call without tokens has no place for its reward."""
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
