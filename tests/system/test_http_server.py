"""Servers of this process: who is let in, headers that do not end, clients that stop sending and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import pytest

from mmrl.config import ModelConfig
from mmrl.models.chat import render_prompt
from mmrl.models.load import load_tokenizer
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.serving import make_app as retriever_app
from mmrl.serve import policy
from mmrl.serve.policy import ServedPolicy
from tests.helpers.gateway import Scripted
from tests.helpers.servers import DOCUMENTS, fetch_json, listening

TOKEN = "a-token-of-sixteen-letters"
BODY = {"model": "policy", "messages": [{"role": "user", "content": "Where?"}]}


def policy_app(token: str | None = None, **options: Any) -> Any:
    engine = Scripted(lambda prompt: "Porto", **options)
    return policy.make_app(ServedPolicy(engine, engine.tokenizer), token)


def retriever(token: str | None = None) -> Any:
    return retriever_app(Bm25Retriever(DOCUMENTS), {}, token=token)


APPS = {"policy": (policy_app, "/v1/models"), "retriever": (retriever, "/health")}


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def sent(url: str, body: object = None, path: str = "/v1/chat/completions", **headers: str) -> socket.socket:
    """A connection on which a request was sent."""
    connection, data = connected(url), b"" if body is None else json.dumps(body).encode()
    fields = {"Host": "localhost", "Content-Length": str(len(data))} | headers
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n"
    connection.sendall((head + "".join(f"{n}: {v}\r\n" for n, v in fields.items() if v) + "\r\n").encode() + data)
    return connection


def read(connection: socket.socket) -> tuple[int, str]:
    """The status of the reply, and all that came until the server closed."""
    data = b""
    with connection:
        while part := connection.recv(65536):
            data += part
    replies = [reply for reply in data.decode().split("HTTP/1.1 ") if reply and not reply.startswith("100 ")]
    return (int(replies[0][:3]) if replies else 0), data.decode()


def soon(true: Callable[[], bool], within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "evil.example@localhost.evil.example"}, 403),
        ({"Host": "evil.example:80@localhost"}, 403),
        ({"Host": "localhost/evil.example"}, 403),
        ({"Host": "local\thost"}, 403),
        ({"Host": "192.168.0.7:8000"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost.evil.example:8000"}, 403),
    ],
    ids=str,
)
def test_without_a_token_a_web_page_is_let_in_nowhere(name: str, headers: dict[str, str], status: int) -> None:
    make, path = APPS[name]
    with listening(make()) as url:
        got, text = read(sent(url, path=path, **headers, Connection="close"))
        assert got == status, text
        if status == 403:
            problem = json.loads(text.partition("\r\n\r\n")[2])
            assert f"{list(headers)[-1]}: got '" in str(problem) and "expected localhost" in str(problem)


@pytest.mark.parametrize("name", APPS)
def test_with_a_token_whoever_brings_it_is_let_in_under_any_name(name: str) -> None:
    make, path = APPS[name]
    with listening(make(TOKEN)) as url:
        for headers, status in (
            ({"Authorization": f"Bearer {TOKEN}"}, 200),
            ({"X-Api-Key": TOKEN}, 200),
            ({"X-Api-Key": "other"}, 401),
            ({"Authorization": TOKEN}, 401),
            ({}, 401),
        ):
            given = {"Host": "policy.example", "Connection": "close"} | headers
            assert read(sent(url, path=path, **given))[0] == status


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "])
@pytest.mark.parametrize("after", [False, True], ids=["first", "after a reply"])
def test_a_connection_without_a_complete_header_ends(
    begun: bytes, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.system.http_connection.HEADER_S", 0.5)
    with listening(policy_app(delay=1.0)) as url:
        connection = sent(url, path="/health") if after else connected(url)
        if after:
            reply = b""
            while not reply.endswith(b"}"):
                reply += connection.recv(65536)
        started = time.monotonic()
        with connection, suppress(ConnectionError):  # on a slow machine the time is over before all is sent
            for letter in begun:  # slowly, which gives it no more time
                connection.sendall(bytes([letter]))
                time.sleep(0.005)
            read(connection)
        # Of a connection that is kept, and on which nothing comes, uvicorn itself closes after five seconds.
        assert time.monotonic() - started < (2 if begun or not after else 10)
        # what is under way may take longer
        assert read(sent(url, BODY, Connection="close"))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_stops_sending_gets_its_reply(stream: bool) -> None:
    with listening(policy_app(delay=0.5, pieces=True)) as url:
        connection = sent(url, {**BODY, "stream": stream})
        connection.shutdown(socket.SHUT_WR)
        status, text = read(connection)
    assert status == 200 and ("Porto" in text if not stream else "[DONE]" in text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("halved", [False, True])
def test_a_client_that_leaves_ends_its_call(stream: bool, halved: bool) -> None:
    engine = Scripted(lambda prompt: "Porto", delay=60)
    with listening(policy.make_app(ServedPolicy(engine, engine.tokenizer))) as url:
        connection = sent(url, {**BODY, "stream": stream})
        assert soon(lambda: engine.waiting == 1)
        if halved:
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
            assert engine.waiting == 1
        connection.close()
        assert soon(lambda: engine.cancelled == 1, 3.0 if halved else 0.5)
        assert fetch_json(f"{url}/health")[1]["requests"] == 0


def test_a_client_that_leaves_while_its_prompt_renders_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: object) -> tuple[int, ...]:
        time.sleep(1.5)
        return (5,)

    monkeypatch.setattr(policy, "render_prompt", slow)
    monkeypatch.setattr(policy, "MOST_REQUESTS", 3)
    with listening(policy_app()) as url:
        leaving = [sent(url, BODY) for _ in range(3)]
        assert soon(lambda: fetch_json(f"{url}/health")[1]["requests"] == 3, 1.0)
        for connection in leaving:
            connection.close()
        assert soon(lambda: fetch_json(f"{url}/health")[1]["requests"] == 0, 1.0)
        monkeypatch.undo()
        assert read(sent(url, BODY, Connection="close"))[0] == 200


RAISED = (
    StopIteration("x"),
    CancelledError(),
    asyncio.CancelledError(),
    SystemExit(3),
    GeneratorExit(),
    ValueError("x"),
)


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("where", ["render_prompt", "decode_text", "message_of"])
def test_whatever_is_raised_for_a_request_it_gets_a_reply_and_leaves_its_place(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*arguments: object) -> Any:
        raise error

    monkeypatch.setattr(policy, where, raises)
    monkeypatch.setattr(policy, "callable_tools", lambda tokenizer, tools: ())
    tool = {"type": "function", "function": {"name": "search"}}
    with listening(policy_app()) as url:
        for stream in (False, True):
            status, text = read(sent(url, {**BODY, "stream": stream, "tools": [tool]}, Connection="close"))
            assert status in (400, 500), text
        assert fetch_json(f"{url}/health")[1]["requests"] == 0
        monkeypatch.undo()
        assert read(sent(url, BODY, Connection="close"))[0] == 200


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_whatever_a_retriever_raises_its_queries_get_a_reply(error: BaseException) -> None:
    class Raises(Bm25Retriever):
        def search(self, queries: Any, k: Any) -> Any:
            if queries == ["raise"]:
                raise error
            return super().search(queries, k)

    with listening(retriever_app(Raises(DOCUMENTS), {})) as url:
        for query, status in (("raise", 500), ("Porto", 200)):
            assert fetch_json(f"{url}/retrieve", queries=[query], topk=1)[0] == status


def test_a_text_of_every_private_use_character_is_a_prompt() -> None:
    text = "".join(map(chr, range(0xE000, 0xF8FF)))
    tokenizer = load_tokenizer(ModelConfig(name="tiny", path="tiny"))
    assert text in tokenizer.decode([*render_prompt(tokenizer, [{"role": "user", "content": text}])])
