"""What a supervised step consists of: calls with advantage 1, in an order that depends on the seed alone.

A demonstration is rendered to exactly the ids that a rollout would send (`mmrl.models.chat.render_prompt`), followed by
its completion and the end-of-turn token; only these last two are trained. Used by `stages.sft`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from mmrl import rng
from mmrl.models.chat import encode_text, render_observation, render_prompt
from mmrl.records import Call
from mmrl.tasks.base import Demonstration
from mmrl.trainer.objective import StepBatch, TrainCall, TrainEntry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Call:
    """A demonstration as a call; the end-of-turn token is the last of its completion."""
    # By the same functions as in rollouts, so that the ids are those that a rollout would send.
    prompt_ids = render_prompt(tokenizer, demonstration.messages)
    for completion, observation in demonstration.history:
        prompt_ids = render_observation(tokenizer, (*prompt_ids, *encode_text(tokenizer, completion)), observation)
    end = int(tokenizer.eos_token_id)
    return plain_call(demonstration.module, prompt_ids, (*encode_text(tokenizer, demonstration.completion), end))


def plain_call(module: str, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Call:
    """A call of ids alone: without log-probabilities nothing is compared with a sampler."""
    bare = Call(id="", example="", parent=None, module=module, completion_tokens=len(completion_ids))
    return replace(bare, prompt_ids=prompt_ids, completion_ids=completion_ids)


def tokens_of(call: Call) -> int:
    """Tokens of prompt and completion together."""
    return len(call.prompt_ids) + len(call.completion_ids)


def order(calls: Sequence[Call], mix: Mapping[str, float], seed: int) -> Iterator[int]:
    """Indices into `calls` without end: one pass after the other (`passes`), each in a new order.

    A step may take the end of a pass and the start of the next: all steps are of one size, and no call is left out.
    """
    for rows, draws in passes(calls, mix, seed):
        draws.shuffle(rows)
        yield from rows


def passes(calls: Sequence[Call], mix: Mapping[str, float], seed: int) -> Iterator[tuple[list[int], random.Random]]:
    """The indices into `calls` that a pass has, in their order, and its source of draws; pass after pass without end.

    Args:
        mix: module -> how often a pass has each of its calls, relative to 1 for modules not named; rounded up or down
            at random.
    """
    for number in count():
        # Ahead of time and a pure function of the seed: what was killed continues with the same steps.
        draws = rng.stream(seed, "warmup", number)
        rows: list[int] = []
        for index, call in enumerate(calls):
            share = mix.get(call.module, 1.0)
            rows += [index] * (int(share) + (draws.random() < share - int(share)))
        yield rows, draws


def step_batch(step: int, calls: Sequence[Call]) -> StepBatch:
    """The calls of a step: the loss is the mean over all their completion tokens."""
    weight = 1 / sum(len(call.completion_ids) for call in calls)
    trained = [train_call(f"{place}", call, weight) for place, call in enumerate(calls)]
    return StepBatch(step=step, calls=trained, metrics={"train/sequences": float(len(calls))})


def train_call(name: str, call: Call, weight: float) -> TrainCall:
    """A call whose tokens all have advantage 1 and one weight; `name`: its id within the step."""
    tokens = len(call.completion_ids)
    entry = TrainEntry(advantages=(1.0,) * tokens, weights=(weight,) * tokens)
    return TrainCall(call=replace(call, id=name), entries=(entry,))


def digest(calls: Sequence[Call]) -> str:
    """What tells the sequences of two runs apart."""
    return f"{rng.digest(*(str((call.module, call.prompt_ids, call.completion_ids)) for call in calls)):032x}"
