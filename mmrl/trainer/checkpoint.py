"""Checkpoints that are whole or absent: written beside, flushed, then renamed into place.

Part of `trainer`. A checkpoint is a folder `checkpoint-<steps done>` with what Hugging Face's Trainer saves (model or
adapter, optimizer, scheduler, random states, trainer state), the critic, `extra.json` of the caller, and
`complete.json`, the list of its files with sizes and digests. `store.policy` reads them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.trainer_pt_utils import safe_globals

from mmrl.errors import CheckpointError, MmrlError, StorageError, storage_error
from mmrl.models.report import without_bars
from mmrl.store.policy import (
    EXTRA,
    MARKER,
    checkpoint_step,
    complete_checkpoints,
    damage,
    every_checkpoint,
    is_complete,
    kept_mark,
    write_marker,
)
from mmrl.system.files import JsonObject, sync
from mmrl.trainer.critic import ADAPTER, FILE, Critic
from mmrl.trainer.sharding import local

if TYPE_CHECKING:
    from transformers import Trainer

    from mmrl.config import TrainConfig

_LEFTOVER = re.compile(r"\.(writing|removing)-checkpoint-\d+")
_PICKLED = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")


def save(
    trainer: Trainer,
    folder: Path,
    step: int,
    *,
    train: TrainConfig,
    critic: Critic | None,
    write_state: Callable[[str], None],
    recorded: Callable[[], Mapping[str, object]],
) -> None:
    """Write `checkpoint-<step>` into a folder of checkpoints; every process takes part, the main one writes.

    Args:
        write_state: writes what the trainer has (weights, optimizer, scheduler, random states) into a folder.
        recorded: the content of `extra.json`.

    Raises:
        StorageError: the disk refuses; what was saved before is whole.
        MmrlError: a weight is not finite; what was saved before is whole.
    """
    _require_finite(trainer, critic, step)
    accelerator, main = trainer.accelerator, trainer.accelerator.is_main_process
    temporary = begin(folder, step) if main else temporary_folder(folder, step)
    try:
        # The folder is there before anyone writes into it, and every process has written before it gets its name.
        accelerator.wait_for_everyone()
        with without_bars():
            write_state(str(temporary))
        critic_state = critic.state() if critic is not None else None
        if critic_state is not None and main:
            # peft saved it as one more adapter of the policy, which it is not.
            shutil.rmtree(temporary / ADAPTER, ignore_errors=True)
            save_file(critic_state, temporary / FILE)
        accelerator.wait_for_everyone()
        record = recorded()  # on all processes, which have a part of it each
        if main:
            trainer.state.save_to_json(str(temporary / "trainer_state.json"))
            # peft's form of a card, which nobody has filled in; an export has one.
            (temporary / "README.md").unlink(missing_ok=True)
            commit(folder, step, record)
            prune(folder, train.keep, train.saves_after)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)  # it would keep a full disk full
        raise _refused(error, folder / f"checkpoint-{step}") or error from error
    accelerator.wait_for_everyone()


def _require_finite(trainer: Trainer, critic: Critic | None, step: int) -> None:
    # A run can go on from no such weights, and saving them would push out the checkpoints before.
    model = cast("torch.nn.Module", trainer.model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained += critic.named_parameters().values() if critic is not None else ()
    bad = sum(not torch.isfinite(local(parameter)).all() for parameter in trained)
    if trainer.accelerator.reduce(torch.tensor(bad, device=trainer.accelerator.device)) > 0:
        raise MmrlError(f"step {step}: a weight is not finite, so nothing is saved; lower train.lr, and resume")


def _refused(error: Exception, target: Path) -> StorageError | None:
    """Return the error of a disk that refuses a checkpoint; None for any other."""
    if isinstance(error, OSError):
        # The folder's name and not the file's: that one has gone with the folder.
        error = OSError(error.errno, error.strerror or str(error))
        return storage_error(error, target) or StorageError(f"{target}: cannot be saved: {error.strerror}")
    return storage_error(error, target)


def require(path: Path) -> None:
    """Raises `CheckpointError` unless `path` is a complete checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    if not is_complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint ({MARKER} is missing or disagrees with the files)")


def temporary_folder(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint that is being written."""
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
    write_marker(path, step)
    # Contents and directory entries first, then the name, then the name's directory: after a power failure a
    # checkpoint that bears its name is readable to the last byte.
    for file in [*path.rglob("*"), path]:
        sync(file)
    if target.exists():
        _remove(target)
    os.rename(path, target)
    sync(folder)
    return target


def prune(folder: Path, keep: int, due: Callable[[int], bool] = lambda step: True) -> None:
    """Delete all but the newest `keep` complete checkpoints and those that other runs start from; and incomplete ones.

    Args:
        due: whether a checkpoint is due after a step. One of another step (of a run that was stopped) stays only while
            it is the newest, so that a run that was continued ends with the checkpoints of one that was not stopped.
    """
    complete = complete_checkpoints(folder)
    staying = {*[path for path in complete if due(checkpoint_step(path) or 0)][-keep:], *complete[-1:]}
    staying |= {path for path in complete if kept_mark(path).exists()}
    for path in every_checkpoint(folder):
        if path not in staying:
            _remove(path)


def unusable(path: Path) -> str:
    """Return the reason why a checkpoint cannot be continued from, in words that name the file; empty where it can.

    Nothing that a file holds is run: pickles are read as weights alone.
    """
    if problem := damage(path):
        return problem
    # Whoever can write a file can write its digest too; and checkpoints of former versions have none.
    for file in sorted(path.rglob("*")):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt"):
                    pass
            elif _PICKLED.fullmatch(file.name):
                with safe_globals():
                    torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            elif file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
        # torch and safetensors raise what their parsers meet.
        except Exception as error:
            reason = "it holds more than weights" if "eights_only" in str(error) else str(error).splitlines()[0][:200]
            return f"{file} cannot be read ({type(error).__name__}: {reason})"
    return ""


def saved_extra(path: Path) -> JsonObject:
    """Return the record that `save` stored in a checkpoint; empty where nothing."""
    file = path / EXTRA
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


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
