"""Replies of hostile servers: refused by size, before they are decoded, in bounded time and memory."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx  # noqa: F401
import pytest

from mmrl.config.endpoint import EndpointConfig
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import EngineFailure, RetrievalFailure
from mmrl.retrieval.protocols import read_search_r1_reply
from mmrl.retrieval.remote import RemoteRetriever
from mmrl.system.replies import quoted
from tests.helpers.servers import Scripted, chat_reply, serving
from tests.helpers.watch import terminates

# `httpx` is imported here, since the clients do so at their first request, whose time is measured.
MILLION = 10**6
LARGE = 12 * 2**20
JSON = {"Content-Type": "application/json"}


def chat(text: str) -> str:
    return json.dumps(chat_reply(text).body)


def passage(text: str = "Lisbon", **fields: Any) -> str:
    return json.dumps({"result": [[{"document": {"title": "t", "text": text}, "score": 1.0, **fields}]]})


def zipped(text: str, copies: int) -> bytes:
    """`text`, followed by `copies` MiB of spaces, compressed: 5 kB for each of them."""
    return gzip.compress(text.encode() + b" " * (copies * 2**20), compresslevel=1)


def ask_endpoint(url: str) -> str:
    settings = EndpointConfig(url=url, model="m", key_env=None, attempts=2, max_wait_s=0.01, timeout_s=20)
    client = OpenAIChat(settings)
    try:
        return asyncio.run(client.complete([{"role": "user", "content": "?"}], max_tokens=20))
    finally:
        client.close()


def ask_retriever(url: str) -> str:
    client = RemoteRetriever(url, retries=1, timeout_s=20)
    try:
        return client.search(["?"], [1])[0][0].text
    finally:
        client.close()


@pytest.fixture
def bounded() -> AbstractContextManager[None]:
    """Whatever happens inside takes at most 60 MiB of memory, the server's included, and terminates."""

    @contextmanager
    def watched() -> Iterator[None]:
        tracemalloc.start()
        try:
            with terminates():
                yield
            assert tracemalloc.get_traced_memory()[1] < 60 * 2**20
        finally:
            tracemalloc.stop()

    return watched()


HOSTILE: dict[str, Callable[[str], Scripted]] = {
    "12 MB": lambda good: Scripted(good + " " * LARGE),
    "12 MB in the middle": lambda good: Scripted(good.replace("Lisbon", "x" * LARGE)),
    "bomb": lambda good: Scripted(zipped(good, 120), headers={"Content-Encoding": "gzip"}),
    "bomb in another coding": lambda good: Scripted(zipped(good, 9), headers={"Content-Encoding": "gzip, gzip"}),
    "unknown coding": lambda good: Scripted(good, headers={"Content-Encoding": "br"}),
    "no gzip": lambda good: Scripted(good, headers={"Content-Encoding": "gzip"}),
    "error page": lambda good: Scripted("x" * LARGE, 400),
    "error bomb": lambda good: Scripted(zipped("", 120), 400, headers={"Content-Encoding": "gzip"}),
    "redirect": lambda good: Scripted("x" * LARGE, 302, headers={"Location": "/elsewhere"}),
    "brackets": lambda good: Scripted("[" * MILLION, headers=JSON),
    "digits": lambda good: Scripted("9" * MILLION, headers=JSON),
}


@pytest.mark.parametrize("fault", HOSTILE)
@pytest.mark.parametrize(
    ("ask", "good", "failure"),
    [(ask_endpoint, chat("Lisbon"), EngineFailure), (ask_retriever, passage("Lisbon"), RetrievalFailure)],
    ids=["endpoint", "retriever"],
)
def test_hostile_replies_are_refused_in_bounded_time_and_memory(
    ask: Callable[[str], str],
    good: str,
    failure: type[Exception],
    fault: str,
    bounded: AbstractContextManager[None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply = HOSTILE[fault](good)
    with serving([reply]) as (url, _), bounded, pytest.raises(failure) as raised:
        ask(url)
    assert len(str(raised.value)) < 500
    assert all(len(record.getMessage()) < 700 for record in caplog.records)


@pytest.mark.parametrize(
    ("ask", "good"), [(ask_endpoint, chat("Lisbon")), (ask_retriever, passage("Lisbon"))], ids=["endpoint", "retriever"]
)
def test_compressed_replies_are_read(ask: Callable[[str], str], good: str) -> None:
    with serving([Scripted(gzip.compress(good.encode()), headers={"Content-Encoding": "gzip"})]) as (url, server):
        assert ask(url) == "Lisbon"
    assert {name.lower(): value for name, value in server.seen[0].headers.items()}["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    "reply",
    [
        passage(score="9" * MILLION),
        passage().replace("1.0", "9" * MILLION),
        passage().replace("1.0", "9" * 4000),
        passage().replace("1.0", "0." + "1" * MILLION + "e999999"),
        passage("x" * (MILLION + 2**17)),
        passage(pad="x").replace('"title"', f'"id": "{"x" * MILLION}", "title"'),
        passage().replace('"title"', '"id": [1], "title"'),
    ],
)
def test_huge_numbers_names_and_passages_are_refused_with_a_short_reason(reply: str) -> None:
    with terminates(), pytest.raises((ValueError, TypeError, OverflowError)) as raised:
        read_search_r1_reply(json.loads(reply), 1)
    assert len(str(raised.value)) < 300


def test_a_completion_of_many_times_its_tokens_is_refused() -> None:
    with serving([chat_reply("x" * 50_000)]) as (url, server), pytest.raises(EngineFailure) as raised:
        ask_endpoint(url)
    assert "a completion of 50000 characters for max_tokens=20" in str(raised.value)
    assert len(server.seen) == 1


def test_a_reply_that_counts_tokens_without_end_costs_nothing() -> None:
    reply = chat_reply("Lisbon", prompt=10**4000)
    with serving([reply]) as (url, _):
        assert ask_endpoint(url) == "Lisbon"


@pytest.mark.parametrize("charset", ["zlib", "punycode", "utf-16", "no such"])
def test_a_charset_of_a_reply_neither_decompresses_nor_raises(charset: str) -> None:
    page = Scripted(b"<html>" + b"-\xff" * 30_000, 400, headers={"Content-Type": f"text/html; charset={charset}"})
    with terminates(), serving([page]) as (url, _), pytest.raises(EngineFailure, match="HTTP 400"):
        ask_endpoint(url)


def test_a_query_beyond_all_measure_is_cut_and_answered() -> None:
    with serving([Scripted(passage("Lisbon"))]) as (url, server):
        client = RemoteRetriever(url, retries=0)
        assert client.search(["x" * 200_000], [1])[0][0].text == "Lisbon"
        client.close()
    assert len(server.seen[0].body["queries"][0]) == 20_000


def test_quotes_are_short_and_on_one_line() -> None:
    assert quoted(" a\n b " * MILLION).startswith("a b a b")
    assert len(quoted("x" * MILLION)) == 200
    assert quoted(" \n") == ""
