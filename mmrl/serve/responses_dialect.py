"""OpenAI's second dialect: `POST /v1/responses`, its replies and streams, over the requests of chat completions.

Nothing is kept between requests: a client sends what came before in `input`, as the Agents SDK does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from typing_extensions import override

from mmrl.serve.front import Dialect, Running, failed
from mmrl.serve.protocol import (
    WITHOUT_EFFECT,
    ChatRequest,
    ResponseFormat,
    SamplingRequest,
    joined,
    parse_fields,
    parse_request,
)

IGNORED = (*WITHOUT_EFFECT, "stream_options", "prompt_cache_options")
NEUTRAL = {
    "truncation": ("disabled",),
    "background": (False,),
    "top_logprobs": (0,),
    "context_management": ([],),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
}
"""Fields that cannot be had, and the values with which they change nothing."""

Text = Annotated[str, BeforeValidator(partial(joined, kinds=("input_text", "output_text", "text")))]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Item(BaseModel):
    """Item of `input`; ids and states that are sent back with it say nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Message(_Item):
    model_config = ConfigDict(extra="forbid")
    id: object = None
    type: object = None
    status: object = None
    phase: object = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class _Call(_Item):
    call_id: str
    name: str
    arguments: str


class _Output(_Item):
    call_id: str
    output: Text


class _Thoughts(_Item):
    """Thoughts of a reply that is sent back; they are in its context already."""


Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")]
    | Annotated[_Thoughts, Tag("reasoning")],
    Discriminator(
        lambda item: item.get("type", "message") if isinstance(item, dict) else None,
        custom_error_type="item",
        custom_error_message="expected an item of type message, function_call, function_call_output or reasoning",
    ),
]


class _Tool(_Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Choice(_Body):
    type: Literal["function"]
    name: str


def _as_chats(form: object) -> object:
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    return form


class _TextOptions(_Body):
    format: Annotated[ResponseFormat, BeforeValidator(_as_chats)] = ResponseFormat(type="text")
    verbosity: str | None = None


class _Reasoning(_Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(_Body):
    """`POST /v1/responses`."""

    model: str
    input: Annotated[list[Item], BeforeValidator(_as_items)] = Field(min_length=1)
    instructions: str | None = None
    tools: list[_Tool] = []
    tool_choice: Literal["none", "auto", "required"] | _Choice = "auto"
    parallel_tool_calls: bool = True
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    include: list[Literal["reasoning.encrypted_content"]] = []
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False

    def as_chat(self) -> dict[str, Any]:
        """Return the same request of chat completions."""
        named = self.tool_choice
        choice = named if isinstance(named, str) else {"type": "function", "function": {"name": named.name}}
        return {
            "model": self.model,
            "messages": self._messages(),
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.model_dump(),
            "reasoning_effort": self.reasoning.effort,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
        }

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        messages += [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        for item in self.input:
            if isinstance(item, _Message):
                messages.append({"role": item.role, "content": item.content})
            elif isinstance(item, _Output):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            elif isinstance(item, _Call):
                # The calls of a reply, and its text before them, are items of their own.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
        return messages


class Responses(Dialect):
    """Dialect of `POST /v1/responses`."""

    @override
    def parse(self, body: bytes) -> SamplingRequest:
        parsed = parse_fields(ResponsesRequest, body, IGNORED, NEUTRAL)
        return parse_request(ChatRequest, json.dumps(parsed.as_chat()).encode())

    @override
    def reply(self, running: Running) -> dict[str, Any]:
        (answer,), (prompt, new) = running.finished.answers, running.finished.tokens
        name, cut = running.id, answer.finish == "length"
        state = "incomplete" if cut else "completed"
        output: list[dict[str, Any]] = []
        if answer.reasoning:
            thoughts = [{"type": "reasoning_text", "text": answer.reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": thoughts})
        if answer.text or not answer.tool_calls:
            output.append(_message(name, [_part(answer.text)]))
        for number, call in enumerate(answer.tool_calls):
            ids = {"id": f"fc_{name}_{number}", "call_id": call["id"]}
            output.append({"type": "function_call", **ids, **call["function"]})
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + new,
        }
        return {
            **_begun(running),
            "status": state,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [{**item, "status": state} for item in output],
            "usage": usage,
        }

    @override
    async def events(self, running: Running) -> AsyncIterator[str]:
        numbers = itertools.count()

        def event(kind: str, **fields: object) -> str:
            kind = kind if kind == "error" else f"response.{kind}"
            data = {"type": kind, "sequence_number": next(numbers), **fields}
            return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

        yield event("created", response=_begun(running))
        yield event("in_progress", response=_begun(running))
        live = running.begun is not None
        try:
            if live:
                empty = _message(running.id, [])
                at: dict[str, Any] = {"output_index": 0, "item_id": empty["id"], "content_index": 0}
                yield event("output_item.added", output_index=0, item={**empty, "status": "in_progress"})
                yield event("content_part.added", **at, part=_part(""))
                async for text in running.pieces():
                    yield event("output_text.delta", **at, delta=text, logprobs=[])
            whole = self.reply(running)
        except Exception as error:  # the status is sent already
            yield event("error", **failed(error)[1])
            return
        for index, item in enumerate(whole["output"]):
            called = item["type"] == "function_call"
            filled = "arguments" if called else "content"
            at = {"output_index": index, "item_id": item["id"]}
            if not live:
                empty = {**item, "status": "in_progress", filled: type(item[filled])()}
                yield event("output_item.added", output_index=index, item=empty)
            if called:
                yield event("function_call_arguments.delta", **at, delta=item["arguments"])
                yield event("function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
            for number, part in enumerate(item["content"] if item["type"] == "message" else ()):
                at["content_index"] = number
                if not live:
                    yield event("content_part.added", **at, part=_part(""))
                    yield event("output_text.delta", **at, delta=part["text"], logprobs=[])
                yield event("output_text.done", **at, text=part["text"], logprobs=[])
                yield event("content_part.done", **at, part=part)
            yield event("output_item.done", output_index=index, item=item)
        yield event(whole["status"], response=whole)


def _begun(running: Running) -> dict[str, Any]:
    """Return a reply of which nothing is known yet."""
    parsed = running.parsed
    assert isinstance(parsed, ChatRequest)
    choice = parsed.tool_choice
    return {
        "id": f"resp_{running.id}",
        "object": "response",
        "created_at": running.created,
        "model": parsed.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "tools": [{"type": "function", **tool["function"]} for tool in parsed.tools],
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", **choice["function"]},
        "parallel_tool_calls": parsed.parallel_tool_calls,
        "usage": None,
    }


def _message(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": parts}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
