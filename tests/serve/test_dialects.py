"""Requests of each protocol as they are read: what changes a prompt or its reply is passed on, or refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ParsedChatCompletionMessage
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mmrl.serve.conversations import texts_added
from mmrl.serve.policy import ServedPolicy, make_app
from mmrl.serve.protocol import ChatRequest, CompletionRequest, Refused, parse_request
from mmrl.serve.routes import DIALECTS
from tests.helpers.gateway import Scripted
from tests.helpers.servers import listening

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER: Any = {"role": "user", "content": "Where?"}
BARE: dict[str, Any] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "Where?"},
    MESSAGES: {"messages": [USER], "max_tokens": 8},
}
SEARCH: dict[str, Any] = {"name": "search", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {
    CHAT: {"type": "function", "function": SEARCH},
    RESPONSES: {"type": "function", **SEARCH},
    MESSAGES: {"name": "search", "input_schema": {"type": "object"}},
}
USE: Any = {"type": "tool_use", "id": "c", "name": "search", "input": {"q": "a"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c", "content": "the server is down"}


def read(path: str, **body: Any) -> ChatRequest:
    """A request as both servers read it."""
    parsed = DIALECTS[path].parse(json.dumps({"model": "policy", **BARE[path], **body}).encode())
    assert isinstance(parsed, ChatRequest)
    return parsed


def refusal(path: str, **body: Any) -> tuple[str | None, str]:
    """The field that a request is refused by, and what is said of it."""
    with pytest.raises(Refused) as refused:
        read(path, **body)
    assert refused.value.status == 400
    return refused.value.param, refused.value.message


def named(path: str, name: str) -> Any:
    """The choice of a tool."""
    return {
        CHAT: {"type": "function", "function": {"name": name}},
        RESPONSES: {"type": "function", "name": name},
        MESSAGES: {"type": "tool", "name": name},
    }[path]


def any_tool(path: str) -> Any:
    return {"type": "any"} if path == MESSAGES else "required"


def test_top_k_of_anthropics_requests_is_that_of_their_sampling() -> None:
    engine = Scripted(lambda prompt: "x")
    with listening(make_app(ServedPolicy(engine, engine.tokenizer))) as url:
        body = {"model": "policy", **BARE[MESSAGES]}
        assert httpx.post(f"{url}{MESSAGES}", json={**body, "top_k": 5}).status_code == 200
        refused = httpx.post(f"{url}{MESSAGES}", json={**body, "top_k": -5})
    assert [request.sampling.top_k for request in engine.requests] == [5]
    error = {"type": "invalid_request_error", "message": "top_k: Input should be greater than or equal to 0"}
    assert (refused.status_code, refused.json()) == (400, {"type": "error", "error": error})


@pytest.mark.parametrize("path", BARE)
def test_a_tool_choice_that_no_tool_of_the_request_answers_is_refused(path: str) -> None:
    tools = [TOOL[path]]
    for choice in (any_tool(path), named(path, "search")):
        assert read(path, tools=tools, tool_choice=choice).tool_choice != "auto"
    param, says = refusal(path, tools=tools, tool_choice=named(path, "zz"))
    assert param == "tool_choice" and "got 'zz', expected a tool of the request: search" in says
    for choice in (any_tool(path), named(path, "search")):
        assert refusal(path, tool_choice=choice)[0] == "tool_choice"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text", "text": None}], "messages.0.content.0.text.text"),
        ([{"type": "text"}], "messages.0.content.0.text.text"),
        (
            [{"type": "tool_use", "id": "c", "name": "search", "arguments": {"q": "a"}}],
            "messages.0.content.0.tool_use.input",
        ),
        ([{"type": "tool_result", "content": "a"}], "messages.0.content.0.tool_result.tool_use_id"),
        ([{**RESULT, "is_error": "no"}], "messages.0.content.0.tool_result.is_error"),
        ([{**RESULT, "content": [USE]}], "messages.0.content.0.tool_result.content.0.type"),
        ([{"type": "image", "source": {}}], "messages.0.content.0"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_block_that_no_message_could_show_whole_is_refused(content: Any, param: str) -> None:
    assert refusal(MESSAGES, messages=[{"role": "user", "content": content}])[0] == param


def test_a_tools_result_with_is_error_is_an_error_to_the_model() -> None:
    messages = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    assert read(MESSAGES, messages=messages).conversation()[-1]["content"] == "the server is down"
    for content in (RESULT["content"], [{"type": "text", "text": RESULT["content"]}]):
        messages[-1] = {"role": "user", "content": [{**RESULT, "content": content, "is_error": True}]}
        assert read(MESSAGES, messages=messages).conversation()[-1]["content"] == "{'error': 'the server is down'}"


def test_what_openais_client_has_read_of_a_reply_is_sent_back_with_it() -> None:
    said = ParsedChatCompletionMessage[Any](role="assistant", content='{"a": 1}', parsed={"a": 1})
    sent = said.model_dump(exclude_unset=True)
    assert "parsed" in sent
    assert read(CHAT, messages=[USER, sent]).conversation()[1] == {"role": "assistant", "content": '{"a": 1}'}


@pytest.mark.parametrize(
    ("path", "message", "param"),
    [
        (CHAT, {"function_call": {"name": "search", "arguments": "{}"}}, "messages.1.function_call"),
        (CHAT, {"refusal": "No."}, "messages.1.refusal"),
        (CHAT, {"audio": {"id": "a"}}, "messages.1.audio"),
        (RESPONSES, {"content": "", "tool_calls": [{"id": "c"}]}, "input.1.message.tool_calls"),
    ],
)
def test_a_message_whose_call_or_words_no_prompt_would_have_is_refused(path: str, message: Any, param: str) -> None:
    field = param.partition(".")[0]
    said = {"role": "assistant", **message}
    assert refusal(path, **{field: [USER, said]}) == (param, f"{param}: unknown field")
    empty = {"role": "assistant", "content": "It.", **(dict.fromkeys(message) if path == CHAT else {})}
    assert read(path, **{field: [USER, empty]}).conversation()[1] == {"role": "assistant", "content": "It."}


def test_tokens_keep_the_space_that_alone_they_lose() -> None:
    words = Tokenizer(WordLevel({"▁By": 0, "▁the": 1, "▁se": 2, "a": 3, "</s>": 4}, unk_token="</s>"))
    words.add_special_tokens(["</s>"])
    words.decoder = decoders.Metaspace()
    assert words.decode([1]) == "the"
    texts = texts_added(lambda ids: str(words.decode(list(ids))), [0, 4, 1, 2, 3, 4])
    assert texts == ["By", "", " the", " se", "a", ""]


@pytest.mark.parametrize(("given", "taken"), [(False, True), (None, True), (0, False), (1, False), (True, False)])
def test_log_probabilities_of_completions_are_refused_where_they_are_asked_for(given: Any, taken: bool) -> None:
    body = json.dumps({"model": "policy", "prompt": "x", "logprobs": given}).encode()
    if taken:
        assert parse_request(CompletionRequest, body).prompt == "x"
    else:
        with pytest.raises(Refused, match="logprobs: this server does not have it"):
            parse_request(CompletionRequest, body)


def test_a_completions_text_begins_with_the_tokenizers_own_tokens_unless_it_asks_for_none() -> None:
    words = Tokenizer(WordLevel({"<s>": 0, "hi": 1}, unk_token="<s>"))
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    served = ServedPolicy(Scripted(str), PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    for asked, ids in (({}, (0, 1)), ({"add_special_tokens": True}, (0, 1)), ({"add_special_tokens": False}, (1,))):
        request = parse_request(CompletionRequest, json.dumps({"model": "policy", "prompt": "hi", **asked}).encode())
        assert asyncio.run(served.encoded(request.prompt, request.add_special_tokens)) == ids


def test_the_role_function_is_refused() -> None:
    assert refusal(CHAT, messages=[{"role": "function", "name": "search", "content": "a"}])[0] == "messages.0.role"


@pytest.mark.parametrize("given", [{}, {"shema": {"type": "object"}}, {"schema": None}], ids=str)
def test_a_form_without_its_schema_is_refused(given: Any) -> None:
    says = "schema: got None, expected a JSON schema"
    param, told = refusal(CHAT, response_format={"type": "json_schema", "json_schema": {"name": "s", **given}})
    assert param == "response_format" and says in told
    param, told = refusal(RESPONSES, text={"format": {"type": "json_schema", "name": "s", **given}})
    assert param == "text.format" and says in told
    form = {"type": "json_schema", **given}
    assert (refusal(MESSAGES, output_config={"format": form})[0] or "").startswith("output_config.format.s")


def test_a_form_that_is_whole_is_that_of_the_reply() -> None:
    schema = {"type": "array"}
    chat = read(CHAT, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
    responses = read(RESPONSES, text={"format": {"type": "json_schema", "name": "s", "schema": schema}})
    messages = read(MESSAGES, output_config={"format": {"type": "json_schema", "schema": schema}})
    for parsed in (chat, responses, messages):
        assert parsed.response_format is not None and parsed.response_format.wanted == schema
    anything = read(CHAT, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {}}})
    assert anything.response_format is not None and anything.response_format.wanted == {}
    assert refusal(CHAT, response_format={"type": "json_schema"})[0] == "response_format"
