"""Equal numbers of generated calls: which base batches a budget is worth, and their forests as one.

Part of `audit`. A base batch has all examples, one group each. The unit is the largest number of calls that any row's
base batch takes; a row whose base batch takes fewer plays more of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from mmrl.credit.entries import Credit
from mmrl.records import Forest


def base_batches(unit_calls: float, batch_calls: float, batches: int) -> int:
    """Return how many base batches of `batch_calls` calls a row begins before `batches` units are spent."""
    return math.ceil(batches * unit_calls / batch_calls)


def runs(unit_calls: float, batch_calls: float, batches: int, budget: int) -> list[range]:
    """Cut a row's base batches into disjoint runs that are worth `budget` units each; units that are left are dropped.

    A base batch belongs to the run in which it begins, so runs have equal numbers of calls up to one base batch, and
    exactly equal ones on average.
    """
    borders = [base_batches(unit_calls, batch_calls, run * budget) for run in range(batches // budget + 1)]
    return [range(start, end) for start, end in pairwise(borders)]


def joined(forests: Sequence[Forest]) -> Forest:
    """Return base batches of the same examples as one batch: each one's examples are examples of their own.

    What was `q1` in forest number k is `k:q1`; ids of calls and rollouts begin alike.
    """
    calls, rollouts = {}, []
    for number, forest in enumerate(forests):
        for call in forest.calls.values():
            parent = None if call.parent is None else _named(number, call.parent)
            name = _named(number, call.id)
            calls[name] = replace(call, id=name, parent=parent, example=_named(number, call.example))
        for rollout in forest.rollouts:
            leaf = None if rollout.leaf is None else _named(number, rollout.leaf)
            rollouts.append(
                replace(rollout, id=_named(number, rollout.id), leaf=leaf, example=_named(number, rollout.example))
            )
    return replace(forests[0], calls=calls, rollouts=tuple(rollouts))


def scaled_alike(parts: Sequence[Credit], whole: Credit) -> bool:
    """Return True if every token has 1 / len(parts) of the weight · advantage in `whole` that it has in its own part.

    The gradient of the joined batch is then the mean of those of its parts.

    Args:
        whole: credit of the `joined` forests that `parts` are the credits of.
    """
    found, count = _coefficients(whole), len(parts)
    expected = {
        _named(number, call): tuple(value / count for value in values)
        for number, part in enumerate(parts)
        for call, values in _coefficients(part).items()
    }
    return found.keys() == expected.keys() and all(
        math.isclose(a, b, rel_tol=1e-9) for call in found for a, b in zip(found[call], expected[call], strict=True)
    )


def _coefficients(credit: Credit) -> Mapping[str, Sequence[float]]:
    """Return call id -> weight · advantage of each token, summed over the call's entries; calls without any are out."""
    sums: dict[str, list[float]] = {}
    for entry in credit.entries:
        values = [w * a for w, a in zip(entry.weights, entry.advantages, strict=True)]
        earlier = sums.get(entry.call, [0.0] * len(values))
        sums[entry.call] = [a + b for a, b in zip(earlier, values, strict=True)]
    return {call: values for call, values in sums.items() if any(values)}


def _named(number: int, name: str) -> str:
    return f"{number}:{name}"
