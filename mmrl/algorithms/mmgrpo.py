"""mmGRPO (arXiv 2508.04660): a group per module and invocation, over independent rollouts of a program.

    group (example, module, k): the k-th call of the module in each rollout, all with their rollout's reward
    A = (r - mean) / (std + eps) within the group;  token weight = 1 / (groups · G · |o|)

Works for any program, also when rollouts call a module different numbers of times (shorter lists are filled up or all
cut), when rollouts come from several teacher programs, and when parsing fails: the failing call has a format reward,
and where the failure ended its rollout the other calls are not trained. Use it for programs whose modules have prompts
of their own and no penalties per module.

Groups line the calls of a module up by invocation, padded to equal length, cut to the k most diverse (PADGROUPS and
SELECTKDIVERSEELEMENTS of the paper); the defaults follow what the authors' code did where it and the paper's text
differ (docs/mmgrpo.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from typing_extensions import override

from mmrl import rng
from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import MmgrpoConfig
from mmrl.config.teacher import STUDENT
from mmrl.credit.entries import Credit, Group, Member, Reward
from mmrl.credit.groups import compare, weigh
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.scored import ScoredRollout, by_example
from mmrl.credit.slots import slot_id
from mmrl.errors import ParseFailure
from mmrl.records import Call, Forest, caught
from mmrl.rollout import plans


class Mmgrpo(Algorithm[MmgrpoConfig]):
    """Module-level groups."""

    name = "mmgrpo"

    def plan(self, algo: MmgrpoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan R independent rollouts, teachers one after the other."""
        # Teacher-major order is part of the rollouts' ids, and with them of every sampling seed.
        shares = algo.shares()
        return tuple(
            plans.Tree(teacher=None if name == STUDENT else name)
            for name, count in shares.items()
            for _ in range(count)
        )

    @override
    def credit(self, forest: Forest, algo: MmgrpoConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        groups = weigh(compare(module_groups(forest, algo, seed), algo), algo, minibatch)
        # Groups that count as not sampled come last (the sort is stable): recorded without weight.
        entries = tuple(entry for group in sorted(groups, key=lambda g: g.is_dropped) for entry in group.entries())
        return Credit(algo=self.name, entries=entries, groups=tuple(groups))


Invocations = dict[int, Member]
"""A rollout's members for a module, by invocation."""


def module_groups(forest: Forest, algo: MmgrpoConfig, seed: int) -> list[Group]:
    """Return the groups (example, module, k) of a forest, ordered by module, then example, then k.

    Args:
        seed: run seed of random fillers.
    """
    # Rollouts that were planned, not those that count: a group is padded to R also where some have failed.
    planned: dict[str, int] = {}
    for rollout in forest.rollouts:
        planned[rollout.example] = planned.get(rollout.example, 0) + 1
    traces = {
        example: {scored.rollout.id: members for scored in rollouts if (members := _trace(scored, algo))}
        for example, rollouts in by_example(forest).items()
    }
    groups = []
    for module in forest.modules:
        for example, of_example in traces.items():
            # One key per example and module, so a filler does not move with the batch around it.
            rows = _rows(of_example, module, algo, (seed, forest.step, "filler", example, module))
            for k in sorted({k for row in rows for k in row}):
                members = [row[k] for row in rows if k in row]
                # Past the cut of the others there is nothing to compare one failure with.
                alone = algo.padding_mode == "truncate" and len(members) == 1 < len(rows)
                members = [m for m in members if not is_overlong(m.call, algo)]
                members = members if alone else _sized(members, planned[example], algo)
                if members:
                    groups.append(Group(slot_id(example, module, k), tuple(members)))
    return groups


def is_overlong(call: Call, algo: MmgrpoConfig) -> bool:
    """Return True if prompt and completion exceed `max_context`; a prompt of unknown length counts 0."""
    return algo.max_context is not None and (call.prompt_tokens or 0) + call.completion_tokens > algo.max_context


def most_diverse(members: Sequence[Member], size: int) -> list[Member]:
    """Select `size` members at even ranks of the reward; all where there are just that many.

    Ranks are round(i · (n - 1) / (size - 1)), halves to even, over the stable descending order.
    """
    if len(members) == size:
        return list(members)
    # Even ranks keep best and worst, which carry the signal, and what lies between them at equal steps. Fractions:
    # a rank that is a half in binary rounding would go to one side or the other by the machine.
    ranked = sorted(members, key=lambda member: -member.reward.total)
    ranks = [round(Fraction(i * (len(ranked) - 1), size - 1)) for i in range(size)]
    return [
        replace(ranked[rank], filler=True) if position and rank == ranks[position - 1] else ranked[rank]
        for position, rank in enumerate(ranks)
    ]


def _trace(scored: ScoredRollout, algo: MmgrpoConfig) -> list[Member]:
    """Select the calls of a rollout that are trained, with their rewards (docs/mmgrpo.md)."""
    calls = scored.path
    if algo.overlong == "trajectory" and any(is_overlong(call, algo) for call in calls):
        return []
    failing, went_on = [call for call in calls if not call.ok], caught(scored.rollout, calls)
    reward = scored.outcome
    # A rollout that ended because of a call that could not be parsed teaches the format and nothing else: its other
    # calls did not fail, and its outcome says nothing of them.
    if failing and scored.rollout.error == ParseFailure.kind:
        reward = _format(failing[-1], algo)
        calls = calls if algo.failing_traces == "trajectory" else tuple(failing)
    return [Member((call,), reward if call.ok else _format(call, algo), caught=call in went_on) for call in calls]


def _format(call: Call, algo: MmgrpoConfig) -> Reward:
    """Return the reward of a call that could not be parsed: between the two scores, by the share of fields present."""
    # A partial reply is better than none, so that there is a way up for a model that never parses.
    share = call.present_fields / call.expected_fields if call.expected_fields else 0.0
    score = algo.format_failure_score + (algo.format_failure_best - algo.format_failure_score) * share
    return Reward(score, {"format": score})


def _rows(traces: Mapping[str, Sequence[Member]], module: str, algo: MmgrpoConfig, key: rng.Key) -> list[Invocations]:
    """Make a row per rollout that takes part, padded as `padding_mode` says."""
    rows: dict[str, Invocations] = {}
    for rollout, trained in traces.items():
        members = [member for member in trained if member.call.module == module]
        if members:
            rows[rollout] = _row(members, algo)
        elif algo.on_missing == "skip_example":
            return []
    # Lists of unequal length cannot be compared place by place: the paper cuts all to the shortest or fills up to the
    # longest; `ragged` compares whoever is there.
    if algo.padding_mode == "truncate":
        return _cut(list(rows.values()))
    if algo.padding_mode == "fill" and algo.fill_source == "rollout" and rows:
        longest = 1 + max(max(row) for row in rows.values())
        return [_filled(row, longest, algo.filler, (*key, rollout)) for rollout, row in rows.items()]
    return list(rows.values())


def _row(members: Sequence[Member], algo: MmgrpoConfig) -> Invocations:
    # A failure that ended its rollout takes the place of the calls before it, which are not trained; one that the
    # program caught stands among them.
    ended = algo.failing_index == "true" and not members[0].call.ok
    if ended or any(member.caught for member in members):
        return {member.call.invocation: member for member in members}
    return dict(enumerate(members))


def _cut(rows: Sequence[Invocations]) -> list[Invocations]:
    """Cut every list to the shortest, but for caught failures: they neither count nor are they cut."""
    lists = [[k for k, member in row.items() if not member.caught] for row in rows]
    shortest = min((len(indices) for indices in lists if indices), default=0)
    return [
        {k: member for k, member in row.items() if member.caught or k in indices[:shortest]}
        for row, indices in zip(rows, lists, strict=True)
    ]


def _filled(row: Invocations, length: int, filler: str, key: rng.Key) -> Invocations:
    """Fill every missing invocation with a call of the same row: the last, or one drawn at random.

    A caught failure is taken only where there is no other.
    """
    calls = [member for member in row.values() if not member.caught] or list(row.values())
    missing = [k for k in range(length) if k not in row]
    fillers = {k: calls[-1] if filler == "max" else rng.stream(*key, k).choice(calls) for k in missing}
    return row | {k: replace(member, filler=True) for k, member in fillers.items()}


def _sized(members: Sequence[Member], rollouts: int, algo: MmgrpoConfig) -> list[Member]:
    """Pad a group to the number of rollouts, then select; a ragged group is never enlarged."""
    if not members:
        return []
    if algo.padding_mode == "ragged":
        return most_diverse(members, min(algo.group_size or len(members), len(members)))
    # Repeated from its head.
    copies = [replace(members[i % len(members)], filler=True) for i in range(len(members), rollouts)]
    padded = [*members, *copies]
    return padded if algo.group_size is None else most_diverse(padded, algo.group_size)
