"""Models that differ behind one API: which settings they take, what they think beside the answer, what they count."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from mmrl.cli import main
from mmrl.config.endpoint import EndpointConfig
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import EngineFailure, RequestFailure
from tests.engines.test_openai import ASK, ask
from tests.helpers.servers import Scripted, Seen, chat_reply, serving


def unsupported(message: str, **error: str) -> Scripted:
    """As OpenAI's reasoning models answer."""
    return Scripted({"error": {"message": message, **error}}, 400)


OTHER_LIMIT = unsupported(
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    param="max_tokens",
    code="unsupported_parameter",
)
NO_TEMPERATURE = unsupported(
    "Unsupported value: 'temperature' does not support 0.0 with this model. Only the default (1) value is supported.",
    param="temperature",
    code="unsupported_value",
)
SHORT = unsupported("Could not finish the message because max_tokens or model output limit was reached.")


def chat_at(url: str, path: str = "engine.endpoint", **more: Any) -> OpenAIChat:
    settings: dict[str, Any] = {"url": url, "model": "big", "key_env": None, "attempts": 1} | more
    return OpenAIChat(EndpointConfig(**settings), path)


def reasoning_model(seen: Seen) -> Scripted:
    """Takes neither `max_tokens` nor a temperature."""
    if "max_tokens" in seen.body:
        return OTHER_LIMIT
    if "temperature" in seen.body:
        return NO_TEMPERATURE
    return chat_reply("In Portugal.")


def test_the_limit_is_renamed_when_the_server_asks_for_it_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def many(chat: OpenAIChat) -> list[str]:
        return await asyncio.gather(*(chat.complete(ASK, max_tokens=9) for _ in range(5)))

    with serving(reasoning_model) as (url, server):
        chat = chat_at(url)
        assert asyncio.run(many(chat)) == ["In Portugal."] * 5
        before = len(server.seen)
        assert ask(chat, max_tokens=9) == "In Portugal."
    assert [seen.body.get("max_completion_tokens") for seen in server.seen[before:]] == [9]
    assert (chat.usage.requests, chat.usage.failures) == (6, 0)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "engine.endpoint.max_tokens_field=max_completion_tokens" in said


def test_a_prompt_that_leaves_no_room_for_the_limit_does_not_rename_it() -> None:
    """In vLLM's words, which name both."""
    too_long = (
        "'max_tokens' or 'max_completion_tokens' is too large: 200. This model's maximum context length is 4096 tokens "
        "and your request has 4000 input tokens (200 > 4096 - 4000)."
    )
    with serving([Scripted({"error": {"message": too_long}}, 400), chat_reply("In Portugal.")]) as (url, server):
        chat = chat_at(url)
        with pytest.raises(RequestFailure) as raised:
            asyncio.run(chat.complete(ASK, max_tokens=200))
        assert ask(chat, max_tokens=9) == "In Portugal."
    assert "max_tokens_field" not in str(raised.value)
    assert [set(seen.body) - {"model", "messages"} for seen in server.seen] == [{"max_tokens"}] * 2


def test_the_name_of_the_limit_can_be_fixed() -> None:
    with serving(reasoning_model) as (url, server):
        assert ask(chat_at(url, max_tokens_field="max_completion_tokens"), max_tokens=9) == "In Portugal."
        with pytest.raises(EngineFailure, match=r"\(set engine\.endpoint\.max_tokens_field=max_completion_tokens\)"):
            ask(chat_at(url, max_tokens_field="max_tokens"), max_tokens=9)
    assert [set(seen.body) - {"model", "messages"} for seen in server.seen] == [
        {"max_completion_tokens"},
        {"max_tokens"},
    ]


def test_a_setting_that_the_model_refuses_is_named_with_the_key_to_change() -> None:
    with serving(reasoning_model) as (url, server):
        with pytest.raises(
            EngineFailure, match=r"HTTP 400: .*temperature.* \(leave it out: a\.omit=\[temperature\]\)$"
        ):
            ask(chat_at(url, path="a"), temperature=0.0, max_tokens=9)
        text = ask(chat_at(url, omit=("temperature", "top_p", "seed")), temperature=0.0, top_p=0.9, seed=3)
    assert text == "In Portugal." and set(server.seen[-1].body) == {"model", "messages"}


def test_further_fields_and_headers_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "somebody-else")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "somebody-else")
    body = {"reasoning_effort": "low", "provider": {"order": ("a", "b")}, "temperature": 1.0}
    more: dict[str, Any] = {"extra_body": body, "omit": ("temperature",), "extra_headers": {"X-Title": "mmrl"}}
    with serving([chat_reply("x")]) as (url, server):
        ask(chat_at(url, **more, organization="org-1", project="proj-1"), temperature=0.0)
        ask(chat_at(url), seed=None)
    one, other = server.seen
    assert set(other.body) == {"model", "messages"}
    assert one.body["reasoning_effort"] == "low" and one.body["provider"] == {"order": ["a", "b"]}
    assert one.body["temperature"] == 1.0
    names = ("x-title", "openai-organization", "openai-project")
    assert [one.headers[name] for name in names] == ["mmrl", "org-1", "proj-1"]
    assert not set(names) & {name.lower() for name in other.headers}


def thinking(content: Any, finish: str = "stop", **message: Any) -> Scripted:
    reply = chat_reply(None, prompt=1000, completion=500, finish=finish)
    reply.body["choices"][0]["message"] = {"role": "assistant", "content": content, **message}
    reply.body["usage"] |= {
        "prompt_tokens_details": {"cached_tokens": 800},
        "completion_tokens_details": {"reasoning_tokens": 400},
    }
    return reply


