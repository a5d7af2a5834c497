"""A user's command: run once with an input, its output bounded, ended with everything that it started.

A guard beside this process ends what runs when this one is killed outright (Linux).
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from mmrl.system import marked
from mmrl.system.child_process import end_with_parent
from mmrl.system.marked import MARK, kill_marked
from mmrl.system.user_code import in_thread

LARGEST_OUTPUT = 2**22
"""Bytes of stdout."""
LONGEST_ERROR = 2000
"""Bytes of stderr, from its end, that an error quotes."""
LOOKS_S = 0.05
"""Pause between looks whether the command has ended."""
TERMINATED_S = 1.0
"""Time in which the last output comes after the end."""


class CommandError(Exception):
    """A command that failed; the message quotes its stderr."""


async def run_command(words: Sequence[str], text: str, env: Mapping[str, str], mark: str) -> bytes:
    """Run a command and return what it wrote to stdout; cancelling ends it.

    Args:
        words: the command and its arguments.
        text: its stdin.
        env: its environment.
        mark: a secret in `env` by which processes are known that left the command's group (Linux).

    Raises:
        CommandError: it cannot be started, its exit code is not 0, or it wrote more than `LARGEST_OUTPUT`.
    """
    running: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def run() -> bytes:
        process = _started(words, text, env)
        running.append(process)
        if ended.is_set():  # cancelled while it started
            _end(process, mark)
        return _output(process)

    try:
        return await in_thread(run)
    finally:
        ended.set()
        for process in running:
            # In a thread, since it reads the environment of every process.
            await in_thread(_end, process, mark)


def _started(words: Sequence[str], text: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as stdin:
        # A file and no pipe: a command that does not read its input holds nobody up.
        stdin.write(text.encode())
        stdin.seek(0)
        try:
            return subprocess.Popen(
                words,
                env=marked_environment(env),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that its group is its own
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise CommandError(f"cannot start {words[0]}: {error.strerror or error}") from None


_LOCK = threading.Lock()
_GUARDS: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
"""Process id, since a fork has one of its own -> its guard, and the mark of its commands."""


def marked_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the mark of this process's commands, which a guard ends once this one has ended."""
    with _LOCK:
        if os.getpid() not in _GUARDS:
            mark = secrets.token_urlsafe(24)
            guard = subprocess.Popen(
                [sys.executable, "-IS", marked.__file__, str(os.getpid())],
                env={**os.environ, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # what interrupts this process must not end its guard
            )
            _GUARDS[os.getpid()] = guard, mark
        return {**env, MARK: _GUARDS[os.getpid()][1]}


def _output(process: subprocess.Popen[bytes]) -> bytes:
    """Read until the process ends, or both pipes do: what it started may hold them open."""
    output, errors = bytearray(), bytearray()
    until: float | None = None
    # Closed here, where they are read: a number that is closed elsewhere may be another file's by now.
    with ExitStack() as pipes, selectors.DefaultSelector() as selector:
        for pipe, kept in ((process.stdout, output), (process.stderr, errors)):
            assert pipe is not None
            pipes.callback(pipe.close)
            selector.register(pipe, selectors.EVENT_READ, kept)
        while selector.get_map():
            ready = selector.select(LOOKS_S)
            for key, _ in ready:
                part = os.read(key.fd, 2**16)
                key.data.extend(part)
                if not part:
                    selector.unregister(key.fileobj)
            del errors[:-LONGEST_ERROR]
            if len(output) > LARGEST_OUTPUT:
                raise CommandError(f"it wrote more than {LARGEST_OUTPUT} bytes to stdout")
            if until is None and process.poll() is not None:
                until = time.monotonic() + TERMINATED_S
            if until is not None and (not ready or time.monotonic() > until):
                break
    if code := process.wait():
        raise CommandError(f"exit code {code}: {errors.decode(errors='replace').strip()}")
    return bytes(output)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the process, its group, and every process that has the mark in its environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kill_marked(mark)
