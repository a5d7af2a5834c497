"""An OpenAI-compatible endpoint: its address, limits and price. The key itself is never in a config."""

from __future__ import annotations

from pydantic import Field, field_validator

from mmrl.config.base import Section, address_problem


class Endpoint(Section):
    """An OpenAI-compatible HTTP endpoint."""

    url: str = Field("https://api.openai.com/v1", description="base of the API, up to and with /v1")
    key_env: str | None = Field("OPENAI_API_KEY", description="environment variable with the key; null: no key is sent")
    timeout_s: float = Field(120.0, gt=0, description="limit of one HTTP request")
    attempts: int = Field(6, ge=1, description="tries of one request, the first one included")
    max_wait_s: float = Field(60.0, ge=0, description="longest pause between two tries; a longer Retry-After fails")
    concurrency: int = Field(16, ge=1, description="requests in flight at once")
    requests_per_minute: float | None = Field(None, gt=0, description="null: no limit")
    price_in: float = Field(0.0, ge=0, description="USD per million prompt tokens, for the cost counter")
    price_out: float = Field(0.0, ge=0, description="USD per million completion tokens")

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        if problem := address_problem(url, ", up to and with /v1"):
            raise ValueError(problem)
        return url


class EndpointConfig(Endpoint):
    """A model behind such an endpoint."""

    model: str = Field(description="model name as the endpoint knows it")
