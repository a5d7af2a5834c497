"""`algo.*` of a stage that optimises prompts: one schema per optimiser of DSPy."""

from __future__ import annotations

from typing import Literal

from mmrl.config.base import Section


class PromptConfig(Section):
    """What every optimiser of prompts has."""

    name: str


class Miprov2Config(PromptConfig):
    """MIPROv2: instructions and demonstrations of all modules together (arXiv 2406.11695)."""

    name: Literal["miprov2"]


PROMPT_SCHEMAS: dict[str, type[PromptConfig]] = {"miprov2": Miprov2Config}
"""Optimiser -> schema. The same names are in `conf/algo/`."""
