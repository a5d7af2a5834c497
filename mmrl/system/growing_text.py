"""Text of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class GrowingText:
    """Decodes token ids one by one; the parts together are the beginning of what `decode` gives for all.

    Args:
        marks: tells a token that marks a part of a reply: text ends before the first one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], marks: Callable[[int], bool] = lambda token: False):
        self.text = ""
        self._decode, self._marks = decode, marks
        self._ids: list[int] = []
        # Text is decoded from a token before the new ones on: some tokenizers drop a space at the left edge.
        self._context, self._decoded = 0, 0
        self._parts = False

    def add(self, token: int) -> str:
        """Add a token. Returns the text that is new with it: empty inside of a character, and within marked parts."""
        self._ids.append(token)
        # What is text so far may be thoughts: which part is the reply is known when it is complete.
        self._parts = self._parts or self._marks(token)
        before = self._decode(self._ids[self._context : self._decoded])
        after = self._decode(self._ids[self._context :])
        if self._parts or len(after) <= len(before) or after.endswith("\ufffd"):  # half of a character
            return ""
        self._context, self._decoded = self._decoded, len(self._ids)
        self.text += after[len(before) :]
        return after[len(before) :]
