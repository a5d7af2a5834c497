"""C3 (arXiv 2603.06859): a call against further samples of the same call, each played on to the end.

    V(call) = mean over its successors of their values, recursively;  of a rollout's end its outcome
    A = V - mean V of its siblings;  token weight = share of paths that reach the call / (B · siblings · |o|)

`algo.fanout` names the calls that are sampled several times. Samples of one call have the same history, so their
values differ by what the reply was worth and by the chance of what comes after, and by nothing else. A call weighs as
much as the paths that reach it; equal weights for all calls would count branches that go on more than those that stop
early. So with `loss_mean=constant` the expected gradient is that of the expected outcome.

Use it where replies of early modules matter and their credit is to be exact; the cost is the product of the widths. A
module called once, sampled G times, is RLOO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import fmean

from typing_extensions import override

from mmrl import rng
from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import C3Config
from mmrl.credit.backward import passed_up
from mmrl.credit.entries import Credit, Group, Reward
from mmrl.credit.groups import compare, with_weights
from mmrl.credit.loss_weights import LossSequence, Minibatches, minibatch_of, per_token
from mmrl.credit.scored import scored_rollouts
from mmrl.credit.slots import by_slot
from mmrl.errors import unknown
from mmrl.records import Forest
from mmrl.rollout import plans


class C3(Algorithm[C3Config]):
    """A group per sampled call; values of calls by the mean of what comes after them."""

    name = "c3"

    def check(self, algo: C3Config, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Return unknown modules in `fanout`, or more leaves than `max_leaves`."""
        widths = algo.widths(modules)
        problems = [unknown("algo.fanout", name, modules) for name, _ in widths if name not in modules]
        (tree,) = self.plan(algo, modules, ())
        if not problems and tree.size > algo.max_leaves:
            named = ", ".join(f"{name}:{invocation} {width}" for (name, invocation), width in widths.items())
            problems.append(
                f"algo.fanout: {tree.size} rollouts of each example ({named}), expected at most "
                f"algo.max_leaves={algo.max_leaves}"
            )
        return problems

    def plan(self, algo: C3Config, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan one tree with a fork at each call of `fanout`."""
        widths = algo.widths(modules).items()
        return (plans.Tree(tuple(plans.Fork(name, width, number) for (name, number), width in widths if width > 1)),)

    @override
    def credit(self, forest: Forest, algo: C3Config, seed: int, minibatch: Minibatches = None) -> Credit:
        values = passed_up(forest, lambda call, successors: fmean(successors))
        rewards = {call: Reward(value, {"outcome": value}) for call, value in values.items()}
        within = algo.siblings == "parent"
        groups = compare(by_slot(forest, rewards, within_parent=lambda call: within), algo)
        groups = with_weights(groups, _weights(groups, _reach(forest, values), algo, minibatch))
        # Each call is in one group; entries in the forest's order.
        entries = {entry.call: entry for group in groups for entry in group.entries()}
        alone = [group.is_singleton for group in groups for _ in group.members]
        return Credit(
            algo=self.name,
            entries=tuple(entries[call] for call in values),
            groups=tuple(groups),
            metrics={"credit/without_siblings": fmean(alone)} if alone else {},
        )


def _reach(forest: Forest, scored: Iterable[str]) -> dict[str, float]:
    """Return the share of its example's paths that reach each scored call; behind a call they part evenly.

    The first calls of all trees of an example are samples of one call.
    """
    calls = [forest.calls[call] for call in scored]
    successors = Counter((call.example, call.parent) for call in calls)
    successors.update((rollout.path[-1].example, rollout.path[-1].id) for rollout in scored_rollouts(forest))
    reach: dict[str, float] = {}
    for call in calls:  # parents come first
        above = 1.0 if call.parent is None else reach[call.parent]
        reach[call.id] = above / successors[call.example, call.parent]
    return reach


def _weights(
    groups: Sequence[Group], reach: Mapping[str, float], algo: C3Config, minibatch: Minibatches
) -> list[float]:
    """Return the weight of each token of each member, in order."""
    sequences, siblings, kinds = [], Counter[tuple[Hashable, str | None]](), dict[str, set[str]]()
    calls = [member.call for group in groups for member in group.members]
    for group in groups:
        kind = "dropped" if group.is_dropped else "alone" if group.is_singleton else "compared"
        for member in group.members:
            tokens = 0 if group.is_dropped else member.tokens(algo.left_out)
            sequences.append(LossSequence(member.call.example, group.id, tokens, compared=not group.is_singleton))
            siblings[group.id, member.call.parent] += 1
            if member.tokens():
                kinds.setdefault(member.call.example, set()).add(kind)
    # An example counts as sampled, but where all that was compared in it is dropped.
    counted = [example for example, kind in kinds.items() if "compared" in kind or "dropped" not in kind]
    examples = Counter(minibatch_of(example, minibatch) for example in counted)
    # A sibling without a token takes no share from the others.
    sharing = Counter((s.slot, call.parent) for call, s in zip(calls, sequences, strict=True) if s.counts)
    shares = [
        reach[call.id]
        * (siblings[s.slot, call.parent] / sharing[s.slot, call.parent])
        / examples[minibatch_of(s.example, minibatch)]
        if s.counts
        else 0.0
        for call, s in zip(calls, sequences, strict=True)
    ]
    return per_token(sequences, shares, algo, minibatch)
