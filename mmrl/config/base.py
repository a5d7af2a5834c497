"""Base of all config models: frozen, unknown keys refused, no silent conversion."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the config; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )


def no_lookalike(value: Any) -> Any:
    """For choices among whole numbers, where Python takes `true` for 1 and 1.0 for 1.

    Raises:
        ValueError: a truth value or a fraction.
    """
    if isinstance(value, bool | float):
        raise ValueError(f"got {value!r}, expected a whole number")
    return value


def is_address(url: str) -> bool:
    """Whether `url` is http(s)://, with a host and, where it names one, a port that exists."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is no number or above 65535, a bracket that is not closed
        return False
    known = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return known and url.isprintable() and " " not in url
