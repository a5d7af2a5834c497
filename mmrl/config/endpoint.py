"""An OpenAI-compatible endpoint: its address, limits, price and habits. The key itself is never in a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from mmrl.config.base import Idle, Section, address_problem
from mmrl.secrets import holder, secret_name

SENT = ("temperature", "top_p", "seed", "max_tokens")
"""Settings of a request that mmrl sends, and that an endpoint may not take."""
OWN_FIELDS = ("model", "messages", "stream", "n", "max_tokens", "max_completion_tokens")
"""Fields of a request's body that are mmrl's alone."""
OWN_HEADERS = (
    *("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding"),
    *("openai-organization", "openai-project"),
)
"""Headers that are mmrl's: the length and form of a request and its reply, and what has a key of its own."""
_PRINTED = r"\A[ -~]+\z"
"""Text that an HTTP header can hold: no line break, no letter beyond ASCII."""
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_HEADERS = re.compile(r"(auth|authorization|cookie|key|token|secret|password)$", re.IGNORECASE)


def _as_json(value: object) -> object:
    """Convert tuples, as which a config's lists come, to lists, recursively."""
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


def omitted(key: str, setting: str) -> Idle[Endpoint]:
    """Return the rule of a key about a setting that `omit` names."""
    return Idle(key, lambda endpoint: setting in endpoint.omit, f"with {setting} in omit; leave one of the two out")


class Endpoint(Section):
    """An OpenAI-compatible HTTP endpoint."""

    url: str = Field("https://api.openai.com/v1", description="base of the API, up to and with /v1")
    key_env: str | None = Field("OPENAI_API_KEY", description="environment variable with the key; null: no key is sent")
    organization: str | None = Field(None, pattern=_PRINTED, description="header OpenAI-Organization; null: not sent")
    project: str | None = Field(None, pattern=_PRINTED, description="header OpenAI-Project; null: not sent")
    timeout_s: float = Field(120.0, gt=0, description="limit of one HTTP request")
    attempts: int = Field(6, ge=1, description="tries of one request, the first one included")
    max_wait_s: float = Field(60.0, ge=0, description="longest pause between two tries; a longer Retry-After fails")
    concurrency: int = Field(16, ge=1, description="requests in flight at once")
    requests_per_minute: float | None = Field(None, gt=0, description="null: no limit")
    max_tokens_field: Literal["auto", "max_tokens", "max_completion_tokens"] = Field(
        "auto", description="name of the limit of new tokens; auto: max_tokens until the server asks for the other"
    )
    omit: tuple[Literal["temperature", "top_p", "seed", "max_tokens"], ...] = Field(
        (), description="settings that are not sent, for models that refuse them: the endpoint's own hold"
    )
    extra_body: Annotated[dict[str, JsonValue], BeforeValidator(_as_json)] = Field(
        {}, description="further fields of every request, e.g. reasoning_effort"
    )
    extra_headers: dict[str, str] = Field({}, description="further headers; a secret one as ${oc.env:NAME}")
    reasoning: Literal["drop", "cut", "keep"] = Field(
        "drop",
        description="thoughts beside the answer: drop: unread; cut: also a <think> block that begins the answer; keep: "
        "graded with it, in <think> tags",
    )
    price_in: float = Field(0.0, ge=0, description="USD per million prompt tokens, for the cost counter")
    price_cached: float | None = Field(None, ge=0, description="of those from the endpoint's cache; null: price_in")
    price_out: float = Field(0.0, ge=0, description="USD per million completion tokens, reasoning included")
    idle: ClassVar[list[Idle[Any]]] = [omitted("max_tokens_field", "max_tokens")]

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        if problem := address_problem(url, ", up to and with /v1"):
            raise ValueError(problem)
        return url

    @field_validator("extra_body")
    @classmethod
    def _body(cls, fields: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if problems := [f"got '{name}', which mmrl sets itself; leave it out" for name in fields if name in OWN_FIELDS]:
            raise ValueError(*problems)
        return fields

    @field_validator("extra_headers")
    @classmethod
    def _headers(cls, fields: dict[str, str]) -> dict[str, str]:
        # no sentence quotes a value, which may be a key
        problems = []
        for name, value in fields.items():
            if not _HEADER.fullmatch(name):
                problems.append(f"got {name!r:.60}, expected the name of an HTTP header")
            elif name.lower() in OWN_HEADERS:
                problems.append(f"got '{name}', which mmrl sets itself; leave it out")
            elif not (value.isascii() and value.isprintable()):
                problems.append(
                    f"got for '{name}' something that no HTTP header can hold (a line break, or beyond ASCII)"
                )
            # `validate` finds the other names of secrets, wherever they stand in a config
            elif _SECRET_HEADERS.search(name) and not secret_name(name) and holder(value) is None:
                problems.append(
                    f"got a text for '{name}', which says that it is a secret, and every run directory would keep it; "
                    f"take an environment variable: '{name}: ${{oc.env:NAME}}'"
                )
        if problems:
            raise ValueError(*problems)
        return fields

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        problems = [
            f"extra_body: got '{name}', which every request has already; name it in omit too, and this one is sent"
            for name in self.extra_body
            if name in SENT and name not in self.omit
        ]
        if self.key_env is not None and any(name.lower() == "authorization" for name in self.extra_headers):
            problems.append(f"extra_headers: got 'Authorization' beside key_env={self.key_env}; set key_env=null")
        if problems:
            raise ValueError(*problems)
        return self


class EndpointConfig(Endpoint):
    """A model behind such an endpoint."""

    model: str = Field(description="model name as the endpoint knows it")
