"""The warm start of a tiny model: supervised steps on demonstrations, by mmrl's trainer.

`algo=sft` takes a number of sequences per step, whose tokens all count alike. A model that has never been trained needs
a number of batches that count alike whatever their number of tokens, so that modules with prompts of different lengths
are learnt together rather than in turn. The batches are planned ahead, a pure function of the seed, so that a killed
build continues from its last checkpoint with the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from mmrl.config import ModelConfig, TrainConfig
from mmrl.errors import CheckpointError, ConfigError
from mmrl.records import Call
from mmrl.stages.sft import FINGERPRINT, encode, fingerprint, passes, tokens_of, train_call
from mmrl.store.policy import newest_checkpoint
from mmrl.tasks.base import Demonstration
from mmrl.trainer.checkpoint import saved_extra
from mmrl.trainer.objective import StepBatch
from mmrl.trainer.settings import Settings
from mmrl.trainer.trl_trainer import MmrlTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Steps, their size and their learning rate."""

    train: TrainConfig
    """`microbatch_tokens`: tokens of one batch as if padded; a longer demonstration is a batch by itself."""
    batches: int = 1
    """Batches per optimizer step, spread over short and long demonstrations."""
    mix: Mapping[str, float] = field(default_factory=dict)
    """Module -> how often each of its demonstrations is in a pass, relative to 1 for modules not named."""
    seed: int = 0


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration],
    settings: WarmStart,
    output: Path,
    callbacks: Sequence[TrainerCallback] = (),
) -> PreTrainedModel:
    """Train `model` in place and return it, from the last checkpoint in `output` where there is one.

    Raises:
        CheckpointError: the checkpoints in `output` belong to other demonstrations or settings.
    """
    calls = [encode(tokenizer, demonstration) for demonstration in demonstrations]
    shares = {"batches": settings.batches, "mix": dict(settings.mix), "seed": settings.seed}
    record = {"train": settings.train.model_dump(mode="json"), **shares, "data": fingerprint(calls)}
    start = newest_checkpoint(output) if output.is_dir() else None
    stored = saved_extra(start).get(FINGERPRINT) if start is not None else record
    if stored != record:
        raise CheckpointError(f"{output}: made with other settings or demonstrations; delete it to start anew")
    batches = plan_batches(calls, settings)

    def next_batch(step: int) -> StepBatch:
        planned = batches[(step - 1) * settings.batches : step * settings.batches]
        # Each batch counts alike: a mean over all tokens would belong to whichever module writes the most.
        sizes = [len(planned) * sum(len(calls[row].completion_ids) for row in batch) for batch in planned]
        rows = [(row, 1 / size) for batch, size in zip(planned, sizes, strict=True) for row in batch]
        trained = [train_call(f"{place}", calls[row], weight) for place, (row, weight) in enumerate(rows)]
        return StepBatch(step=step, calls=trained)

    trainer = MmrlTrainer(
        model,
        tokenizer,
        Settings.supervised(settings.train, ModelConfig(name="tiny", path="tiny"), settings.seed),
        output_dir=output,
    )
    trainer.follow(next_batch, recorded=lambda: {FINGERPRINT: record})
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train(start)
    return model


def plan_batches(calls: Sequence[Call], settings: WarmStart) -> list[list[int]]:
    """Indices into `calls` for each batch of the steps, in order.

    Each pass sees the demonstrations in a new order: those of similar length are neighbours, neighbours are cut into
    batches by the token budget, and a step takes its batches from equal shares of the range of lengths.
    """
    if not any(settings.mix.get(call.module, 1.0) > 0 for call in calls):
        raise ConfigError(f"mix: got {dict(settings.mix)}, expected a positive share for some module")
    batches: list[list[int]] = []
    total = settings.train.steps * settings.batches
    for rows, draws in passes(calls, settings.mix, settings.seed):
        # A little noise on the length, so that a pass does not always join the same neighbours.
        keys = {row: tokens_of(calls[row]) * (1 + 0.1 * draws.random()) for row in set(rows)}
        cut = _cut(sorted(rows, key=keys.__getitem__), calls, settings.train.microbatch_tokens or 0)
        # Each of the batches of a step comes from another stratum of lengths.
        bounds = [round(len(cut) * share / settings.batches) for share in range(settings.batches + 1)]
        strata = [cut[low:high] for low, high in pairwise(bounds)]
        for stratum in strata:
            draws.shuffle(stratum)
        batches += [batch for step in zip_longest(*strata) for batch in step if batch is not None]
        if len(batches) >= total:
            break
    return batches[:total]


def _cut(rows: Sequence[int], calls: Sequence[Call], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = 0
    for row in rows:
        longest = max(longest, tokens_of(calls[row]))
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = tokens_of(calls[row])
        batches[-1].append(row)
    return batches
