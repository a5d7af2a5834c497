"""Supervised training on demonstrations: what a step is made of, and the warm start of models that know nothing yet.

A demonstration is rendered to exactly the ids that a rollout would send (`mmrl.models.chat.render_prompt`), followed by
its completion and the end-of-turn token; only these last two are trained, unless `prompt_weight` says more. Which
sequences a step takes and how they are cut into batches is planned ahead, a pure function of the seed, so that what
was killed continues from its last checkpoint with the same batches. Used by `stages.sft`; `warm_start` is for whoever
builds the shipped tiny models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from datasets import Dataset

from mmrl import rng
from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.models.chat import encode_text, render_observation, render_prompt
from mmrl.models.policy import newest_checkpoint
from mmrl.records import Call
from mmrl.tasks.base import Demonstration
from mmrl.trainer import checkpoint
from mmrl.trainer.adapters import Adapters
from mmrl.trainer.objective import TrainCall, TrainEntry
from mmrl.trainer.packing import Pack, choose_packing, make_packs
from mmrl.trainer.supervised import IGNORED, Batch, SupervisedTrainer, WarmStartSettings

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


FINGERPRINT = "warmup"
"""Key of `extra.json` in a checkpoint: the sequences and settings that made it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One demonstration as token ids."""

    module: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """The end-of-turn token is its last, unless a rollout ended without one."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration],
    settings: WarmStartSettings,
    output_dir: str | Path,
    *,
    resume: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> PreTrainedModel:
    """Train `model` in place on `demonstrations` and return it.

    Args:
        model: trained as it comes, whether all its parameters or those of an adapter are trainable.
        output_dir: checkpoints go to `output_dir/checkpoint-<step>`.
        resume: continue from the last checkpoint there is (start anew when there is none).
        callbacks: transformers callbacks, for progress or an early stop.

    Raises:
        ConfigError: there are no demonstrations.
        DataError: a demonstration is longer than the model's context.
        CheckpointError: the checkpoints in `output_dir` belong to other demonstrations or settings.
    """
    encoded = encode(tokenizer, demonstrations, context_length(model))
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    start = newest_checkpoint(output) if resume else None
    fit(model, tokenizer, encoded, settings, output, start=start, callbacks=callbacks)
    return model


