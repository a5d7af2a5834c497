"""The one event loop for network I/O of a process, in a thread of its own.

A connection belongs to the event loop that opened it, and the loops that programs run in are short: each step and each
evaluation has one of its own, and a deterministic engine decodes inside it, which holds it up. So network clients live
in this loop, which only ever does I/O and lasts as long as the process.
"""

from __future__ import annotations

import asyncio
import os
import threading

_LOCK = threading.Lock()
# By process id: after a fork the child has the object but not the thread that runs it.
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}


def io_loop() -> asyncio.AbstractEventLoop:
    """Return the I/O loop of this process, started at the first use."""
    with _LOCK:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            # Not anyio's BlockingPortal: it makes the caller wait for a turn of this loop with every request, and its
            # clean end can hang the interpreter's. A daemon thread simply ends with the process.
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="mmrl-io", daemon=True).start()
        return loop
