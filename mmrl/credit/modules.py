"""What is said of single modules: factors of their advantages, and modules that are frozen.

After an algorithm's own credit (rewards -> groups -> advantages -> weights): entries in, entries out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mmrl.credit.entries import Credit
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
    calls = {
        call_id: replace(call, logprobs=nothing, ref_logprobs=nothing)
        for call_id, call in forest.calls.items()
        if call.module in frozen and call.logprobs is None
        for nothing in [(0.0,) * call.completion_tokens]
    }
    return replace(forest, calls={**forest.calls, **calls}) if calls else forest


def leave_out(credit: Credit, forest: Forest, frozen: Collection[str]) -> Credit:
    """Weight 0 for every token of the frozen modules. The other modules' weights stay as they are.

    So what a frozen module is left out of changes nothing in the update of another module's own weights.
    """
    entries = [
        replace(entry, weights=(0.0,) * len(entry.weights)) if forest.calls[entry.call].module in frozen else entry
        for entry in credit.entries
    ]
    return replace(credit, entries=tuple(entries))
