"""A server that mmrl starts: port, log, health, last words, end. Knows no vLLM.

Under `vllm_server`. The process leads a session of its own, so that its children end with it; it also ends when mmrl is
killed outright (Linux).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmrl.errors import EngineFailure

WORDS = 12
"""Log lines that an error quotes."""
GRACE_S = 10.0
"""Between asking a server to end and killing it."""


class ServerProcess:
    """One managed server.

    Args:
        command: given a port, the command line.
        env: variables added to this process's own.
        log: where its output is kept, appended.
        timeout_s: until `/health` must answer.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], env: Mapping[str, str], log: Path, timeout_s: float):
        self.command = command
        self.env = env
        self.log = log
        self.timeout_s = timeout_s
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process that was started last."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it and wait until it is healthy.

        Raises:
            EngineFailure: it ended, or was not healthy in time; with its last log lines.
        """
        self.stop()
        self.port = free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            command = list(self.command(self.port))
            log.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
            log.flush()
            try:
                self._process = process = subprocess.Popen(
                    command,
                    env={**os.environ, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent if _LIBC is not None else None,
                )
            except OSError as error:
                raise EngineFailure(f"cannot start {command[0]}: {error.strerror or error}") from error
        try:
            self._wait(process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it and its children; nothing happens when it has ended already."""
        process, self._process = self._process, None
        if process is None:
            return
        for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            if process.poll() is None or number == signal.SIGKILL:  # children may outlive their parent
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)

    def words(self) -> str:
        """Its last log lines, for errors."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 20_000))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return "\n".join([f"its log ({self.log}) ends with:", *[f"  {line[:300]}" for line in lines[-WORDS:]]])

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            code = process.poll()
            if code is not None:
                raise EngineFailure(f"the server ended with code {code} before it was healthy; {self.words()}")
            if self._healthy():
                return
            if time.monotonic() > deadline:
                raise EngineFailure(
                    f"the server was not healthy after engine.start_timeout_s={self.timeout_s:g} s; {self.words()}"
                )
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _libc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        return library if hasattr(library, "prctl") else None
    except OSError:
        return None


_LIBC = _libc()
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """In a child, before it becomes another program: SIGTERM when its parent dies, however it dies (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
