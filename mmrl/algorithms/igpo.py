"""IGPO (arXiv 2510.14967): a turn is worth what it adds to the probability of the gold answer.

    g_t = p_{t+1} - p_t,  p_t: probability of the gold answer if the program had to answer before turn t
    r̃: all g_t of all rollouts of an example and their outcomes (at the last turn), normalised together
    A_t = sum over k >= t of gamma^(k-t) · r̃_k;  token weight = 1 / (B · G · |o_i|)

The gains are turn rewards (`task.reward=gain`, `stages.information_gain`); other turn rewards take their place where
`task.reward` says so. Use it for agents of several turns whose questions have known answers: a turn is paid for what it
found, also in rollouts whose outcome is the same. Several gold answers: the likeliest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mmrl.algorithms.base import Algorithm
from mmrl.config import AlgoConfig
from mmrl.config.algo import IgpoConfig
from mmrl.credit.backward import discounted
from mmrl.credit.entries import Credit, Group, Member, Reward
from mmrl.credit.groups import compare, weigh_rollouts
from mmrl.credit.scored import by_example
from mmrl.records import Forest


class Igpo(Algorithm):
    """Turn rewards and outcomes of an example in one group, added up along the rollout."""

    name = "igpo"
    needs_turn_rewards = True
    turn_sets = ("gain",)
    """The reward set that it takes where the user names none and the task has it."""

    def credit(self, forest: Forest, algo: AlgoConfig, seed: int, minibatch: Mapping[str, int] | None = None) -> Credit:
        """See `mmrl.algorithms.Algorithm.credit`."""
        algo = IgpoConfig.narrow(algo)
        examples = by_example(forest)
        turns = {
            example: [
                Member((call,), Reward(call.turn_reward, {"turn": call.turn_reward}))
                for rollout in rollouts
                for call in rollout.path[:-1]
                if call.turn_reward is not None
            ]
            for example, rollouts in examples.items()
        }
        outcomes = {name: [Member(r.path[-1:], r.outcome) for r in rollouts] for name, rollouts in examples.items()}
        groups = compare([Group(name, (*turns[name], *outcomes[name])) for name in examples], algo)
        advantages = {group.id: [member.advantage for member in group.members] for group in groups}
        sequences = weigh_rollouts(examples, advantages, algo, minibatch)
        entries = []
        for group, rollouts, weighed in zip(groups, examples.values(), sequences, strict=True):
            remaining = iter(group.members)
            before = [
                [next(remaining) if call.turn_reward is not None else None for call in r.path[:-1]] for r in rollouts
            ]
            for rollout, compared, sequence in zip(rollouts, before, weighed.members, strict=True):
                # A call without a turn reward has what comes after it.
                members = [*compared, next(remaining)]
                values = discounted([member.advantage if member else 0.0 for member in members], algo.gamma)
                for call, member, value in zip(rollout.path, members, values, strict=True):
                    reward = member.reward if member else Reward(0.0)
                    parts = {**reward.parts, "own_advantage": member.advantage if member else 0.0}
                    entries.append(group.entry(call, replace(reward, parts=parts), value, sequence.weight))
        return Credit(algo=self.name, entries=tuple(entries), groups=tuple(groups))
