"""What a step of the weight stage works on, as pure functions: examples, mini-batches, the trainer's calls."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl import rng
from mmrl.credit.entries import Credit
from mmrl.records import Example, Forest
from mmrl.trainer.objective import TrainCall, TrainEntry


def batch_of(examples: Sequence[Example], size: int, step: int, seed: int) -> list[Example]:
    """Examples of step number `step` (from 1): shuffled each epoch, walked in batches, the last one topped up.

    A batch never holds an example twice. Requires `size` <= number of examples.
    """
    batches = -(-len(examples) // size)
    epoch, index = divmod(step - 1, batches)
    order = list(range(len(examples)))
    rng.stream(seed, "order", epoch).shuffle(order)
    chosen = order[index * size : (index + 1) * size]
    chosen += order[: size - len(chosen)]
    return [examples[i] for i in chosen]


def minibatches(examples: Sequence[Example], count: int) -> dict[str, int]:
    """Example id -> mini-batch: consecutive examples, sizes differing by at most one."""
    return {example.id: index * count // len(examples) for index, example in enumerate(examples)}


def train_calls(forest: Forest, credit: Credit, minibatch: dict[str, int]) -> list[TrainCall]:
    """What the trainer sees: each credited call once, with its entries."""
    entries: dict[str, list[TrainEntry]] = {}
    for entry in credit.entries:
        entries.setdefault(entry.call, []).append(
            TrainEntry(advantages=entry.advantages, weights=entry.weights, returns=entry.returns)
        )
    calls = []
    for call_id, found in entries.items():
        call = forest.calls[call_id]
        calls.append(
            TrainCall(
                id=call.id,
                module=call.module,
                prompt_ids=call.prompt_ids,
                completion_ids=call.completion_ids,
                old_logprobs=call.logprobs,
                ref_logprobs=call.ref_logprobs,
                old_values=None if call.values is None else call.values[: call.completion_tokens],
                entries=tuple(found),
                minibatch=minibatch[call.example],
            )
        )
    return calls
