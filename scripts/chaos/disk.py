"""A disk for one trial: a file system in memory that only this process and its children see, filled or read-only."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

SIZE = 96 << 20
TRIES = 200
"""Of making a disk read-only, each 10 ms after the one before."""
_NEWNS = 0x20000


class Disk:
    """A mount at `folder`, which exists and is empty; it is gone with this process."""

    def __init__(self, folder: Path):
        self.folder = folder
        ctypes.CDLL(None).unshare(_NEWNS)
        _call("mount", "--make-rprivate", "/")
        _call("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", folder)
        self._filler = folder / ".filler"

    def fill(self, room: int) -> None:
        """Leave `room` bytes."""
        with self._filler.open("wb", buffering=0) as file:
            state = os.statvfs(self.folder)
            os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - room))

    def make_readonly(self) -> None:
        """Let nothing be written to what the run writes into."""
        # A file system with an open file cannot be made read-only, but a second view of it can.
        target = self.folder / "run" if (self.folder / "run").is_dir() else self.folder
        _call("mount", "--bind", target, target)
        # Busy while another process of the run writes a file that it has opened in that view.
        for attempt in range(TRIES):
            try:
                return _call("mount", "-o", "remount,bind,ro", target)
            except subprocess.CalledProcessError:
                if attempt == TRIES - 1:
                    raise
                time.sleep(0.01)

    def release(self) -> None:
        """Give the room back, and let everything be written."""
        for target in (self.folder, self.folder / "run"):
            if target.is_dir() and os.statvfs(target).f_flag & os.ST_RDONLY:
                _call("umount", "--lazy", target)
        self._filler.unlink(missing_ok=True)


def _call(*words: str | Path) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True)


def available() -> bool:
    """True where this process may mount a disk (tried in a child, whose mounts end with it)."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
