"""Invented names, and draws that are the same on every machine. Bottom of the mini world.

`random.Random.random` is the only generator method whose stream Python guarantees across versions, so every draw is
made from it alone.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TypeVar

from mmrl import rng

T = TypeVar("T")

ONSETS = ("b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("n", "r", "l", "s", "k")
_REAL = """benin canada dakar gabon havana japan kabul kenan korea kosovo malawi manila milan monaco nepal nevada niger
panama paris rabat romania sahara saudi sudan tahiti tunis turin vegas venus human woman solar polar lunar rural honor
razor roman salon satan semen demon lemon melon novel panel level rebel fatal vital legal naval hotel model
nasal viral"""
REAL_WORDS = frozenset(_REAL.split())
"""Words that the syllables can make and that would mislead a reader."""


class Draws:
    """A stream of draws for one purpose; equal keys give equal streams.

    Args:
        key: what the draws are for, the world's seed first.
    """

    def __init__(self, *key: int | str):
        # the method itself stays: nothing else of the generator may be used here
        self._random = rng.stream("mini", *key).random

    def below(self, count: int) -> int:
        """An integer in [0, count)."""
        return int(self._random() * count)

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return self._random() < share

    def pick(self, choices: Sequence[T]) -> T:
        """One of `choices`."""
        return choices[self.below(len(choices))]

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Permute in place (Fisher-Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


def invent_words(draws: Draws, count: int) -> list[str]:
    """`count` different capitalised words of two or three syllables, none of them a listed real word."""
    invented: dict[str, None] = {}
    while len(invented) < count:
        syllables = 3 if draws.chance(0.25) else 2
        word = "".join(draws.pick(ONSETS) + draws.pick(VOWELS) for _ in range(syllables))
        if syllables == 2:
            word += draws.pick(CODAS)
        if word not in REAL_WORDS:
            invented.setdefault(word.capitalize())
    return list(invented)
