"""IGPO (arXiv 2510.14967): a turn is worth what it adds to the probability of the gold answer.

    g_t = p_{t+1} - p_t,  p_t: probability of the gold answer if the program had to answer before turn t
    r̃: all g_t of all rollouts of an example and their outcomes (at the last turn), normalised together
    A_t = sum over k >= t of gamma^(k-t) · r̃_k;  token weight = 1 / (B · G · |o_i|)

`algo.normalise=separate` normalises the gains and the outcomes of an example apart. The gains are turn rewards
(`task.reward=gain`, `stages.information_gain`); other turn rewards take their place where `task.reward` says so. Use it
for agents of several turns whose questions have known answers: a turn is paid for what it found, also in rollouts whose
outcome is the same. Several gold answers: the likeliest counts.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import IgpoConfig
from mmrl.credit.backward import discounted
from mmrl.credit.entries import Credit, Group, Member, Reward
from mmrl.credit.groups import compare, weigh_rollouts
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.scored import by_example
from mmrl.records import Forest


class Igpo(Algorithm[IgpoConfig]):
    """Turn rewards and outcomes of an example in one group, or in a group each, added up along the rollout."""

    name = "igpo"
    needs_turn_rewards = True
    turn_sets = ("gain",)
    """The reward set that it takes where the user names none and the task has it."""

    @override
    def credit(self, forest: Forest, algo: IgpoConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        examples = by_example(forest)
        turns = {
            example: tuple(
                Member((call,), Reward(call.turn_reward, {"turn": call.turn_reward}))
                for rollout in rollouts
                for call in rollout.path[:-1]
                if call.turn_reward is not None
            )
            for example, rollouts in examples.items()
        }
        outcomes = {name: tuple(Member(r.path[-1:], r.outcome) for r in own) for name, own in examples.items()}
        if algo.normalise == "joint":
            of_turns = of_outcomes = groups = compare(
                [Group(name, turns[name] + outcomes[name]) for name in examples], algo
            )
        else:
            # Two calls: `std_over=batch` is one deviation of all turns, and one of all outcomes.
            of_turns = compare([Group(f"{name}:turns", turns[name]) for name in examples], algo)
            of_outcomes = compare([Group(name, outcomes[name]) for name in examples], algo)
            groups = [group for group in (*of_turns, *of_outcomes) if group.members]
        advantages = {
            example: [member.advantage for group in (own, of_all) for member in group.members]
            for example, own, of_all in zip(examples, of_turns, of_outcomes, strict=True)
        }
        weighed = weigh_rollouts(examples, advantages, algo, minibatch)
        entries = []
        for group, own, rollouts, weights in zip(of_outcomes, of_turns, examples.values(), weighed, strict=True):
            # In one group the turns come first.
            compared, last = iter(own.members), iter(group.members[-len(rollouts) :])
            for rollout, sequence in zip(rollouts, weights.members, strict=True):
                # A call without a turn reward has what comes after it.
                members = [next(compared) if call.turn_reward is not None else None for call in rollout.path[:-1]]
                members.append(next(last))
                values = discounted([member.advantage if member else 0.0 for member in members], algo.gamma)
                for call, member, value in zip(rollout.path, members, values, strict=True):
                    reward = member.reward if member else Reward(0.0)
                    parts = {**reward.parts, "own_advantage": member.advantage if member else 0.0}
                    within = own if "turn" in parts else group
                    entries.append(within.entry(call, replace(reward, parts=parts), value, sequence.weight))
        return Credit(algo=self.name, entries=tuple(entries), groups=tuple(groups))
