"""A terminal for tests: runs a command in a pseudo-terminal and keeps the lines that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tests.helpers import TOP

PART = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?[\d;]*[a-z]|\x1b\[[\d;]*m|\r|\n|[^\x1b\r\n]+|\x1b")


@dataclass(frozen=True)
class Seen:
    """What a command has shown."""

    code: int
    lines: list[str]
    """Lines of the screen in the end, with those that have scrolled away."""
    raw: str
    first_s: float
    """Seconds until its first letter."""


def screen(text: str) -> list[str]:
    """Return the lines that stand on a screen after `text`: of its codes those of moving up and erasing a line."""
    lines, row, column = [""], 0, 0
    for part in PART.finditer(text):
        word, count, code = part[0], int(part[1] or 1), part[2]
        if word == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif word == "\r":
            column = 0
        elif code == "A":
            row = max(row - count, 0)
        elif code == "K":
            lines[row] = lines[row][:column] if not part[1] else ""
        elif not word.startswith("\x1b"):
            lines[row] = lines[row].ljust(column)[:column] + word + lines[row][column + len(word) :]
            column += len(word)
    return lines


def in_terminal(*words: str, keys: Mapping[str, str] | None = None, columns: int = 100) -> Seen:
    """Run a Python with `words` in a terminal of UTF-8; fails after five minutes.

    Args:
        keys: text -> what is typed when it appears (`\\x03`: Ctrl-C).
    """
    pid, terminal = pty.fork()
    if pid == 0:
        variables = {**os.environ, "PYTHONPATH": str(TOP), "TERM": "xterm", "PYTHONUTF8": "1"}
        os.execve(sys.executable, [sys.executable, *words], variables)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    waiting, started, raw, first_s = dict(keys or {}), time.monotonic(), b"", 0.0
    while time.monotonic() < started + 300:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # Linux's way of saying that the other end is closed
            break
        if not read:
            break
        first_s = first_s or time.monotonic() - started
        raw += read
        for text in [text for text in waiting if text in raw.decode(errors="replace")]:
            os.write(terminal, waiting.pop(text).encode())
    else:
        os.kill(pid, 9)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    shown = raw.decode()
    return Seen(code, [line.rstrip() for line in screen(shown)], shown, first_s)
