"""Ending a run from outside: at once where nothing is lost by it, after the step elsewhere.

By SIGTERM; of a run in a thread (`system.notebook`) by a flag, which the thread looks at where it waits for rollouts;
where it loads something it is interrupted.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

from mmrl.errors import Stopped


class Stop:
    """A request that this process, or a run in a thread of it, ends, and whether it may end right now."""

    def __init__(self) -> None:
        self.requested = False
        self.forward: Callable[[int, None], None] | None = None
        """Passes a request on to processes that the thread waits for."""
        self._held = False
        self._raised = False
        self._timer: threading.Timer | None = None

    def ask(self, number: int, frame: object) -> None:
        """Handle SIGTERM: raise `Stopped`, the first time and unless that is held back."""
        # Once: schedulers and parents repeat the signal, which must not break what is being saved or closed.
        first, self.requested = not self.requested, True
        if first and not self._held:
            self.end()

    def request(self) -> None:
        """Ask a run in another thread to end."""
        self.requested = True
        if self.forward is not None:
            self.forward(signal.SIGTERM, None)

    def reach(self, thread: int) -> None:
        """Raise `Stopped` in a thread that was asked to end and does not wait for rollouts, where it looks itself.

        Nor inside an import, which could not be done again in this process: after it.
        """
        if not self.requested or self._held or self._raised or self.forward is not None:
            return
        frame = sys._current_frames().get(thread)
        files = {frame.f_code.co_filename for frame, _ in traceback.walk_stack(frame)} if frame is not None else set()
        if asyncio.runners.__file__ not in files and not any(file.startswith("<frozen importlib") for file in files):
            self._raised = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))

    def end(self) -> NoReturn:
        """Raise `Stopped`; while what runs is being closed, `look` does not raise it again."""
        self._raised = True
        raise Stopped

    def swallowed(self, number: int) -> None:
        """Signal once more after a signal during a destructor, where Python drops exceptions."""
        if number == signal.SIGTERM:
            self.requested = False
        # a moment later, when the destructor has returned
        self._timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Cancel the repeated signal."""
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a stop until `requested` is read: the weights are half-way between two steps."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a stop raise at once inside `held`, also one that came before."""
        self._held = False
        try:
            if self.requested:
                self.end()
            yield
        finally:
            self._held = True


_THREAD = threading.local()
"""`stop` of a thread that has one."""


@contextmanager
def obeying(stop: Stop) -> Iterator[None]:
    """Let a run in this thread obey `stop`: no signal is handled outside of the main thread."""
    _THREAD.stop = stop
    try:
        yield
    finally:
        del _THREAD.stop


def of_this_thread() -> Stop | None:
    """Return what this thread obeys."""
    return getattr(_THREAD, "stop", None)


def look() -> None:
    """Raise `Stopped` where this thread has been asked to end and may end right now, once."""
    if (stop := of_this_thread()) is not None and stop.requested and not (stop._held or stop._raised):
        stop.end()


@contextmanager
def _dropped(handled: Callable[[sys.UnraisableHookArgs], bool]) -> Iterator[None]:
    """Print exceptions that Python drops inside (of a destructor) unless they are handled."""

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if not handled(args):
            hook(args)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook


def quiet_loops() -> AbstractContextManager[None]:
    """Suppress messages of event loops that Ctrl-C ended within their constructor: they cannot even be printed."""
    return _dropped(lambda args: getattr(args.object, "__qualname__", "") == "BaseEventLoop.__del__")


@contextmanager
def stoppable(in_a_group: bool = False) -> Iterator[Stop]:
    """End the block on SIGTERM, by `Stopped`; saved files stay.

    Args:
        in_a_group: True if the parent process passes Ctrl-C on, so that it may come twice.

    Raises:
        SystemExit: in place of `Stopped`: Typer has an exit code of its own for whatever is a KeyboardInterrupt.
    """
    stop = Stop()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop.ask)}
    except ValueError:  # not the main thread: someone else handles signals
        yield of_this_thread() or stop
        return
    # A second Ctrl-C, which the parent passes on too, would break the cleaning up that the first one began.
    if in_a_group:
        handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)

    def interrupted(args: sys.UnraisableHookArgs) -> bool:
        if not issubclass(args.exc_type, KeyboardInterrupt):
            return False
        stop.swallowed(signal.SIGTERM if args.exc_type is Stopped else signal.SIGINT)
        return True

    try:
        with _dropped(interrupted):
            yield stop
    except Stopped as stopped:
        raise SystemExit(Stopped.exit_code) from stopped
    finally:
        stop.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
