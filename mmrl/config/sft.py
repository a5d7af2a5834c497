"""`algo.*` of a supervised stage."""

from __future__ import annotations

from typing import Literal

from mmrl.config.base import Section

SFT = "sft"
"""Its name after `algo=`."""


class SftConfig(Section):
    """Supervised training on demonstrations."""

    name: Literal["sft"]
