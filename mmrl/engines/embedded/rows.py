"""When a completion ends, on plain Python: end-of-turn ids, stop strings, length limits. Knows no torch.

Between the decode loops, which make one token per row and step, and the `Completion` that a program receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl import rng
from mmrl.engines.base import Completion, Request
from mmrl.errors import EngineFailure, LengthFailure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGE_TOKENS = 8
"""Tokens decoded before the earliest one that can hold a stop string: a decode's left edge may be off by one."""


@dataclass(slots=True, eq=False)
class Row:
    """The completion of one request so far."""

    prompt_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    limit: int
    """Most tokens this row may have, `max_context` counted in."""
    uniforms: np.ndarray
    """(limit,) float64: token t is drawn with the t-th."""
    adapter: str | None = None
    """The adapter that speaks, where modules have weights of their own."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Rules:
    """What a request may ask for, and when its completion ends.

    Args:
        tokenizer: decodes for stop strings; its special tokens count as text there.
        eos_ids: each ends a completion with `eos`.
        vocabulary: ids of prompts must be below it.
        max_context: most tokens of prompt and completion together; None for no limit.
        adapters: module name -> adapter name, where modules have weights of their own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Iterable[int],
        vocabulary: int,
        max_context: int | None,
        adapters: Mapping[str, str] | None = None,
    ):
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.vocabulary = vocabulary
        self.max_context = max_context
        self.adapters = adapters
        self._special: frozenset[int] = frozenset(getattr(tokenizer, "all_special_ids", ()) or ())
        self._pieces: dict[int, str] = {}

    def check(self, request: Request) -> None:
        """Refuse what cannot be generated for.

        Raises:
            LengthFailure: the prompt leaves no room in the context.
            EngineFailure: any other impossible request.
        """
        prompt, sampling = request.prompt_ids, request.sampling
        if self.max_context is not None and len(prompt) >= self.max_context:
            raise LengthFailure(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.max_context} tokens"
            )
        if not prompt:
            raise EngineFailure("the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            raise EngineFailure(f"the prompt has a token id outside the model's vocabulary of {self.vocabulary}")
        if self.adapters is not None and request.module not in self.adapters:
            raise EngineFailure(f"module '{request.module}' has no adapter (there are {', '.join(self.adapters)})")
        if sampling.max_tokens < 1:
            raise EngineFailure(f"max_tokens: got {sampling.max_tokens}, expected at least 1")
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
            raise EngineFailure(
                f"got temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}; expected "
                "temperature >= 0, 0 < top_p <= 1, top_k >= 0"
            )

    def row(self, request: Request) -> Row:
        """The empty row of a request that passed `check`."""
        sampling = request.sampling
        limit = sampling.max_tokens
        if self.max_context is not None:
            limit = min(limit, self.max_context - len(request.prompt_ids))
        return Row(
            prompt_ids=request.prompt_ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=tuple(text for text in sampling.stop if text),
            limit=limit,
            uniforms=rng.uniforms(sampling.seed, limit),
            adapter=self.adapters[request.module] if self.adapters is not None else None,
        )

    def append(self, row: Row, token: int, logprob: float) -> str | None:
        """Add one token; returns why the completion is over (`eos`, `stop`, `length`) or None.

        Raises:
            EngineFailure: the log-probability is not a finite number (the weights have diverged).
        """
        if not logprob > -np.inf:
            raise EngineFailure(f"the model gave a log-probability of {logprob}; its weights may have diverged")
        row.ids.append(token)
        row.logprobs.append(logprob)
        if token in self.eos_ids:
            return "eos"
        if row.stop and self._stopped(row):
            return "stop"
        return "length" if len(row.ids) >= row.limit else None

    def completion(self, row: Row, finish: str, policy_version: int) -> Completion:
        """What the program receives."""
        return Completion(
            ids=tuple(row.ids), logprobs=tuple(row.logprobs), finish=finish, policy_version=policy_version
        )

    def _stopped(self, row: Row) -> bool:
        """Whether the newest token completes a stop string in the generated text."""
        piece = self._piece(row.ids[-1])
        candidates = [stop for stop in row.stop if _may_end(stop, piece)]
        if not candidates:
            return False
        tail = max(len(stop.encode()) for stop in candidates) + EDGE_TOKENS
        if self._holds(row.ids[-tail:], candidates):
            return True
        plain = [token for token in row.ids if token not in self._special]
        return len(plain) < len(row.ids) and self._holds(plain[-tail:], candidates)

    def _holds(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in stops)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def _may_end(stop: str, piece: str) -> bool:
    """Whether a token of this text may complete `stop`: a cheap filter that never says no wrongly.

    A piece decoded alone can lack a leading space or show bytes of an unfinished character as U+FFFD.
    """
    return stop[-1] in piece or stop[-1] == " " or not piece or "\ufffd" in piece


def eos_ids(tokenizer: Any, generation_config: Any) -> frozenset[int]:
    """End-of-turn ids: the tokenizer's own and the list of the model's generation config."""
    found: set[int] = set()
    for source in (tokenizer, generation_config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)
