"""Invented names, and the words of `words.yaml`. Bottom of the mini world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mmrl.tasks.mini import draws

WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
"""Words and templates of documents, questions, claims and messages, by their use."""

ONSETS = ("b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("n", "r", "l", "s", "k")
_REAL = """benin canada dakar gabon havana japan kabul kenan korea kosovo malawi manila milan monaco nepal nevada niger
panama paris rabat romania sahara saudi sudan tahiti tunis turin vegas venus human woman solar polar lunar rural honor
razor roman salon satan semen demon lemon melon novel panel level rebel fatal vital legal naval hotel model
nasal viral"""
REAL_WORDS = frozenset(_REAL.split())
"""Words that the syllables can make and that would mislead a reader."""


class Draws(draws.Draws):
    """Further draws that only the making of the world needs."""

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def chance(self, share: float) -> bool:
        """True with probability `share`."""
        return self._random() < share


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
