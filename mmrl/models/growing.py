"""The text of a completion while its tokens come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrl.models.chat import decode_text, marked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GrowingText:
    """Decodes token ids one by one; the parts together are the beginning of what `decode_text` gives for all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Text is decoded from a token before the new ones on: some tokenizers drop a space at the left edge.
        self._context, self._decoded = 0, 0
        self._parts = False

    def add(self, token: int) -> str:
        """Add a token. Returns the text that is new with it: empty inside of a character, and within marked parts."""
        self._ids.append(token)
        # What is text so far may be thoughts: which part is the reply is known when it is complete.
        self._parts = self._parts or marked(self._tokenizer, [token])
        before = decode_text(self._tokenizer, self._ids[self._context : self._decoded])
        after = decode_text(self._tokenizer, self._ids[self._context :])
        if self._parts or len(after) <= len(before) or after.endswith("\ufffd"):  # half of a character
            return ""
        self._context, self._decoded = self._decoded, len(self._ids)
        self.text += after[len(before) :]
        return after[len(before) :]
