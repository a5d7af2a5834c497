"""Base of all config models: frozen, unknown keys refused, no silent conversion."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of the config; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )
