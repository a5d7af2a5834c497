"""Training on canonical text instead of the sampled tokens (`algo.reserialise`, arXiv 2508.04660's released code).

Between sampling and credit: forest in, forest out. What the policy sampled stays in `Call.sampled_ids` and `Call.text`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmrl.errors import ParseFailure
from mmrl.records import Call, Forest
from mmrl.tasks.base import Canonical


def reserialised(forest: Forest, program: Canonical, encode: Callable[[str], Sequence[int]], end: int) -> Forest:
    """The forest with the completion of every call replaced by its canonical text.

    Calls that could not be parsed, or whose text has no canonical form, keep what was sampled. The others lose their
    sampling log-probabilities, which belong to other tokens: the trainer computes its own before the first update.

    Args:
        encode: text to token ids.
        end: id of the end-of-turn token, which ends every canonical completion.
    """
    return replace(forest, calls={call.id: _again(call, program, encode, end) for call in forest.calls.values()})


def _again(call: Call, program: Canonical, encode: Callable[[str], Sequence[int]], end: int) -> Call:
    if not call.ok:
        return call
    try:
        text = program.canonical(call)
    except ParseFailure:
        return call
    if text is None:
        return call
    ids = (*encode(text), end)
    if ids == call.completion_ids:
        return call
    return replace(
        call,
        completion_ids=ids,
        completion_tokens=len(ids),
        sampled_ids=call.sampled_ids or call.completion_ids,
        logprobs=None,
    )
