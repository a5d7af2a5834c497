"""A disk for one trial: a file system in memory that only this process and its children see, filled or read-only."""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path

SIZE = 96 << 20
_NEWNS, _RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE, _DETACH = 0x20000, 1, 32, 4096, 16384, 1 << 18, 2


class Disk:
    """A mount at `folder`, which exists and is empty; it is gone with this process.

    Raises:
        OSError: this process may not mount anything.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        libc = ctypes.CDLL(None, use_errno=True)
        _checked(libc.unshare(_NEWNS))
        _checked(libc.mount(b"none", b"/", None, _REC | _PRIVATE, None))
        _checked(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={SIZE}".encode()))
        self._libc = libc
        self._filler = folder / ".filler"

    def fill(self, room: int) -> None:
        """Leave `room` bytes."""
        with self._filler.open("wb", buffering=0) as file:
            state = os.statvfs(self.folder)
            os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - room))

    def make_readonly(self) -> None:
        """Let nothing be written to what the run writes into."""
        # A file system with an open file cannot be made read-only, but a second view of it can.
        target = os.fsencode(self.folder / "run" if (self.folder / "run").is_dir() else self.folder)
        _checked(self._libc.mount(target, target, None, _BIND, None))
        _checked(self._libc.mount(target, target, None, _BIND | _REMOUNT | _RDONLY, None))

    def release(self) -> None:
        """Give the room back, and let everything be written."""
        for target in (self.folder, self.folder / "run"):
            if target.is_dir() and os.statvfs(target).f_flag & os.ST_RDONLY:
                _checked(self._libc.umount2(os.fsencode(target), _DETACH))
        self._filler.unlink(missing_ok=True)


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def available() -> bool:
    """True where this process may mount a disk (tried in a child, whose mounts end with it)."""
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                Disk(Path(folder))
                code = 0
            except OSError:
                pass
            finally:
                os._exit(code)
        return os.waitpid(pid, 0)[1] == 0
