"""Saving the trainer's state: all of it or nothing, one process writing, the critic beside the policy.

Part of `trainer`; `trl_trainer` inherits from it. The formats are transformers', the folders `checkpoint`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import CheckpointError
from mmrl.trainer import checkpoint
from mmrl.trainer.critic import ADAPTER, Critic
from mmrl.trainer.inert import no_progress_bars
from mmrl.trainer.settings import Settings


class Saves:
    """The part of the trainer that saves; the attributes are the Trainer's."""

    settings: Settings
    critic: Critic | None
    accelerator: Any
    model: Any
    state: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    save_model: Callable[..., None]
    _save_optimizer_and_scheduler: Callable[[str], None]
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
            if self.critic is not None and main:
                # peft saved it as one more adapter of the policy, which it is not.
                shutil.rmtree(temporary / ADAPTER, ignore_errors=True)
                self.critic.save(temporary)
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
