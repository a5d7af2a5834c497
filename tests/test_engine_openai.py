"""The client of OpenAI-compatible endpoints, against a scripted server."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
from typing import Any

import pytest

from mmrl.config.endpoint import EndpointConfig
from mmrl.engines.openai import OpenAIChat, retry_after
from mmrl.errors import ConfigError, EngineFailure
from tests.scripted_server import Scripted, ScriptedServer, Seen, chat_reply, serving

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
        text = ask(chat, temperature=0.5, max_tokens=7, stop=("###",), seed=3, extra={"n": 1})
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
    assert chat.usage.metrics() == {
        "endpoint/requests": 1,
        "endpoint/retries": 0,
        "endpoint/failures": 0,
        "endpoint/prompt_tokens": 10,
        "endpoint/completion_tokens": 5,
        "endpoint/cost": pytest.approx((10 * 2 + 5 * 8) / 1e6),
    }


def test_settings_left_out_are_not_sent() -> None:
    with serving([chat_reply("x")]) as (url, server):
        ask(chat_at(url))
    assert set(server.seen[0].body) == {"model", "messages"}


def test_server_errors_and_garbage_are_tried_again() -> None:
    script = [
        Scripted("boom", 500),
        Scripted("<html>gateway</html>", 200),
        Scripted({"choices": []}, 200),
        chat_reply("fine"),
    ]
    with serving(script) as (url, server):
        chat = chat_at(url, max_wait_s=0.02)
        assert ask(chat) == "fine"
    assert len(server.seen) == 4
    assert (chat.usage.requests, chat.usage.retries, chat.usage.failures) == (1, 3, 0)


def test_tries_are_bounded_and_the_server_is_quoted() -> None:
    with serving([Scripted("out of cheese", 503)]) as (url, server):
        chat = chat_at(url, attempts=3, max_wait_s=0.02)
        with pytest.raises(EngineFailure, match=r"big at .*HTTP 503: out of cheese \(3 tries\)"):
            ask(chat)
    assert len(server.seen) == 3
    assert chat.usage.failures == 1


def test_retry_after_is_waited_for() -> None:
    with serving([Scripted("slow down", 429, {"Retry-After": "0.4"}), chat_reply("fine")]) as (url, server):
        assert ask(chat_at(url)) == "fine"
    assert server.seen[1].time - server.seen[0].time >= 0.4


def test_a_retry_after_longer_than_the_limit_fails_at_once() -> None:
    with (
        serving([Scripted("quota", 429, {"Retry-After": "3600"})]) as (url, server),
        pytest.raises(EngineFailure, match="asks to wait 3600 s, longer than max_wait_s=5"),
    ):
        ask(chat_at(url, max_wait_s=5.0))
    assert len(server.seen) == 1


def test_retry_after_may_be_a_date() -> None:
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert retry_after({"retry-after": later}) == pytest.approx(100, abs=3)
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None


def test_a_refusal_is_not_tried_again_and_never_shows_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        serving([Scripted({"error": f"Incorrect API key provided: {KEY}"}, 401)]) as (url, server),
        pytest.raises(EngineFailure, match=r"HTTP 401.*\[key\]") as raised,
    ):
        ask(chat_at(url))
    assert len(server.seen) == 1
    assert KEY not in str(raised.value) and KEY not in caplog.text
    assert KEY not in EndpointConfig(url=url, model="big", key_env="TEST_KEY").model_dump_json()


def test_no_reply_in_time_is_tried_again() -> None:
    with serving([Scripted("late", delay=6.0), chat_reply("fine")]) as (url, server):
        assert ask(chat_at(url, timeout_s=2.0, max_wait_s=0.02)) == "fine"
    assert len(server.seen) == 2


def test_nobody_listens() -> None:
    with serving([chat_reply("x")]) as (url, _):
        pass
    with pytest.raises(EngineFailure, match=r"ConnectError.*\(2 tries\)"):
        ask(chat_at(url, attempts=2, max_wait_s=0.02))


def test_without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(ConfigError, match=r"^task\.judge\.key_env: the environment variable TEST_KEY is not set"):
        OpenAIChat(EndpointConfig(model="big", key_env="TEST_KEY"), "task.judge")
    with serving([chat_reply("x")]) as (url, server):
        ask(OpenAIChat(EndpointConfig(url=url, model="big", key_env=None)))
    assert "Authorization" not in server.seen[0].headers


def test_concurrency_is_bounded_and_replies_find_their_askers() -> None:
    def echo(seen: Seen) -> Scripted:
        reply = chat_reply(seen.body["messages"][0]["content"])
        reply.delay = 0.05
        return reply

    async def many(chat: OpenAIChat) -> list[str]:
        return await asyncio.gather(*[chat.complete([{"role": "user", "content": str(i)}]) for i in range(9)])

    with serving(echo) as (url, server):
        chat = chat_at(url, concurrency=3)
        assert asyncio.run(many(chat)) == [str(i) for i in range(9)]
        assert asyncio.run(many(chat)) == [str(i) for i in range(9)]  # a second event loop, the same connections
        chat.close()
    assert server.most_in_flight == 3


def test_rate_limit_spaces_the_starts() -> None:
    async def many(chat: OpenAIChat) -> None:
        await asyncio.gather(*[chat.complete(ASK) for _ in range(4)])

    with serving([chat_reply("x")]) as (url, server):
        chat = chat_at(url, requests_per_minute=600.0)
        started = time.monotonic()
        asyncio.run(many(chat))
        chat.close()
    assert max(seen.time for seen in server.seen) - started >= 0.3


def test_a_cancelled_question_frees_its_place() -> None:
    async def impatient(chat: OpenAIChat, server: ScriptedServer) -> str:
        first = asyncio.create_task(chat.complete(ASK))
        while not server.seen:
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await asyncio.wait_for(chat.complete(ASK), 10)

    with serving([Scripted("late", delay=20.0), chat_reply("fine")]) as (url, server):
        chat = chat_at(url, concurrency=1)
        assert asyncio.run(impatient(chat, server)) == "fine"
        chat.close()
