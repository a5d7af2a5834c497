"""The loops of a process: one for all work of a kind, from any event loop; cancelled, interrupted, closed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from mmrl.errors import ConfigError
from mmrl.system.http_client import PROXIES, HttpClient, HttpFailure
from mmrl.system.portal import io_loop, on_rollout_loop, rollout_loop
from mmrl.system.stop import stoppable
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


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "ftp://me:hunter22@h:1", "http://[::1", "127.0.0.1:99999"])
def test_a_proxy_that_cannot_be_used_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", proxy)
    client = HttpClient("test", timeout_s=5.0, concurrency=1, proxies=True)
    with pytest.raises((ConfigError, HttpFailure), match="HTTP_PROXY") as raised:
        client.wait(client.attempt("GET", "http://127.0.0.2/", limit=100))
    assert "hunter22" not in str(raised.value)
    client.close()


def test_certificates_are_checked_whatever_the_first_address_is() -> None:
    """A plain address may redirect to one with TLS."""

    async def connected(client: HttpClient) -> tuple[bool, object]:
        made: Any = client._connect()
        context = made._transport._pool._ssl_context
        await made.aclose()
        return context.check_hostname, context.verify_mode

    client = HttpClient("x", timeout_s=20, concurrency=1, redirects=True)
    import ssl

    assert client.wait(connected(client)) == (True, ssl.CERT_REQUIRED)


def test_work_on_the_loop_of_rollouts_ends_before_whoever_cancels_it_goes_on() -> None:
    ended = []

    @on_rollout_loop
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append(asyncio.get_running_loop())

    async def impatient() -> None:
        async with asyncio.timeout(0.05):
            await work()

    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(impatient())
    assert ended == [rollout_loop()] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_work_on_the_loop_of_rollouts(number: signal.Signals) -> None:
    ended = threading.Event()

    @on_rollout_loop
    async def work() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit), stoppable():
        asyncio.run(work())
    assert ended.is_set()


def test_what_ends_a_process_does_not_end_a_loop() -> None:
    async def exits() -> None:
        sys.exit(3)

    @on_rollout_loop
    async def work() -> None:
        await asyncio.gather(asyncio.create_task(exits()))

    for _ in range(2):
        with pytest.raises(SystemExit):
            asyncio.run(work())
    assert asyncio.run(on_rollout_loop(where)()) is rollout_loop()


def test_what_user_code_left_on_a_loop_is_cleaned_up_at_the_end_of_the_process() -> None:
    code = """
import asyncio
from mmrl.system.portal import on_rollout_loop

async def left():
    try:
        await asyncio.sleep(60)
    finally:
        print("task ended")

async def generator():
    try:
        yield 1
    finally:
        await asyncio.sleep(0)
        print("generator closed")

kept = []

@on_rollout_loop
async def work():
    kept.extend([asyncio.create_task(left()), made := generator()])
    await anext(made)

asyncio.run(work())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("task ended\ngenerator closed\n", "")


def test_a_process_ends_with_its_code_also_in_a_long_forward() -> None:
    """A thread that torch runs in must not end the process by abort, which a scheduler takes for a crash."""
    code = """
import sys, threading, torch
from mmrl.cli import main
from mmrl.system.portal import Job, rollout_loop

async def forward():
    begun.set()
    while True:
        weights @ weights

def dispatch(words):
    Job(forward(), rollout_loop())
    begun.wait()
    print("saved")
    raise SystemExit(143)

torch.set_num_threads(1)
weights, begun = torch.ones(300, 300), threading.Event()
sys.argv = ["mmrl", "train"]
sys.exit(main(dispatch=dispatch))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "saved\n", "stopped by SIGTERM\n")
