"""Damage to the folder of a stopped run: one file of it, as a disk, a copy or a hand may leave it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

KINDS = ("truncated", "emptied", "missing", "one bit", "64 bytes", "a digit", "a line lost", "a line twice", "a folder")


def damage(folder: Path, noise: random.Random) -> tuple[str, str, bytes]:
    """Damage one file below `folder`; returns what was done, the file's name below it, and what it held."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("run.lock", "lock"))
    path, kind = noise.choice(files), noise.choice(KINDS)
    data = path.read_bytes()
    text = path.suffix in (".json", ".jsonl", ".yaml", ".jinja")
    if not data and kind not in ("missing", "a folder"):
        kind = "missing"
    if kind in ("a digit", "a line lost", "a line twice") and not text:
        kind = "one bit"
    _do(path, kind, bytearray(data), noise)
    return kind, str(path.relative_to(folder)), data


def put_back(path: Path, data: bytes) -> None:
    """A damaged file as it was, as from a copy that somebody has."""
    if path.is_dir():
        path.rmdir()
    path.write_bytes(data)


def _do(path: Path, kind: str, data: bytearray, noise: random.Random) -> None:
    if kind == "missing":
        path.unlink()
        return
    if kind == "a folder":
        path.unlink()
        path.mkdir()
        return
    lines = bytes(data).splitlines(keepends=True)
    if kind == "truncated":
        del data[noise.randrange(len(data)) :]
    elif kind == "emptied":
        data.clear()
    elif kind == "one bit":
        data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
    elif kind == "64 bytes":
        start = noise.randrange(len(data))
        for at in range(start, min(start + 64, len(data))):
            data[at] ^= noise.randrange(1, 256)
    elif kind == "a digit":
        places = [at for at, byte in enumerate(data) if 48 <= byte <= 57] or [0]
        at = noise.choice(places)
        data[at] = noise.choice([byte for byte in b"0123456789" if byte != data[at]])
    else:
        at = noise.randrange(len(lines))
        lines[at : at + 1] = [] if kind == "a line lost" else [lines[at]] * 2
        data[:] = b"".join(lines)
    path.write_bytes(data)


def copy(source: Path, target: Path) -> None:
    """A stopped run's folder, as it was left."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
