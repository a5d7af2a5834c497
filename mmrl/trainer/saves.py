"""Saving the trainer's state: all of it or nothing, one process writing, the critic beside the policy.

Part of `trainer`; `trl_trainer` inherits from it. The formats are transformers', the folders `checkpoint`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mmrl.errors import CheckpointError
from mmrl.trainer import checkpoint
from mmrl.trainer.critic import ADAPTER, FILE, Critic
from mmrl.trainer.inert import no_progress_bars
from mmrl.trainer.settings import Settings
from mmrl.trainer.sharding import OPTIMIZER, SCHEDULER, gathered_optimizer, is_sharded, load_optimizer, load_weights


class Saves:
    """The part of the trainer that saves; the attributes are the Trainer's."""

    settings: Settings
    critic: Critic | None
    accelerator: Any
    model: Any
    state: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    optimizer: Any
    lr_scheduler: Any
    save_model: Callable[..., None]
    _save_scaler: Callable[[str], None]
    _save_rng_state: Callable[[str], None]
    folder: Path
    """Where checkpoints go."""
    extra: Callable[[int], Mapping[str, Any]]
    """What else a checkpoint says of a step."""

    @property
    def steps_done(self) -> int:
        """Steps whose optimizer steps are all done."""
        return int(self.state.global_step) // self.settings.updates

    def whole_state(self) -> dict[str, Any] | None:
        """All weights, gathered on the main process, where processes share them; None where each holds them whole."""
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            return None
        state: dict[str, Any] = self.accelerator.get_state_dict(self.model)
        return state

    def save(self) -> Path:
        """Save the state after the last finished step, if that is not saved yet; between steps only."""
        target = self.folder / f"checkpoint-{self.steps_done}"
        if not checkpoint.complete(target):
            self._save_checkpoint(self.model, None)
        return target

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step % self.settings.updates:
            raise CheckpointError("a checkpoint can only be saved between steps")
        folder, step, main = self.folder, self.steps_done, self.accelerator.is_main_process
        temporary = checkpoint.begin(folder, step) if main else checkpoint.temporary(folder, step)
        try:
            self.accelerator.wait_for_everyone()
            with no_progress_bars():
                self.save_model(str(temporary), _internal_call=True)
            critic = self.critic.state() if self.critic is not None else None
            if critic is not None and main:
                # peft saved it as one more adapter of the policy, which it is not.
                shutil.rmtree(temporary / ADAPTER, ignore_errors=True)
                save_file(critic, temporary / FILE)
            self._save_optimizer_and_scheduler(str(temporary))
            self._save_scaler(str(temporary))
            self._save_rng_state(str(temporary))
            self.accelerator.wait_for_everyone()
            if main:
                self.state.save_to_json(str(temporary / "trainer_state.json"))
                checkpoint.commit(folder, step, self.extra(step))
                checkpoint.prune(folder, self.settings.train.keep)
        except OSError as error:
            raise CheckpointError(f"{folder}/checkpoint-{step}: cannot be saved: {error.strerror or error}") from error
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None and is_sharded(self.accelerator):
            # Gathered one by one, tied weights have become two.
            tied = dict(self.model.named_parameters(remove_duplicate=False)).keys()
            extra = tied - dict(self.model.named_parameters()).keys()
            state_dict = {name: value for name, value in state_dict.items() if name not in extra}
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.accelerator):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state = gathered_optimizer(self.optimizer)
        if self.accelerator.is_main_process:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if is_sharded(self.accelerator):
            load_weights(self.model, folder)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        if self.critic is not None:
            self.critic.load(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_sharded(self.accelerator):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        folder = Path(checkpoint)
        # Read where it is needed: of a large model, each process touches its own part of the file.
        load_optimizer(self.optimizer, torch.load(folder / OPTIMIZER, map_location="cpu", mmap=True, weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))
