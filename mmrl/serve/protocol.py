"""OpenAI's protocol: what is read of a request, within bounds, what is refused, and the objects of a reply.

What would change the completion and cannot be had is refused, never passed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mmrl.config.base import Temperature
from mmrl.serve.json_schema import check_schema

LARGEST_REQUEST = 4 * 2**20
"""Bytes of a request's body."""
MOST_TOKENS = 2**17
"""New tokens of one completion, where neither the request nor the model says less."""
MOST_STOPS, LONGEST_STOP = 16, 1000
"""Stop strings of a request, and characters of one."""
MOST_CHOICES, MOST_TOOLS = 16, 256
"""Choices of a reply (`n`), and tools of a request."""
WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"),
    *("prompt_cache_retention", "prediction", "verbosity", "usage", "priority", "cache_prompt", "keep_alive"),
)
"""Fields that no completion depends on, where the schema has none."""
NEUTRAL: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "modalities": (["text"],),
    # of vLLM, SGLang, OpenRouter and others
    "thinking": (),
    "reasoning": ({},),
    "provider": ({},),
    "transforms": ([],),
    "options": ({},),
    "min_p": (0,),
    "top_a": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "detokenize": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "chat_template_kwargs": ({},),
}
"""Fields that cannot be had, and the values with which they change nothing; null is one for all."""


class Refused(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        message: value received and value expected.
        param: the field.
        code: OpenAI's word for it, where it has one.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, object]:
        """Return an OpenAI error object."""
        return error_object(self.status, self.message, self.param, self.code)


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Return an OpenAI error object."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def joined(content: object, kinds: Collection[object] = ("text",)) -> object:
    """Join the parts of a message, of these types, into one text."""
    if not isinstance(content, list):
        return content
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    # Dropped silently, an image would leave a question about nothing.
    if any(part.get("type") not in kinds or not isinstance(part.get("text"), str) for part in parts):
        raise ValueError("got a part that is no text, and this model reads text alone")
    return "".join(str(part["text"]) for part in parts)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingRequest(_Body):
    """Fields that chat completions and completions share."""

    model: str
    temperature: Temperature = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, BeforeValidator(lambda value: 0 if value == -1 else value)] = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def limit(self) -> int:
        """New tokens at most."""
        # Two names of one limit, of older and newer clients; where both are sent the lower one holds.
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min([*limits, MOST_TOKENS])

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, without empty ones."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
            raise Refused(400, f"stop: expected at most {MOST_STOPS} texts of {LONGEST_STOP} characters", "stop")
        # An empty text is in every text, and would end each completion before it begins.
        return tuple(text for text in texts if text)


def _names_function(value: dict[str, Any]) -> dict[str, Any]:
    function = value.get("function")
    if value.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("expected {type: function, function: {name: …}}")
    return value


OfFunction = Annotated[dict[str, Any], AfterValidator(_names_function)]
"""A tool, a call of one or the choice of one: `{"type": "function", "function": {"name": …}}`."""


def _neutral_message(message: object) -> object:
    """Leave out what clients copy from a reply into the next request and no prompt has."""
    if not isinstance(message, Mapping):
        return message
    copied = (
        *("annotations", "parsed", "reasoning_content", "reasoning", "reasoning_details", "thinking_blocks"),
        *("provider_specific_fields", "cache_control"),
    )
    kept = {name: value for name, value in message.items() if value not in (None, []) and name not in copied}
    return {"content": "", **kept}


