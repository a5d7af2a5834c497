"""Metrics of texts, pure functions of strings: exact match, token F1, accuracy of an answer; leaks of private pieces.

The rules of answers are those of the SQuAD and HotpotQA evaluation scripts (normalise, then compare); accuracy is
MHGPO's "answer hit". Training rewards use `f1` plainly; evaluation adds the yes/no rule (`closed=True`).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from mmrl.retrieval.words import HAS_UNSPACED

Punctuation = Literal["delete", "space"]
"""Treatment of punctuation marks in normalisation: `delete` (SQuAD, HotpotQA) or `space` (MMOA-RAG)."""

# HotpotQA's script: an answer of this kind is right or wrong, never partly right.
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BETWEEN_CANDIDATES = re.compile(r"[,;/|\n\u3001\uff0c\uff1b]|\b(?:or|and)\b", re.IGNORECASE)
_DELETE = str.maketrans("", "", string.punctuation)
_SPACE = str.maketrans(string.punctuation, " " * len(string.punctuation))


def normalize(text: str, punctuation: Punctuation = "delete") -> str:
    """Normalise: lower case, no ASCII punctuation, no articles, single spaces. Other scripts' punctuation stays."""
    # Punctuation before articles, as the official script: "a." becomes the article "a" and goes.
    text = text.lower().translate(_DELETE if punctuation == "delete" else _SPACE)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, gold: str, punctuation: Punctuation = "delete") -> float:
    """Return 1.0 if both are equal after normalisation, else 0.0."""
    return float(normalize(prediction, punctuation) == normalize(gold, punctuation))


def f1(prediction: str, gold: str, *, closed: bool = False, punctuation: Punctuation = "delete") -> float:
    """Return the harmonic mean of precision and recall over the multisets of normalised tokens.

    Args:
        closed: HotpotQA's evaluation rule: 0 when one side is yes, no or noanswer and the other is not the same.

    Returns:
        A number in [0, 1]; 0 when no token is shared, so also when both sides are empty (as the official script).
    """
    predicted, expected = normalize(prediction, punctuation), normalize(gold, punctuation)
    if closed and _closed_mismatch(predicted, expected):
        return 0.0
    predicted_tokens, expected_tokens = predicted.split(), expected.split()
    shared = sum((Counter(predicted_tokens) & Counter(expected_tokens)).values())
    # also avoids 0/0 where a side has no tokens
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted_tokens), shared / len(expected_tokens)
    return 2 * precision * recall / (precision + recall)


def accuracy(prediction: str, gold: str, *, closed: bool = True, punctuation: Punctuation = "delete") -> float:
    """Return 1.0 if the normalised gold answer is a substring of the normalised prediction, else 0.0.

    Args:
        closed: as in `f1`; without it every prediction that contains the letters "no" would hit the gold answer "no".

    A gold answer that normalises to nothing is hit by an equally empty prediction only.
    """
    predicted, expected = normalize(prediction, punctuation), normalize(gold, punctuation)
    if closed and _closed_mismatch(predicted, expected):
        return 0.0
    return float(expected in predicted if expected else not predicted)


def answer_shape(answer: str) -> dict[str, float]:
    """Count an answer's words and candidates: the parts between commas, semicolons, bars, lines, "or" and "and".

    Rewards that look for an accepted answer inside the given one rise with both; alarms watch them.
    """
    candidates = sum(bool(part.strip()) for part in _BETWEEN_CANDIDATES.split(answer))
    return {"answer_words": float(len(answer.split())), "answer_candidates": float(candidates)}


def _closed_mismatch(predicted: str, expected: str) -> bool:
    return predicted != expected and not CLOSED_ANSWERS.isdisjoint((predicted, expected))


# --- leaks of private pieces

# Code points with the property Default_Ignorable_Code_Point that are no format characters (Cf).
_IGNORABLE = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)}
)
_MARKER = re.compile(r"\[\s?\[\s*##[^\[\]\n]{0,64}##\s*\]\s?\]\n?")
_WORD = re.compile(r"[^\W_]+")


class _Normalised(dict[int, str]):
    """Code point -> its compatibility form (NFKC) in lower case; empty for what leaves no trace on a page."""

    # Character by character: normalising a whole text reorders its accents, which takes the square of their number.
    def __missing__(self, code: int) -> str:
        ignored = unicodedata.category(chr(code)) == "Cf" or code in _IGNORABLE
        self[code] = normalised = "" if ignored else unicodedata.normalize("NFKC", chr(code)).casefold()
        return normalised


_NORMALISED = _Normalised()


def leaked_pieces(pieces: Sequence[str], text: str) -> int:
    """Count the `pieces` in `text`, as far as rules can see: the leak count of `papillon`'s rule-based judge.

    A piece counts when its words stand in the text one after the other. Both are normalised first (NFKC, case folded,
    without invisible characters and DSPy's field markers). Not seen: paraphrase, translation, initials, other spellings
    (accents, look-alike letters, words glued together or spelled letter by letter, reversed), HTML entities and
    encodings. A piece without a letter or digit counts where it stands as it is, one in a script without spaces between
    words (Chinese, Thai) also within others. Linear in the text.
    """
    plain = _normalised(text)
    words = _words(plain)

    def leaks(piece: str) -> bool:
        sought = _normalised(piece)
        if HAS_UNSPACED.search(sought) and sought in plain:
            return True
        return found in words if (found := _words(sought)).strip() else piece in text

    return sum(map(leaks, pieces))


def _normalised(text: str) -> str:
    return " ".join(_MARKER.sub("", text.translate(_NORMALISED)).split())


def _words(normalised: str) -> str:
    """Return the words of a normalised text, each between single spaces."""
    return f" {' '.join(_WORD.findall(normalised))} "
