"""Draws that are the same on every machine and Python version, for the mini world's demonstrations.

`random.Random.random` is the only generator method whose stream Python guarantees across versions, so every draw is
made from it alone.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TypeVar

from mmrl import rng

T = TypeVar("T")


class Draws:
    """A stream of draws for one purpose; equal keys give equal streams.

    Args:
        key: purpose of the draws.
    """

    def __init__(self, *key: int | str):
        # the method itself stays: nothing else of the generator may be used here
        self._random = rng.stream("mini", *key).random

    def below(self, count: int) -> int:
        """Draw an integer in [0, count)."""
        return int(self._random() * count)

    def pick(self, choices: Sequence[T]) -> T:
        """Draw one of `choices`."""
        return choices[self.below(len(choices))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Permute `items` in place (Fisher-Yates)."""
        for last in range(len(items) - 1, 0, -1):
            index = self.below(last + 1)
            items[last], items[index] = items[index], items[last]
