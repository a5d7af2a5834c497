"""Anthropic's dialect: `POST /v1/messages`, its replies, streams and errors, over the requests of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mmrl.serve.front import Answer, Dialect, Running
from mmrl.serve.protocol import RecordedRequest, SamplingRequest, parse_fields, parse_request

STOPPED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""OpenAI's finish reasons in Anthropic's words."""
WITHOUT_EFFECT = ("metadata", "service_tier")


def _blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Block(_Body):
    """Part of a message; `cache_control` changes no completion."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: Annotated[list[_Block], BeforeValidator(_blocks)] = []
    is_error: bool = False
    thinking: str = ""
    signature: str = ""
    data: str = ""
    cache_control: dict[str, Any] | None = None
    citations: None = None


_Blocks = Annotated[list[_Block], BeforeValidator(_blocks)]


class _Message(_Body):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


class _Tool(_Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}
    type: Literal["custom"] = "custom"
    cache_control: dict[str, Any] | None = None


class _Choice(_Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Thinking(_Body):
    type: Literal["disabled"]


class MessagesRequest(_Body):
    """`POST /v1/messages`."""

    model: str
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: _Blocks = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_sequences: list[str] = []
    stream: bool = False
    tools: list[_Tool] = []
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None

    def as_openai(self) -> dict[str, Any]:
        """Return the same request in OpenAI's dialect."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": _text(self.system)}] if self.system else []
        for message in self.messages:
            messages += _converted(message)
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }
        if self.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in self.tools
            ]
        if self.tool_choice is not None:
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            choices: dict[str, Any] = {"any": "required", "tool": named}
            body["tool_choice"] = choices.get(self.tool_choice.type, self.tool_choice.type)
        return body


class Messages(Dialect):
    """Dialect of `POST /v1/messages`."""

    def parse(self, body: bytes) -> SamplingRequest:
        """See `Dialect.parse`."""
        parsed = parse_fields(MessagesRequest, body, WITHOUT_EFFECT)
        return parse_request(RecordedRequest, json.dumps(parsed.as_openai()).encode())

    def reply(self, running: Running) -> dict[str, Any]:
        """See `Dialect.reply`."""
        answer = running.answers()[0]
        blocks = [{**block, **filled} for block, filled, _ in _contents(answer)]
        return {**_head(running), "content": blocks, **_stopped(answer), "usage": _usage(running)}

    async def events(self, running: Running) -> AsyncIterator[str]:
        """See `Dialect.events`."""
        answer = running.answers()[0]
        begun = {**_head(running), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(running)}
        yield _event("message_start", message=begun)
        for index, (block, _, delta) in enumerate(_contents(answer)):
            yield _event("content_block_start", index=index, content_block=block)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_stopped(answer), usage=_usage(running))
        yield _event("message_stop")

    def error(self, status: int, refusal: dict[str, Any]) -> dict[str, Any]:
        """See `Dialect.error`."""
        error = refusal["error"]
        return {"type": "error", "error": {"type": error["type"], "message": error["message"]}}


def _contents(answer: Answer) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Return the blocks of a reply: empty, what fills them, and the same as a delta."""
    blocks: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    if answer.text or not answer.tool_calls:
        text = {"text": answer.text}
        blocks.append(({"type": "text", "text": ""}, text, {"type": "text_delta", **text}))
    for call in answer.tool_calls:
        arguments = call["function"]["arguments"]
        read = json.loads(arguments)
        empty = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        filled = {"input": read if isinstance(read, dict) else {}}
        blocks.append((empty, filled, {"type": "input_json_delta", "partial_json": arguments}))
    return blocks


def _converted(message: _Message) -> list[dict[str, Any]]:
    """Return a message in OpenAI's dialect, where each result of a tool is a message of its own."""
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in message.content
        if block.type == "tool_result"
    ]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    text = _text(message.content)
    said: dict[str, Any] = {"role": message.role, "content": text} | ({"tool_calls": calls} if calls else {})
    return [*results, *([said] if text or calls or not results else [])]


def _text(blocks: Sequence[_Block]) -> str:
    return "".join(block.text for block in blocks if block.type == "text")


def _head(running: Running) -> dict[str, Any]:
    return {"id": f"msg_{running.id}", "type": "message", "role": "assistant", "model": running.parsed.model}


def _stopped(answer: Answer) -> dict[str, Any]:
    return {"stop_reason": STOPPED[answer.finish], "stop_sequence": None}


def _usage(running: Running) -> dict[str, int]:
    prompt, new = running.tokens
    return {"input_tokens": prompt, "output_tokens": new}


def _event(kind: str, **fields: object) -> str:
    data: Mapping[str, object] = {"type": kind, **fields}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
