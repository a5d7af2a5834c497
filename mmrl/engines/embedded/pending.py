"""Requests that wait in the `Batcher` or are decoded by the `RowDecoder`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mmrl.engines.base import Completion, Request
from mmrl.errors import RolloutError


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Request from its arrival to its outcome."""

    request: Request
    future: asyncio.Future[Completion]
    sort_key: tuple[tuple[int, int | str], ...]
    outcome: Completion | RolloutError | None = None
    """Set by the decoder when the job is done."""
