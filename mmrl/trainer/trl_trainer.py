"""The seam to TRL: where batches come from, how one optimizer step runs, when the state is saved.

Part of `trainer`, and the only place that imports TRL. Model and adapter loading, optimizer, schedules, mixed
precision, accelerate and checkpoint formats are TRL's and transformers'. Overridden: `get_train_dataloader` (one item
is one optimizer step's packs), `training_step` (a varying number of micro-batches, one backward each),
`_clip_grad_norm` (reads the norm), `_save_checkpoint` (atomic: `checkpoint`), `_load_from_checkpoint` (full weights by
`models.load`), what FSDP2 saves and loads (`sharding`), `floating_point_ops` and `_send_telemetry` (do nothing).
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from typing_extensions import override

from mmrl.errors import CheckpointError, ConfigError, EngineFailure, Stopped, SyncFailure, TooManyFailures
from mmrl.models.adapter import targets_of
from mmrl.models.load import processor_files, saved_state
from mmrl.models.template import as_saved
from mmrl.store.policy import is_complete
from mmrl.trainer import checkpoint, sharding
from mmrl.trainer.adapters import Adapters, in_fixed_order
from mmrl.trainer.choice import choose_packing
from mmrl.trainer.critic import Critic, trained_in_float32
from mmrl.trainer.forwards import Forwards, module_names
from mmrl.trainer.objective import StepBatch, token_loss, truncated_weights
from mmrl.trainer.packing import Pack, token_budget
from mmrl.trainer.selfcheck import check_at_load, check_batch, require_same_policy
from mmrl.trainer.settings import Settings, no_reward, one_device
from mmrl.trainer.teaching import require_own_logits, teach
from mmrl.trainer.totals import StepTotals, finite

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerBase, TrainerControl


@dataclass(frozen=True, slots=True)
class Update:
    """The work of one optimizer step."""

    step: int
    packs: Sequence[Pack]
    """This process's share; the same number on every process."""
    first: bool
    """True while the weights are those that sampled."""


@dataclass(frozen=True, slots=True)
class UpdateStream:
    """Result of `get_train_dataloader`: sized, and iterated once."""

    size: int
    updates: Callable[[], Iterator[dict[str, Update]]]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[dict[str, Update]]:
        return self.updates()


class UpdateEnd(TrainerCallback):
    """Callback that calls `end_update` after every optimizer step."""

    def __init__(self, end_update: Callable[[TrainerControl], None]):
        self.end_update = end_update

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        """End the update: transformers' step is an optimizer step."""
        self.end_update(control)


