"""Turn rewards by information gain (IGPO, arXiv 2510.14967): how much likelier a turn has made the gold answer.

Between sampling and credit: the trainer forwards the prompt of every call, closed as if the program had to answer now,
and reads the probability of the gold answer. So it is the same with every engine, and a step's calls share prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mmrl.records import Call, Example, Forest
from mmrl.tasks.base import Closing, Task


def gold_problems(task: Task, examples: Sequence[Example]) -> list[str]:
    """Return the one sentence for a task that cannot be closed, or for examples without a gold answer."""
    if not isinstance(task, Closing):
        return [f"task.reward: got gain, and task={task.name} has no `closing` (docs/credits.md)"]
    without = [example.id for example in examples if not task.closing(example)[1]]
    if not without:
        return []
    return [
        f"task.reward: got gain, and {len(without)} of {len(examples)} training examples have no gold answer (the "
        f"first: '{without[0]}'); take data that has them, or another reward set"
    ]


def with_gains(
    forest: Forest,
    task: Closing,
    examples: Mapping[str, Example],
    encode: Callable[[str], Sequence[int]],
    logprobs: Callable[[Sequence[Call]], Sequence[Sequence[float]]],
    kind: str = "probability",
) -> Forest:
    """Return the forest with `turn_reward` p(next call) - p(call) on every call that another one follows.

    p is exp of the mean log-probability of a gold answer's tokens after the call's prompt and the text that closes it
    (`Closing.closing`), or that mean itself with `kind="logprob"`; the highest of several gold answers. It becomes the
    call's fact `gold_probability`, or `gold_logprob`.

    Args:
        encode: text to token ids.
        logprobs: of the completion tokens of calls, under the policy at the sampling temperature.
    """
    closed = {}
    for name, example in examples.items():
        frame_text, gold_texts = task.closing(example)
        closed[name] = tuple(encode(frame_text)), [tuple(encode(gold)) for gold in gold_texts]
    # One forward for equal prompts, as of siblings.
    scored_calls: dict[tuple[tuple[int, ...], tuple[int, ...]], Call] = {}
    for call in forest.calls.values():
        frame, golds = closed[call.example]
        for gold in golds:
            scored_calls[call.prompt_ids, gold] = Call(
                id=call.id,
                example=call.example,
                parent=None,
                module=call.module,
                prompt_ids=call.prompt_ids + frame,
                completion_ids=gold,
                completion_tokens=len(gold),
            )
    scored = dict(zip(scored_calls, logprobs(list(scored_calls.values())), strict=True))
    likeliest = {
        call.id: max(fmean(scored[call.prompt_ids, gold]) for gold in closed[call.example][1])
        for call in forest.calls.values()
    }
    value = {name: math.exp(mean) if kind == "probability" else mean for name, mean in likeliest.items()}
    calls = {}
    for call in forest.calls.values():
        now, after = value[call.id], [value[child] for child in forest.children[call.id]]
        # What follows a call is the same for all that go on from it, so its children's prompts are, too.
        gain = fmean(after) - now if after else None
        calls[call.id] = replace(call, turn_reward=gain, facts={**call.facts, f"gold_{kind}": now})
    return replace(forest, calls=calls)
