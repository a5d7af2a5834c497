"""PPO and MT-PPO (arXiv 2505.11821, Sec. 4): a critic, and advantages by GAE over a rollout's tokens.

    delta_t = r_t + gamma · V_{t+1} - V_t;  A_t = sum over l of (gamma · lambda)^l · delta_{t+l};  returns = A + V
    trained on: A whitened over the batch; weight = 1 / trained tokens of the step

`ppo` puts the outcome on the last token; `mt_ppo` adds each turn's reward on the last token of the turn. Use `mt_ppo`
where a task can judge turns; `ppo` where only the outcome is known and a critic is affordable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from mmrl.algorithms.options import section, turn_problems
from mmrl.config import AlgoConfig
from mmrl.config.algo import TurnCriticConfig
from mmrl.credit.entries import Credit
from mmrl.credit.gae import critic_values, gae, kl_rewards
from mmrl.credit.segments import Segment, segment_credit
from mmrl.credit.sequences import Track, track_weights, tracks_by_example
from mmrl.records import Forest
from mmrl.rollout import plans


class Ppo:
    """One rollout per example, its calls in order as one sequence."""

    needs_critic = True

    def __init__(self, name: str, turns: bool):
        self.name = name
        self.needs_turn_rewards = turns

    def check(self, algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """MT-PPO needs turn rewards."""
        return turn_problems(self.name, "ppo", reward_sets) if self.needs_turn_rewards else []

    def plan(self, algo: AlgoConfig, modules: Sequence[str], key: tuple[Any, ...]) -> tuple[plans.Tree, ...]:
        """One rollout."""
        return plans.independent(1)

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.base.Algorithm.credit`."""
        algo = section(algo, TurnCriticConfig)
        tracks = tracks_by_example(forest)
        weights = track_weights(tracks, algo, minibatch)
        segments = [
            segment
            for own in tracks.values()
            for track in own
            for segment in self._segments(track, algo, weights[track.rollout.id])
        ]
        return segment_credit(self.name, segments, algo.whiten)

    def _segments(self, track: Track, algo: TurnCriticConfig, weight: float) -> list[Segment]:
        """Place the rewards, estimate over the rollout's tokens, and cut the result at the calls."""
        observed = algo.obs == "all"
        lengths = [call.completion_tokens + (call.observation_tokens if observed else 0) for call in track.path]
        starts = [0, *accumulate(lengths)]
        total = starts.pop()
        rewards = [0.0] * total
        parts: list[dict[str, float]] = [{} for _ in track.path]
        last = len(track.path) - 1
        for index, (call, start) in enumerate(zip(track.path, starts, strict=True)):
            if algo.kl == "reward" and algo.beta:
                terms = kl_rewards(call, algo.beta)
                rewards[start : start + len(terms)] = [r + k for r, k in zip(rewards[start:], terms, strict=False)]
                parts[index]["kl"] = sum(terms)
            amount = track.reward if index == last else (call.turn_reward or 0.0) if self.needs_turn_rewards else 0.0
            if index == last or self.needs_turn_rewards:
                parts[index]["outcome" if index == last else "turn"] = amount
            end = start + (lengths[index] if algo.position == "turn_end" else call.completion_tokens)
            if total:  # a turn without tokens leaves its reward on the token before it
                rewards[max(end - 1, 0)] += amount
        values = [value for call in track.path for value in critic_values(call, observed)]
        advantages = gae(rewards, values, algo.gamma, algo.gae_lambda)
        return [
            Segment(
                call, part, tuple(rewards[s : s + n]), tuple(values[s : s + n]), tuple(advantages[s : s + n]), weight
            )
            for call, part, s, n in zip(track.path, parts, starts, lengths, strict=True)
        ]
