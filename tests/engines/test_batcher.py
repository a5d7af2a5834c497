"""The batcher, over a decoder that only counts: schedules, failures, cancellation, event loops."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Sequence

import pytest

from mmrl.engines.base import Completion, Request, Sampling
from mmrl.engines.embedded.batcher import Batcher
from mmrl.engines.embedded.pending import PendingRequest
from mmrl.errors import EngineFailure
from tests.helpers import Fake


class Counter(Fake):
    """Takes `max_tokens` steps per row; a prompt holding 13 breaks the batch, 14 its prefill, 15 is slow."""

    def __init__(self, refills: bool = True, width: int = 100):
        self.refills = refills
        self.width = width
        self.rows: dict[int, list] = {}
        self.log: list[tuple[str, tuple]] = []
        self.running = False
        self.threads: set[int] = set()
        self.broken_start = False

    def start(self, version: int) -> None:
        if self.broken_start:
            raise MemoryError("no room at all")
        assert not self.running
        self.running = True

    def stop(self) -> None:
        self.running = False
        self.rows = {}

    def forget(self) -> None:
        assert not self.rows

    def room(self, jobs: Sequence[PendingRequest], active: int) -> int:
        return max(0, self.width - active)

    def admit(self, jobs: Sequence[PendingRequest]) -> None:
        assert self.running
        assert self.refills or not self.rows
        self.log.append(("admit", tuple(job.request.order for job in jobs)))
        for job in jobs:
            if 14 in job.request.prompt_ids:
                raise ValueError("prefill broke")
            self.rows[id(job)] = [job, 0]
        self.step()

    def step(self) -> None:
        self.threads.add(threading.get_ident())
        self.log.append(("step", tuple(sorted(job.request.order for job, _ in self.rows.values()))))
        for row in self.rows.values():
            row[1] += 1
            job = row[0]
            if 13 in job.request.prompt_ids:
                raise ValueError("decode broke")
            if 15 in job.request.prompt_ids:
                time.sleep(0.002)
            if 16 in job.request.prompt_ids:
                raise KeyboardInterrupt
            if row[1] == job.request.sampling.max_tokens:
                job.outcome = Completion(ids=(1,) * row[1], logprobs=(0.0,) * row[1], finish="length")

    def drop(self, jobs: Sequence[PendingRequest]) -> None:
        for job in jobs:
            del self.rows[id(job)]


def ask(order: tuple, length: int = 3, *prompt: int) -> Request:
    return Request(prompt_ids=(1, *prompt), sampling=Sampling(max_tokens=length), order=order)


async def program(batcher: Batcher, requests: Sequence[Request], pause: random.Random | None = None) -> list[int]:
    """Asks one after the other, sleeping in between when told to."""
    lengths = []
    try:
        for request in requests:
            if pause is not None:
                for _ in range(pause.randrange(4)):
                    await asyncio.sleep(pause.choice([0, 0, 0.001]))
            lengths.append(len((await batcher.generate(request)).ids))
    finally:
        batcher.leave()
    return lengths


async def run(batcher: Batcher, programs: Sequence[Sequence[Request]], seed: int | None = None) -> list[list[int]]:
    pauses = random.Random(seed) if seed is not None else None
    for _ in programs:
        batcher.enter()
    order = list(range(len(programs)))
    if pauses is not None:
        pauses.shuffle(order)
    tasks = {index: asyncio.create_task(program(batcher, programs[index], pauses)) for index in order}
    return [await tasks[index] for index in range(len(programs))]


def some_programs(count: int = 6) -> list[list[Request]]:
    dice = random.Random(5)
    return [[ask((p, turn), dice.randint(1, 6)) for turn in range(dice.randint(1, 4))] for p in range(count)]


@pytest.mark.parametrize("refills", [True, False])
@pytest.mark.parametrize("width", [100, 3])
def test_deterministic_batches_do_not_depend_on_timing(refills: bool, width: int) -> None:
    def log(seed: int) -> list:
        decoder = Counter(refills, width)
        wanted = [[r.sampling.max_tokens for r in requests] for requests in some_programs()]
        assert asyncio.run(run(Batcher(decoder), some_programs(), seed)) == wanted
        return decoder.log

    first = log(0)
    assert all(log(seed) == first for seed in range(1, 8))


def test_deterministic_waits_for_all_and_sorts() -> None:
    decoder = Counter()
    asyncio.run(run(Batcher(decoder), [[ask((2,), 1)], [ask((10,), 1)], [ask((1,), 2)]], seed=1))
    assert decoder.log[0] == ("admit", ((1,), (2,), (10,)))


def test_rows_are_refilled_while_others_go_on() -> None:
    decoder = Counter()
    asyncio.run(run(Batcher(decoder), [[ask((0,), 9)], [ask((1,), 2), ask((2,), 2)]]))
    assert ("step", ((0,), (2,))) in decoder.log


def test_greedy_does_not_wait_for_a_slow_program() -> None:
    decoder = Counter()
    batcher = Batcher(decoder, "greedy")

    async def both() -> list[list[int]]:
        quick_done = asyncio.Event()

        async def slow() -> list[int]:
            await quick_done.wait()  # for ever, if the other waited for this one
            return await program(batcher, [ask((0,), 2)])

        async def quick() -> list[int]:
            lengths = await program(batcher, [ask((1,), 3)])
            quick_done.set()
            return lengths

        batcher.enter()
        batcher.enter()
        return list(await asyncio.wait_for(asyncio.gather(slow(), quick()), 30))

    assert asyncio.run(both()) == [[2], [3]]
    assert threading.get_ident() not in decoder.threads


def test_greedy_joins_a_running_batch() -> None:
    decoder = Counter()
    batcher = Batcher(decoder, "greedy")

    async def late() -> None:
        while not any(name == "step" for name, _ in decoder.log):
            await asyncio.sleep(0.001)
        await program(batcher, [ask((1,), 2)])

    async def both() -> None:
        await asyncio.gather(program(batcher, [ask((0,), 200, 15)]), late())

    asyncio.run(both())
    assert ("step", ((0,), (1,))) in decoder.log


@pytest.mark.parametrize("schedule", ["deterministic", "greedy"])
def test_a_program_that_leaves_lets_the_others_go(schedule: str) -> None:
    batcher = Batcher(Counter(), schedule)

    async def leaver() -> None:
        await asyncio.sleep(0.01)
        batcher.leave()

    async def both() -> list[int]:
        batcher.enter()
        batcher.enter()
        _, lengths = await asyncio.gather(leaver(), program(batcher, [ask((0,), 3)]))
        return lengths

    assert asyncio.run(both()) == [3]
    assert batcher.live == 0


@pytest.mark.parametrize("schedule", ["deterministic", "greedy"])
@pytest.mark.parametrize("bad", [13, 14])
def test_a_broken_batch_fails_its_rows_and_later_ones_succeed(schedule: str, bad: int) -> None:
    decoder = Counter()
    batcher = Batcher(decoder, schedule)

    async def everything() -> list:
        first = await asyncio.gather(
            batcher.generate(ask((0,), 3, bad)), batcher.generate(ask((1,), 3)), return_exceptions=True
        )
        return [*first, await batcher.generate(ask((2,), 3))]

    broken, _, fine = asyncio.run(everything())
    assert isinstance(broken, EngineFailure)
    assert "broke" in str(broken)
    assert isinstance(broken.__cause__, ValueError)
    assert len(fine.ids) == 3
    assert not decoder.running


def test_a_decoder_that_cannot_start_fails_who_waits() -> None:
    decoder = Counter()
    decoder.broken_start = True
    with pytest.raises(EngineFailure, match="no room at all"):
        asyncio.run(asyncio.wait_for(Batcher(decoder).generate(ask((0,))), 5))


@pytest.mark.parametrize("schedule", ["deterministic", "greedy"])
def test_timeouts_of_waiting_and_of_running_programs(schedule: str) -> None:
    decoder = Counter(width=1)
    batcher = Batcher(decoder, schedule)

    async def impatient(order: int) -> str:
        try:
            async with asyncio.timeout(0.05):
                await batcher.generate(ask((order,), 100_000, 15))
        except TimeoutError:
            return "timeout"
        finally:
            batcher.leave()
        return "done"

    async def everything() -> list:
        for _ in range(3):
            batcher.enter()
        return list(await asyncio.gather(impatient(0), impatient(1), program(batcher, [ask((2,), 3)])))

    assert asyncio.run(everything()) == ["timeout", "timeout", [3]]
    assert not decoder.running
    assert not decoder.rows


def test_the_time_of_a_burst_under_way_counts_as_computing() -> None:
    decoder = Counter()
    batcher = Batcher(decoder, "greedy")
    seen: list[float] = []

    async def watch() -> None:
        while len(seen) < 2:
            if batcher._since is not None:
                assert batcher.busy_s == 0.0, "the first burst ends with its only row"
                seen.append(batcher.computing_s)
            await asyncio.sleep(0.002)

    async def both() -> None:
        batcher.enter()
        await asyncio.gather(program(batcher, [ask((0,), 300, 15)]), watch())

    asyncio.run(both())
    assert 0 < seen[0] < seen[1] <= batcher.computing_s == batcher.busy_s


@pytest.mark.parametrize("schedule", ["deterministic", "greedy"])
def test_a_loop_torn_down_in_mid_batch_leaves_no_trace(schedule: str) -> None:
    decoder = Counter()
    batcher = Batcher(decoder, schedule)

    async def abandoned() -> None:
        batcher.enter()
        batcher.enter()
        asyncio.get_running_loop().create_task(batcher.generate(ask((0,), 100_000, 15)))
        batcher.leave()
        await asyncio.sleep(0.02)

    for _ in range(2):
        asyncio.run(abandoned())
        assert not decoder.running
        assert asyncio.run(run(batcher, [[ask((0,), 2)], [ask((1,), 3)]])) == [[2], [3]]


def test_a_loop_closed_under_a_batch_leaves_no_trace() -> None:
    decoder = Counter()
    batcher = Batcher(decoder)
    loop = asyncio.new_event_loop()
    task = loop.create_task(batcher.generate(ask((0,), 100_000, 15)))
    loop.run_until_complete(asyncio.sleep(0.03))
    assert decoder.running
    loop.close()

    async def later() -> list[list[int]]:
        nonlocal task
        gathering = asyncio.create_task(run(batcher, [[ask((0,), 2)], [ask((1,), 300, 15)]]))
        await asyncio.sleep(0.03)
        del task
        gc.collect()  # the remainder of the old loop ends now, in the middle of the new batch
        return await gathering

    assert asyncio.run(later()) == [[2], [300]]


def test_a_keyboard_interrupt_in_mid_decode_leaves_no_trace() -> None:
    decoder = Counter()
    batcher = Batcher(decoder)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run(batcher, [[ask((0,), 5, 16)], [ask((1,), 5)]]))
    assert not decoder.running
    assert asyncio.run(run(batcher, [[ask((0,), 2)]])) == [[2]]


@pytest.mark.parametrize("schedule", ["deterministic", "greedy"])
def test_after_a_rest_nothing_is_decoded_any_more(schedule: str) -> None:
    """On a loop that goes on: the trainer uses the model next, and the weights may change."""
    decoder = Counter()
    batcher = Batcher(decoder, schedule)

    async def left() -> None:
        batcher.enter()
        task = asyncio.get_running_loop().create_task(batcher.generate(ask((0,), 100_000, 15)))
        await asyncio.sleep(0.05)
        assert decoder.running
        task.cancel()
        batcher.leave()
        await batcher.rest()
        assert not decoder.running
        batcher.set_version(1)

    asyncio.run(left())
