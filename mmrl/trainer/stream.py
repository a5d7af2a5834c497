"""What drives the Trainer's loop: the stream of optimizer steps, and the callback that ends a step.

Part of `trainer`; used by `trl_trainer` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from mmrl.trainer.packing import Pack

if TYPE_CHECKING:
    from mmrl.trainer.trl_trainer import MmrlTrainer


@dataclass(frozen=True, slots=True)
class Update:
    """The work of one optimizer step."""

    step: int
    packs: Sequence[Pack]
    """This process's share; the same number on every process."""
    first: bool
    """Whether the weights are still those that sampled."""
    last: bool
    """Whether the step ends with it."""


class UpdateStream:
    """What `get_train_dataloader` returns: sized, and iterated once."""

    def __init__(self, trainer: MmrlTrainer):
        self.trainer = trainer

    def __len__(self) -> int:
        return self.trainer.settings.train.steps * self.trainer.settings.updates

    def __iter__(self) -> Iterator[dict[str, Update]]:
        return self.trainer.updates()


class StepEnd(TrainerCallback):
    """Tells the caller that a step is done, and the Trainer when to save."""

    def __init__(self, trainer: MmrlTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After every optimizer step."""
        trainer = self.trainer
        if state.global_step % trainer.settings.updates:
            return
        step, train = trainer.steps_done, trainer.settings.train
        trainer.policy.eval()
        metrics = trainer.batch_metrics | trainer.totals.metrics(trainer.reduce)
        if trainer.critic is not None:
            metrics |= trainer.critic.metrics(trainer.reduce)
            metrics["critic/lr"] = trainer.critic_lr
        trainer.on_step_end(step, metrics)
        control.should_save = step % train.save_every == 0 or step == train.steps
