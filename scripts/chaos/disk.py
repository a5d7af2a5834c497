"""A disk of a trial's own: a file system in memory that only this process and its children see, filled or read-only."""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path

from scripts.chaos.hooks import Fault

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
        self._readonly: Path | None = None

    def strike(self, fault: Fault) -> None:
        """Fill it to `fault.room` bytes, or make what the run writes into read-only."""
        if fault.what == "full":
            with self._filler.open("wb", buffering=0) as file:
                state = os.statvfs(self.folder)
                os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - fault.room))
            return
        # A file system with an open file cannot be made read-only, but a second view of it can.
        target = os.fsencode(self.folder / "run" if (self.folder / "run").is_dir() else self.folder)
        _checked(self._libc.mount(target, target, None, _BIND, None))
        _checked(self._libc.mount(target, target, None, _BIND | _REMOUNT | _RDONLY, None))
        self._readonly = Path(os.fsdecode(target))

    def release(self) -> None:
        """There is room again, and everything can be written."""
        if self._readonly is not None:
            _checked(self._libc.umount2(os.fsencode(self._readonly), _DETACH))
            self._readonly = None
        self._filler.unlink(missing_ok=True)


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def available() -> bool:
    """Whether this process may have a disk of its own (tried in a child, whose mounts end with it)."""
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
