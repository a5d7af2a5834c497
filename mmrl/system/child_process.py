"""A server that mmrl starts as a child process: port, log, readiness, last log lines, end. Knows no particular server.

    server = ChildProcess(lambda port: ["serve", f"--port={port}"], log=folder / "serve.log", timeout_s=60.0)
    server.start()
    ... server.url ...
    server.stop()

It ends with `stop`, when this process exits, and when this process is killed outright (Linux).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil

from mmrl.errors import EngineFailure
from mmrl.secrets import hide
from mmrl.system.portal import io_loop

LOG_LINES = 12
"""Log lines that an error quotes."""
GRACE_S = 10.0
"""Between asking a server to end and killing it."""
OF_A_LAUNCH = re.compile(
    r"((LOCAL_|NODE_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)|MMRL_JOB"
    r"|(TORCHELASTIC|ACCELERATE|FSDP)_.*)"
)
"""Variables by which mmrl, torchrun and accelerate tell a process its place among others."""


class ChildProcess:
    """Server in a child process, from start to stop.

    Args:
        command: function from a port to the command line.
        env: variables added to those of this process, whose place in a launch it does not inherit.
        log: file to which its output is appended.
        timeout_s: time within which it must answer.
        limit: name of `timeout_s` in an error ("engine.start_timeout_s").
        host: address of this machine at which it listens.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        log: Path,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        limit: str = "a limit of",
        host: str = "127.0.0.1",
    ):
        self.command, self.log, self.timeout_s, self._limit = command, log, timeout_s, limit
        self.env = dict(env or {})
        self.host, self.port = host, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the last start."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it on a free port and wait until it answers; one that runs already is stopped first.

        On failure, and when interrupted, it is stopped.

        Raises:
            EngineFailure: there is no such program, it ended, or did not answer in time; with its last log lines.
        """
        self.stop()
        # The same one again where nobody has it: other processes may know the address.
        self.port = self.port if self.port and _free(self.port) else free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = list(self.command(self.port))
        try:
            # Linux ties the signal of `end_with_parent` to the thread that forks, not to the process: a server started
            # by a worker thread would end with that thread. The I/O loop's thread lasts as long as the process.
            process = asyncio.run_coroutine_threadsafe(self._fork(command), io_loop()).result()
        except OSError as error:
            raise EngineFailure(f"cannot start {command[0]}: {error.strerror or error}") from error
        self._process = process
        _RUNNING.add(self)
        # The health page and not the port alone: servers listen long before their model is loaded.
        deadline = time.monotonic() + self.timeout_s
        try:
            while not self._answers():
                code = process.poll()
                if code is not None:
                    raise EngineFailure(f"the server ended with code {code} before it was healthy; {self.log_tail()}")
                if time.monotonic() > deadline:
                    raise EngineFailure(
                        f"the server was not healthy after {self._limit}={self.timeout_s:g} s; {self.log_tail()}"
                    )
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it and all of its descendants; nothing happens when it has ended already."""
        process, self._process = self._process, None
        _RUNNING.discard(self)
        if process is not None:
            _end(process)

    def log_tail(self) -> str:
        """Return the last log lines, for errors."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                # A server's log may have gigabytes by the time it fails.
                file.seek(max(0, file.tell() - 20_000))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return "\n".join([f"its log ({self.log}) ends with:", *[f"  {line[:300]}" for line in lines[-LOG_LINES:]]])

    async def _fork(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the process, in the I/O loop's thread."""
        with self.log.open("ab") as log:
            log.write(f"\n--- {time.strftime('%Y-%m-%d %H:%M:%S')} {hide(' '.join(command))}\n".encode())
            log.flush()
            return subprocess.Popen(
                command,
                env={**_environment(), **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its group, which `stop` signals, is its own
                preexec_fn=end_with_parent if _LIBC is not None else None,
            )

    def _answers(self) -> bool:
        try:
            # Not urllib: it would ask a proxy of the environment, which knows nothing of this machine's own ports.
            connection = HTTPConnection(self.host, self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


def _environment() -> dict[str, str]:
    """Return this process's variables without those of a launch.

    A server of several processes that found them would wait for a launcher that is not its own: under torchrun its
    workers would look for a store that the launcher is to keep.
    """
    return {name: value for name, value in os.environ.items() if not OF_A_LAUNCH.fullmatch(name)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the process's group, wait, then send SIGKILL to the group and to all descendants."""
    # Both ways are needed: descendants whose leader has died no longer count as such, but stay in its group;
    # descendants that made a session of their own (an engine's core) have left the group.
    descendants: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(process.pid).children(recursive=True)
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal_group(process, signal.SIGKILL)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


_RUNNING: set[ChildProcess] = set()


@atexit.register
def _stop_all() -> None:
    for child in list(_RUNNING):
        if child._owner == os.getpid():  # not in a fork
            child.stop()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _free(port: int) -> bool:
    """Return True if a server can listen at a port now."""
    with socket.socket() as probe:
        # As servers do: connections of the one before that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


# Loaded before any fork: between a fork and what the child becomes, nothing may be loaded.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask for a signal at the end of the starting thread; called in a child before it executes its program (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
