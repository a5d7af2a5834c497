"""Text to token ids: whole texts with the special tokens that a template wrote, and text that goes on inside one.

A tokenizer may treat the start of a text, or of what follows a special token, as the start of a word (SentencePiece's
blank in front: Llama 2, Mistral, Phi 3), so no piece is encoded on its own.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast
from weakref import ref

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SPENT = [0.0]
_PROBE = "a b"
_BEFORE = ("\n", "\ue000")
"""Texts that no vocabulary joins with what follows them, the second where a text begins with line breaks."""


class Encoder:
    """Encoder of one tokenizer.

    Texts come as parts: ordinary text and special tokens in turn, text first and last. Nothing in the former becomes a
    special token, whatever it looks like.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        # It is kept in a table by tokenizer, and must not keep its own key alive.
        self._tokenizer = ref(tokenizer)
        self._added = {token.content: (i, token) for i, token in tokenizer.added_tokens_decoder.items()}
        # Only tokens flagged special can end a turn or start a role; others (<think>) are a model's ordinary words.
        self.special = {text: i for text, (i, token) in self._added.items() if token.special}
        """Special token -> its id."""
        # Longest first, since one special token may begin like another.
        self.pattern = re.compile("|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or r"(?!)")
        self._ids = frozenset(self.special.values())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, which the caller holds."""
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        return tokenizer

    def parts(self, text: str) -> list[str]:
        """Cut a text at its special tokens."""
        return [str(part) for part in re.split(f"({self.pattern.pattern})", text)] if self.special else [text]

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Return the ids of a whole text, nothing added: the tokenizer's own, as far as no part looks special."""
        written = [self.special[token] for token in parts[1::2]]
        if not written:
            return self._plain(parts[0])
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = "".join(parts)
        ids = list(tokenizer.encode(text, add_special_tokens=False)) if backend is None else _fast(backend, text, False)
        if [i for i in ids if i in self._ids] == written:
            return ids
        if backend is None:
            return self._piecewise(parts)
        # With the special tokens written as others that no text contains, and without those that it does.
        text = "".join(part if number % 2 == 0 else self._alias(part) for number, part in enumerate(parts))
        return [self._meant.get(i, i) for i in _fast(self._copy, text, True)]

    def following(self, parts: Sequence[str]) -> list[int]:
        """Return the ids of a text that goes on after other text: decoded behind its ids, it is what was given."""
        for before, ids in self._starts:
            whole = self.encode([before + parts[0], *parts[1:]])
            if whole[: len(ids)] == ids:
                return whole[len(ids) :]
        return self.encode(parts)

    @cached_property
    def _starts(self) -> list[tuple[str, list[int]]]:
        """Texts to put in front, each with its ids; empty where every text has the same ids behind others as alone."""

        def decode(ids: list[int]) -> str:
            return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        alone = self._plain(_PROBE)
        if decode([*alone, *alone]) == 2 * _PROBE:
            return []
        starts = [(before, self._plain(before)) for before in _BEFORE]
        return [
            (before, ids)
            for before, ids in starts
            if decode([*ids, *self._plain(before + _PROBE)[len(ids) :]]) == decode(ids) + _PROBE
        ]

    def _plain(self, text: str) -> list[int]:
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        return _fast(backend, text, True)

    @cached_property
    def _nonce(self) -> str:
        return secrets.token_hex(8)

    def _alias(self, token: str) -> str:
        return f"\ue000{self._nonce}.{self.special[token]}\ue001"

    @cached_property
    def _copy(self) -> Tokenizer:
        from tokenizers import AddedToken, Tokenizer

        copy: Tokenizer = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        for text in self.special:
            token = self._added[text][1]
            copy.add_tokens([AddedToken(self._alias(text), **{flag: getattr(token, flag) for flag in flags})])
        return copy

    @cached_property
    def _meant(self) -> dict[int, int]:
        """Id of an alias -> id of its special token."""
        # Every alias was just added, so that it has an id.
        return {cast(int, self._copy.token_to_id(self._alias(text))): i for text, i in self.special.items()}

    def _piecewise(self, parts: Sequence[str]) -> list[int]:
        """Encode each part on its own, as a tokenizer in Python does."""
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self.special[part])
                continue
            # A special token may take the white space beside it.
            part = part.lstrip() if number and self._added[parts[number - 1]][1].rstrip else part
            part = part.rstrip() if number + 1 < len(parts) and self._added[parts[number + 1]][1].lstrip else part
            ids += self._plain(part) if part else []
        return ids


def _fast(backend: Tokenizer, text: str, as_text: bool) -> list[int]:
    """Encode with a fast tokenizer; `as_text`: no special token is recognised."""
    started = time.perf_counter()
    # A call that pads or cuts leaves that behind.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    backend.encode_special_tokens = as_text
    # Without the offsets that nobody reads here: two thirds of the time.
    ids = list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    _SPENT[0] += time.perf_counter() - started
    return ids


def tokenizer_seconds() -> float:
    """Return the seconds that this process has spent inside fast tokenizers, encoding prompts."""
    return _SPENT[0]
