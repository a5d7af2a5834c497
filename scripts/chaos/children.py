"""Runs as children that can be disturbed: starting, watching, and what is left when they have ended.

A child is forked from this process, which has imported everything and trained nothing, so that it starts at once; or
it is a real `python -m mmrl`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import psutil

from mmrl.cli import main
from scripts.chaos.disk import Disk
from scripts.chaos.hooks import SIGNALS, Fault, Hooks

LIMIT_S = 240.0
"""Longest life of a child; one that lives longer hangs."""
ENDING_S = 8.0
"""Longest that the run's children may outlive it."""
_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A child that has ended."""

    code: int
    """Negative: the signal."""
    err: str
    struck: bool = False
    hung: bool = False
    left: tuple[str, ...] = ()
    """Command lines of processes that it has left behind."""


def adopt_orphans() -> None:
    """Make what a dead child leaves behind a child of this process, which can then see it."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run(
    words: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str],
    fault: Fault | None = None,
    disk: Disk | None = None,
    events: Path | None = None,
) -> Ended:
    """Run `mmrl WORDS` in a fork of this process, with `folder` as its current one.

    Args:
        fault: what happens to it.
        disk: that `folder` lies on, for faults of disks.
        events: file for how often and how long its phases were called.
    """
    struck = folder.parent / "struck"
    struck.unlink(missing_ok=True)
    child = Forked(lambda: _mmrl(words, folder, env, Hooks(fault, struck, disk), events))
    found = _ended(child, folder)
    return replace(found, struck=struck.exists())


def run_fresh(
    words: Sequence[str], folder: Path, *, env: Mapping[str, str], fault: Fault | None = None, mark: str = ""
) -> Ended:
    """Run `python -m mmrl WORDS` as anybody would.

    Args:
        fault: a signal that is sent some seconds after the start, or after a file that `mark` matches is there.
    """
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
    struck = threading.Event()

    def strike(fault: Fault) -> None:
        while mark and child.poll() is None and not any(folder.glob(mark)):
            time.sleep(0.005)
        time.sleep(fault.delay)
        if child.poll() is None:
            child.send_signal(SIGNALS[fault.what])
            struck.set()

    if fault is not None:
        threading.Thread(target=strike, args=(fault,), daemon=True).start()
    return replace(_ended(child, folder), struck=struck.is_set())


class Forked(subprocess.Popen[bytes]):
    """A child that calls `work`, which returns its exit code, in a fork of this process."""

    def __init__(self, work: Callable[[], int]):
        self.work = work
        super().__init__([""])

    def _execute_child(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        code = 70
        try:
            code = self.work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            # End as the interpreter would, without the stack that lies below the fork.
            with contextlib.suppress(BaseException):
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _ended(child: subprocess.Popen[bytes], folder: Path) -> Ended:
    """Wait for a child, and see what it leaves: its errors, and processes that did not end with it."""
    started, hung = time.monotonic(), False
    while child.poll() is None:
        if time.monotonic() - started > LIMIT_S and not hung:
            hung = True
            child.kill()
        time.sleep(0.005)
    found = Ended(
        code=child.returncode,
        # Beside the run's folder, whose disk may be full.
        err=(folder.parent / "err").read_text(errors="replace"),
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
    """Children of this process after the run has ended: those that it has left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children: list[psutil.Process] = psutil.Process().children(recursive=True)
    return children


def _mmrl(words: Sequence[str], folder: Path, env: Mapping[str, str], hooks: Hooks, events: Path | None) -> int:
    """In a fork: run `mmrl WORDS`, and return its exit code."""
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
    # Processes of a run of several, which `mmrl.run.launch` starts by psutil, are forks too: importing everything
    # anew takes most of a trial's time.
    worker = functools.partial(_worker, hooks=hooks, events=events)
    psutil.subprocess = SimpleNamespace(Popen=worker)
    hooks.install()
    code = main(list(words))
    if events is not None and not events.exists():  # the first of several processes has written it
        hooks.save(events)
    return code


def _worker(
    command: Sequence[str],
    env: Mapping[str, str],
    preexec_fn: Callable[[], object],
    hooks: Hooks,
    events: Path | None,
) -> Forked:
    """Fork a process of a run of several."""

    def work() -> int:
        # A process that is started anew has no handlers of the one that starts it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(env)
        preexec_fn()
        code = main(list(command[3:]))
        if events is not None and env["RANK"] == "0":
            hooks.save(events)
        return code

    return Forked(work)