def fit(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Sequence[Encoded],
    settings: WarmStartSettings,
    output: Path,
    *,
    start: Path | None = None,
    adapters: Adapters | None = None,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    stopping: Callable[[], bool] = lambda: False,
    extra: Callable[[int], Mapping[str, object]] = lambda step: {},
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Train `model` in place on sequences; checkpoints go to `output`, a folder that is there.

    Args:
        start: a complete checkpoint of the same sequences and settings to continue from.
        adapters: weights per module, already on the model.
        on_step: given each step's number and metrics, before a checkpoint is saved.
        stopping: whether to save and return after the step under way.
        extra: given the step, what to store in the checkpoint's `extra.json`.

    Raises:
        CheckpointError: `start` belongs to other sequences or settings.
        MmrlError: the loss or the gradient is no number.
    """
    fingerprint = _fingerprint(encoded, settings)
    if start is not None:
        checkpoint.require(start)
        _check_fingerprint(start, fingerprint)
    # Any id does: padding is right of everything that is trained and never attended to.
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    of = adapters.of if adapters is not None else {}
    steps = plan_steps(encoded, settings, of)
    # Packs score what completions consist of, and weigh all tokens of a step alike.
    fits = settings.prompt_weight == 0 and settings.examples is not None
    tries = fits and choose_packing(settings.packing, cast("PreTrainedModel", model))
    trainer = SupervisedTrainer(
        model,
        settings,
        output,
        adapters=adapters,
        on_step=on_step,
        stopping=stopping,
        extra=lambda step: {**extra(step), FINGERPRINT: fingerprint},
        train_dataset=Dataset.from_dict({"batches": steps}),
        data_collator=_Packer(encoded, settings, of) if tries else _Collator(encoded, int(pad_id), settings),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    # A key-value cache is of no use in training and would hold memory.
    model.config.use_cache = False
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    model.config.use_cache = True


def encode(
    tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Demonstration], limit: int | None = None
) -> list[Encoded]:
    """Token ids of demonstrations, as a rollout would send and sample them.

    Raises:
        ConfigError: there are none.
        DataError: one is longer than `limit` tokens.
    """
    if not demonstrations:
        raise ConfigError("task: it makes no demonstrations, so there is nothing to warm up on; choose another stage")
    encoded = []
    for index, demonstration in enumerate(demonstrations):
        item = encode_one(tokenizer, demonstration)
        if limit is not None and len(item) > limit:
            raise DataError(
                f"demonstration {index} (module '{item.module}'): {len(item)} tokens, "
                f"expected at most {limit}, the model's context"
            )
        encoded.append(item)
    return encoded


def encode_one(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Encoded:
    """Token ids of one demonstration."""
    # By the same functions as in rollouts, so that the ids are those that a rollout would send.
    prompt_ids = render_prompt(tokenizer, demonstration.messages)
    for completion, observation in demonstration.history:
        prompt_ids = render_observation(tokenizer, (*prompt_ids, *encode_text(tokenizer, completion)), observation)
    end = int(tokenizer.eos_token_id)
    return Encoded(demonstration.module, prompt_ids, (*encode_text(tokenizer, demonstration.completion), end))


def plan_steps(
    encoded: Sequence[Encoded], settings: WarmStartSettings, adapters: Mapping[str, str] | None = None
) -> list[list[list[int]]]:
    """The batches of each step, as indices into `encoded`.

    Args:
        adapters: module -> adapter; a batch runs with one adapter.
    """
    size = settings.examples
    if size is None:
        batches = plan_batches(encoded, settings)
        return [batches[at : at + settings.batches] for at in range(0, len(batches), settings.batches)]
    steps: list[list[list[int]]] = []
    rows: list[int] = []
    passes = 0
    while len(steps) < settings.steps:
        # A step may take the end of one pass and the start of the next: all are of one size, and no row is left out.
        while len(rows) < size:
            seen, draws = _one_pass(encoded, settings, passes)
            draws.shuffle(seen)
            rows += seen
            passes += 1
        chosen, rows = rows[:size], rows[size:]
        chosen.sort(key=lambda row: len(encoded[row]))
        apart: dict[str, list[int]] = {}
        for row in chosen:
            apart.setdefault((adapters or {}).get(encoded[row].module, ""), []).append(row)
        steps.append([cut for _, part in sorted(apart.items()) for cut in _cut(part, encoded, settings.batch_tokens)])
    return steps


def plan_batches(encoded: Sequence[Encoded], settings: WarmStartSettings) -> list[list[int]]:
    """Indices into `encoded` for each batch of `settings.steps` steps, in order.

    Each pass sees the demonstrations in a new order: those of similar length are neighbours, neighbours are cut into
    batches by the token budget, and a step takes its batches from equal shares of the range of lengths.
    """
    batches: list[list[int]] = []
    total = settings.steps * settings.batches
    passes = 0
    while len(batches) < total:
        rows, draws = _one_pass(encoded, settings, passes)
        # A little noise on the length, so that a pass does not always join the same neighbours.
        keys = {row: len(encoded[row]) * (1 + 0.1 * draws.random()) for row in set(rows)}
        rows.sort(key=keys.__getitem__)
        cut = _cut(rows, encoded, settings.batch_tokens)
        # Each of the batches of a step comes from another stratum of lengths.
        bounds = [round(len(cut) * share / settings.batches) for share in range(settings.batches + 1)]
        strata = [cut[low:high] for low, high in pairwise(bounds)]
        for stratum in strata:
            draws.shuffle(stratum)
        batches += [batch for step in zip_longest(*strata) for batch in step if batch is not None]
        passes += 1
    return batches[:total]


def _one_pass(encoded: Sequence[Encoded], settings: WarmStartSettings, number: int) -> tuple[list[int], random.Random]:
    """The rows that a pass sees, each as often as its module's share says, and the pass's source of draws."""
    draws = rng.stream(settings.seed, "warmup", number)
    rows = [index for index, item in enumerate(encoded) for _ in range(_times(item, settings, draws.random()))]
    if not rows and not any(settings.mix.get(item.module, 1.0) > 0 for item in encoded):
        raise ConfigError(f"warmup.mix: got {dict(settings.mix)}, expected a positive share for some module")
    return rows, draws


def _times(item: Encoded, settings: WarmStartSettings, uniform: float) -> int:
    """How often a pass sees a demonstration: its share, rounded up or down at random."""
    share = settings.mix.get(item.module, 1.0)
    return int(share) + (uniform < share - int(share))


def _cut(rows: Sequence[int], encoded: Sequence[Encoded], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(encoded[row]))
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = len(encoded[row])
        batches[-1].append(row)
    return batches


class _Collator:
    """One planned step to padded batches.

    Padding is on the right and there is no attention mask: in a causal model a position never sees what is right of
    it, and SDPA is faster without a mask.
    """

    def __init__(self, encoded: Sequence[Encoded], pad_id: int, settings: WarmStartSettings):
        self.encoded, self.pad_id, self.settings = encoded, pad_id, settings

    def __call__(self, planned: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> dict[str, list[Batch]]:
        parts = [[self.encoded[row] for row in batch] for step in planned for batch in step["batches"]]
        return {"batches": [self.padded(items, *self._scales(items, parts)) for items in parts]}

    def _scales(self, items: Sequence[Encoded], parts: Sequence[Sequence[Encoded]]) -> tuple[float, float]:
        """Weights of a batch's tokens in the loss of a step: of completions, of prompts."""
        # Without a number of sequences each batch counts alike: a mean over all tokens would belong to whichever
        # module writes the most.
        whole = [item for part in parts for item in part]
        counted, times = (items, len(parts)) if self.settings.examples is None else (whole, 1)
        read = times * max(1, sum(len(item.prompt_ids) - 1 for item in counted))
        return 1 / (times * sum(len(i.completion_ids) for i in counted)), self.settings.prompt_weight / read

    def padded(self, items: Sequence[Encoded], scale: float, prompt_scale: float) -> Batch:
        """The tensors of one batch."""
        input_ids = torch.full((len(items), max(map(len, items))), self.pad_id)
        labels = torch.full_like(input_ids, IGNORED)
        prompt_labels = torch.full_like(input_ids, IGNORED)
        for row, item in enumerate(items):
            start, end = len(item.prompt_ids), len(item)
            input_ids[row, :end] = torch.tensor(item.prompt_ids + item.completion_ids)
            labels[row, start:end] = torch.tensor(item.completion_ids)
            prompt_labels[row, 1:start] = torch.tensor(item.prompt_ids[1:])
        return {
            "input_ids": input_ids,
            "labels": labels,
            "prompt_labels": prompt_labels,
            "modules": [item.module for item in items],
            "scale": scale,
            "prompt_scale": prompt_scale,
        }


class _Packer:
    """One planned step to packs of prefix tries; no pack mixes adapters."""

    def __init__(self, encoded: Sequence[Encoded], settings: WarmStartSettings, adapters: Mapping[str, str]):
        self.encoded, self.settings, self.adapters = encoded, settings, adapters
        self.modules = sorted({item.module for item in encoded})

    def __call__(self, planned: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> dict[str, list[Pack]]:
        rows = [row for step in planned for batch in step["batches"] for row in batch]
        scale = 1 / sum(len(self.encoded[row].completion_ids) for row in rows)
        apart: dict[str, list[TrainCall]] = {}
        for place, row in enumerate(rows):
            item = self.encoded[row]
            apart.setdefault(self.adapters.get(item.module, ""), []).append(_train_call(f"{place}", item, scale))
        budget = self.settings.batch_tokens
        packs = [make_packs(calls, budget, beta=0.0, modules=self.modules, tries=True) for calls in apart.values()]
        return {"batches": [pack for some in packs for pack in some]}


def _train_call(name: str, item: Encoded, weight: float) -> TrainCall:
    tokens = len(item.completion_ids)
    call = Call(
        id=name,
        example=name,
        parent=None,
        module=item.module,
        prompt_ids=item.prompt_ids,
        completion_ids=item.completion_ids,
        completion_tokens=tokens,
    )
    return TrainCall(call=call, entries=(TrainEntry(advantages=(1.0,) * tokens, weights=(weight,) * tokens),))


def context_length(model: PreTrainedModel | PeftModel) -> int | None:
    """Longest sequence of a model; None where its config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _fingerprint(encoded: Sequence[Encoded], settings: WarmStartSettings) -> dict[str, object]:
    """What a checkpoint stores of its sequences and settings."""
    data = rng.digest(*(str((e.module, e.prompt_ids, e.completion_ids)) for e in encoded))
    # No part of what is learnt; nor are further steps where the rate of those before does not depend on them.
    left_out = {"packing", "log_every", *(["steps"] if settings.schedule.startswith("constant") else [])}
    kept = {name: value for name, value in asdict(settings).items() if name not in left_out}
    return {**kept, "mix": dict(settings.mix), "data": f"{data:032x}"}


def _check_fingerprint(start: Path, current: Mapping[str, object]) -> None:
    """Checkpoints may only be continued with the data and settings that made them."""
    stored = checkpoint.saved_extra(start).get(FINGERPRINT, {})
    changed = sorted(key for key in current if stored.get(key) != current[key])
    if changed:
        raise CheckpointError(
            f"{start.parent}: its checkpoints were made with other {', '.join(changed)}; "
            "continue with the same, or start in an empty folder"
        )
