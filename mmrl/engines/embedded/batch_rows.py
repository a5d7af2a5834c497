"""Ends of completions, in plain Python: end-of-turn ids, stop strings, length limits. Knows no torch.

Between the decode loops, which make one token per row and step, and the `Completion` that a program receives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmrl import rng
from mmrl.config.base import LEAST_TEMPERATURE
from mmrl.engines.base import Completion, Request
from mmrl.errors import EngineFailure, LengthFailure, RequestFailure
from mmrl.models.load import rope_border

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.engines")

TOLERANCE, HALF_TOLERANCE = 1e-3, 0.2
"""Difference of log-probabilities computed in two ways that rounding explains: in float32 the largest; in half
precision the mean over sampled tokens, since single tokens of a real model differ by more than 0.5."""
EDGE_TOKENS = 8
"""Tokens decoded before the earliest one that can hold a stop string: a decode's left edge may be off by one."""


def difference(first: Sequence[float], second: Sequence[float], *, half: bool) -> float:
    """Return the difference of two computations of log-probabilities that is held against the tolerance."""
    # NumPy's, since one NaN must stay one.
    gaps = np.abs(np.subtract(first, second))
    return float(gaps.mean() if half else gaps.max())


@dataclass(slots=True, eq=False)
class BatchRow:
    """The completion of one request so far."""

    request: Request
    limit: int
    """Most tokens this row may have, `max_context` counted in."""
    uniforms: np.ndarray
    """(limit,) float64: token t is drawn with the t-th."""
    adapter: str | None = None
    """LoRA adapter of the row, where modules have separate weights."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The request's."""
        return self.request.prompt_ids


class Rules:
    """Limits of requests, and ends of completions.

    Args:
        tokenizer: decodes for stop strings; its special tokens count as text there.
        eos_ids: each ends a completion with `eos`.
        vocabulary: ids of prompts must be below it.
        max_context: most tokens of prompt and completion together; None for no limit.
        adapters: module name -> adapter name, where modules have separate weights.
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
        self._special: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self._pieces: dict[int, str] = {}

    def check(self, request: Request) -> None:
        """Refuse what cannot be generated for.

        Raises:
            LengthFailure: the prompt leaves no room in the context.
            RequestFailure: any other impossible request.
        """
        prompt, sampling = request.prompt_ids, request.sampling
        if self.max_context is not None and len(prompt) >= self.max_context:
            raise LengthFailure(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.max_context} tokens"
            )
        if not prompt:
            raise RequestFailure("the prompt has no tokens")
        # Checked here, where the error names the request: inside the batch it would be an index error for all rows.
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            raise RequestFailure(f"the prompt has a token id outside the model's vocabulary of {self.vocabulary}")
        if self.adapters is not None and request.module not in self.adapters:
            raise RequestFailure(f"module '{request.module}' has no adapter (there are {', '.join(self.adapters)})")
        if sampling.max_tokens < 1:
            raise RequestFailure(f"max_tokens: got {sampling.max_tokens}, expected at least 1")
        warm = sampling.temperature == 0 or sampling.temperature >= LEAST_TEMPERATURE
        if not (warm and 0 < sampling.top_p <= 1 and sampling.top_k >= 0):
            raise RequestFailure(
                f"got temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}; expected "
                f"temperature 0 or at least {LEAST_TEMPERATURE}, 0 < top_p <= 1, top_k >= 0"
            )

    def row(self, request: Request) -> BatchRow:
        """Return the empty row of a request that passed `check`."""
        limit = request.sampling.max_tokens
        # The prompt and all sampled tokens have positions; beyond the context the model was not trained on any.
        if self.max_context is not None:
            limit = min(limit, self.max_context - len(request.prompt_ids))
        return BatchRow(
            request=request,
            limit=limit,
            # All of them now: the draw of token t depends on the seed and t, not on how the row was batched.
            uniforms=rng.uniforms(request.sampling.seed, limit),
            adapter=self.adapters[request.module] if self.adapters is not None else None,
        )

    def append(self, row: BatchRow, token: int, logprob: float) -> str | None:
        """Add one token; returns why the completion is over (`eos`, `stop`, `length`) or None.

        Raises:
            EngineFailure: the log-probability is not a finite number (the weights have diverged).
        """
        if not logprob > -np.inf:  # false for nan as well
            raise EngineFailure(f"the model gave a log-probability of {logprob}; its weights may have diverged")
        row.ids.append(token)
        row.logprobs.append(logprob)
        if row.request.on_token is not None:
            row.request.on_token(token)
        if token in self.eos_ids:
            return "eos"
        if row.request.sampling.stop and self._stopped(row):
            return "stop"
        return "length" if len(row.ids) >= row.limit else None

    def completion(self, row: BatchRow, finish: str, policy_version: int) -> Completion:
        """Return the completion that the program receives."""
        return Completion(
            ids=tuple(row.ids), logprobs=tuple(row.logprobs), finish=finish, policy_version=policy_version
        )

    def _stopped(self, row: BatchRow) -> bool:
        """Return True if the newest token completes a stop string in the generated text."""
        # Decoding the text after every token would make a completion of T tokens cost T² / 2. So first a test of the
        # newest token alone, cached by id, and then the decode of a tail that is long enough for the longest string.
        newest = row.ids[-1]
        if newest not in self._pieces:
            self._pieces[newest] = self._decode([newest])
        # A piece decoded alone can lack a leading space, or show bytes of an unfinished character as U+FFFD.
        piece = self._pieces[newest]
        unknown = not piece or "\ufffd" in piece
        stops = [stop for stop in row.request.sampling.stop if stop]
        candidates = [stop for stop in stops if unknown or stop[-1] == " " or stop[-1] in piece]
        if not candidates:
            return False
        # A token that adds text adds at least one byte, so a stop string of n bytes lies in the last n such tokens.
        tail = max(len(stop.encode()) for stop in candidates) + EDGE_TOKENS
        if self._holds(row.ids[-tail:], candidates):
            return True
        # The same without special tokens, which may add nothing to the text and stand between two parts of the string.
        ordinary = [token for token in row.ids if token not in self._special]
        return len(ordinary) < len(row.ids) and self._holds(ordinary[-tail:], candidates)

    def _holds(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        text = self._decode(ids)
        return any(stop in text for stop in stops)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def context_limit(settings: PretrainedConfig, *limits: int | None) -> int | None:
    """Return the smallest of the model's positions and `limits`; None where there is no limit at all.

    Contexts end where a model begins to encode positions otherwise (`rope_border`): a row that crosses it would go on
    from keys of another encoding, and change that of the rows beside it.
    """
    # Not every architecture has a table of positions (ALiBi, state-space models).
    candidates = [*limits, getattr(settings, "max_position_embeddings", None), rope_border(settings)]
    return min((value for value in candidates if value), default=None)


def engine_context(settings: PretrainedConfig, *limits: int | None) -> int | None:
    """Return `context_limit` for an engine that is being built, and say where the encoding of positions ends it."""
    limit = context_limit(settings, *limits)
    if limit is not None and limit == rope_border(settings):
        LOG.warning("task.max_context: contexts end at %d tokens, where this model encodes positions otherwise", limit)
    return limit
