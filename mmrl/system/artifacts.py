"""Folders that are built once and stay on disk (indexes): where they lie, and whether they are what was written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from mmrl.system.files import differences, file_digest, user_path

CHECKED_BYTES = 64 * 2**20
"""Files up to this size are checked by content, larger ones by size alone: start-up must not read gigabytes."""

FileChecks: TypeAlias = Mapping[str, tuple[int, str | None]]
"""File name below a folder -> size in bytes, SHA-256 of the content (None for large files)."""


def cache_root(configured: str | None) -> Path:
    """Return the cache folder: `task.retriever.cache_dir`, else $MMRL_CACHE, else ~/.cache/mmrl."""
    folder = configured or os.environ.get("MMRL_CACHE") or "~/.cache/mmrl"
    return user_path(folder)


def file_checks(folder: Path, without: tuple[str, ...] = ()) -> dict[str, tuple[int, str | None]]:
    """Return sizes and checksums of all files below a folder, except those with certain names."""
    checks = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name not in without:
            size = file.stat().st_size
            checks[str(file.relative_to(folder))] = (size, file_digest(file) if size <= CHECKED_BYTES else None)
    return checks


def verify(folder: Path, files: FileChecks) -> None:
    """Compare a folder with what `file_checks` gave when it was written; other files in it do not matter.

    Raises:
        ValueError: a file is missing, or is not what was written.
    """
    for file, text in differences({folder / name: check for name, check in files.items()}).items():
        raise ValueError(f"{file.name} {text}")
