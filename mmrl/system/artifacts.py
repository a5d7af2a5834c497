"""Things that are built once and kept on disk by content hash (indexes). Bottom of `retrieval`.

A folder is built beside its place and moved there in one step, so a reader never sees half of one, and of several
builders at once the first to finish wins. A manifest lists every file's size and checksum: a folder that does not
agree with it is rebuilt with a notice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MANIFEST = "manifest.json"
CHECKED_BYTES = 64 * 2**20
"""Files up to this size are checked by content, larger ones by size alone: start-up must not read gigabytes."""

log = logging.getLogger("mmrl.cache")


def cache_root(configured: str | None) -> Path:
    """The cache folder: `task.retriever.cache_dir`, else $MMRL_CACHE, else ~/.cache/mmrl."""
    chosen = configured or os.environ.get("MMRL_CACHE") or "~/.cache/mmrl"
    return Path(chosen).expanduser()


def load_or_build(
    folder: Path, build: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]
) -> T:
    """The thing kept in `folder`, built and saved there first when it is missing or damaged.

    Args:
        folder: place named by a hash of everything that the thing depends on.
        build: makes it.
        save: writes it into a folder that exists and is empty.
        load: reads it back; may raise anything on damage.

    Returns:
        What `load` gives, or what `build` gave where the cache cannot be written (with a notice).
    """
    if folder.is_dir():
        try:
            _verify(folder)
            return load(folder)
        except Exception as error:
            log.warning("cached index %s is damaged (%s); it is rebuilt", folder, error)
            _discard(folder)
    built = build()
    try:
        _publish(built, folder, save)
    except OSError as error:
        log.warning("cannot write the cache %s (%s); the index stays in memory", folder.parent, error)
        return built
    try:
        return load(folder)
    except Exception as error:
        log.warning("cannot read back the cached index %s (%s); it stays in memory", folder, error)
        return built


def _publish(built: T, folder: Path, save: Callable[[T, Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(built, work)
        manifest = {file.name: [file.stat().st_size, checksum(file)] for file in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        os.chmod(work, 0o755)
        try:
            os.replace(work, folder)
        except OSError:
            if not (folder / MANIFEST).is_file():
                raise
            # another process finished first; its content is the same
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _verify(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for name, (size, content) in manifest.items():
        file = folder / name
        if file.stat().st_size != size:
            raise ValueError(f"{name} has {file.stat().st_size} bytes, expected {size}")
        if content is not None and checksum(file) != content:
            raise ValueError(f"{name} has another content than was written")


def checksum(file: Path) -> str | None:
    """Hash of a file's content; None for one above `CHECKED_BYTES`."""
    if file.stat().st_size > CHECKED_BYTES:
        return None
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _discard(folder: Path) -> None:
    """Move a damaged folder aside, then delete it: nobody sees it half deleted."""
    try:
        aside = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
        os.replace(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        log.warning("cannot remove %s (%s)", folder, error)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is whole or as it was before, at any instant."""
    work = path.with_name(f".{path.name}.tmp")
    with work.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)
