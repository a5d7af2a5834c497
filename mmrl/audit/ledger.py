"""The ledger of an audit: what has been measured, piece by piece, so that a killed one measures nothing twice."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.system.files import append_jsonl, plain, read_jsonl, repair_jsonl, take_lock

FILE, LOCK = "work.jsonl", "lock"


class Ledger:
    """Numbers by the name of their piece of work, in a file of one line each; the first line has the settings.

    Args:
        folder: of the audit; made where it is not there.
        settings: all that the numbers depend on.

    Raises:
        ConfigError: the folder has another audit, or something else.
        CheckpointError: a line is damaged, or another process has the folder.
    """

    def __init__(self, folder: Path, settings: object):
        path, stored = folder / FILE, plain(settings)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"out: {folder} is a file, expected a folder")
        if folder.exists() and not path.exists() and any(found.name != LOCK for found in folder.iterdir()):
            raise ConfigError(f"out: {folder} is not empty, and no audit; expected a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = take_lock(folder / LOCK)
        except BlockingIOError as error:
            raise CheckpointError(f"{folder}: in use by pid {error}") from None
        self._path = path
        try:
            repair_jsonl(path)
            lines = read_jsonl(path) if path.exists() else []
            self.pieces = {line["piece"]: line["numbers"] for line in lines}
        except (DataError, KeyError) as error:
            raise CheckpointError(f"{error}; restore {path} from a copy, or begin in another folder") from None
        if self.piece("settings", lambda: stored) != stored:
            raise ConfigError(f"out: {folder} has an audit with other settings; expected a new folder")

    def piece(self, name: str, measure: Callable[[], object]) -> Any:
        """Return the numbers of a piece of work: from the file, or measured and stored now."""
        if name not in self.pieces:
            numbers = plain(measure())
            append_jsonl(self._path, [{"piece": name, "numbers": numbers}])
            self.pieces[name] = numbers
        return self.pieces[name]

    def __contains__(self, name: str) -> bool:
        return name in self.pieces

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)
