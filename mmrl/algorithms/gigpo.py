"""GiGPO (arXiv 2505.10978): whole rollouts are compared, and so are calls that were made in the same state.

    A_t = A^E_i + w · A^S_t;  token weight = 1 / (B · G · |o_i|)
    A^E: the rollout's reward, normalised over the G rollouts of the example (Eq. 3)
    A^S: R_t = sum over k >= t of gamma^(k-t) · r_k, normalised over the calls of the same state (Eqs. 5 to 7)

A state is what the program names in a call's facts (`facts={"state": ...}`), with `algo.similarity` also one like it,
or, for a module whose prompts are fresh, the prompt. r_k is a call's turn reward where the task's reward set has any,
and the outcome at the last call. Use it for agents that come back to the same state on several ways. With a growing
context no prompt but the first repeats: then only the first call is compared again, `credit/anchored_later_share` is 0,
and an alarm says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from typing_extensions import override

from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import GigpoConfig
from mmrl.credit.backward import discounted
from mmrl.credit.entries import Credit, Entry, Group, Member, Reward
from mmrl.credit.groups import compare, weigh_rollouts
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.scored import ScoredRollout, by_example
from mmrl.records import Call, Forest


class Gigpo(Algorithm[GigpoConfig]):
    """Advantages of a rollout and of its calls' states, added."""

    name = "gigpo"
    reads_turn_rewards = True

    @override
    def credit(self, forest: Forest, algo: GigpoConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        examples = by_example(forest)
        rollouts = [rollout for samples in examples.values() for rollout in samples]
        episodes = compare([_episodes(example, samples, algo.count) for example, samples in examples.items()], algo)
        states, within = _states(rollouts, algo)
        # Equal rewards have equal advantages, so that a reward names its rollout's.
        episode = {(g.id, member.reward.total): member.advantage for g in episodes for member in g.members}
        advantages = {
            example: [
                episode[example, r.reward] + algo.step_coef * step.advantage
                for r in samples
                for step in within[r.rollout.id]
            ]
            for example, samples in examples.items()
        }
        sequences = weigh_rollouts(examples, advantages, algo, minibatch)
        entries = []
        for group, samples, weighed in zip(episodes, examples.values(), sequences, strict=True):
            for rollout, sequence in zip(samples, weighed.members, strict=True):
                for call, step in zip(rollout.path, within[rollout.rollout.id], strict=True):
                    whole = episode[group.id, rollout.reward]
                    entries.append(_entry(call, group, sequence, whole, step, algo.step_coef))
        anchored = sum(len(group.members) for group in states if not group.is_singleton)
        counts = {"credit/anchored_share": anchored, "credit/first_share": len(rollouts)}
        shares = {name: count / len(entries) for name, count in counts.items() if entries}
        later = [not g.is_singleton for g in states for member in g.members if member.call.parent is not None]
        shares |= {"credit/anchored_later_share": sum(later) / len(later)} if later else {}
        return Credit(algo=self.name, entries=tuple(entries), groups=(*episodes, *states), metrics=shares)


State = tuple[str, str, Hashable]
"""Module; what the state is known by (`state`: a name, `prompt`, `call`); and that."""


def call_state(call: Call) -> State:
    """Return the state of a call: the one that the program named, else its prompt, else (nothing repeats) itself."""
    if (state := call.facts.get("state")) is not None:
        return call.module, "state", str(state)
    return (call.module, "prompt", call.prompt_ids) if call.prompt_ids else (call.module, "call", call.id)


def _alike(state: State, known: Iterable[State], least: float) -> State:
    """Return the first known state with a name as alike as `least`; `state` itself where there is none.

    Prompts are not looked at: those of a growing context differ little from turn to turn.
    """
    for other in known:
        if state[1] == "state" and other[:2] == state[:2]:
            matcher = SequenceMatcher(None, str(state[2]), str(other[2]))
            # Its two upper bounds first: they cost little.
            if all(bound() >= least for bound in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
                return other
    return state


def _states(rollouts: Sequence[ScoredRollout], algo: GigpoConfig) -> tuple[list[Group], dict[str, list[Member]]]:
    """Group the calls of an example by state and compare their returns; also return them by rollout, in path order."""
    groups: dict[tuple[str, State], list[Member]] = {}
    positions: list[tuple[str, tuple[str, State], int]] = []
    for rollout in rollouts:
        rewards = [call.turn_reward or 0.0 for call in rollout.path[:-1]] + [rollout.reward]
        for call, value in zip(rollout.path, discounted(rewards, algo.gamma), strict=True):
            key = call.example, call_state(call)
            if algo.similarity is not None and key not in groups:
                known = (state for example, state in groups if example == call.example)
                key = call.example, _alike(key[1], known, algo.similarity)
            group = groups.setdefault(key, [])
            positions.append((rollout.rollout.id, key, len(group)))
            group.append(Member((call,), Reward(value, {"return": value})))
    states = [Group(f"{key[0]}:state{number}", tuple(members)) for number, (key, members) in enumerate(groups.items())]
    compared = dict(zip(groups, compare(states, algo), strict=True))
    within: dict[str, list[Member]] = {}
    for rollout_id, key, position in positions:
        within.setdefault(rollout_id, []).append(compared[key].members[position])
    return list(compared.values()), within


def _episodes(example: str, rollouts: Sequence[ScoredRollout], count: str) -> Group:
    """Group an example's rollouts; with `count=call` each as often as it has calls, so that long ones weigh more."""
    each = None if count == "call" else 1
    return Group(example, tuple(Member(r.path, r.outcome) for r in rollouts for _ in r.path[:each]))


def _entry(call: Call, episodes: Group, sequence: Member, episode: float, step: Member, coef: float) -> Entry:
    parts = {**sequence.reward.parts, **step.reward.parts, "episode": episode, "step": step.advantage}
    reward = Reward(sequence.reward.total, parts)
    return episodes.entry(call, reward, episode + coef * step.advantage, sequence.weight)
