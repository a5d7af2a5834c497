"""The seam to TRL's SFT: planned steps of batches in, a trained policy and checkpoints out.

A batch is padded sequences, or a pack of prefix tries, in which what sequences share (demonstrations and labels of a
prompt) is forwarded once.

Part of `trainer`; `stages.warmup` plans the steps. Model and optimizer are transformers', checkpoints those of
`trainer.checkpoint`. Overridden: `training_step` (a step is a varying number of batches, one backward each), which
tokens the head scores, `_clip_grad_norm` (reads the norm; adapters apart), `_save_checkpoint` (atomic).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from mmrl.trainer import checkpoint
from mmrl.trainer.adapters import Adapters, in_fixed_order
from mmrl.trainer.critic import trained_in_float32
from mmrl.trainer.logprobs import score
from mmrl.trainer.packing import Pack
from mmrl.trainer.settings import one_device
from mmrl.trainer.totals import SupervisedTotals, finite
from mmrl.trainer.tree_attention import last_parts
from mmrl.trainer.trl_trainer import UpdateEnd

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainerControl

IGNORED = -100
"""Label of a position that is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """How long, how much at once, how fast."""

    steps: int
    """Optimizer steps; demonstrations are gone through as often as that takes."""
    examples: int | None = None
    """Sequences of a step, whose tokens all count alike. None: as many as `batches` batches hold, which count alike
    whatever their number of tokens."""
    batch_tokens: int = 4096
    """Padded tokens of one batch (a single longer demonstration is a batch of its own)."""
    batches: int = 1
    """Without `examples`, batches per optimizer step, spread over short and long demonstrations: modules with prompts
    of different lengths are learnt together rather than in turn."""
    prompt_weight: float = 0.0
    """Weight of the prompts' own tokens in the loss (1 for completions). A model that has never been trained learns to
    read from them; one that can read needs none."""
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    grad_clip: float = 1.0
    gradient_checkpointing: bool = False
    packing: str = "padded"
    """As `train.packing`: auto | trie | padded. Tries need `examples`, and `prompt_weight` 0."""
    mix: Mapping[str, float] = field(default_factory=dict)
    """Module -> how often each of its demonstrations is seen per pass, relative to 1 for modules not named."""
    seed: int = 0
    save_every: int = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 2
    log_every: int = 50

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return step % self.save_every == 0 or step == self.steps


class Batch(TypedDict):
    """Padded sequences that are forwarded at once."""

    input_ids: torch.Tensor
    """[B, T]"""
    labels: torch.Tensor
    """[B, T], `IGNORED` but for completions."""
    prompt_labels: torch.Tensor
    """[B, T], `IGNORED` but for prompts."""
    modules: list[str]
    """Of each sequence."""
    scale: float
    """Weight of a completion token in the step's loss."""
    prompt_scale: float
    """Weight of a prompt token in the step's loss."""


