"""Engines: prompt token ids in, sampled token ids and log-probabilities out."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mmrl.engines.base import Completion, Engine, Request, Sampling, Tokenizer
from mmrl.errors import ConfigError, unknown

ENGINES: dict[str, str] = {
    "transformers": "mmrl.engines.transformers:TransformersEngine",
}
"""Name in `engine.name` -> `module:class`, imported when it is asked for, since engines import torch."""


def engine_class(name: str) -> Any:
    """The class of one engine.

    Raises:
        ConfigError: no engine has that name.
    """
    if name not in ENGINES:
        raise ConfigError(unknown("engine.name", name, ENGINES))
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(import_module(module), attribute)


__all__ = ["ENGINES", "Completion", "Engine", "Request", "Sampling", "Tokenizer", "engine_class"]
