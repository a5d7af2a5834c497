"""Anthropic's dialect: `POST /v1/messages`, its replies, streams and errors, over the requests of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import override

from mmrl.serve.front import Answer, Dialect, Running, failed
from mmrl.serve.protocol import ChatRequest, Refused, SamplingRequest, parse_fields, parse_request

STOPPED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""OpenAI's finish reasons in Anthropic's words."""
WITHOUT_EFFECT = ("metadata", "service_tier", "cache_control", "inference_geo", "speed")
NEUTRAL: Mapping[str, Sequence[object]] = {"mcp_servers": ([],), "context_management": ({}, {"edits": []})}
"""Fields that cannot be had, and the values with which they change nothing."""


class _Block(BaseModel):
    """Block of a message; what it says to caches, and of citations, says nothing to a model."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Text(_Block):
    type: Literal["text"]
    text: str


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[list[_Text], BeforeValidator(_as_blocks)]


class _Call(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


class _Result(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool = False

    @property
    def shown(self) -> str:
        """What a model reads: an error as that of a tool of an environment."""
        text = _text(self.content or ())
        return str({"error": text}) if self.is_error else text


class _Thoughts(_Block):
    """Thoughts of a reply that is sent back; they are in its context already."""

    type: Literal["thinking", "redacted_thinking"]


Block = _Text | _Call | _Result | _Thoughts


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Message(_Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Annotated[Block, Field(discriminator="type")]], BeforeValidator(_as_blocks)]


class _Tool(_Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}
    type: Literal["custom"] = "custom"
    cache_control: dict[str, Any] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] = []


class _Choice(_Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Format(_Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _Output(_Body):
    effort: str | None = None
    format: _Format | None = None


class MessagesRequest(_Body):
    """`POST /v1/messages`."""

    model: str
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: Texts = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=0)
    stop_sequences: list[str] = []
    stream: bool = False
    tools: list[_Tool] = []
    tool_choice: _Choice | None = None
    thinking: dict[Literal["type"], Literal["disabled"]] | None = None
    output_config: _Output = _Output()

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
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "reasoning_effort": self.output_config.effort,
        }
        if (form := self.output_config.format) is not None:
            body["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema_}}
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
            body["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return body


class Messages(Dialect):
    """Dialect of `POST /v1/messages`."""

    @override
    def parse(self, body: bytes) -> SamplingRequest:
        parsed = parse_fields(MessagesRequest, body, WITHOUT_EFFECT, NEUTRAL)
        if parsed.messages[-1].role == "assistant":
            raise Refused(
                400,
                "messages: the last one is the assistant's, and this server does not go on with a reply that was begun "
                "(prefill); expected one of the user",
                "messages",
            )
        return parse_request(ChatRequest, json.dumps(parsed.as_openai()).encode())

    @override
    def reply(self, running: Running) -> dict[str, Any]:
        answer = running.finished.answers[0]
        blocks = [{**block, **filled} for block, filled, _ in _contents(answer)]
        return {**_head(running), "content": blocks, **_stopped(answer), "usage": _usage(running)}

    @override
    async def events(self, running: Running) -> AsyncIterator[str]:
        usage = {"input_tokens": running.prompt_tokens, "output_tokens": 0}
        begun = {**_head(running), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=begun)
        try:
            if running.begun is not None:
                yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                async for text in running.pieces():
                    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
                yield _event("content_block_stop", index=0)
            answer = running.finished.answers[0]
            for index, (block, _, delta) in enumerate(_contents(answer) if running.begun is None else ()):
                yield _event("content_block_start", index=index, content_block=block)
                yield _event("content_block_delta", index=index, delta=delta)
                yield _event("content_block_stop", index=index)
            yield _event("message_delta", delta=_stopped(answer), usage=_usage(running))
            yield _event("message_stop")
        except Exception as error:  # the status is sent already
            yield _event("error", **self.error(*failed(error)))

    @override
    def error(self, status: int, refusal: dict[str, Any]) -> dict[str, Any]:
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
        empty = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        # As the model wrote them, also where they are no object: an empty one would be other arguments.
        filled = {"input": json.loads(arguments)}
        blocks.append((empty, filled, {"type": "input_json_delta", "partial_json": arguments}))
    return blocks


def _converted(message: _Message) -> list[dict[str, Any]]:
    """Return a message in OpenAI's dialect, where each result of a tool is a message of its own."""
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.shown}
        for block in message.content
        if isinstance(block, _Result)
    ]
    calls = []
    for block in (block for block in message.content if isinstance(block, _Call)):
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        calls.append({"id": block.id, "type": "function", "function": function})
    text = _text(message.content)
    said: dict[str, Any] = {"role": message.role, "content": text} | ({"tool_calls": calls} if calls else {})
    return [*results, *([said] if text or calls or not results else [])]


def _text(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, _Text))


def _head(running: Running) -> dict[str, Any]:
    return {"id": f"msg_{running.id}", "type": "message", "role": "assistant", "model": running.parsed.model}


def _stopped(answer: Answer) -> dict[str, Any]:
    reason = "stop_sequence" if answer.finish == "stop" and answer.stop else STOPPED[answer.finish]
    return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}


def _usage(running: Running) -> dict[str, int]:
    prompt, new = running.finished.tokens
    return {"input_tokens": prompt, "output_tokens": new}


def _event(kind: str, **fields: object) -> str:
    data: Mapping[str, object] = {"type": kind, **fields}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
