"""The seam to TRL: where batches come from, how one optimizer step runs, when and how the state is saved.

Part of `trainer`, and the only place that imports TRL. Model and adapter loading, optimizer, schedules, mixed
precision, accelerate and checkpoint formats are TRL's and transformers'. Overridden: `get_train_dataloader` (one item
is one optimizer step's packs), `training_step` (a varying number of micro-batches, one backward each),
`_clip_grad_norm` (reads the norm), `_save_checkpoint` (atomic: `saves`), `floating_point_ops` and `_send_telemetry`
(nothing).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from mmrl.config import AlgoConfig, ModelConfig, TrainConfig
from mmrl.errors import ConfigError, MmrlError, SyncFailure, TooManyFailures
from mmrl.trainer import checkpoint
from mmrl.trainer.adapters import Adapters
from mmrl.trainer.critic import make_critic, trained_in_float32
from mmrl.trainer.forwards import Forwards
from mmrl.trainer.inert import no_reward, one_device
from mmrl.trainer.layout import choose_packing, token_budget
from mmrl.trainer.objective import Correction, StepBatch, token_loss, truncated_weights
from mmrl.trainer.packing import Pack
from mmrl.trainer.saves import Saves
from mmrl.trainer.selfcheck import compare
from mmrl.trainer.settings import Settings
from mmrl.trainer.sharding import as_number, exact_outputs, is_sharded, shard
from mmrl.trainer.stream import StepEnd, Update, UpdateStream
from mmrl.trainer.totals import StepTotals

__all__ = ["MmrlTrainer", "StepBatch", "build_trainer"]

OnStepEnd = Callable[[int, dict[str, float]], None]


def build_trainer(
    model: Any,
    tokenizer: Any,
    *,
    train: TrainConfig,
    algo: AlgoConfig,
    model_config: ModelConfig,
    seed: int,
    output_dir: Path | str,
    next_batch: Callable[[int], StepBatch],
    on_step_end: OnStepEnd,
    resume_from: Path | None = None,
    extra: Callable[[int], Mapping[str, Any]] | None = None,
    adapters: Adapters | None = None,
) -> MmrlTrainer:
    """The trainer of one run; `train()` runs it from its start, or on from `resume_from`.

    For step 1, 2, … `train.steps`: `next_batch(step)` with the model in evaluation mode, then `algo.epochs` ×
    `algo.minibatches` optimizer steps, then `on_step_end(step, metrics)`, then a checkpoint where one is due.

    Args:
        model: the base model on its device (`mmrl.models.load.load_model`); with `model_config.lora` it is wrapped
            in place.
            Its weights at this point are the reference policy.
        output_dir: where checkpoints go.
        resume_from: a complete checkpoint of the same config.
        extra: given the step, what to store in the checkpoint's `extra.json`.
        adapters: weights per module; None: all modules share one policy.

    Raises:
        ConfigError: settings that have no effect or cannot work, all at once.
        CheckpointError: `resume_from` is not complete.
    """
    settings = Settings(train=train, algo=algo, model=model_config, seed=seed)
    settings.check()
    if resume_from is not None:
        checkpoint.require(Path(resume_from))
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.sweep(folder)
    return MmrlTrainer(
        model,
        tokenizer,
        settings=settings,
        folder=folder,
        next_batch=next_batch,
        on_step_end=on_step_end,
        resume_from=resume_from,
        extra=extra or (lambda step: {}),
        adapters=adapters,
    )


class MmrlTrainer(Saves, Forwards, GRPOTrainer):
    """See `build_trainer`, which makes it."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        settings: Settings,
        folder: Path,
        next_batch: Callable[[int], StepBatch],
        on_step_end: OnStepEnd,
        resume_from: Path | None,
        extra: Callable[[int], Mapping[str, Any]],
        adapters: Adapters | None,
    ):
        self.settings = settings
        self.folder = folder
        self.next_batch = next_batch
        self.on_step_end = on_step_end
        self.resume_from = resume_from
        self.extra = extra
        self.tries = choose_packing(settings.train.packing, model)
        self.budget = token_budget(
            settings.train.microbatch_tokens, model, checkpointing=settings.model.gradient_checkpointing
        )
        self.compared = not self.tries
        self.critic = make_critic(settings, model)
        self.critic_lr = 0.0
        self.adapters = adapters
        lora = settings.lora()
        if adapters is not None:
            if lora is None:
                raise ConfigError("model.lora: weights per module are adapters; set model.lora")
            model, lora = adapters.attach(model, lora, settings.seed), None
        needs_copy = settings.algo.beta > 0 and settings.model.lora is None and not isinstance(model, PeftModel)
        reference = copy.deepcopy(model).eval().requires_grad_(False) if needs_copy else None
        on_cpu, autocast = model.device.type == "cpu", model.dtype == torch.bfloat16
        super().__init__(
            model=model,
            reward_funcs=no_reward,
            args=one_device(
                GRPOConfig(**settings.arguments(folder, on_cpu=on_cpu, autocast=autocast, dense=self.tries))
            ),
            train_dataset=Dataset.from_dict({"prompt": ["mmrl brings its own batches"] * 2}),
            processing_class=tokenizer,
            callbacks=[StepEnd(self)],
            peft_config=lora,
        )
        self.remove_callback(PrinterCallback)
        sharded = is_sharded(self.accelerator)
        if self.accelerator.num_processes > 1 and (adapters or (self.critic and self.critic.adapter and not sharded)):
            # DDP expects every trained weight in every backward pass.
            raise ConfigError("hardware.processes: weights per module and algo.critic=adapter need 1 process")
        if sharded:
            exact_outputs(self.accelerator)
        trained_in_float32(self.policy)
        self.beta = settings.beta
        if self.critic is not None:
            self.critic.attach(self.model, self.accelerator)
        if reference is not None:
            self.ref_model = (
                shard(reference, self.accelerator)
                if sharded
                else self.accelerator.prepare_model(reference, evaluation_mode=True)
            )
        self.totals = StepTotals((), self.args.device)
        self.batch_metrics: dict[str, float] = {}

    # -- running ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run to `train.steps`, from `resume_from_checkpoint`, else from `resume_from`, else from the start."""
        source = resume_from_checkpoint or self.resume_from
        if not source:
            return super().train(None, *args, **kwargs)
        checkpoint.require(Path(str(source)))
        return super().train(str(source), *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """The optimizer steps that are left; sampling happens as they are asked for."""
        return UpdateStream(self)

    def updates(self) -> Iterator[dict[str, Update]]:
        """One item per optimizer step, from the first step that is not done."""
        for step in range(self.steps_done + 1, self.settings.train.steps + 1):
            self.policy.eval()
            batch = self._next_batch(step)
            if not self.compared:
                self.compared = compare(self, batch.calls)
            started = time.perf_counter()
            minibatches = self._packs(batch)
            count = self.settings.updates
            if count > 1 and not self.settings.algo.ratio_one:
                self._freeze_old([pack for packs in minibatches for pack in packs])
            self.totals.seconds += time.perf_counter() - started
            for number in range(count):
                packs = minibatches[number % len(minibatches)]
                yield {"update": Update(step, packs, first=number == 0, last=number == count - 1)}

    def _next_batch(self, step: int) -> StepBatch:
        try:
            return self.next_batch(step)
        except (SyncFailure, TooManyFailures):
            if self.steps_done:
                self.save()
            raise

    def _packs(self, batch: StepBatch) -> list[list[Pack]]:
        """This process's packs of each mini-batch; starts the step's totals."""
        algo = self.settings.algo
        if batch.minibatches != algo.minibatches or any(not 0 <= c.minibatch < algo.minibatches for c in batch.calls):
            raise MmrlError(f"step {batch.step}: mini-batches must be 0 to {algo.minibatches - 1} (algo.minibatches)")
        modules = list(dict.fromkeys(call.module for call in batch.calls))
        self.totals = StepTotals(modules, self.args.device)
        self.batch_metrics = dict(batch.metrics)
        if self.critic is not None:
            self.critic.restart(self.args.device)
        found, trained = [], set()
        for index in range(algo.minibatches):
            calls = [call for call in batch.calls if call.minibatch == index]
            packs = self._make_packs(calls, modules)
            trained |= {call.id for pack in packs for call in pack.calls}
            found.append([pack.to(self.args.device) for pack in self._share(packs)])
        self.batch_metrics["train/calls_skipped"] = float(sum(call.id not in trained for call in batch.calls))
        return found

    def _share(self, packs: list[Pack]) -> list[Pack]:
        """Every `num_processes`-th pack; short processes repeat the last pack with weight 0, so that all do as many
        forwards (FSDP waits for all)."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        missing = -len(packs) % world
        if missing:
            filler = replace(packs[-1], weights=torch.zeros_like(packs[-1].weights), filler=True)
            packs = [*packs, *[filler] * missing]
        return packs[rank::world]

    # -- one optimizer step ----------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of every pack; gradients are synchronised between processes once."""
        started = time.perf_counter()
        update: Update = inputs["update"]
        if self.critic is not None:
            self.critic.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        # Sharded gradients are joined after each pack: waiting would keep whole ones on every process.
        sharded = is_sharded(self.accelerator)
        for count, pack in enumerate(update.packs, start=1):
            now = sharded or count == len(update.packs)
            with nullcontext() if now else self.accelerator.no_sync(model), self._with_adapter(pack):
                total += self._train_on(model, pack, first=update.first)
        loss = float(self.reduce(total, "sum"))
        if not math.isfinite(loss):
            raise MmrlError(f"step {update.step}: the loss is {loss}; lower train.lr, or resume an earlier checkpoint")
        self.totals.losses.append(loss)
        self.totals.lr = float(self._get_learning_rate())
        if self.adapters is not None and self.optimizer is not None:
            groups = self.optimizer.param_groups
            self.totals.adapter_lr = {n: float(g["lr"]) for n, g in zip(self.adapters.trained, groups, strict=False)}
        if self.critic is not None and self.optimizer is not None:
            self.critic_lr = float(self.optimizer.param_groups[-1]["lr"])
        self.totals.seconds += time.perf_counter() - started
        self._step += 1
        return torch.tensor(loss, device=self.args.device)

    def _train_on(self, model: Any, pack: Pack, first: bool) -> torch.Tensor:
        algo = self.settings.algo
        known = not pack.known_ref.isnan().any()
        if pack.ref is None and (self.settings.beta > 0 or known):
            pack.ref = self._reference(pack)
        model.train()
        with self.compute_loss_context_manager():
            scores = self._score(model, pack, entropy=True)
        if first and not pack.filler:
            self.totals.add_gap(pack, scores.logprobs)
        at = pack.entry_index
        result = token_loss(
            scores.logprobs[at],
            self._old(pack, scores.logprobs.detach())[at],
            None if pack.ref is None else pack.ref[at],
            pack.advantages,
            pack.weights,
            algo.clip,
            algo.clip_high,
            self.settings.beta,
            algo.ratio_one,
            self._correction(pack, scores.logprobs.detach(), at),
        )
        # Processes' gradients are averaged, and this loss is a sum.
        self.accelerator.backward(result.loss * self.accelerator.num_processes)
        self.totals.add(pack, scores, result)
        if self.critic is not None:
            self.critic.train_on(pack, scores.hidden, self.accelerator, self.compute_loss_context_manager())
        return result.loss.detach().double()

    def _old(self, pack: Pack, current: torch.Tensor) -> torch.Tensor:
        """Denominator of the ratio. Of a single update, recomputing would give `current` itself."""
        if pack.old is not None:
            return pack.old
        if self.settings.train.old_logprobs == "recompute":
            return current
        return torch.where(pack.sampled.isnan(), current, pack.sampled)

    def _correction(self, pack: Pack, current: torch.Tensor, at: torch.Tensor) -> Correction | None:
        """Truncated importance weights of the entries' tokens; before a step's only update, `current` is its start."""
        cap = self.settings.train.tis
        if cap is None:
            return None
        return truncated_weights(self._old(pack, current), pack.sampled, cap).at(at)

    def _freeze_old(self, packs: Sequence[Pack]) -> None:
        """Before the first of several updates: the denominators that need a forward of the sampling weights."""
        recompute = self.settings.train.old_logprobs == "recompute"
        for pack in packs:
            # Processes must agree on whether to forward, and each sees only its own packs.
            missing = torch.tensor(float(recompute or bool(pack.sampled.isnan().any())), device=self.args.device)
            if float(self.reduce(missing, "max")):
                pack.old = self._old(pack, self._policy(pack))
            else:
                pack.old = pack.sampled

    def _clip_grad_norm(self, model: Any) -> Any:
        limit = self.settings.train.grad_clip
        if self.critic is not None:
            self.critic.clip(limit, self.accelerator)
        if self.adapters is not None:
            norms = self.adapters.clip(model, limit)
            self.totals.adapter_norms.append(norms)
            norm: Any = math.hypot(*norms.values())
        elif self.critic is not None:
            # Not the critic's adapter, which lives inside the policy.
            own = {id(p) for p in self.critic.named_parameters().values()}
            norm = self.accelerator.clip_grad_norm_([p for p in model.parameters() if id(p) not in own], limit)
        else:
            norm = super()._clip_grad_norm(model)
        value = as_number(norm) if norm is not None else 0.0
        if not math.isfinite(value):
            step = self.steps_done + 1
            raise MmrlError(
                f"step {step}: the gradient norm is {value}; lower train.lr, or resume an earlier checkpoint"
            )
        self.totals.grad_norms.append(value)
        return norm

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW over the policy, and the critic in groups of its own."""
        if self.adapters is not None and self.optimizer is None:
            groups = self.adapters.groups(self.model, self.args.learning_rate, self.args.weight_decay)
            self.adapters.train_all(self.model)
            kind, kwargs = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(groups, **kwargs)
        optimizer: Any = super().create_optimizer(model)
        if not is_sharded(self.accelerator):
            self._add_critic(optimizer)
        return optimizer

    def _add_critic(self, optimizer: Any) -> None:
        if self.critic is not None:
            for group in self.critic.groups(self.settings.train.weight_decay):
                optimizer.add_param_group(group)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The policy's schedule, and the critic's."""
        if is_sharded(self.accelerator):
            # accelerate, which has just sharded the policy, knows one model's weights in an optimizer.
            self._add_critic(self.optimizer)
        scheduler: Any = super().create_scheduler(num_training_steps, optimizer)
        if self.critic is not None:
            factors = [*scheduler.lr_lambdas[:-2], self.critic.factor, self.critic.factor]
            self.lr_scheduler = scheduler = torch.optim.lr_scheduler.LambdaLR(scheduler.optimizer, factors)
        return scheduler

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: Hugging Face's formula needs its own batch format."""
        return 0

    def _send_telemetry(self) -> None:
        """A run tells nobody about itself."""