@pytest.mark.parametrize(
    ("reply", "drop", "cut", "keep"),
    [
        (thinking("42", reasoning_content="six times seven"), "42", "42", "<think>\nsix times seven\n</think>\n\n42"),
        (thinking("42", reasoning="six"), "42", "42", "<think>\nsix\n</think>\n\n42"),
        (
            thinking("<think>\nsix\n</think>\n\n42"),
            "<think>\nsix\n</think>\n\n42",
            "42",
            "<think>\nsix\n</think>\n\n42",
        ),
        (thinking("six</think>42"), "six</think>42", "42", "six</think>42"),  # the template has opened the block
        (thinking("say <think> or </think>"), *["say <think> or </think>"] * 3),
        (thinking([{"type": "thinking", "thinking": []}, {"type": "text", "text": "42"}]), *["42"] * 3),
        (thinking(None, "length", reasoning_content="six"), "", "", "<think>\nsix\n</think>\n\n"),
        (thinking("<think>six", "length"), "<think>six", "", "<think>six"),
    ],
    ids=range(8),
)
def test_thoughts_are_no_answer_unless_they_are_asked_for(reply: Scripted, drop: str, cut: str, keep: str) -> None:
    with serving([reply]) as (url, _):
        assert [ask(chat_at(url, reasoning=kind)) for kind in ("drop", "cut", "keep")] == [drop, cut, keep]


def test_an_empty_answer_may_be_left_out_beside_thoughts_and_nowhere_else() -> None:
    reply = thinking("")
    message = reply.body["choices"][0]["message"]
    del message["content"]
    with serving([reply]) as (url, _):
        with pytest.raises(EngineFailure, match="no chat completion"):
            ask(chat_at(url))
        message["reasoning_content"] = "six"
        assert ask(chat_at(url)) == ""


def test_tokens_of_thoughts_and_of_the_cache_are_counted_and_priced() -> None:
    with serving([thinking("42"), thinking(None, "length", reasoning_content="…")]) as (url, _):
        chat = chat_at(url, price_in=2.0, price_cached=0.5, price_out=8.0)
        ask(chat)
        assert chat.usage.cost == pytest.approx((200 * 2 + 800 * 0.5 + 500 * 8) / 1e6)
        ask(chat)
    metrics = chat.usage.metrics()
    assert (metrics["endpoint/cached_tokens"], metrics["endpoint/reasoning_tokens"]) == (1600, 800)
    assert metrics["endpoint/unanswered"] == 1
    assert chat.describe().endswith(
        "(2 requests, 1 unanswered, 2000 prompt tokens, 1600 cached tokens, 1000 completion tokens, "
        "800 reasoning tokens, 0.01 USD)"
    )


def test_a_reasoning_model_is_found_by_the_probe() -> None:
    def probed(seen: Seen) -> Scripted:
        return OTHER_LIMIT if "max_tokens" in seen.body else SHORT

    with serving(probed) as (url, server):
        assert chat_at(url).unreachable() == []
    limits = [key for seen in server.seen for key in seen.body or () if key.startswith("max_")]
    assert limits == ["max_tokens", "max_completion_tokens"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"extra_body": {"stream": True}}, "extra_body\n.*got 'stream', which mmrl sets itself"),
        ({"extra_body": {"temperature": 1}}, "extra_body: got 'temperature', which every request has already"),
        ({"extra_headers": {"Content-Length": "3"}}, "got 'Content-Length', which mmrl sets itself"),
        ({"extra_headers": {"a b": "x"}}, "got 'a b', expected the name of an HTTP header"),
        ({"extra_headers": {"X-A": "x\r\nX-B: y"}}, "got for 'X-A' something that no HTTP header can hold"),
        ({"extra_headers": {"Authorization": "Bearer x"}}, "got a text for 'Authorization'"),
        ({"extra_headers": {"Ocp-Apim-Subscription-Key": "abcdefgh"}}, "got a text for 'Ocp-Apim-Subscription-Key'"),
        ({"organization": "ä"}, "match pattern"),
        (
            {"omit": ("max_tokens",), "max_tokens_field": "max_tokens"},
            "max_tokens_field: got max_tokens, which has no effect with max_tokens in omit",
        ),
        ({"omit": ("top_k",)}, "omit"),
    ],
)
def test_what_no_request_can_have_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EndpointConfig(model="big", key_env=None, **settings)


def test_a_secret_header_comes_from_the_environment_and_stays_out_of_all_files(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEWAY", "gateway-secret-0123456789")
    with serving(lambda seen: Scripted({"error": f"no {seen.headers.get('X-Api-Key')}"}, 403)) as (url, server):
        words = ["eval", "engine=openai", "policy=big", f"engine.endpoint.url={url}", "engine.endpoint.key_env=null"]
        header = "engine.endpoint.extra_headers={X-Api-Key: '${oc.env:GATEWAY}'}"
        assert main([*words, header, f"run.dir={tmp_path / 'run'}"]) == 2
        assert main([*words, "engine.endpoint.extra_headers={X-Api-Key: plain-text-secret}"]) == 2
    assert {seen.headers["X-Api-Key"] for seen in server.seen} == {"gateway-secret-0123456789"}
    error = capsys.readouterr().err
    assert "refuses every request: HTTP 403" in error and "${oc.env:GATEWAY}" in error
    assert "engine.endpoint.extra_headers.X-Api-Key: got a text" in error
    assert "gateway-secret" not in error and "plain-text-secret" not in error
