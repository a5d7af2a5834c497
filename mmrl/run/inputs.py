"""Files that a config names and a run reads: prompts, chat template, data, corpus. Recorded by content at the start.

`environment.json` keeps a digest of each; a run that is continued, or stands beside others, must have read the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

from mmrl.config.base import GENERATED, MINI, SPLITS, value_at
from mmrl.errors import DataError
from mmrl.system.files import JsonObject, file_digest, map_threaded, user_path
from mmrl.tasks.data.places import files_below, is_saved
from mmrl.tasks.data.rows import Source

_FILES = ("task.prompts", "task.labels", "model.chat_template")
_SOURCES = (*(f"task.data.{split}" for split in SPLITS), "task.corpus", "algo.file")
KEYS = (*_FILES, *_SOURCES)
"""Keys whose files are known by content."""
_NO_FILES = (MINI, GENERATED, "paper", "plain")
"""Values of these keys that name no file, whatever lies in the current folder."""
_WHOLE = 2**28
"""Bytes up to which the files of a setting are read whole; of larger ones, their sizes and blocks of as many bytes."""
_BLOCKS = 256


def inputs_of(config: Mapping[str, object]) -> dict[str, str]:
    """Return `KEY=VALUE` -> digest of the files behind it, for each key of a config that names local files."""
    values = {key: value_at(config, key) for key in KEYS}
    found = {
        f"{key}={value}": _digest(key, value)
        for key, value in values.items()
        if isinstance(value, str) and value not in _NO_FILES
    }
    return {setting: digest for setting, digest in found.items() if digest}


def changed_inputs(facts: JsonObject) -> list[str]:
    """Return the settings whose files are others now than at the start that `environment.json` knows.

    Files that are not here are none: whatever reads them says so.
    """
    recorded = facts.get("inputs") or {}
    now = {setting: _digest(*setting.split("=", 1)) for setting in recorded}
    return [setting for setting, digest in now.items() if digest and digest != recorded[setting]]


def _digest(key: str, value: str) -> str:
    """Return a digest of the names and the contents of the files of a setting; empty where there are none."""
    with suppress(DataError, OSError):  # said where they are read
        paths = _paths(key, value)
        total = sum(path.stat().st_size for path in paths)
        digests = map_threaded(partial(_content, total=total), paths)
        lines = (f"{path.name} {digest}\n" for path, digest in zip(paths, digests, strict=True))
        return sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest() if paths else ""
    return ""


def _paths(key: str, value: str) -> list[Path]:
    path = user_path(value)
    if key in _FILES:
        return [path] if path.is_file() else []
    if key == "task.corpus" and path.is_dir() and not is_saved(path):
        return files_below(path)
    return Source(key, value).files(key.rpartition(".")[2] if key.startswith("task.data.") else "train")


def _content(path: Path, total: int) -> str:
    facts = path.stat()
    share = facts.st_size if total <= _WHOLE else _WHOLE * facts.st_size // total
    return _content_of(path, facts.st_size, facts.st_mtime_ns, share)


@cache  # a set looks at the same files for each of its runs
def _content_of(path: Path, size: int, changed: int, share: int) -> str:
    if share == size:
        return file_digest(path)
    content, blocks = sha256(str(size).encode()), max(1, _BLOCKS * share // _WHOLE)
    with open(path, "rb") as file:
        for number in range(blocks):
            file.seek(size * number // blocks)
            content.update(file.read(share // blocks))
    return content.hexdigest()