class Message(_Body):
    """Message of a chat request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(joined)]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[OfFunction] = []

    def rendered(self) -> dict[str, Any]:
        """Convert for a chat template, where the role developer is system."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.tool_calls:
            message["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as chat templates and `ctx.call` have it, its arguments as an object."""
    name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
    with suppress(ValueError, TypeError, RecursionError):  # what is no JSON stays as it is
        arguments = json.loads(arguments)
    return {"id": call.get("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


class ResponseFormat(_Body):
    """`response_format`: a reply that is no such JSON counts as one that does not parse."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" or self.json_schema:
            schema = self.json_schema.get("schema")
            if not isinstance(schema, dict):
                raise ValueError(f"schema: got {schema!r:.60}, expected a JSON schema that is an object")
            check_schema(schema)
        return self

    @property
    def wanted(self) -> Mapping[str, Any]:
        """JSON schema of a reply."""
        schema: Mapping[str, Any] = self.json_schema.get("schema", {"type": "object"})
        return schema


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`. In a rollout the run's own temperature, `top_p` and `seed` hold."""

    messages: list[Annotated[Message, BeforeValidator(_neutral_message)]] = Field(min_length=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    tools: list[OfFunction] = Field([], max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | OfFunction = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    logprobs: bool = False
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("tool_choice")
    @classmethod
    def _can_be_met(cls, choice: str | dict[str, Any], info: ValidationInfo) -> str | dict[str, Any]:
        # Else every reply would be of another form than was asked for, by no fault of the model.
        names = [tool["function"]["name"] for tool in info.data.get("tools", ())]
        if choice == "required" and not names:
            raise ValueError("asks for a call of a tool, and the request has none; expected tools")
        if isinstance(choice, dict) and (name := choice["function"]["name"]) not in names:
            raise ValueError(
                f"got {name!r:.60}, expected a tool of the request: {', '.join(names) or 'it has none':.200}"
            )
        return choice

    def refuse_other_prompts(self, unchanged_by: Callable[[Mapping[str, Any]], bool]) -> None:
        """Refuse arguments of the chat template with which prompts would not be those of the run.

        Args:
            unchanged_by: arguments -> whether prompts are the same with them.

        Raises:
            Refused: one changes prompts.
        """
        arguments = {f"chat_template_kwargs.{name}": {name: value} for name, value in self.chat_template_kwargs.items()}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = {"reasoning_effort": self.reasoning_effort}
        for field, argument in arguments.items():
            if not unchanged_by(argument):
                got = f"{next(iter(argument.values()))!r:.60}"
                text = f"{field:.100}: with {got} this model's prompts would not be those of its training; leave it out"
                raise Refused(400, text, field, "unsupported_value")

    def conversation(self) -> list[dict[str, Any]]:
        """Convert messages for a chat template."""
        return [message.rendered() for message in self.messages]

    def functions(self) -> list[dict[str, Any]]:
        """Convert tools for a chat template."""
        named = [{key: value for key, value in tool["function"].items() if value is not None} for tool in self.tools]
        return [{"type": "function", "function": function} for function in named]


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str]
    add_special_tokens: bool = True


BodyT = TypeVar("BodyT", bound=BaseModel)


def parse_request(schema: type[BodyT], body: bytes) -> BodyT:
    """Parse and check a request of OpenAI's.

    Raises:
        Refused: it is none, or asks for what cannot be had.
    """
    return parse_fields(schema, body, WITHOUT_EFFECT, NEUTRAL)


def parse_fields(
    schema: type[BodyT], body: bytes, ignored: Sequence[str], neutral: Mapping[str, Sequence[object]]
) -> BodyT:
    """Parse and check a body.

    Args:
        ignored: fields that no completion depends on.
        neutral: fields that cannot be had where the schema has none -> values with which they change nothing.

    Raises:
        Refused: see `parse_request`.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body is no JSON object")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # No tokenizer takes it, and no reply could quote it.
        raise Refused(400, "a text of the body has half a character (a lone surrogate)") from None
    # Clients send many fields at their default; refusing those would refuse most clients.
    for name, harmless in neutral.items():
        if name in schema.model_fields:
            continue
        value = fields.pop(name, None)
        # 0 is not false: `logprobs` of 0 asks for those of the sampled tokens.
        if value is not None and (type(value) is bool, value) not in [(type(one) is bool, one) for one in harmless]:
            raise Refused(400, f"{name}: this server does not have it; leave it out", name, "unsupported_parameter")
    # null stands for a field that is left out
    unread = set(ignored) - set(schema.model_fields)
    values = {name: value for name, value in fields.items() if value is not None and name not in unread}
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        # OpenAI's error object has room for one field.
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise Refused(400, f"{param[:100]}: unknown field", param[:100], "unknown_parameter") from None
        raise Refused(400, f"{param}: {first['msg']}", param) from None
