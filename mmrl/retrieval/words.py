"""Words of a text, alike for the passages of an index and for what is looked up in them. Used by BM25,
coverage, prompts and metrics."""

from __future__ import annotations

import re
import unicodedata

import regex

UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that put no spaces between words, for a character class of `regex`."""
_CHARACTER = rf"[{UNSPACED}]"
# Letters and the accents and vowel signs on them: `re` ends a word at each sign of Hindi, say.
_WORDS = regex.compile(rf"(?=\w){_CHARACTER}\p{{M}}*|(?:(?!{_CHARACTER})[\w\p{{M}}])+")
_PARTS = regex.compile(rf"{_CHARACTER}[\p{{M}}\p{{P}}]*|(?:(?!{_CHARACTER})\S)+")
_LATIN_WORDS = re.compile(r"\w+")
_NOT_LATIN = re.compile("[^\0-\u02ff\u2010-\u203e]")
HAS_UNSPACED = regex.compile(_CHARACTER)
"""Finds a character of a script without spaces."""


def words(text: str) -> list[str]:
    """Return the lower-cased words of a text in compatibility form (NFKC); in scripts without spaces, its characters.

    Words are then found whichever way accents are encoded, and within a run of Chinese, say.
    """
    # The same words by `re`, several times faster.
    if text.isascii():
        return _LATIN_WORDS.findall(text.lower())
    # Turkish İ becomes i and a dot above, which no other spelling of the word has.
    text = unicodedata.normalize("NFKC", text).lower().replace("i\u0307", "i")
    if _NOT_LATIN.search(text) is None:
        return _LATIN_WORDS.findall(text)
    found: list[str] = _WORDS.findall(text)
    return found


def first_words(text: str, count: int | None) -> str:
    """Return the first `count` words between white space, or characters of scripts without spaces, of a text.

    One that has no more, and any without a `count`, stays as it is; a cut one has single spaces.
    """
    if count is None:
        return text
    if HAS_UNSPACED.search(text) is None:
        parts = text.split()
        return text if len(parts) <= count else " ".join(parts[:count])
    ends = [part.end() for part in _PARTS.finditer(text)]
    return text if len(ends) <= count else " ".join(text[: ends[count - 1]].split())
