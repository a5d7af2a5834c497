"""Folders that are built once and stay on disk (indexes): checked by size and checksum, whole or absent.

`load_or_build` keeps what is made in memory, in a folder named by a content hash; one that does not agree with its
manifest is rebuilt with a notice. Index folders, whose build takes hours and is continued, have their own life and
share the checks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from mmrl.system.files import atomic_dir, differences, digest, user_path

T = TypeVar("T")

MANIFEST = "manifest.json"
CHECKED_BYTES = 64 * 2**20
"""Files up to this size are checked by content, larger ones by size alone: start-up must not read gigabytes."""

FileChecks: TypeAlias = Mapping[str, tuple[int, str | None]]
"""File name below a folder -> size in bytes, SHA-256 of the content (None for large files)."""

log = logging.getLogger("mmrl.cache")


def cache_root(configured: str | None) -> Path:
    """The cache folder: `task.retriever.cache_dir`, else $MMRL_CACHE, else ~/.cache/mmrl."""
    chosen = configured or os.environ.get("MMRL_CACHE") or "~/.cache/mmrl"
    return user_path(chosen)


def load_or_build(
    folder: Path, build: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]
) -> T:
    """What is stored in `folder`; built, and saved there, where it is missing or damaged.

    Where the cache cannot be written, it is built for this process alone, with a notice.

    Args:
        folder: place named by a hash of everything that the content depends on.
        build: makes it.
        save: writes it into a folder that exists and is empty.
        load: reads it back; may raise anything on damage.
    """
    if folder.is_dir():
        try:
            verify(folder, json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
            return load(folder)
        # Libraries raise anything on a damaged file; whatever it is, building again is the cure.
        except Exception as error:
            log.warning("cached index %s is damaged (%s); it is rebuilt", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    built = build()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_dir(folder) as work:
            save(built, work)
            (work / MANIFEST).write_text(json.dumps(file_checks(work), indent=1), encoding="utf-8")
    except OSError as error:
        # Of several builders the first to finish wins: the content is the same.
        if not (folder / MANIFEST).is_file():
            log.warning("cannot write the cache %s (%s); the index stays in memory", folder.parent, error)
    return built


def file_checks(folder: Path, without: tuple[str, ...] = ()) -> dict[str, tuple[int, str | None]]:
    """Sizes and checksums of all files below a folder, except those with certain names."""
    checks = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name not in without:
            size = file.stat().st_size
            checks[str(file.relative_to(folder))] = (size, digest(file) if size <= CHECKED_BYTES else None)
    return checks


def verify(folder: Path, files: FileChecks) -> None:
    """Compare a folder with what `file_checks` gave when it was written; other files in it do not matter.

    Raises:
        ValueError: a file is missing, or is not what was written.
    """
    for file, text in differences({folder / name: check for name, check in files.items()}).items():
        raise ValueError(f"{file.name} {text}")
