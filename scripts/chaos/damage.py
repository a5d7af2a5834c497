"""Damage to a file of a run, as a disk, a copy or a hand may leave it."""

from __future__ import annotations

import random
from pathlib import Path

KINDS = ("truncated", "emptied", "missing", "one bit", "a folder")


def damage(folder: Path, noise: random.Random) -> tuple[str, str, bytes]:
    """Damage one file below `folder`; returns what was done, the file's name below it, and what it held."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("run.lock", "lock"))
    path = noise.choice(files)
    data = path.read_bytes()
    return damage_file(path, noise), str(path.relative_to(folder)), data


def damage_file(path: Path, noise: random.Random) -> str:
    """Damage a file; returns what was done to it, one of `KINDS`."""
    kind, data = noise.choice(KINDS), bytearray(path.read_bytes())
    if not data and kind not in ("missing", "a folder"):
        kind = "missing"
    if kind == "one bit" and path.suffix == ".jsonl":  # which have no checksum
        kind = "truncated"
    if kind in ("missing", "a folder"):
        path.unlink()
        if kind == "a folder":
            path.mkdir()
        return kind
    if kind == "truncated":
        del data[noise.randrange(len(data)) :]
    elif kind == "emptied":
        data.clear()
    else:
        data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
    path.write_bytes(data)
    return kind


def put_back(path: Path, data: bytes) -> None:
    """Restore a damaged file, as from a copy that somebody has."""
    if path.is_dir():
        path.rmdir()
    path.write_bytes(data)
