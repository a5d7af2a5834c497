"""Conversion of mmrl's config sections to the arguments of Hugging Face's Trainer; refuses what it cannot do.

Part of `trainer`; no TRL here, so that a config can be checked without loading it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mmrl.config import AlgoConfig, ModelConfig, TrainConfig
from mmrl.config.algo import CriticConfig
from mmrl.config.rules import across_sections
from mmrl.config.sft import SFT
from mmrl.config.teacher import INITIAL
from mmrl.errors import ConfigError
from mmrl.models.adapter import targets_of

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, TrainingArguments

ArgumentsT = TypeVar("ArgumentsT", bound="TrainingArguments")
# torch 2.13's newer name for it is not one that accelerate passes on, nor one that torch 2.9 knows.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
# transformers 5.24 calls it activation checkpointing; TRL and peft, of whose options it is one, do not yet.
warnings.filterwarnings("ignore", message=r"`(is_)?gradient_checkpointing(_\w+)?` is", category=FutureWarning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The config sections that the trainer reads."""

    train: TrainConfig
    algo: AlgoConfig
    model: ModelConfig
    seed: int

    @classmethod
    def supervised(cls, train: TrainConfig, model: ModelConfig, seed: int) -> Settings:
        """Make settings of supervised steps, whose tokens have advantage 1: the ratio is 1, without a reference."""
        return cls(train=train, algo=AlgoConfig(name=SFT, ratio_one=True, beta=0.0), model=model, seed=seed)

    @property
    def is_supervised(self) -> bool:
        """True if the trainer reports likelihood and accuracy, of which reinforcement learning has no use."""
        return self.algo.name == SFT

    @property
    def has_dropout(self) -> bool:
        """True if the update's log-probabilities have noise that the sampler's do not have: dropout of adapters."""
        return not self.is_supervised and self.model.lora is not None and self.model.lora.dropout > 0

    @property
    def updates(self) -> int:
        """Optimizer steps of one step."""
        return self.algo.epochs * self.algo.minibatches

    @property
    def critic(self) -> CriticConfig | None:
        """Settings of the critic, for algorithms that have one."""
        return self.algo if isinstance(self.algo, CriticConfig) else None

    @property
    def beta(self) -> float:
        """Weight of the KL term in the loss: 0 where it is part of the reward."""
        in_reward = self.critic is not None and self.critic.kl == "reward"
        return 0.0 if in_reward else self.algo.beta

    @property
    def needs_initial(self) -> bool:
        """True if the weights at the start of the run are used: by the KL term, or as a teacher."""
        return self.algo.beta > 0 or INITIAL in (self.algo.distill or {}).values()

    def problems(self) -> list[str]:
        """Return problems of the settings, one sentence each."""
        train, messages = self.train, []
        if train.warmup_steps >= train.steps * self.updates and train.warmup_steps:
            messages.append(
                f"train.warmup_steps: got {train.warmup_steps}, expected less than the run's "
                f"{train.steps * self.updates} optimizer steps"
            )
        if self.model.dtype == "float16":
            messages.append("model.dtype: float16 cannot be trained safely, expected bfloat16, float32 or auto")
        return messages

    def check(self) -> None:
        """Raises `ConfigError` with every problem, keys without effect too."""
        sections = {"train": self.train, "algo": self.algo, "model": self.model}
        if messages := across_sections(sections) + self.problems():
            raise ConfigError(messages)

    def lora(self, model: PreTrainedModel, *, dropout: bool = True) -> LoraConfig | None:
        """Return peft's `LoraConfig` for `model`, or None when all parameters are trained."""
        lora = self.model.lora
        return None if lora is None else targets_of(model, lora).peft_config(lora, dropout=dropout)

    def arguments(self, folder: Path, *, on_cpu: bool, autocast: bool, dense: bool) -> dict[str, Any]:
        """Return the arguments of TRL's `GRPOConfig`.

        Whatever belongs to TRL's own sampling, rewards, logging and saving is off or inert; one optimizer step is one
        `training_step`, so nothing divides the loss.

        Args:
            dense: every forward uses all weights (so not of a mixture of experts).
        """
        train = self.train
        return {
            "output_dir": str(folder),
            "max_steps": train.steps * self.updates,
            "learning_rate": train.lr,
            "lr_scheduler_type": train.schedule,
            "warmup_steps": train.warmup_steps,
            "max_grad_norm": train.grad_clip,
            "adam_beta1": train.adam_beta1,
            "adam_beta2": train.adam_beta2,
            "weight_decay": train.weight_decay,
            "optim": "adamw_torch",
            # transformers takes no seed of more than 32 bits.
            "seed": self.seed % 2**32,
            "bf16": autocast,
            "use_cpu": on_cpu,
            "gradient_checkpointing": self.model.gradient_checkpointing,
            # One "batch" is a step's packs, whatever their number: these sizes are inert, and only have to pass TRL's
            # test that a batch is a whole number of groups.
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            # The reference policy is ours: TRL would load it again by name, without what a stage before has trained.
            "beta": 0.0,
            # DDP would broadcast them in forwards, and processes do not all make equally many (`forwards.annotate`);
            # they are rotary tables, equal everywhere.
            "ddp_broadcast_buffers": False,
            # Looking for unused weights costs a walk over each graph, and PyTorch warns of it.
            "ddp_find_unused_parameters": False if dense else None,
            "average_tokens_across_devices": False,
            # A resumed run starts its own data stream at the right step; there is nothing to skip.
            "ignore_data_skip": True,
            # Metrics, logs, checkpoints and evaluations are written by mmrl, in the run directory.
            "disable_tqdm": True,
            "log_level": "error",
            "logging_strategy": "no",
            "save_strategy": "no",
        }


def no_reward(*args: object, **kwargs: object) -> NoReturn:
    """Raise: TRL requires a reward function and must not call it."""
    raise RuntimeError("rewards come from mmrl.credit; TRL's own reward path must never run")


def one_device(args: ArgumentsT) -> ArgumentsT:
    """Count one device per process, however many are visible (`Trainer` would wrap in DataParallel)."""
    import torch

    if args.n_gpu > 1:
        args._n_gpu = 1
    if args.device.type == "cpu":
        # Several processes call it cpu:0, a name under which torch cannot load the optimizer of a checkpoint.
        args.__dict__["_setup_devices"] = torch.device("cpu")
    return args
