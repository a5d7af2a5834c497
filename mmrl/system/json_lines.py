"""A file of JSON lines that only grows: digests of what a run has written.

`digests.jsonl` (`Ledger`) has one line per journal and evaluation of a training run: its name in the run directory, its
size and its SHA-256, so that a resume notices files that have changed since. A checkpoint stores the marks of that file
and of `metrics.jsonl` (how long they were at its step, and their digests), so all that a run has written hangs on the
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.system.files import JsonObject, append_jsonl, differences, named

LINES_DIFFER = "has lost or changed lines from before the checkpoint"


def mark_of(data: bytes) -> JsonObject:
    """Return size and digest of a file's content."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def file_mark(path: Path) -> JsonObject:
    """Return the mark of a file (`mark_of`), which need not exist."""
    return mark_of(path.read_bytes() if path.exists() else b"")


def begins_with(path: Path, mark: Mapping[str, Any]) -> bool:
    """True for a file that still begins with what it held when `mark` was made."""
    data = path.read_bytes()[: mark["bytes"]] if path.is_file() else b""
    return mark_of(data) == {"bytes": mark["bytes"], "sha256": mark["sha256"]}


def cut(path: Path, mark: Mapping[str, Any]) -> None:
    """Forget what was appended to a file after `mark`."""
    if path.exists():
        with named(path):
            os.truncate(path, mark["bytes"])


class Ledger:
    """`digests.jsonl` of the run directory `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "digests.jsonl"
        self._noted: dict[str, JsonObject] = {}

    def note(self, path: Path, data: bytes | None = None) -> None:
        """Note a file that is now whole.

        Args:
            data: its content, where that is at hand.
        """
        name = str(path.relative_to(self.folder))
        line = {"file": name, **(file_mark(path) if data is None else mark_of(data))}
        # An evaluation that is read back is identical; a repeated one may differ in its last bits.
        if self._noted.get(name) != line:
            append_jsonl(self.path, [line])
            self._noted[name] = line

    def has(self, path: Path) -> bool:
        """True for a file that a line describes."""
        return str(path.relative_to(self.folder)) in self._noted

    def changed(self, mark: Mapping[str, Any] | None, grown: bool = False) -> dict[Path, str]:
        """Return the files that differ from what `mark` describes, and how each differs.

        Args:
            mark: None: all lines are taken for what they are.
            grown: True if a file may have more content after that.
        """
        if mark is not None and not begins_with(self.path, mark):
            return {self.path: LINES_DIFFER}
        noted = {self.folder / name: (line["bytes"], line["sha256"]) for name, line in self._lines(mark).items()}
        return differences(noted, grown)

    def read(self) -> None:
        """Begin with the content of the file."""
        self._noted = self._lines(None)

    def cut(self, mark: Mapping[str, Any] | None) -> None:
        """Forget what was noted after `mark`; None: everything, which is then noted again."""
        if mark is None:
            self.path.unlink(missing_ok=True)
        else:
            cut(self.path, mark)
        self.read()

    def _lines(self, mark: Mapping[str, Any] | None) -> dict[str, JsonObject]:
        """Return the last line of each file."""
        data = self.path.read_bytes() if self.path.exists() else b""
        noted: dict[str, JsonObject] = {}
        for text in data[: None if mark is None else mark["bytes"]].splitlines():
            try:
                line = json.loads(text)
                noted[line["file"]] = {"file": line["file"], "bytes": int(line["bytes"]), "sha256": str(line["sha256"])}
            # Only without a mark: a line that was damaged, or torn by a kill, says nothing.
            except (ValueError, KeyError, TypeError):
                continue
        return noted
