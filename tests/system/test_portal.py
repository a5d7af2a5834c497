"""The I/O loop of a process, and the HTTP client in it: one loop for all, from any event loop; cancelled and closed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mmrl.system.http_client import HttpClient, HttpFailure
from mmrl.system.portal import io_loop
from tests.helpers.servers import Scripted, serving


async def where() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_all_clients_live_in_one_loop_whatever_loop_asks() -> None:
    first, second = (HttpClient(name, timeout_s=1, concurrency=4) for name in "ab")
    loops = [asyncio.run(first.run(where())), asyncio.run(first.run(where())), second.wait(where())]
    assert set(loops) == {io_loop()}
    assert sum(thread.name == "mmrl-io" for thread in threading.enumerate()) == 1


def test_a_closed_client_has_no_connections_and_begins_anew() -> None:
    with serving([Scripted("x")]) as (url, _):
        client = HttpClient("x", timeout_s=20, concurrency=4)
        for _ in range(2):
            assert client.wait(client.attempt("GET", url, limit=10)) == b"x"
            (connection,) = client._idle
            client.close()
            client.close()
            assert connection.is_closed and client._idle == []


def test_work_that_is_not_waited_for_any_more_is_cancelled() -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    io = HttpClient("x", timeout_s=1, concurrency=4)
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


@pytest.mark.parametrize("location", ["http://127.0.0.1:99999/x", "ftp://127.0.0.1/x", "http://[::1/x"])
def test_a_redirect_to_what_is_no_address_is_a_failure_of_the_request(location: str) -> None:
    with serving([Scripted("", 302, headers={"Location": location, "Content-Length": "0"})]) as (url, _):
        client = HttpClient("x", timeout_s=20, concurrency=1, redirects=True)
        with pytest.raises(HttpFailure) as failure:
            client.wait(client.attempt("GET", url, limit=10))
        client.close()
    assert failure.value.cause == "connection"


def test_certificates_are_checked_whatever_the_first_address_is() -> None:
    """A plain address may redirect to one with TLS."""

    async def connected(client: HttpClient) -> tuple[bool, object]:
        made = client._connect()
        context = made._transport._pool._ssl_context
        await made.aclose()
        return context.check_hostname, context.verify_mode

    client = HttpClient("x", timeout_s=20, concurrency=1, redirects=True)
    import ssl

    assert client.wait(connected(client)) == (True, ssl.CERT_REQUIRED)
