"""The I/O loop of a process: one for all clients, from any event loop or none; cancellation and closing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mmrl.system.portal import IoScope, io_loop


class Client:
    """Notes the loop it lives in, and whether it was closed."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = False

    async def close(self) -> None:
        self.closed = True


def scope(concurrency: int = 4) -> IoScope[Client]:
    return IoScope(Client, lambda client: client.close(), concurrency)


async def client_of(io: IoScope[Client]) -> Client:
    return io.client


def test_all_clients_live_in_one_loop_whatever_loop_asks() -> None:
    first, second = scope(), scope()
    seen = [asyncio.run(first.run(client_of(first))), asyncio.run(first.run(client_of(first)))]
    seen.append(second.wait(client_of(second)))
    assert seen[0] is seen[1] and seen[0] is not seen[2]
    assert {client.loop for client in seen} == {io_loop()}
    assert sum(thread.name == "mmrl-io" for thread in threading.enumerate()) == 1
    for io in (first, second):
        io.close()
        io.close()
    assert all(client.closed for client in seen)
    assert first.wait(client_of(first)) is not seen[0], "a later use starts anew"
    first.close()


def test_work_that_is_not_waited_for_any_more_is_cancelled() -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    io = scope()
    with pytest.raises(TimeoutError):
        io.wait(work(), timeout=0.1)
    assert ended.wait(10)
    ended.clear()

    async def impatient() -> None:
        async with asyncio.timeout(0.1):
            await io.run(work())

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert ended.wait(10)
