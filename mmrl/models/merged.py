"""Weights that runs, evaluations and servers begin with: compared with what was saved, before they are loaded.

The adapter of a checkpoint is merged once, into `RUN/merged/checkpoint-N`, for all runs that start there. Such a folder
can be made again, so it is where it is damaged, or of another checkpoint than the run has now.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from filelock import FileLock

from mmrl.config import ModelConfig
from mmrl.config.base import value_at
from mmrl.errors import ConfigError
from mmrl.models.save import write_merged, write_tokenizer
from mmrl.store.policy import (
    MARKER,
    MERGED,
    Policy,
    checkpoint_step,
    damage,
    is_complete,
    is_made_of,
    resolve,
    run_config,
    source_of,
    write_marker,
)
from mmrl.system.files import atomic_dir


def merged(policy: Policy, model: ModelConfig) -> str:
    """Return the folder of a checkpoint's base with its adapter merged into it, made where it is not there.

    Args:
        policy: of a checkpoint with one adapter.
        model: the `model` section of a run; the base's revision is that of the checkpoint's own run.

    Raises:
        ConfigError: the base cannot be loaded, or is damaged.
        CheckpointError: the adapter holds numbers that are not finite.
    """
    checkpoint = Path(str(policy.adapter))
    target = checkpoint.parent.parent / MERGED / checkpoint.name
    if not _problem(target, checkpoint):
        return str(target)
    target.parent.mkdir(exist_ok=True)
    # Several runs may start from these weights at the same time: one merges, and the others wait for it.
    with FileLock(target.with_name(f".{target.name}.lock")):
        if problem := _problem(target, checkpoint):
            if target.is_dir():
                print(f"warning: {problem}; merged again from {checkpoint}", file=sys.stderr, flush=True)
            # Also what a killed merge has left; the lock excludes any other.
            for stale in (target, *target.parent.glob(f".{target.name}-*")):
                shutil.rmtree(stale, ignore_errors=True)
            require_undamaged(policy, model)
            revision = value_at(run_config(str(checkpoint)), "model.revision")
            with atomic_dir(target) as folder:
                write_merged(policy.base, checkpoint, model.model_copy(update={"revision": revision}), folder)
                write_tokenizer(checkpoint, [folder])
                write_marker(folder, checkpoint_step(checkpoint), checkpoint)
    return str(target)


def _problem(target: Path, checkpoint: Path) -> str:
    """Return why a checkpoint has to be merged again, in words; empty where it was merged into `target` as it is."""
    if problem := damage(target):
        return problem
    return "" if is_made_of(target, checkpoint) else f"{target} was made of another {checkpoint.name}"


def require_undamaged(policy: Policy, model: ModelConfig) -> None:
    """Compare the weights of a policy with what its run has saved; a damaged merged base is made again.

    Raises:
        ConfigError: they are not what was saved.
    """
    bases = [text for text in (policy.base, policy.initial) if text]
    for base in bases:
        source = source_of(base)
        if Path(base).parent.name == MERGED and source is not None and is_complete(source) and damage(Path(base)):
            merged(resolve(str(source)), model)
    folders = {Path(text) for text in (policy.adapter, *bases, *policy.adapters.values()) if text}
    # One adapter of several is a folder inside its checkpoint.
    for folder in sorted({parent for path in folders for parent in (path, path.parent) if (parent / MARKER).is_file()}):
        if problem := damage(folder, lambda name: name.endswith((".safetensors", ".json", ".jinja"))):
            raise ConfigError(f"policy: {problem}; restore it, or take another checkpoint of the run")
