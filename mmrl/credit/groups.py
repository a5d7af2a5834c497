"""Groups: which calls are compared with each other. One function per rule of the papers.

Second step of credit (rewards -> groups -> advantages -> weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mmrl import rng
from mmrl.credit.rewards import Reward
from mmrl.records import Call, Forest


@dataclass(frozen=True, slots=True)
class Member:
    """One place in a group: a call with the reward it has there."""

    call: Call
    reward: Reward
    filler: bool = False
    """Put there by padding: repeats an entry of the same call."""


@dataclass(frozen=True, slots=True)
class Group:
    """Members whose rewards are compared."""

    id: str
    members: tuple[Member, ...]


def by_slot(forest: Forest, rewards: Mapping[str, Reward], calls: Iterable[str] | None = None) -> list[Group]:
    """Group by (example, module, invocation): all siblings of a slot, homogeneous or not (MHGPO, m = (q, agent)).

    Args:
        calls: only these; None: every call that has a reward.
    """
    found: dict[tuple[str, str, int], list[Member]] = {}
    for call_id in rewards if calls is None else calls:
        call = forest.calls[call_id]
        found.setdefault((call.example, call.module, call.invocation), []).append(Member(call, rewards[call_id]))
    return [Group(slot_id(*key), tuple(members)) for key, members in found.items()]


def by_parent(forest: Forest, rewards: Mapping[str, Reward], module: str) -> list[Group]:
    """`by_slot`, but the first calls of `module` compare only with those of the same parent (`os_group=parent`)."""
    found: dict[tuple[str, str, int, str | None], list[Member]] = {}
    for call_id, reward in rewards.items():
        call = forest.calls[call_id]
        parent = call.parent if (call.module, call.invocation) == (module, 0) else None
        found.setdefault((call.example, call.module, call.invocation, parent), []).append(Member(call, reward))
    return [
        Group(slot_id(*key[:3]) + (f"<{key[3]}" if key[3] is not None else ""), tuple(members))
        for key, members in found.items()
    ]


@dataclass(frozen=True)
class ForkView:
    """Where each tree forked, read from `Rollout.fork` or, where that is null, from the shape of the tree."""

    forest: Forest

    @cached_property
    def at_fork(self) -> frozenset[str]:
        """Calls sampled at a fork: the first call of the forked module on the path of a rollout."""
        return frozenset(
            call.id
            for rollout in self.forest.rollouts
            for call in self.forest.path(rollout)
            if (call.module, call.invocation) == (self._fork_of(self.forest.path(rollout), rollout.fork), 0)
        )

    @cached_property
    def above_fork(self) -> Mapping[str, str]:
        """Call id -> forked module, for calls that the tree made before its fork."""
        found: dict[str, str] = {}
        for rollout in self.forest.rollouts:
            path = self.forest.path(rollout)
            fork = self._fork_of(path, rollout.fork)
            for call in path:
                if call.module == fork:
                    break
                found[call.id] = fork
        return found

    def _fork_of(self, path: Sequence[Call], recorded: str | None) -> str:
        if recorded is not None or not path:
            return recorded or ""
        for call in path[:-1]:
            if len(self.forest.children[call.id]) > 1:
                return self.forest.calls[self.forest.children[call.id][0]].module
        return path[0].module


def regroup_singles(
    forest: Forest, rewards: Mapping[str, Reward], above: Mapping[str, str], how: str, size: int, seed: int
) -> list[Group]:
    """Groups over the batch for the single calls above a round-robin fork (MHGPO-RR, Sec. 3.2 or Alg. 3).

    Args:
        above: single call -> module at which its tree forked.
        how: `by_agent_fork` compares calls of one slot whose trees forked at the same module;
            `agent_chunks` permutes the calls of a slot and cuts consecutive chunks of `size`;
            `alg3` does so over all single calls together. Chunks drop their remainder.
        seed: run seed of the permutations.
    """
    batch_order = {example: index for index, example in enumerate(forest.examples)}
    singles = [forest.calls[call_id] for call_id in rewards if call_id in above]
    pools: dict[tuple[str | int, ...], list[Member]] = {}
    # Stable, so an example's calls stay in path order: Alg. 3's "agents ascending".
    for call in sorted(singles, key=lambda call: batch_order[call.example]):
        slot = (call.module, call.invocation)
        pool = {"by_agent_fork": (*slot, above[call.id]), "agent_chunks": slot, "alg3": ()}[how]
        pools.setdefault(pool, []).append(Member(call, rewards[call.id]))
    groups: list[Group] = []
    for key, members in pools.items():
        name = ":".join(["RR", *(str(part) for part in key)])
        if how == "by_agent_fork":
            groups.append(Group(name, tuple(members)))
            continue
        rng.stream(seed, forest.step, "regroup", *key).shuffle(members)
        for start in range(0, len(members) - size + 1, size):
            groups.append(Group(f"{name}:{start // size}", tuple(members[start : start + size])))
    return groups


def slot_id(example: str, module: str, invocation: int) -> str:
    """Group id of (example, module, invocation)."""
    return f"{example}:{module}:{invocation}"
