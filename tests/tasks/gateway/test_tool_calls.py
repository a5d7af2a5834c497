"""What a model writes as tool calls and forms, good and bad, as each client reads it; and whose failure it is."""

import json
from functools import cache
from typing import Any

import httpx
import pytest

from mmrl.models.chat import encode_text, render_prompt
from mmrl.models.replies import message_of
from mmrl.models.template import use
from tests.helpers.gateway import Scripted, agent_task, one, post, tokenizer

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "Where?"}


@cache
def reader():
    return tokenizer("qwen3")


def called(arguments, name="search"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def stream_events(text):
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def of_chat(reply):
    message = reply["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return message["content"] or "", [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def of_chat_stream(text):
    deltas = [choice["delta"] for event in stream_events(text) for choice in event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    content = "".join(delta.get("content") or "" for delta in deltas)
    return content, [(call["name"], json.loads(call["arguments"])) for call in calls]


def of_messages(reply):
    blocks = reply["content"]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return "".join(block["text"] for block in blocks if block["type"] == "text"), calls


def of_messages_stream(text):
    events = stream_events(text)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    names = [event["content_block"].get("name") for event in events if event["type"] == "content_block_start"]
    parts = [json.loads(delta["partial_json"]) for delta in deltas if delta["type"] == "input_json_delta"]
    content = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
    return content, list(zip(filter(None, names), parts, strict=True))


def of_responses(reply):
    texts = [part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    return "".join(texts), [(call["name"], json.loads(call["arguments"])) for call in calls]


def of_responses_stream(text):
    events = stream_events(text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    told = "".join(deltas), [(event["name"], json.loads(event["arguments"])) for event in done]
    assert told == of_responses(events[-1]["response"])
    return told


ANTHROPIC_TOOL = {"name": "search", "input_schema": PARAMETERS}
CLIENTS: dict[str, tuple[Any, Any, Any]] = {
    "chat/completions": ({"messages": [USER], "tools": [TOOL]}, of_chat, of_chat_stream),
    "messages": (
        {"messages": [USER], "tools": [ANTHROPIC_TOOL], "max_tokens": 500},
        of_messages,
        of_messages_stream,
    ),
    "responses": (
        {"input": "Where?", "tools": [{"type": "function", **TOOL["function"]}]},
        of_responses,
        of_responses_stream,
    ),
}
GOOD = called('{"q": "a"}')
NAN, HALF = called('{"q": NaN}'), called('{"q": "\\ud83d"}')
REPLIES = {
    "good": (GOOD, ("", [("search", {"q": "a"})]), True),
    "text on both sides": (f"I look.\n{GOOD}\nDone.", ("I look.\nDone.", [("search", {"q": "a"})]), True),
    "text between": (f"{GOOD}\nand\n{GOOD}", ("and", [("search", {"q": "a"})] * 2), True),
    "encoded twice": (called('"{\\"q\\": 1}"'), ("", [("search", '{"q": 1}')]), False),
    "a list": (called('["a"]'), ("", [("search", ["a"])]), False),
    "a number": (called("3"), ("", [("search", 3)]), False),
    "of another type": (called('{"q": 3}'), ("", [("search", {"q": 3})]), False),
    "one is missing": (called("{}"), ("", [("search", {})]), False),
    "of no tool": (called('{"q": "a"}', "other"), ("", [("other", {"q": "a"})]), False),
    "no number": (NAN, (NAN, []), False),
    "half a character": (HALF, (HALF, []), False),
    "cut off": (GOOD[:-16], (GOOD[:-16], []), False),
    "under another name": (
        GOOD.replace("arguments", "parameters"),
        (GOOD.replace("arguments", "parameters"), []),
        False,
    ),
}


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", CLIENTS)
def test_a_tool_call_arrives_as_it_was_written_and_a_bad_one_is_the_models_doing(path, stream, reply):
    text, expected, ok = REPLIES[reply]
    body, whole, streamed = CLIENTS[path]

    async def agent(example, base_url, api_key):
        headers = {"authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(base_url=base_url, headers=headers) as asking:
            answer = await asking.post(f"/{path}", json={"model": "m", "stream": stream, **body})
        assert answer.status_code == 200, answer.text
        got = streamed(answer.text) if stream else whole(answer.json())
        assert got == expected
        raise TypeError("an agent that minds")

    rollout, (call,) = one(agent_task(agent), Scripted(lambda prompt: text, reader()))
    assert "an agent that minds" in rollout.error_message
    assert (rollout.error, rollout.reward, call.ok) == (("program", None, True) if ok else ("parse", 0.0, False))


def test_an_arguments_depth_that_no_reader_takes_is_text():
    read = reader()
    text = called("[" * 20_000)
    message = message_of(read, render_prompt(read, [USER], [TOOL]), encode_text(read, text), [TOOL])
    assert message == {"content": text, "unread_call": True}


def test_what_is_said_of_calls_is_none():
    read = reader()
    text = "<think>\nA <tool_call> would help.\n</think>\n\nIn Portugal."
    message = message_of(read, render_prompt(read, [USER], [TOOL]), encode_text(read, text), [TOOL])
    assert message == {"content": "In Portugal.", "reasoning_content": "A <tool_call> would help."}


@cache
def thinking(template, on=True):
    read = tokenizer(template)
    use(read, thinking=on, date=None)
    return read


@pytest.mark.parametrize(
    ("template", "written", "message"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nIn Portugal.", {"content": "In Portugal.", "reasoning_content": "Hm."}),
        ("qwen3", "In Portugal.", {"content": "In Portugal."}),
        ("qwen3", "<think>\nHm. No", {"content": "", "reasoning_content": "Hm. No"}),  # cut off
        ("qwen3", f"<think>\nHm.\n</think>\n\n{called('{}')}", {"content": called("{}"), "reasoning_content": "Hm."}),
        ("qwen3_5_think", "Hm.\n</think>\n\nIn Portugal.", {"content": "In Portugal.", "reasoning_content": "Hm."}),
        ("qwen3_5_think", "Hm. No", {"content": "", "reasoning_content": "Hm. No"}),
        ("glm4moe", "<think>Hm.</think>\nIn Portugal.", {"content": "In Portugal.", "reasoning_content": "Hm."}),
    ],
)
def test_thoughts_are_no_content_without_tools_either(template, written, message):
    read = thinking(template)
    assert message_of(read, render_prompt(read, [USER]), encode_text(read, written), ()) == message
    plain = thinking(template, on=False)  # a text is a text
    assert message_of(plain, render_prompt(plain, [USER]), encode_text(plain, written), ()) == {"content": written}


def test_the_form_that_a_request_asks_for_is_that_of_what_follows_thoughts():
    """With and without tools: else a run would teach a model not to think."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    async def agent(example, base_url, api_key):
        got, messages = [], [USER]
        for tools in ({}, {"tools": [TOOL]}, {}):
            body: dict[str, Any] = {"response_format": form, "messages": messages, **tools}
            answer = await post(base_url, api_key, **body)
            message = answer.json()["choices"][0]["message"]
            got.append((message["content"], message["reasoning_content"]))
            messages = [*messages, message, USER] if not tools else messages
        return got

    text = '<think>\nHm.\n</think>\n\n{"a": 0}'
    task = agent_task(agent, metric=lambda record, result: 1.0)
    rollout, calls = one(task, Scripted(lambda prompt: text, thinking("qwen3")))
    assert (rollout.error, rollout.prediction) == (None, [['{"a": 0}', "Hm."]] * 3)
    assert [(call.ok, call.turn, call.facts["rewritten_history"]) for call in calls] == [
        (True, 0, 0.0),
        (True, 0, 1.0),  # other tools: a context of its own
        (True, 1, 0.0),
    ]


SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "string"}, "sure": {"type": "boolean"}, "of": {"$ref": "#/$defs/numbers"}},
    "required": ["value", "sure"],
    "$defs": {"numbers": {"type": "array", "items": {"type": "integer"}}},
}
FORMS: dict[str, Any] = {
    "chat/completions": {
        "messages": [USER],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "messages": {
        "messages": [USER],
        "max_tokens": 500,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "responses": {"input": "Where?", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("text", "present"),
    [
        ('{"value": "0", "sure": true, "of": [1]}', None),
        ('{"value": "0", "sure": "perhaps"}', 1),
        ('{"value": "0", "sure": true, "of": ["x"]}', 2),
        ('{"value": "0"}', 1),
        ('{"value": "0", "sure": NaN}', 0),
        ("[]", 0),
        ('```json\n{"value": "0", "sure": true}\n```', 0),
    ],
)
def test_a_reply_of_other_types_than_its_schema_says_is_the_models_doing(path, text, present):
    async def agent(example, base_url, api_key):
        async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}) as asking:
            answer = await asking.post(f"/{path}", json={"model": "m", **FORMS[path]})
        assert CLIENTS[path][1](answer.json()) == (text, [])
        raise TypeError("an agent that minds")

    rollout, (call,) = one(agent_task(agent), Scripted(lambda prompt: text, reader()))
    assert "an agent that minds" in rollout.error_message
    assert (rollout.error, call.ok) == (("program", True) if present is None else ("parse", False))
    assert (call.present_fields, call.expected_fields) == ((0, 0) if present is None else (present, 2))
