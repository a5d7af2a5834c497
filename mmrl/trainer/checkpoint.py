"""Checkpoints that are whole or absent: written beside, flushed, then renamed into place.

Part of `trainer`; `run` asks for the newest one, the trainer fills them. A checkpoint is a folder
`checkpoint-<steps done>` with what Hugging Face's Trainer saves (model or adapter, optimizer, scheduler, random states,
trainer state), `extra.json` of the caller, and `complete.json`, the list of its files and sizes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import CheckpointError

MARKER = "complete.json"
EXTRA = "extra.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(writing|removing)-checkpoint-\d+")


def step_of(path: Path) -> int | None:
    """Steps done at `checkpoint-<steps>`; None for any other name."""
    found = _NAME.fullmatch(path.name)
    return int(found.group(1)) if found else None


def complete(path: Path) -> bool:
    """Whether `path` is a checkpoint whose files are all there, with the sizes they were written with."""
    try:
        sizes = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = [(step, path) for path in folder.glob("checkpoint-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found) if complete(path)]


def latest(folder: Path | str) -> Path | None:
    """The newest complete checkpoint of a run, given its directory or its `checkpoints` folder; None without one."""
    root = Path(folder)
    inner = root / "checkpoints"
    found = checkpoints(inner if inner.is_dir() else root)
    return found[-1] if found else None


def read_extra(path: Path) -> dict[str, Any]:
    """What the caller stored with the checkpoint.

    Raises:
        CheckpointError: `path` is not a complete checkpoint.
    """
    require(path)
    extra: dict[str, Any] = json.loads((path / EXTRA).read_text(encoding="utf-8"))
    return extra


def require(path: Path) -> None:
    """Raises `CheckpointError` unless `path` is a complete checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    if not complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint ({MARKER} is missing or disagrees with the files)")


def temporary(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder / f".writing-checkpoint-{step}"


def begin(folder: Path, step: int) -> Path:
    """Make the empty folder to write the checkpoint of `step` into; `commit` gives it its name.

    A process killed at any instant leaves either the whole checkpoint or none, and a folder that `sweep` removes.
    """
    path = temporary(folder, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def commit(folder: Path, step: int, extra: Mapping[str, Any]) -> Path:
    """Flush what was written since `begin` to the disk, then rename it to `checkpoint-<step>`; returns that path.

    An existing checkpoint of the same step is replaced.

    Args:
        extra: JSON-serialisable, kept in the checkpoint.
    """
    path, target = temporary(folder, step), folder / f"checkpoint-{step}"
    (path / EXTRA).write_text(json.dumps(dict(extra)), encoding="utf-8")
    files = sorted(found for found in path.rglob("*") if found.is_file())
    sizes = {str(found.relative_to(path)): found.stat().st_size for found in files}
    (path / MARKER).write_text(json.dumps({"step": step, "files": sizes}, indent=1), encoding="utf-8")
    for found in [*files, path / MARKER, *(inner for inner in path.rglob("*") if inner.is_dir()), path]:
        _flush(found)
    if target.exists():
        _remove(target)
    os.rename(path, target)
    _flush(folder)
    return target


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and incomplete ones."""
    kept = set(checkpoints(folder)[-keep:])
    for path in folder.glob("checkpoint-*"):
        if step_of(path) is not None and path not in kept:
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
