"""Supervised warm start: TRL's SFT on demonstrations that a task can make. A stage before reinforcement learning.

A demonstration is rendered to exactly the ids that a rollout would send (`mmrl.models.chat.render_prompt`), followed by
its completion and the end-of-turn token; only these last two are trained, unless `prompt_weight` says more. Batches are
cut by length and token budget, so that a CPU spends its time on words and not on padding, and which demonstration comes
when is a pure function of the seed. A stage that was killed continues from its last checkpoint with the same batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from mmrl import rng
from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.models.chat import encode_text, render_observation, render_prompt
from mmrl.tasks.base import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

IGNORED = -100
"""Label of a position that is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """How long, how much at once, how fast."""

    steps: int
    """Optimizer steps; demonstrations are gone through as often as that takes."""
    batch_tokens: int = 4096
    """Padded tokens of one batch (a single longer demonstration is a batch of its own)."""
    batches: int = 1
    """Batches per optimizer step, spread over short and long demonstrations: modules with prompts of different
    lengths are learnt together rather than in turn."""
    prompt_weight: float = 0.0
    """Weight of the prompts' own tokens in the loss (1 for completions). A model that has never been trained learns to
    read from them; one that can read needs none."""
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta2: float = 0.999
    grad_clip: float = 1.0
    mix: Mapping[str, float] = field(default_factory=dict)
    """Module -> how often each of its demonstrations is seen per pass, relative to 1 for modules not named."""
    seed: int = 0
    save_every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    log_every: int = 50


