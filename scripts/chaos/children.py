"""Starting a run as a child that can be disturbed, watching it, and what is left of it when it has ended.

A child is forked from this process, which has imported everything and trained nothing, so that it starts at once; or
it is a real `python -m mmrl`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from scripts.chaos.disk import Disk
from scripts.chaos.hooks import SIGNALS, Fault, Hooks

LIMIT_S = 240.0
"""Longest life of a child; one that lives longer hangs."""
ENDING_S = 8.0
"""Longest that its own children may outlive it."""
_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A child that has ended."""

    code: int
    """Negative: the signal."""
    err: str
    struck: bool
    seconds: float
    hung: bool = False
    left: tuple[str, ...] = ()
    """Command lines of processes that it has left behind."""


def adopt_orphans() -> None:
    """From now on, what a dead child leaves behind becomes a child of this process, and can be seen."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run(
    words: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str],
    fault: Fault | None = None,
    disk: Disk | None = None,
    events: Path | None = None,
    after: float | None = None,
) -> Ended:
    """Run `mmrl WORDS` in a fork of this process, with `folder` as its current one.

    Args:
        fault: what happens to it.
        disk: that `folder` lies on, for faults of disks.
        events: file for how often and how long its phases were called.
        after: the fault's signal comes after so many seconds, whatever it is doing.
    """
    told, tell = os.pipe()
    answered, answer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_child(words, folder, env, Hooks(None if after is not None else fault, tell, answered), events)
    os.close(tell)
    os.close(answered)
    try:
        watched = _Watched(pid, fault, disk, answer)
        return watched.until_end(told, started, folder, after)
    finally:
        os.close(told)
        os.close(answer)


class _Watched:
    def __init__(self, pid: int, fault: Fault | None, disk: Disk | None, answer: int):
        self.pid, self.fault, self.disk, self.answer = pid, fault, disk, answer
        self.struck = self.hung = False
        self.ready: float | None = None

    def until_end(self, told: int, started: float, folder: Path, after: float | None) -> Ended:
        code: int | None = None
        while code is None:
            if select.select([told], [], [], 0.005)[0]:
                for line in os.read(told, 4096).decode().splitlines():
                    self._asked(line)
            now = time.monotonic() - started
            # Not before: Ctrl-C in the harness's own part of the child would say nothing of mmrl.
            due = after is not None and self.ready is not None and time.monotonic() - self.ready >= after
            if due and self.fault is not None:
                self._signal(self.pid, SIGNALS[self.fault.what])
                after = None
            if now > LIMIT_S and not self.hung:
                self.hung = True
                os.kill(self.pid, signal.SIGKILL)
            found, status = os.waitpid(self.pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if found else None
        while select.select([told], [], [], 0)[0] and (rest := os.read(told, 4096)):
            self.struck |= b"struck" in rest
        return ended(code, folder, self.struck, time.monotonic() - started, self.hung)

    def _asked(self, line: str) -> None:
        if line == "ready":
            self.ready = time.monotonic()
            return
        assert self.fault is not None
        if line == "struck":
            self.struck = True
        elif line == "disk":
            assert self.disk is not None
            self.disk.strike(self.fault)
            self.struck = True
            os.write(self.answer, b".")
        else:
            pid, _, delay = line.partition(" ")
            time.sleep(float(delay))
            self._signal(int(pid), SIGNALS[self.fault.what])

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.struck = True


def run_fresh(
    words: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str],
    kill: Callable[[float, int], int | None] | None = None,
) -> Ended:
    """Run `python -m mmrl WORDS` as anybody would.

    Args:
        kill: given the seconds since the start and its pid, the signal that it is sent now, or None; asked until it
            has given one.
    """
    started, struck, hung = time.monotonic(), False, False
    logs = folder.parent
    with (logs / "out").open("wb") as out, (logs / "err").open("wb") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "mmrl", *words],
            cwd=folder,
            env={**os.environ, **env},
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        while child.poll() is None:
            now = time.monotonic() - started
            if kill is not None and not struck and (number := kill(now, child.pid)) is not None:
                child.send_signal(number)
                struck = True
            if now > LIMIT_S and not hung:
                hung = True
                child.kill()
            time.sleep(0.005)
    return ended(child.returncode, folder, struck, time.monotonic() - started, hung)


def ended(code: int, folder: Path, struck: bool, seconds: float, hung: bool) -> Ended:
    """Read what a child left: its errors, and processes that did not end with it."""
    found = Ended(
        code=code,
        # Beside the run's folder, whose disk may be full.
        err=(folder.parent / "err").read_text(errors="replace"),
        struck=struck,
        seconds=seconds,
        hung=hung,
    )
    deadline = time.monotonic() + ENDING_S
    while left := _children():
        if time.monotonic() > deadline:
            texts = []
            for process in left:
                with contextlib.suppress(psutil.Error):
                    texts.append(" ".join(process.cmdline())[:200])
                    process.kill()
            return replace(found, left=tuple(texts))
        time.sleep(0.02)
    return found


def _children() -> list[psutil.Process]:
    """Of this process, after its own child has ended: those whom that one has left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return psutil.Process().children(recursive=True)


def _be_child(words: Sequence[str], folder: Path, env: Mapping[str, str], hooks: Hooks, events: Path | None) -> None:
    """In the fork: the run, until it ends; never returns."""
    code = 70
    try:
        os.setsid()
        for name, number in (("out", 1), ("err", 2)):
            opened = os.open(folder.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        os.chdir(folder)
        os.environ.update(env)
        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell that starts jobs in the background has them ignore Ctrl-C, which is inherited.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        _fork_workers(hooks, events)
        hooks.install()
        code = _main(words)
        if events is not None and not events.exists():  # the first of several processes has written it
            hooks.save(events)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _main(words: Sequence[str]) -> int:
    from mmrl.cli import main

    try:
        return main(list(words))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _leave(code: int) -> None:
    """End as the interpreter would, without the stack that lies below the fork."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _fork_workers(hooks: Hooks, events: Path | None) -> None:
    """Let the processes of a run of several be forks too: importing everything anew takes most of a trial's time."""
    from types import SimpleNamespace

    from mmrl.run import launch

    class Forked:
        """As much of `subprocess.Popen` as `mmrl.run.launch` uses."""

        def __init__(self, command: Sequence[str], env: Mapping[str, str], preexec_fn: Callable[[], object]):
            self.returncode: int | None = None
            self.pid = os.fork()
            if self.pid == 0:
                code = 70
                try:
                    # A process that is started anew has no handlers of the one that starts it.
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.environ.update(env)
                    preexec_fn()
                    code = _main(list(command[3:]))
                    if events is not None and env["RANK"] == "0":
                        hooks.save(events)
                except BaseException:
                    traceback.print_exc()
                finally:
                    _leave(code)

        def poll(self) -> int | None:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

        def wait(self, timeout: float | None = None) -> int:
            deadline = None if timeout is None else time.monotonic() + timeout
            while self.poll() is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("worker", timeout or 0.0)
                time.sleep(0.01)
            assert self.returncode is not None
            return self.returncode

        def send_signal(self, number: int) -> None:
            if self.poll() is None:
                os.kill(self.pid, number)

        def terminate(self) -> None:
            self.send_signal(signal.SIGTERM)

        def kill(self) -> None:
            self.send_signal(signal.SIGKILL)

    names: Any = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
    launch.subprocess = names
