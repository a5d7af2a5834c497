"""MHGPO's groups and weights: a slot is (example, module, invocation), and trees fork at modules.

Second and last step of credit for MHGPO (arXiv 2506.02718); the comparison in between is that of every group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mmrl import rng
from mmrl.config.algo import MhgpoConfig
from mmrl.credit.entries import Group, Member, Reward
from mmrl.credit.groups import with_weights
from mmrl.credit.loss_weights import LossSequence, Minibatches, minibatch_of, per_token
from mmrl.records import Call, Forest

Slot = tuple[str, str, int]
"""Example, module, invocation."""


def slot_of(call: Call) -> Slot:
    """Return the slot that a call fills."""
    return call.example, call.module, call.invocation


def slot_id(example: str, module: str, invocation: int) -> str:
    """Group id of a slot."""
    return f"{example}:{module}:{invocation}"


def by_slot(
    forest: Forest,
    rewards: Mapping[str, Reward],
    calls: Iterable[str] | None = None,
    within_parent: Callable[[Call], bool] = lambda call: False,
) -> list[Group]:
    """Return a group per slot: all siblings, with equal prompts or not (MHGPO, m = (q, agent)).

    Args:
        calls: only these; None: every call that has a reward.
        within_parent: True for a call that is compared only with those after the same call, which have its prompt.
    """
    slots: dict[tuple[Slot, str | None], list[Member]] = {}
    for call_id in rewards if calls is None else calls:
        call = forest.calls[call_id]
        parent = call.parent if within_parent(call) else None
        slots.setdefault((slot_of(call), parent), []).append(Member((call,), rewards[call_id]))
    return [
        Group(slot_id(*slot) + (f"<{parent}" if parent is not None else ""), tuple(members))
        for (slot, parent), members in slots.items()
    ]


@dataclass(frozen=True)
class ForkView:
    """Forks of the trees, read from `Rollout.fork` or, where that is null, from the shape of the tree."""

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
        forks: dict[str, str] = {}
        for rollout in self.forest.rollouts:
            path = self.forest.path(rollout)
            fork = self._fork_of(path, rollout.fork)
            for call in path:
                if call.module == fork:
                    break
                forks[call.id] = fork
        return forks

    def _fork_of(self, path: Sequence[Call], recorded: str | None) -> str:
        if recorded is not None or not path:
            return recorded or ""
        # Files written by hand need not say where a tree forked: it did below the first call with several successors.
        for call in path[:-1]:
            if len(self.forest.children[call.id]) > 1:
                return self.forest.calls[self.forest.children[call.id][0]].module
        return path[0].module


def by_fork(forest: Forest, rewards: Mapping[str, Reward], forks: Mapping[str, str]) -> list[Group]:
    """Group as `by_slot` from the fork on; a call above it with its slot's calls whose trees forked at the same module.

    Args:
        forks: call above a fork -> module at which its tree forked.
    """
    slots = by_slot(forest, rewards, [call_id for call_id in rewards if call_id not in forks])
    pools: dict[tuple[str, int, str], list[Member]] = {}
    for call in _in_batch_order(forest, [call_id for call_id in rewards if call_id in forks]):
        key = (call.module, call.invocation, forks[call.id])
        pools.setdefault(key, []).append(Member((call,), rewards[call.id]))
    return slots + [Group(":".join(["RR", *map(str, key)]), tuple(members)) for key, members in pools.items()]


def by_chunks(forest: Forest, rewards: Mapping[str, Reward], mixed: bool, size: int, seed: int) -> list[Group]:
    """`by_slot`, and what is alone in its slot regrouped (MHGPO, arXiv 2506.02718, Alg. 3): single calls of the whole
    batch are shuffled and cut into consecutive chunks of `size`; the remainder is dropped.

    Args:
        mixed: all single calls together, as Alg. 3 has it; else those of each module and invocation by themselves.
        seed: run seed of the permutations.
    """
    slots = by_slot(forest, rewards)
    pools: dict[tuple[str | int, ...], list[Member]] = {}
    for call in _in_batch_order(forest, [group.members[0].call.id for group in slots if group.is_singleton]):
        pool: tuple[str | int, ...] = () if mixed else (call.module, call.invocation)
        pools.setdefault(pool, []).append(Member((call,), rewards[call.id]))
    groups = [group for group in slots if not group.is_singleton]
    for key, members in pools.items():
        # Keyed by the pool, so that what one pool draws does not depend on which other pools a batch happens to have.
        rng.stream(seed, forest.step, "regroup", *key).shuffle(members)
        name = ":".join(["RR", *map(str, key)])
        for start in range(0, len(members) - size + 1, size):
            groups.append(Group(f"{name}:{start // size}", tuple(members[start : start + size])))
    return groups


def _in_batch_order(forest: Forest, calls: Iterable[str]) -> list[Call]:
    """Order calls example after example, as the step has them."""
    order = {example: index for index, example in enumerate(forest.examples)}
    # Stable, so an example's calls stay in path order: Alg. 3's "agents ascending".
    return sorted((forest.calls[call_id] for call_id in calls), key=lambda call: order[call.example])


def weigh_slots(
    groups: Sequence[Group],
    rewarded: Collection[Call],
    trains: Callable[[Call], bool],
    algo: MhgpoConfig,
    minibatch: Minibatches = None,
) -> list[Group]:
    """Weigh tokens by 1 / (B · n · G_k · |o|) for every member (Eq. 6), or as `algo.loss_mean` says.

    Args:
        rewarded: all calls that have a reward. Their slots count in n (and B), even where no group keeps them.
        trains: True if a call is in the loss.
    """
    # A frozen or dropped member is no sequence of the loss: no tokens, so it sets no length for `constant` either.
    sequences = [
        LossSequence(
            m.call.example,
            slot_of(m.call),
            m.tokens() * (trains(m.call) and not g.is_dropped),
            compared=not g.is_singleton,
        )
        for g in groups
        for m in g.members
    ]
    dropped = {slot_of(member.call) for group in groups if group.is_dropped for member in group.members}
    filled = [(call.example, slot_of(call)) for call in rewarded if trains(call) and slot_of(call) not in dropped]
    return with_weights(groups, per_token(sequences, three_level(sequences, filled, minibatch), algo, minibatch))


def three_level(
    sequences: Sequence[LossSequence], filled: Iterable[tuple[str, Hashable]], minibatch: Minibatches = None
) -> list[float]:
    """Return shares 1 / (B · n · G_k) of MHGPO's Eq. 6: mean over examples, over filled slots, over the slot's.

    Args:
        filled: (example, slot) pairs that were sampled: they count in n (and B) even where none of theirs is left.
    """
    # n counts slots that were sampled, not groups: round robin puts calls of one slot into groups over the batch.
    slots: dict[str, set[Hashable]] = {}
    for example, slot in [*filled, *((sequence.example, sequence.slot) for sequence in sequences if sequence.counts)]:
        slots.setdefault(example, set()).add(slot)
    examples = Counter(minibatch_of(example, minibatch) for example in slots)
    sizes = Counter((sequence.example, sequence.slot) for sequence in sequences if sequence.counts)
    return [
        1.0 / (examples[minibatch_of(s.example, minibatch)] * len(slots[s.example]) * sizes[s.example, s.slot])
        if s.counts
        else 0.0
        for s in sequences
    ]
