"""The client of OpenAI-compatible endpoints, against a scripted server."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mmrl.config.endpoint import EndpointConfig
from mmrl.config.retriever import RemoteRetrieverConfig
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import ConfigError, EngineFailure, RequestFailure
from mmrl.system.http_client import Breaker
from mmrl.system.replies import retry_after
from tests.helpers.servers import Scripted, ScriptedServer, Seen, chat_reply, serving

KEY = "sk-very-secret-0123456789"
ASK = [{"role": "user", "content": "Where is Porto?"}]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)


def chat_at(url: str, **settings: Any) -> OpenAIChat:
    return OpenAIChat(EndpointConfig(url=url, model="big", key_env="TEST_KEY", **settings))


def ask(chat: OpenAIChat, **options: Any) -> str:
    try:
        return asyncio.run(chat.complete(ASK, **options))
    finally:
        chat.close()


def test_text_out_and_exactly_these_settings_in() -> None:
    with serving([chat_reply("In Portugal.")]) as (url, server):
        chat = chat_at(url, price_in=2.0, price_out=8.0)
        text = ask(chat, temperature=0.5, max_tokens=7, stop=("###",), seed=3, n=1)
    assert text == "In Portugal."
    (seen,) = server.seen
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["Authorization"] == f"Bearer {KEY}"
    assert seen.body == {
        "model": "big",
        "messages": ASK,
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["###"],
        "seed": 3,
        "n": 1,
    }
    assert {name: count for name, count in chat.usage.metrics().items() if count} == {
        "endpoint/requests": 1,
        "endpoint/prompt_tokens": 10,
        "endpoint/completion_tokens": 5,
        "endpoint/cost": pytest.approx((10 * 2 + 5 * 8) / 1e6),
    }


def test_server_errors_and_garbage_are_tried_again() -> None:
    bad = [Scripted("boom", 500), Scripted("<html>gateway</html>", 200), Scripted({"choices": []}, 200)]
    with serving([*bad, chat_reply("fine")]) as (url, server):
        chat = chat_at(url, max_wait_s=0.02)
        assert ask(chat) == "fine"
    assert len(server.seen) == 4
    assert (chat.usage.requests, chat.usage.retries, chat.usage.failures) == (1, 3, 0)


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_a_reply_that_its_server_could_not_end_is_tried_again(finish: str) -> None:
    with serving([chat_reply("In Port", finish=finish), chat_reply("fine")]) as (url, server):
        chat = chat_at(url, max_wait_s=0.02)
        assert ask(chat) == "fine"
        with pytest.raises(EngineFailure, match=f"finish_reason '{finish}'"):
            server.script = [chat_reply("", finish=finish)]
            ask(chat)
    assert (chat.usage.requests, chat.usage.failures) == (1, 1)


def test_a_reply_that_a_filter_stopped_fails_as_a_refusal_of_it_does() -> None:
    refused = Scripted({"error": {"code": "content_filter"}}, 400)
    with serving([chat_reply("In Port", finish="content_filter"), refused]) as (url, server):
        for _ in range(2):
            with pytest.raises(RequestFailure, match="content_filter"):
                ask(chat_at(url))
    assert len(server.seen) == 2


def test_tries_are_bounded_and_the_server_is_quoted() -> None:
    with serving([Scripted("out of cheese", 503)]) as (url, server):
        chat = chat_at(url, attempts=3, max_wait_s=0.02)
        with pytest.raises(EngineFailure, match=r"big at .*HTTP 503: out of cheese \(3 tries\)"):
            ask(chat)
    assert len(server.seen) == 3
    assert chat.usage.failures == 1


def test_retry_after_is_waited_for_up_to_the_limit() -> None:
    slow, quota = (Scripted("later", 429, {"Retry-After": seconds}) for seconds in ("0.4", "3600"))
    with serving([slow, chat_reply("fine"), quota]) as (url, server):
        assert ask(chat_at(url)) == "fine"
        with pytest.raises(EngineFailure, match="asks to wait 3600 s, longer than 5 s"):
            ask(chat_at(url, max_wait_s=5.0))
    assert server.seen[1].time - server.seen[0].time >= 0.4 and len(server.seen) == 3


def test_retry_after_may_be_a_date() -> None:
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert retry_after({"retry-after": later}) == pytest.approx(100, abs=3)
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({"retry-after": "9"}) == 9
    assert retry_after({}) is None


def test_a_refusal_is_not_tried_again_and_never_shows_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        serving([Scripted({"error": f"Incorrect API key provided: {KEY}"}, 401)]) as (url, server),
        pytest.raises(EngineFailure, match=r"HTTP 401.*\$\{oc\.env:TEST_KEY\}") as raised,
    ):
        ask(chat_at(url))
    assert len(server.seen) == 1
    assert KEY not in str(raised.value) and KEY not in caplog.text
    assert KEY not in EndpointConfig(url=url, model="big", key_env="TEST_KEY").model_dump_json()


def test_without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(ConfigError, match=r"^task\.judge\.key_env: the environment variable TEST_KEY is not set"):
        OpenAIChat(EndpointConfig(model="big", key_env="TEST_KEY"), "task.judge")
    with serving([chat_reply("x")]) as (url, server):
        ask(OpenAIChat(EndpointConfig(url=url, model="big", key_env=None)))
    assert "Authorization" not in server.seen[0].headers


@pytest.mark.parametrize("text", ["sk-öffentlich", "sk-two\nlines", "sk two words"], ids=ascii)
def test_a_key_that_no_header_holds_is_refused_and_not_quoted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", text)
    with pytest.raises(ConfigError, match=r"^task\.judge\.key_env: .*TEST_KEY holds something") as raised:
        OpenAIChat(EndpointConfig(model="big", key_env="TEST_KEY"), "task.judge")
    assert "sk-" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    ["ftp://host/v1", "http:///v1", "http://host:99999/v1", "http://host:0/v1", "http://[::1/v1", "http://a b/v1"],
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST"):
        EndpointConfig(url=url, model="big")
    with pytest.raises(ValueError, match="expected http://HOST"):
        RemoteRetrieverConfig(name="remote", url=url)


@pytest.mark.parametrize(
    ("usage", "prompt", "cached"),
    [
        *((usage, 0, 0) for usage in ('"x"', "[1]", '{"prompt_tokens": 1e999}', '{"prompt_tokens": "x"}', "null")),
        ('{"prompt_tokens": 10, "prompt_cache_hit_tokens": 7}', 10, 7),
        ('{"prompt_tokens": 10, "prompt_tokens_details": null}', 10, 0),
        ('{"prompt_tokens": 10, "prompt_tokens_details": "x"}', 10, 0),
    ],
)
def test_an_answer_counts_whatever_its_usage_says(usage: str, prompt: int, cached: int) -> None:
    body = f'{{"choices": [{{"message": {{"content": "fine"}}}}], "usage": {usage}}}'
    with serving([Scripted(body)]) as (url, _):
        chat = chat_at(url, attempts=1)
        assert ask(chat) == "fine"
    counted = chat.usage
    assert (counted.requests, counted.prompt_tokens, counted.cached_tokens, counted.cost) == (1, prompt, cached, 0.0)


def test_a_reply_that_trickles_in_ends_in_time() -> None:
    """Each byte is in time, the whole is not."""
    stopped = threading.Event()

    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")
            while not stopped.wait(0.05):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=trickle, args=(server,), daemon=True).start()
        with pytest.raises(EngineFailure, match=r"no reply within 0\.5 s \(1 tries\)"):
            ask(chat_at(f"http://127.0.0.1:{server.getsockname()[1]}/v1", timeout_s=0.5, attempts=1))
        stopped.set()


def test_requests_given_up_are_told_but_not_each(caplog: pytest.LogCaptureFixture) -> None:
    with serving([Scripted("no such model", 404)]) as (url, _):
        chat = chat_at(url)
        for _ in range(12):
            with pytest.raises(EngineFailure):
                asyncio.run(chat.complete(ASK))
        chat.close()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(": big at")[0] for message in told] == [
        "engine: request given up (1 so far)",
        "engine: request given up (10 so far)",
    ]
    assert "no such model" in told[0]


@pytest.mark.parametrize(("refuses", "not_sent"), [(False, [False] * 3 + [True] * 2), (True, [False] * 5)])
def test_an_endpoint_that_stays_silent_is_spared_and_one_that_refuses_is_not(
    refuses: bool, not_sent: list[bool]
) -> None:
    with serving([Scripted("no such model", 404)]) as (url, _):
        chat = chat_at(url if refuses else "http://127.0.0.1:1/v1", attempts=1)
        chat._http.breaker = Breaker(failures=3, wait_s=60)
        found = []
        for _ in range(5):
            with pytest.raises(EngineFailure) as failure:
                asyncio.run(chat.complete(ASK))
            found.append("not sent" in str(failure.value))
        chat.close()
    assert found == not_sent and chat.usage.failures == 5


def looked_at(script: Callable[[Seen], Scripted]) -> tuple[list[str], ScriptedServer, OpenAIChat]:
    with serving(script) as (url, server):
        chat = chat_at(url, attempts=1)
        try:
            return chat.unreachable(), server, chat
        finally:
            chat.close()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Scripted("no model big", 404), "engine.model: big at "),
        (Scripted(f"bad key {KEY}", 401), "engine.key_env: big at "),
        (chat_reply("x"), None),
        (Scripted("busy", 429), None),
        (Scripted("broken", 500), None),
    ],
)
def test_an_endpoint_that_refuses_every_request_is_found_by_a_short_one(reply: Scripted, problem: str | None) -> None:
    problems, server, chat = looked_at(lambda seen: reply)
    assert [(seen.path, seen.body["max_tokens"]) for seen in server.seen] == [("/v1/chat/completions", 16)]
    assert server.seen[0].headers["Authorization"] == f"Bearer {KEY}"
    assert chat.usage.metrics()["endpoint/requests"] == 0
    if problem is None:
        assert problems == []
    else:
        (said,) = problems
        assert said.startswith(problem) and f"refuses every request: HTTP {reply.status}" in said
        assert KEY not in said


def test_a_slow_endpoint_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrl.engines.openai.PROBE_S", 0.2)
    slow = Scripted("late", delay=1.0)
    assert looked_at(lambda seen: slow)[0] == []