class MmrlTrainer(GRPOTrainer):
    """Trainer whose `train()` starts anew, and `train(checkpoint)` from a complete checkpoint of the same config.

    For step 1, 2, … `train.steps`, by the functions that `follow` takes: `next_batch(step)` with the model in
    evaluation mode, then `algo.epochs` × `algo.minibatches` optimizer steps, then `on_step_end(step, metrics)`, then a
    checkpoint where one is due.

    Args:
        model: the base model on its device (`mmrl.models.load.load_model`); with `model.lora` it is wrapped in place.
            Its weights at this point are the reference policy.
        settings: the config sections that the trainer reads.
        output_dir: where checkpoints go.
        adapters: weights per module; None: all modules share one policy.

    Raises:
        ConfigError: settings that have no effect or cannot work, all at once.
    """

    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        *,
        output_dir: Path | str,
        adapters: Adapters | None = None,
    ):
        settings.check()
        self.settings = settings
        self.folder = Path(output_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint.sweep(self.folder)
        tries = choose_packing(settings.train.packing, model)
        budget, max_tokens = token_budget(
            settings.train.microbatch_tokens, model, settings.model.gradient_checkpointing
        )
        self.unchecked = settings.model.selfcheck
        """The first batch is still to be compared (`selfcheck`)."""
        self.recorded = False
        """The engine's record of this step is still to be compared."""
        self.noise = 0.0
        """What rounding alone makes of the first batch's log-probabilities, in half precision."""
        # Before TRL wraps the model: the critic may copy its backbone, and the reference is the model as it is now.
        self.critic = None if settings.critic is None else Critic(settings, settings.critic, model)
        self.critic_lr = 0.0
        self.adapters, lora = adapters, settings.lora(model)
        of_adapter = settings.model.lora
        self.facts = {} if of_adapter is None else {"adapter": targets_of(model, of_adapter).described}
        """What the adapter reaches, for the summary."""
        if adapters is not None:
            # `models.assignment` gives weights per module to LoRA alone.
            model, lora = cast("PreTrainedModel", adapters.attach(model, cast("LoraConfig", lora), settings.seed)), None
        # With LoRA, the policy without its adapters is the reference.
        needs_copy = settings.needs_initial and settings.model.lora is None and not isinstance(model, PeftModel)
        reference = copy.deepcopy(model).eval().requires_grad_(False) if needs_copy else None
        arguments = settings.arguments(
            self.folder, on_cpu=model.device.type == "cpu", autocast=model.dtype == torch.bfloat16, dense=tries
        )
        use_cache = getattr(model.config, "use_cache", True)
        super().__init__(
            model=model,
            reward_funcs=no_reward,
            args=one_device(GRPOConfig(**arguments)),
            train_dataset=Dataset.from_dict({"prompt": ["mmrl brings its own batches"] * 2}),
            processing_class=as_saved(tokenizer),
            callbacks=[UpdateEnd(self.end_update)],
            peft_config=lora,
        )
        # transformers has switched it off, and would so in what is saved. Each forward here says whether it takes one.
        self.model.config.use_cache = use_cache
        self.remove_callback(PrinterCallback)
        self.totals, self.batch_metrics = StepTotals((), self.args.device), dict[str, float]()
        self.sharded = sharding.is_sharded(self.accelerator)
        self.forwards = Forwards(
            self, settings, self.critic, adapters, tries=tries, budget=budget, max_tokens=max_tokens
        )
        self._prepare_models(reference)
        if settings.algo.distill_kl == "exact":
            require_own_logits(self.forwards, self.forwards.policy)
        # Weights that processes will share are whole here too, but may not fit on one device.
        checked = self.unchecked and not sharding.shares_weights(self.accelerator)
        self.ways = check_at_load(self.forwards, tokenizer) if checked else []
        """Results of the self-check."""

    def follow(
        self,
        next_batch: Callable[[int], StepBatch],
        on_step_end: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
        recorded: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """Train on the steps of a stage.

        Args:
            next_batch: given the step, what it trains on.
            on_step_end: given the step and its metrics, after its last optimizer step.
            recorded: what a checkpoint stores of the stage (`extra.json`); called by every process.
        """
        self.next_batch, self.on_step_end, self.recorded_stage = next_batch, on_step_end, recorded

    def _prepare_models(self, reference: PreTrainedModel | None) -> None:
        """Prepare policy, critic and reference for training and forwards."""
        adapter = self.critic is not None and self.critic.adapter is not None and not self.sharded
        if self.accelerator.num_processes > 1 and (self.adapters or adapter):
            # DDP expects every trained weight in every backward pass.
            raise ConfigError("hardware.processes: weights per module and algo.critic=adapter need 1 process")
        if self.sharded:
            sharding.exact_outputs(self.accelerator)
        trained_in_float32(self.forwards.policy)
        if self.critic is not None:
            self.critic.attach(self.forwards.policy, self.accelerator)
        in_fixed_order(self.forwards.policy)
        if reference is not None:
            self.forwards.ref_model = (
                sharding.shard(reference, self.accelerator)
                if self.sharded
                else self.accelerator.prepare_model(reference, evaluation_mode=True)
            )

    @property
    def steps_done(self) -> int:
        """Steps whose optimizer steps are all done."""
        return int(self.state.global_step) // self.settings.updates

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run to `train.steps`.

        Raises:
            CheckpointError: the checkpoint is not complete.
        """
        if resume_from_checkpoint is not None:
            checkpoint.require(Path(resume_from_checkpoint))
            resume_from_checkpoint = str(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> UpdateStream:  # type: ignore[override]  # transformers needs no more of a loader
        """Return the optimizer steps that are left; a step's batch is sampled when its first one is due."""
        return UpdateStream(self.settings.train.steps * self.settings.updates, self.updates)

    def updates(self) -> Iterator[dict[str, Update]]:
        """Yield an item per optimizer step, from the first step that is not done."""
        for step in range(self.steps_done + 1, self.settings.train.steps + 1):
            self.forwards.policy.eval()
            settings, batch = self.settings, self._next_batch(step)
            if self.unchecked:
                noise = check_batch(self.forwards, batch.calls)
                self.unchecked, self.noise = noise is None, noise or 0.0
                # Batches that were sampled ahead come from older weights.
                self.recorded = not self.unchecked and (step == 1 or not settings.train.staleness)
            started = time.perf_counter()
            minibatches = self.step_packs(batch)
            count, packs = settings.updates, [pack for packs in minibatches for pack in packs]
            if (count > 1 or settings.has_dropout) and not settings.algo.ratio_one:
                self.forwards.freeze_old(packs)
            teach(self.forwards, packs)
            if settings.has_dropout:
                # The update adds noise to its own forwards: of one pack, a sample, the gap is measured without.
                for pack in minibatches[0][:1]:
                    self.totals.add_gap(pack, self.forwards.policy_of(pack))
            self.totals.seconds += time.perf_counter() - started
            for number in range(count):
                yield {"update": Update(step, minibatches[number % len(minibatches)], first=number == 0)}
            for pack in packs:
                pack.taught = ()  # not held while the next batch is sampled

    def _next_batch(self, step: int) -> StepBatch:
        try:
            return self.next_batch(step)
        except (Stopped, SyncFailure, TooManyFailures, EngineFailure):
            # The weights are good, whatever the world around them is: what is trained stays for a resume.
            if self.steps_done:
                self.save()
            raise

    def step_packs(self, batch: StepBatch) -> list[list[Pack]]:
        """Make this process's packs of each mini-batch; starts the step's totals."""
        modules = module_names([train.call for train in batch.calls])
        self.totals = StepTotals(modules, self.args.device)
        self.batch_metrics = dict(batch.metrics)
        if self.critic is not None:
            self.critic.restart(self.args.device)
        minibatches, skipped = self.forwards.minibatch_packs(batch, modules)
        self.batch_metrics["train/calls_skipped"] = float(skipped)
        return minibatches

    def end_update(self, control: TrainerControl) -> None:
        """Report a step's metrics after its last optimizer step, and save a checkpoint if due."""
        if self.state.global_step % self.settings.updates:
            return
        step = self.steps_done
        self.forwards.policy.eval()
        metrics = self.batch_metrics | self.totals.metrics(self.forwards.reduce)
        if self.critic is not None:
            metrics |= self.critic.metrics(self.forwards.reduce)
            metrics["critic/lr"] = self.critic_lr
        self.on_step_end(step, metrics)
        control.should_save = self.settings.train.saves_after(step)

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of every pack; gradients are synchronised between processes once."""
        started = time.perf_counter()
        update: Update = inputs["update"]
        if self.critic is not None:
            for parameter in self.critic.named_parameters().values():
                parameter.grad = None
        # Packs are summed in their order, in float64, so the reported loss does not depend on how many there are.
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        for count, pack in enumerate(update.packs, start=1):
            # Sharded gradients are joined after each pack: waiting would keep whole ones on every process.
            now = self.sharded or count == len(update.packs)
            self.forwards.use_adapter(pack)
            # DeepSpeed's engine takes an optimizer step in each backward pass that is not told otherwise.
            self.accelerator.sync_gradients = count == len(update.packs)
            with nullcontext() if now else self.accelerator.no_sync(model):
                total += self._train_on(model, pack, first=update.first)
        if self.recorded:
            require_same_policy(self.totals.gaps_of_packs, self.forwards, self.noise)
            self.recorded = False
        loss = float(self.forwards.reduce(total, "sum"))
        self.totals.losses.append(finite(loss, "loss", update.step))
        if self.critic is not None:
            finite(float(self.forwards.reduce(self.critic.sums[0], "sum")), "loss of the critic", update.step)
        self.totals.lr = float(self._get_learning_rate())
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if self.adapters is not None and groups:
            self.totals.adapter_lr = {n: float(g["lr"]) for n, g in zip(self.adapters.trained, groups, strict=False)}
        if self.critic is not None and groups:
            self.critic_lr = float(groups[-1]["lr"])
        self.totals.seconds += time.perf_counter() - started
        self._step += 1
        return torch.tensor(loss, device=self.args.device)

    def _train_on(self, model: torch.nn.Module, pack: Pack, first: bool) -> torch.Tensor:
        algo, train, beta = self.settings.algo, self.settings.train, self.settings.beta
        if pack.ref is None and (beta > 0 or not pack.known_ref.isnan().any()):
            pack.ref = self.forwards.reference(pack)
        model.train()
        with self.forwards.autocast():
            supervised = self.settings.is_supervised
            scores = self.forwards.score(model, pack, entropy=not supervised, hits=supervised, taught=pack.taught)
        if first and not self.settings.has_dropout:
            self.totals.add_gap(pack, scores.logprobs)
        index = pack.entry_index  # (E,) into the pack's N scored positions
        old = pack.old_logprobs(scores.logprobs.detach(), train.old_logprobs == "recompute")  # (N,)
        # Against the weights at the step's start, which in a step of one update are those of now.
        correction = None if train.tis is None else truncated_weights(old[index], pack.sampled[index], train.tis)
        result = token_loss(
            scores.logprobs[index],
            old[index],
            None if pack.ref is None else pack.ref[index],
            pack.advantages,
            pack.weights,
            algo.clip,
            algo.clip_high,
            beta,
            algo.ratio_one,
            correction,
            algo.loss,
            pack.of_call[index],
            pack.rewarded,
        )
        loss = result.loss if scores.kl is None else result.loss + (pack.kl_weights * scores.kl).sum()
        # Processes' gradients are averaged, and this loss is a sum.
        self.accelerator.backward(loss * self.accelerator.num_processes)
        self.totals.add(pack, scores, result)
        if self.critic is not None:
            self.critic.train_on(pack, scores.hidden, self.accelerator, self.forwards.autocast())
        if supervised:
            # With a ratio of 1 the objective's own value is constant; its gradient is that of the log-likelihood.
            return -(pack.weights * scores.logprobs[index].detach()).sum().double()
        return loss.detach().double()

    @override
    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor | float | None:
        limit = self.settings.train.grad_clip
        norm: torch.Tensor | float | None
        if self.critic is not None:
            norm = self.critic.clip(limit, self.accelerator)
            finite(norm, "gradient norm of the critic", self.steps_done + 1)
        if self.adapters is not None:
            norms = self.adapters.clip(cast("PeftModel", model), limit)
            self.totals.adapter_norms.append(norms)
            norm = math.hypot(*norms.values())
        elif self.critic is not None:
            # Its adapter lives inside of the policy.
            of_critic = {id(parameter) for parameter in self.critic.named_parameters().values()}
            own = [parameter for parameter in model.parameters() if id(parameter) not in of_critic]
            norm = self.accelerator.clip_grad_norm_(own, limit)
        else:
            norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        value = sharding.whole_norm(norm) if norm is not None else 0.0
        self.totals.grad_norms.append(finite(value, "gradient norm", self.steps_done + 1))
        return norm

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create AdamW over the policy, and the critic in groups of its own."""
        if self.adapters is not None and self.optimizer is None:
            self.optimizer = self.adapters.make_optimizer(self)
        optimizer = super().create_optimizer(model)
        if not self.sharded:
            self._add_critic(optimizer)
        return optimizer

    def _add_critic(self, optimizer: torch.optim.Optimizer) -> None:
        for group in [] if self.critic is None else self.critic.groups(self.settings.train.weight_decay):
            optimizer.add_param_group(dict(group))

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """Create the schedules of the policy and of the critic."""
        if self.sharded:
            # accelerate, which has just sharded the policy, knows one model's weights in an optimizer.
            self._add_critic(cast("torch.optim.Optimizer", self.optimizer))
        scheduler = cast("torch.optim.lr_scheduler.LambdaLR", super().create_scheduler(num_training_steps, optimizer))
        if self.critic is not None:
            # The critic's two groups come last, and follow its own warm-up.
            factors = [*scheduler.lr_lambdas[:-2], self.critic.factor, self.critic.factor]
            self.lr_scheduler = scheduler = torch.optim.lr_scheduler.LambdaLR(scheduler.optimizer, factors)
        return scheduler

    def whole_state(self) -> dict[str, torch.Tensor] | None:
        """Return what is pushed, gathered, if processes share it: the adapters, or on the main process all weights.

        None if each process holds the weights whole.
        """
        if self.is_deepspeed_enabled:
            # Before training nothing is shared yet; then DeepSpeed's engine alone can gather.
            return None if self.deepspeed is None else self._gathered(self.deepspeed)
        if not self.is_fsdp_enabled:
            return None
        if isinstance(self.model, PeftModel):
            # The base is pushed never, and gathering it would take longer than all else.
            trained = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
            return {name: sharding.gather_tensor(value) for name, value in trained}
        return self._gathered(self.model)

    def _gathered(self, model: Any) -> dict[str, torch.Tensor]:
        return cast("dict[str, torch.Tensor]", self.accelerator.get_state_dict(model))

    def save(self) -> Path:
        """Save the state after the last finished step, if that is not saved yet; between steps only."""
        target = self.folder / f"checkpoint-{self.steps_done}"
        if not is_complete(target):
            self._save_checkpoint(self.model, None)
        return target

    @override
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step % self.settings.updates:
            raise CheckpointError("a checkpoint can only be saved between steps")
        checkpoint.save(
            self,
            self.folder,
            self.steps_done,
            train=self.settings.train,
            critic=self.critic,
            write_state=self._write_state,
            recorded=self.recorded_stage,
        )

    def _write_state(self, folder: str) -> None:
        self.save_model(folder, _internal_call=True)
        self._save_optimizer_and_scheduler(folder)
        self._save_scaler(folder)
        self._save_rng_state(folder)

    @override
    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict is not None and self.sharded:
            state_dict = sharding.without_tied(self.forwards.policy, state_dict)
        super()._save(output_dir, state_dict)
        if output_dir is not None and not isinstance(self.model, PeftModel):
            for file in processor_files(self.settings.model, self.model.config):
                shutil.copyfile(file, Path(output_dir) / file.name)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharded:
            assert self.optimizer is not None and self.lr_scheduler is not None
            main = self.accelerator.is_main_process
            sharding.save_optimizer(self.optimizer, self.lr_scheduler, Path(output_dir), main)
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        policy, folder = self.forwards.policy, Path(resume_from_checkpoint)
        if not isinstance(policy, PeftModel):
            # transformers' own way takes a file's names for the model's, and goes on where they are others.
            if self.sharded:
                sharding.load_full(policy, folder)
            else:
                policy.load_state_dict(saved_state(policy, folder))
        elif self.sharded:
            sharding.load_adapter(policy, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.critic is not None:
            self.critic.load(folder)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.sharded:
            assert self.optimizer is not None and self.lr_scheduler is not None
            sharding.load_optimizer(self.optimizer, self.lr_scheduler, Path(checkpoint))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]

    def floating_point_ops(self, inputs: object) -> int:
        """Return 0: Hugging Face's formula needs its own batch format."""
        return 0

    @override
    def _send_telemetry(self) -> None:
        pass  # nothing about the run
