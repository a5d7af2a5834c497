"""Processes that have a secret in their environment: those which a command of the user's left behind (Linux).

    python marked.py PID    kills those with $MMRL_COMMANDS in their environment once its parent, PID, has ended

Imports the standard library alone, since it also runs as a script, without mmrl.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "MMRL_COMMANDS"
"""Variable with the mark of all commands of a process."""
ROUNDS = 20
"""Looks at most: what forks while it is looked for is found by the next."""


def kill_marked(mark: str) -> None:
    """Kill every process but this one that has the mark in its environment."""
    secret = mark.encode()
    for _ in range(ROUNDS):
        found = False
        for file in Path("/proc").glob("[0-9]*/environ"):
            # Processes end meanwhile, and others are not ours to read.
            with suppress(OSError):
                if int(file.parent.name) != os.getpid() and secret in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            break
        time.sleep(0.01)


if __name__ == "__main__":
    while os.getppid() == int(sys.argv[1]):
        time.sleep(0.5)
    kill_marked(os.environ[MARK])
