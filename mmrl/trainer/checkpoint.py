"""Checkpoints that are whole or absent: written beside, flushed, then renamed into place.

Part of `trainer`. A checkpoint is a folder `checkpoint-<steps done>` with what Hugging Face's Trainer saves (model or
adapter, optimizer, scheduler, random states, trainer state), the critic, `extra.json` of the caller, and
`complete.json`, the list of its files and sizes. `models.policy` reads them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from transformers.utils import logging as hf_logging

from mmrl.errors import CheckpointError
from mmrl.models.policy import EXTRA, MARKER, checkpoint_step, complete_checkpoints, is_complete
from mmrl.trainer.critic import ADAPTER, FILE, Critic

if TYPE_CHECKING:
    from transformers import Trainer

_LEFTOVER = re.compile(r"\.(writing|removing)-checkpoint-\d+")


def save(
    trainer: Trainer,
    folder: Path,
    step: int,
    *,
    critic: Critic | None,
    extra: Callable[[int], Mapping[str, object]],
    keep: int,
) -> None:
    """Write `folder/checkpoint-<step>`; every process takes part, the main one writes.

    Args:
        extra: given the step, what else the checkpoint says; JSON-serialisable.
        keep: how many of the newest checkpoints stay.

    Raises:
        CheckpointError: the disk refuses.
    """
    accelerator, main = trainer.accelerator, trainer.accelerator.is_main_process
    temporary = begin(folder, step) if main else temporary_folder(folder, step)
    try:
        # The folder is there before anyone writes into it, and every process has written before it gets its name.
        accelerator.wait_for_everyone()
        with _no_progress_bars():
            trainer.save_model(str(temporary), _internal_call=True)
        critic_state = critic.state() if critic is not None else None
        if critic_state is not None and main:
            # peft saved it as one more adapter of the policy, which it is not.
            shutil.rmtree(temporary / ADAPTER, ignore_errors=True)
            save_file(critic_state, temporary / FILE)
        trainer._save_optimizer_and_scheduler(str(temporary))
        trainer._save_scaler(str(temporary))
        trainer._save_rng_state(str(temporary))
        accelerator.wait_for_everyone()
        if main:
            trainer.state.save_to_json(str(temporary / "trainer_state.json"))
            commit(folder, step, extra(step))
            prune(folder, keep)
    except OSError as error:
        raise CheckpointError(f"{folder}/checkpoint-{step}: cannot be saved: {error.strerror or error}") from error
    accelerator.wait_for_everyone()


def require(path: Path) -> None:
    """Raises `CheckpointError` unless `path` is a complete checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    if not is_complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint ({MARKER} is missing or disagrees with the files)")


def temporary_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder / f".writing-checkpoint-{step}"


def begin(folder: Path, step: int) -> Path:
    """Make the empty folder to write the checkpoint of `step` into; `commit` gives it its name.

    A process killed at any instant leaves either the whole checkpoint or none, and a folder that `sweep` removes.
    """
    path = temporary_folder(folder, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def commit(folder: Path, step: int, extra: Mapping[str, object]) -> Path:
    """Flush what was written since `begin` to the disk, then rename it to `checkpoint-<step>`; returns that path.

    An existing checkpoint of the same step is replaced.

    Args:
        extra: JSON-serialisable, stored in the checkpoint.
    """
    path, target = temporary_folder(folder, step), folder / f"checkpoint-{step}"
    (path / EXTRA).write_text(json.dumps(dict(extra)), encoding="utf-8")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files}
    (path / MARKER).write_text(json.dumps({"step": step, "files": sizes}, indent=1), encoding="utf-8")
    # Contents and directory entries first, then the name, then the name's directory: after a power failure a
    # checkpoint that bears its name is readable to the last byte.
    for file in [*files, path / MARKER, *(inner for inner in path.rglob("*") if inner.is_dir()), path]:
        _flush(file)
    if target.exists():
        _remove(target)
    os.rename(path, target)
    _flush(folder)
    return target


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and incomplete ones."""
    newest = set(complete_checkpoints(folder)[-keep:])
    for path in folder.glob("checkpoint-*"):
        if checkpoint_step(path) is not None and path not in newest:
            _remove(path)


def sweep(folder: Path) -> None:
    """Delete what killed writers and removers left. Only for the one process that owns the run."""
    for path in folder.glob(".*"):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint so that no instant shows half of it under its name."""
    doomed = path.with_name(f".removing-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Saving shows a bar per shard, in the middle of mmrl's own display."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()
