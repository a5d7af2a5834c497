"""Batcher under all concurrent programs: async requests in, batches for a decoder out. Knows no torch.

Sits between `rollout.context`, whose programs await `generate`, and the decoder that owns the model.

Schedules:

- `deterministic`: rows are admitted, and decoded further, only when every live program is waiting or in flight, and in
  the order of `Request.order`; so the composition of each batch, and with it the last bits of each logit, is a pure
  function of what the programs ask, never of when they ask it.
- `greedy`: whatever waits is admitted at the next decode boundary; decoding runs in a worker thread, so that tools and
  timeouts go on meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from typing_extensions import override

from mmrl.engines.base import Completion, Engine, Request
from mmrl.engines.embedded.pending import PendingRequest
from mmrl.errors import EngineFailure
from mmrl.system.user_code import carried

if TYPE_CHECKING:
    from torch import Tensor

    from mmrl.engines.embedded.row_decoder import RowDecoder

SETTLE_ROUNDS = 8
"""Turns of the event loop without a new request after which all programs are taken to be waiting."""
YIELD_S = 0.02
"""Longest time for which a deterministic decode holds up the event loop and its timers (tools, timeouts)."""


class Batcher(Engine):
    """An engine that collects the requests of all programs and drives one decoder.

    Nothing bound to an event loop outlives that loop: after a cancelled or crashed `asyncio.run` the next one starts
    clean.
    """

    busy_s: float = 0.0
    """Seconds spent decoding, for the share of generation in a step."""

    def __init__(self, decoder: RowDecoder, schedule: str = "deterministic"):
        self.decoder = decoder
        self.schedule = schedule
        self._since: float | None = None
        self._started = self._keeps = False
        self._reset(None)

    @property
    def computing_s(self) -> float:
        """`busy_s`, and the seconds of what is being decoded now, which a worker does."""
        since = self._since  # once: the worker may end in between
        return self.busy_s + (0.0 if since is None else time.perf_counter() - since)

    def _reset(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._stop()  # the driver's loop may have been closed while it ran
        self.decoder.forget()
        self._loop = loop
        self.live = 0
        self.waiting: list[PendingRequest] = []
        self.active: list[PendingRequest] = []
        self._driver: asyncio.Task[None] | None = None
        self._changed: asyncio.Event | None = None
        self._stamp = 0  # counts changes, so that _settle sees one however it came about
        # Read by the worker between two tokens without a lock: a bool is written whole, and one token late is no harm.
        self._interrupt = False

    def _bind(self) -> None:
        """Start afresh in a new event loop; counts made before any loop ran belong to the first one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        # Futures, tasks and events belong to the loop that made them; from another one they cannot be awaited.
        if self._loop is not None and self._loop is not loop:
            self._reset(loop)
        self._loop = loop

    def _wake(self) -> None:
        self._stamp += 1
        if self._changed is not None:
            self._changed.set()

    def set_version(self, version: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Note that the weights have changed and are policy `version` now.

        Raises:
            RuntimeError: rows are in flight; their tokens would come from two policies.
        """
        # A row in flight has keys and values of the old weights in the cache; more tokens would mix two policies.
        if self.active:
            raise RuntimeError("the policy changed while the engine was generating")
        self.policy_version = version
        self.decoder.forget()

    @override
    def enter(self) -> None:
        self._bind()
        self.live += 1
        self._wake()

    def leave(self) -> None:
        """Note that a program has ended. One that outlived its event loop is no longer counted."""
        self._bind()
        # Not below zero: a program that was cancelled with its event loop leaves after `_reset` has cleared the count.
        self.live = max(0, self.live - 1)
        self._forget()
        self._wake()

    @override
    async def rest(self) -> None:
        while not self.live and self._driver is not None and not self._driver.done():
            await asyncio.wait([self._driver], timeout=YIELD_S)

    @contextmanager
    @override
    def prefix_cache_kept(self) -> Iterator[None]:
        """What a request finds depends on those before it, and so may its last bits."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            self._forget()

    def _forget(self) -> None:
        if not self._keeps and self.live == 0 and not self.waiting and not self.active:
            self.decoder.forget()

    async def generate(self, request: Request) -> Completion:
        """Wait for a place in a batch and for the completion.

        Raises:
            EngineFailure: the decoder failed on this request or on its whole batch.
        """
        self._bind()
        loop = asyncio.get_running_loop()
        # Numbers before text, so that keys of mixed types compare; the seed decides between equals.
        key = tuple((int(isinstance(part, str)), part) for part in (*request.order, request.sampling.seed))
        job = PendingRequest(request, loop.create_future(), key)
        self.waiting.append(job)
        # A new row can join only at a decode boundary, between two tokens of all rows: inside a step the tensors of
        # the batch have a fixed shape. A decoder that cannot refill is not disturbed for it.
        self._interrupt = self.decoder.refills
        if self._driver is None or self._driver.done():
            self._changed = asyncio.Event()
            self._driver = loop.create_task(self._drive())
            # Whatever ends it ends every program that waits for it too, and is raised there.
            self._driver.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._wake()
        try:
            return await job.future
        finally:
            if job.outcome is None:  # cancelled, or the driver died
                if job in self.waiting:
                    self.waiting.remove(job)
                self._interrupt = True
                self._wake()

    async def _drive(self) -> None:
        """Serve until nothing waits and nothing is in flight."""
        loop = self._loop
        # Deterministic: decoding runs in this thread, so no program moves while tokens are made. Greedy: in a worker,
        # so that tools and timeouts go on meanwhile.
        pool = ThreadPoolExecutor(1, "mmrl-decode") if self.schedule == "greedy" else None
        try:
            while True:
                await self._settle()
                if not self.waiting and not self.active:
                    return
                try:
                    if not self._started:
                        self._started = True
                        self.decoder.start(self.policy_version)
                    await self._burst(pool)
                except Exception as error:
                    self._fail(error)
                    self._stop()
        finally:
            self._interrupt = True
            if pool is not None:  # the worker reads _interrupt between tokens, so this ends soon
                pool.shutdown(wait=True)
            # Else this task belongs to an event loop that is gone, and is being collected late: the state is another's.
            if self._loop is loop:
                self._stop()
                for job in (*self.active, *self.waiting):
                    job.future.cancel()
                self.active, self.waiting = [], []
                self._forget()

    def _stop(self) -> None:
        if self._started:
            started = time.perf_counter()
            self._started = False
            self.decoder.stop()
            self.busy_s += time.perf_counter() - started

    async def _settle(self) -> None:
        """Let programs run until nothing changes any more and, if deterministic, every program that can ask has."""
        # Programs need several turns of the event loop between a completion and their next request (parsing, gathers,
        # tool replies that are ready). Without this the first one to ask would get a batch of its own.
        assert self._changed is not None
        while True:
            while self._missing():
                self._changed.clear()
                await self._changed.wait()
            stamp = self._stamp
            for _ in range(SETTLE_ROUNDS):
                await asyncio.sleep(0)
                if self._stamp != stamp:
                    break
            else:
                if not self._missing():
                    return

    def _missing(self) -> bool:
        """Return True if the next batch must still wait for a live program."""
        if self.schedule == "greedy" or not (self.waiting or self.active):
            return False
        if self.active and not self.decoder.refills:
            return False  # no row can join this batch anyway
        # A program is counted once per request that it has open (`rollout.context` enters it again for concurrent
        # calls), so as many open requests as live programs means that all of them wait for tokens.
        open_requests = sum(not job.future.done() for job in (*self.active, *self.waiting))
        return open_requests < self.live

    async def _burst(self, pool: ThreadPoolExecutor | None) -> None:
        """Admit what may join now, then decode until a row is done or someone asks for the decoder's attention."""
        # Before anything is admitted: rows whose callers are gone would take room, and their tokens would be lost.
        self.waiting = [job for job in self.waiting if not job.future.done()]
        self._drop([job for job in self.active if job.future.done()])
        admitted: list[PendingRequest] = []
        if self.waiting and (self.decoder.refills or not self.active):
            # By the request's own key, not by arrival: asyncio wakes programs in an order that tools and timers decide.
            self.waiting.sort(key=lambda job: job.sort_key)
            count = max(self.decoder.room(self.waiting, len(self.active)), 0 if self.active else 1)
            admitted, self.waiting = self.waiting[:count], self.waiting[count:]
            self.active += admitted
        if not self.active:
            return
        self._interrupt = False
        if pool is None:
            self._decode(admitted, time.monotonic() + YIELD_S)
        else:
            await asyncio.get_running_loop().run_in_executor(pool, carried(self._decode), admitted, None)
        self._deliver()

    def _decode(self, admitted: Sequence[PendingRequest], until: float | None) -> None:
        """Run the blocking part of `_burst`, in the event loop's thread (deterministic) or in a worker (greedy)."""
        self._since = started = time.perf_counter()
        try:
            if admitted:
                self.decoder.admit(admitted)
            # Back to the event loop as soon as one row is done: its program may ask again and take the free place.
            while not any(job.outcome is not None for job in self.active):
                if self._interrupt or (until is not None and time.monotonic() > until):
                    return
                self.decoder.step()
        finally:
            self._since = None
            self.busy_s += time.perf_counter() - started

    def _drop(self, jobs: Sequence[PendingRequest]) -> None:
        if jobs:
            started = time.perf_counter()
            self.decoder.drop(jobs)
            self.busy_s += time.perf_counter() - started
            self.active = [job for job in self.active if job not in jobs]

    def _deliver(self) -> None:
        done = [job for job in self.active if job.outcome is not None]
        # Dropped before programs hear of it: the next request finds the cache without the rows that are done.
        self._drop(done)
        for job in done:
            if job.future.done():  # cancelled meanwhile
                continue
            if isinstance(job.outcome, Completion):
                job.future.set_result(job.outcome)
            elif job.outcome is not None:
                job.future.set_exception(job.outcome)

    def _fail(self, error: Exception) -> None:
        """Fail every row in flight after the decoder raised; waiting requests are served by a fresh start.

        With nothing in flight the start itself failed, and would fail again: then waiting requests fail too.
        """
        failed = self.active or self.waiting
        for job in failed:
            # One exception object per request: a traceback grows with every place that raises the same object.
            failure = EngineFailure(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            job.outcome = failure
            if not job.future.done():
                job.future.set_exception(failure)
        if self.active:
            self.active = []
        else:
            self.waiting = []
