"""What holds for the credit of every algorithm: metrics of its groups, factors of single modules, frozen modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mmrl.credit.entries import Credit, Group
from mmrl.records import Forest


def scale_advantages(credit: Credit, forest: Forest, factors: Mapping[str, float]) -> Credit:
    """Every advantage of a module times its factor (1 where there is none): c · A.

    Rewards, statistics of groups, weights and the critic's targets stay as they are. 0 leaves a module's KL term.
    """
    entries = []
    for entry in credit.entries:
        factor = factors.get(forest.calls[entry.call].module, 1.0)
        entries.append(
            entry if factor == 1.0 else replace(entry, advantages=tuple(factor * a for a in entry.advantages))
        )
    return replace(credit, entries=tuple(entries))


def without_kl(forest: Forest, frozen: Collection[str]) -> Forest:
    """The forest where calls of frozen modules that have no log-probabilities (an endpoint's) have a KL term of 0."""
    calls = dict(forest.calls)
    for call_id, call in forest.calls.items():
        if call.module in frozen and call.logprobs is None:
            # Equal to the reference's, so beta · (log-prob - reference) adds nothing to the reward.
            zeros = (0.0,) * call.completion_tokens
            calls[call_id] = replace(call, logprobs=zeros, ref_logprobs=zeros)
    return replace(forest, calls=calls)


def leave_out(credit: Credit, forest: Forest, frozen: Collection[str]) -> Credit:
    """Weight 0 for every token of the frozen modules. The other modules' weights stay as they are.

    So what a frozen module is left out of changes nothing in the update of another module's own weights.
    """
    entries = [
        replace(entry, weights=(0.0,) * len(entry.weights)) if forest.calls[entry.call].module in frozen else entry
        for entry in credit.entries
    ]
    return replace(credit, entries=tuple(entries))


def group_metrics(forest: Forest, groups: Sequence[Group]) -> dict[str, float]:
    """Credit metrics of a step (docs/metrics.md)."""
    compared = [group for group in groups if not group.of_one]
    metrics = {
        "credit/groups": float(len(compared)),
        "credit/groups_of_one": float(len(groups) - len(compared)),
        "credit/zero_variance_share": fmean([group.constant for group in compared] or [0.0]),
    }
    for module in forest.modules:
        own = [group for group in compared if any(member.call.module == module for member in group.members)]
        if own:
            metrics[f"credit/{module}/zero_variance_share"] = fmean(group.constant for group in own)
    return metrics