@dataclass(frozen=True, slots=True)
class Encoded:
    """One demonstration as token ids."""

    module: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """The end-of-turn token is its last."""

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
    output = Path(output_dir)
    encoded = encode(tokenizer, demonstrations, _context_length(model))
    batches = plan_batches(encoded, settings)
    # Before the fingerprint is compared: without a checkpoint there is nothing that other data could spoil.
    checkpoint = _last_checkpoint(output) if resume else None
    _check_fingerprint(output, encoded, settings, resuming=checkpoint is not None)
    # Any id does: padding is right of everything that is trained and never attended to.
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    trainer = _WarmStartTrainer(
        model=model,
        args=_arguments(output, settings, str(model.device)),
        train_dataset=Dataset.from_dict({"rows": batches}),
        data_collator=_Collator(encoded, int(pad_id)),
        prompt_weight=settings.prompt_weight,
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    # A key-value cache is of no use in training and would hold memory.
    model.config.use_cache = False
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    model.config.use_cache = True
    return model


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
    end = int(tokenizer.eos_token_id)
    encoded = []
    for index, demonstration in enumerate(demonstrations):
        # By the same functions as in rollouts, so that the ids are those that a rollout would send.
        prompt_ids = render_prompt(tokenizer, demonstration.messages)
        for completion, observation in demonstration.history:
            prompt_ids = render_observation(tokenizer, (*prompt_ids, *encode_text(tokenizer, completion)), observation)
        item = Encoded(demonstration.module, prompt_ids, (*encode_text(tokenizer, demonstration.completion), end))
        if limit is not None and len(item) > limit:
            raise DataError(
                f"demonstration {index} (module '{item.module}'): {len(item)} tokens, "
                f"expected at most {limit}, the model's context"
            )
        encoded.append(item)
    return encoded


def plan_batches(encoded: Sequence[Encoded], settings: WarmStartSettings) -> list[list[int]]:
    """Indices into `encoded` for each batch of `settings.steps` steps, in order.

    Each pass sees the demonstrations in a new order: those of similar length are neighbours, neighbours are cut into
    batches by the token budget, and a step takes its batches from equal shares of the range of lengths.
    """
    batches: list[list[int]] = []
    total = settings.steps * settings.batches
    passes = 0
    while len(batches) < total:
        draws = rng.stream(settings.seed, "warmup", passes)
        rows = [index for index, item in enumerate(encoded) for _ in range(_times(item, settings, draws.random()))]
        if not rows:
            raise ConfigError(f"warmup.mix: got {dict(settings.mix)}, expected a positive share for some module")
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
    """One planned batch of row numbers to padded tensors.

    Padding is on the right and there is no attention mask: in a causal model a position never sees what is right of
    it, and SDPA is faster without a mask.
    """

    def __init__(self, encoded: Sequence[Encoded], pad_id: int):
        self.encoded, self.pad_id = encoded, pad_id

    def __call__(self, planned: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        items = [self.encoded[row] for batch in planned for row in batch["rows"]]
        input_ids = torch.full((len(items), max(map(len, items))), self.pad_id)
        labels = torch.full_like(input_ids, IGNORED)
        prompt_labels = torch.full_like(input_ids, IGNORED)
        for row, item in enumerate(items):
            start, end = len(item.prompt_ids), len(item)
            input_ids[row, :end] = torch.tensor(item.prompt_ids + item.completion_ids)
            labels[row, start:end] = torch.tensor(item.completion_ids)
            prompt_labels[row, 1:start] = torch.tensor(item.prompt_ids[1:])
        return {"input_ids": input_ids, "labels": labels, "prompt_labels": prompt_labels}


class _WarmStartTrainer(SFTTrainer):
    """SFTTrainer whose head scores only what is trained, as a rule the end of a batch, where the completions are.

    TRL's fused head scores every position on a CPU, which costs a tiny model a third of its time.
    """

    def __init__(self, *, prompt_weight: float, **kwargs: Any):
        super().__init__(**kwargs)
        self.prompt_weight = prompt_weight

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Mean negative log-likelihood of a batch's trained tokens, over the number of batches of the step.

        Each batch counts alike: a step's mean over all tokens would belong to whichever module writes the most.
        """
        labels = inputs["labels"]
        # The head, the costliest layer of a tiny model, runs on [B, T - first] positions only.
        first = 1 if self.prompt_weight else int((labels != IGNORED).any(dim=0).nonzero()[0])
        outputs = model(input_ids=inputs["input_ids"], logits_to_keep=labels.shape[1] - first + 1, use_cache=False)
        # logits: [B * (T - first), V], targets: [B * (T - first)], shifted by one position.
        logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, first:].flatten()
        mask = targets != IGNORED
        loss = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
        with torch.no_grad():
            correct = (logits[mask].argmax(dim=-1) == targets[mask]).float().mean()
        self._metrics["train"]["mean_token_accuracy"].append(correct.item())
        if self.prompt_weight:
            read = inputs["prompt_labels"][:, first:].flatten()
            loss = loss + self.prompt_weight * torch.nn.functional.cross_entropy(logits, read, ignore_index=IGNORED)
        # transformers divides by the number of batches itself exactly when it did not count the step's items.
        loss = loss if num_items_in_batch is None else loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def _arguments(output: Path, settings: WarmStartSettings, device: str) -> SFTConfig:
    return SFTConfig(
        output_dir=str(output),
        max_steps=settings.steps,
        per_device_train_batch_size=1,  # one row of the data set is one planned batch
        gradient_accumulation_steps=settings.batches,
        learning_rate=settings.lr,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.grad_clip,
        seed=settings.seed,
        # The plan has its own order; shuffling it would undo the balance of lengths.
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        # Or transformers would drop `rows`, a column that no model takes.
        remove_unused_columns=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=device.startswith("cpu"),
        dataloader_pin_memory=False,
        save_strategy="steps",
        save_steps=settings.save_every,
        save_total_limit=settings.keep,
        logging_steps=settings.log_every,
        disable_tqdm=True,
        report_to=[],
    )


def _context_length(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _last_checkpoint(output: Path) -> Path | None:
    """The newest complete checkpoint: its trainer state is written last."""
    complete = [path for path in output.glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _check_fingerprint(
    output: Path, encoded: Sequence[Encoded], settings: WarmStartSettings, *, resuming: bool
) -> None:
    """Checkpoints may only be continued with the data and settings that made them."""
    current = asdict(settings) | {"mix": dict(settings.mix)}
    current["data"] = f"{rng.digest(*(str((e.prompt_ids, e.completion_ids)) for e in encoded)):032x}"
    path = output / "warmup.json"
    if resuming and path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(key for key in current if stored.get(key) != current[key])
        if changed:
            raise CheckpointError(
                f"{output}: its checkpoints were made with other {', '.join(changed)}; "
                "continue with the same, or start in an empty folder"
            )
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(current, indent=1, sort_keys=True) + "\n", encoding="utf-8")