class SupervisedTrainer(SFTTrainer):
    """SFTTrainer of planned steps, whose head scores only what is trained: the end of a batch, where completions are.

    TRL's fused head scores every position on a CPU, which costs a tiny model a third of its time.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        settings: WarmStartSettings,
        output: Path,
        *,
        adapters: Adapters | None,
        on_step: Callable[[int, dict[str, float]], None],
        stopping: Callable[[], bool],
        extra: Callable[[int], Mapping[str, object]],
        **kwargs: Any,
    ):
        # Before TRL's own, which calls methods of this class.
        self.settings, self.adapters, self.on_step = settings, adapters, on_step
        self.stopping, self.extra, self.sums, self.norm = stopping, extra, SupervisedTotals(), 0.0
        bf16 = model.dtype == torch.bfloat16
        trained_in_float32(model)
        in_fixed_order(model)
        arguments = one_device(_arguments(output, settings, str(model.device), bf16=bf16))
        super().__init__(model=model, args=arguments, **kwargs)
        self.remove_callback(PrinterCallback)
        # The last one, so that it sees what others say of the step.
        self.add_callback(UpdateEnd(self.end_step))

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of every batch of a step."""
        self.sums = SupervisedTotals()
        model.train()
        batches = cast("list[Batch | Pack]", self._prepare_inputs(inputs)["batches"])
        total = 0.0
        for batch in batches:
            module = batch.calls[0].call.module if isinstance(batch, Pack) else batch["modules"][0]
            if self.adapters is not None:
                cast("PeftModel", self.model).set_adapter(self.adapters.of[module])
            with self.compute_loss_context_manager():
                loss = self.pack_loss(model, batch) if isinstance(batch, Pack) else self.batch_loss(model, batch)
            self.accelerator.backward(loss)
            total += float(loss.detach().double())
        self.sums.loss = finite(total, "loss", self.state.global_step + 1)
        self.sums.lr = float(self._get_learning_rate())
        return torch.tensor(total, device=self.args.device)

    def batch_loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """A batch's part of the step's loss: negative log-likelihood of its tokens, times their weight in the step."""
        labels = batch["labels"]
        # The head, the costliest layer of a tiny model, runs on [B, T - first] positions only.
        first = 1 if batch["prompt_scale"] else int((labels != IGNORED).any(dim=0).nonzero()[0])
        outputs = model(input_ids=batch["input_ids"], logits_to_keep=labels.shape[1] - first + 1, use_cache=False)
        # logits: [B, T - first, V], targets: [B, T - first], shifted by one position.
        logits, targets = outputs.logits[:, :-1], labels[:, first:]
        mask = targets != IGNORED
        scored = logits[mask].float()  # [N, V]
        nll = torch.nn.functional.cross_entropy(scored, targets[mask], reduction="none")
        with torch.no_grad():
            of = mask.nonzero()[:, 0]  # (N,) row of each token
            rows = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
            hits = (scored.argmax(dim=-1) == targets[mask]).double()
            nlls, correct = rows.index_add(0, of, nll.double()), rows.index_add(0, of, hits)
            tokens = (labels != IGNORED).sum(dim=1)
            self.sums.add(batch["modules"], tokens, nlls, correct, batch["input_ids"].numel())
        loss = nll.sum() * batch["scale"]
        if batch["prompt_scale"]:
            read = batch["prompt_labels"][:, first:]
            prompts = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), read.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            loss = loss + prompts * batch["prompt_scale"]
        return loss

    def pack_loss(self, model: torch.nn.Module, pack: Pack) -> torch.Tensor:
        """A pack's part of the step's loss: as `batch_loss`, each distinct prefix forwarded once."""
        pack = pack.to(self.args.device)
        plain = self.accelerator.unwrap_model(model)
        head = plain.get_output_embeddings()
        # Recomputed in the backward pass, the last layer would be the whole one again.
        last = () if self.settings.gradient_checkpointing else last_parts(plain)
        scores = score(
            model, head, pack, 1.0, hits=True, last=last
        )  # N positions: the calls' completions, one after the other
        lengths = [len(train.call.completion_ids) for train in pack.calls]
        with torch.no_grad():
            assert scores.hits is not None
            hits = scores.hits.double().split(lengths)
            nlls = (-scores.logprobs.detach().double()).split(lengths)
            tokens = torch.tensor(lengths, device=pack.targets.device)
            modules = [train.call.module for train in pack.calls]
            sums = [torch.stack([part.sum() for part in parts]) for parts in (nlls, hits)]
            self.sums.add(modules, tokens, sums[0], sums[1], pack.tokens)
        return -(scores.logprobs[pack.entry_index] * pack.weights).sum()

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor | float | None:
        norm: torch.Tensor | float | None
        if self.adapters is not None:
            self.sums.norms = self.adapters.clip(cast("PeftModel", model), self.settings.grad_clip)
            norm = math.hypot(*self.sums.norms.values())
        else:
            norm = super()._clip_grad_norm(model)
        self.norm = finite(float(norm) if norm is not None else 0.0, "gradient norm", self.state.global_step + 1)
        return norm

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW; with weights per module a group for each adapter."""
        if self.adapters is not None and self.optimizer is None:
            self.optimizer = self.adapters.make_optimizer(self)
        return super().create_optimizer(model)

    def end_step(self, control: TrainerControl) -> None:
        """After an optimizer step: its metrics, whether a checkpoint is due, whether this is the last one."""
        step = int(self.state.global_step)
        cast("torch.nn.Module", self.model).eval()
        rates: dict[str, float] = {}
        if self.adapters is not None and self.optimizer is not None:
            groups = self.optimizer.param_groups
            rates = {n: float(g["lr"]) for n, g in zip(self.adapters.trained, groups, strict=False)}
        self.on_step(step, self.sums.metrics(self.norm, rates))
        if self.stopping():
            control.should_training_stop = True
        control.should_save = control.should_save or control.should_training_stop or self.settings.saves_after(step)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, settings = int(self.state.global_step), self.settings
        folder = Path(str(self.args.output_dir))
        keep, due = settings.keep, settings.saves_after
        checkpoint.save(self, folder, step, critic=None, extra=self.extra, keep=keep, due=due)

    def floating_point_ops(self, inputs: object) -> int:
        """Not estimated: Hugging Face's formula needs its own batch format."""
        return 0

    def _send_telemetry(self) -> None:
        """A run sends nothing about itself."""


def _arguments(output: Path, settings: WarmStartSettings, device: str, *, bf16: bool) -> SFTConfig:
    return SFTConfig(
        output_dir=str(output),
        max_steps=settings.steps,
        per_device_train_batch_size=1,  # one row of the data set is one planned step
        gradient_accumulation_steps=1,
        learning_rate=settings.lr,
        lr_scheduler_type=settings.schedule,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.grad_clip,
        optim="adamw_torch",
        # transformers takes no seed of more than 32 bits.
        seed=settings.seed % 2**32,
        # The plan has its own order; shuffling it would undo the balance of lengths.
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        # Or transformers would drop `batches`, a column that no model takes.
        remove_unused_columns=False,
        gradient_checkpointing=settings.gradient_checkpointing,
        bf16=bf16,
        use_cpu=device.startswith("cpu"),
        dataloader_pin_memory=False,
        # When a checkpoint is due is for `end_step` to say.
        save_strategy="no",
        logging_steps=settings.log_every,
        disable_tqdm=True,
        log_level="error",
        report_to=[],
    )
