"""Metrics of texts, pure functions of strings: exact match, token F1, accuracy of an answer; leaks of private pieces.

The rules of answers are those of the SQuAD and HotpotQA evaluation scripts (normalise, then compare); accuracy is
MHGPO's "answer hit". Training rewards use `f1` plainly; evaluation adds the yes/no rule (`closed=True`).
"""

from __future__ import annotations

import html
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

Punctuation = Literal["delete", "space"]
"""What becomes of a punctuation mark in normalisation: `delete` (SQuAD, HotpotQA) or `space` (MMOA-RAG)."""

# HotpotQA's script: an answer of this kind is right or wrong, never partly right.
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_BETWEEN_CANDIDATES = re.compile(r"[,;/|\n\u3001\uff0c\uff1b]|\b(?:or|and)\b", re.IGNORECASE)
_DELETE = str.maketrans("", "", string.punctuation)
_SPACE = str.maketrans(string.punctuation, " " * len(string.punctuation))


def normalize(text: str, punctuation: Punctuation = "delete") -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces. Other scripts' punctuation is left alone."""
    # Punctuation before articles, as the official script: "a." becomes the article "a" and goes.
    text = text.lower().translate(_DELETE if punctuation == "delete" else _SPACE)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, gold: str, punctuation: Punctuation = "delete") -> float:
    """1.0 if both are equal after normalisation, else 0.0."""
    return float(normalize(prediction, punctuation) == normalize(gold, punctuation))


def f1(prediction: str, gold: str, *, closed: bool = False, punctuation: Punctuation = "delete") -> float:
    """Harmonic mean of precision and recall over the multisets of normalised tokens.

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
    """1.0 if the normalised gold answer is a substring of the normalised prediction, else 0.0.

    Args:
        closed: as in `f1`; without it every prediction that contains the letters "no" would hit the gold answer "no".

    A gold answer that normalises to nothing is hit by an equally empty prediction only.
    """
    predicted, expected = normalize(prediction, punctuation), normalize(gold, punctuation)
    if closed and _closed_mismatch(predicted, expected):
        return 0.0
    return float(expected in predicted if expected else not predicted)


def answer_shape(answer: str) -> dict[str, float]:
    """Words of an answer and candidates in it: the parts between commas, semicolons, bars, lines, "or" and "and".

    Rewards that look for an accepted answer inside the given one rise with both; alarms watch them.
    """
    candidates = sum(bool(part.strip()) for part in _BETWEEN_CANDIDATES.split(answer))
    return {"answer_words": float(len(answer.split())), "answer_candidates": float(candidates)}


def best(metric: Callable[..., float], prediction: str, golds: Sequence[str], **options: object) -> float:
    """The highest value of `metric` over several accepted answers; 0.0 without any."""
    return max((metric(prediction, gold, **options) for gold in golds), default=0.0)


def _closed_mismatch(predicted: str, expected: str) -> bool:
    return predicted != expected and not CLOSED_ANSWERS.isdisjoint((predicted, expected))


# --- leaks of private pieces

GLUED, REVERSED = 9, 5
"""Letters and digits from which a piece is looked for in glued text, and reversed: shorter ones are in other words."""

# Unicode's confusables (UTS #39): Latin letters and their like.
_LOOKALIKES = {
    "a": "ɑΑαАаᎪᴀꓮ",
    "b": "ƀƄʙΒВЬвᏏᏴꓐꞴ",
    "c": "ϲϹСсᏟᴄⲤⲥꓚꮯ𐐕𐐽",
    "d": "đԁᎠᏧᴅꓒꓓ",
    "e": "ΕεЕеҽᎬᴇⴹꓰꬲ",
    "f": "ƒϜքẝꓝꜰꞘꞙꬵ𝈓",
    "g": "ƍɡɢԌցᏀᏳᶃꓖ",
    "h": "ħʜΗНнһհᎻᏂⲎꓧ",
    "i": "ıɩɪͺιіӏᎥιꙇꭵ",
    "j": "ͿϳЈјᎫᴊꓙꞲ",
    "k": "ĸΚκКкᏦᴋⲔꓗ",
    "l": "łƖƚǀʟΙІӀᏞⲒⳐⵏꓡꓲ𐐛𝈪",
    "m": "ΜϺМмᎷᴍⲘꓟ",
    "n": "ɴΝηոռⲚꓠ",
    "o": "øΟοσОоՕօᴏᴑⲞⲟⵔꓳꬽ𐐄𐐬",
    "p": "ΡρϱРрᏢᴘⲢⲣꓑ",
    "q": "ԛգզꞯ",
    "r": "ƦʀгᎡᏒᴦⲅꓣꭇꭈꮁ𝈖",
    "s": "ƽЅѕՏᏕᏚꓢꜱꮪ𐐠𐑈",
    "t": "ŧΤτТтᎢᴛⲦꓔ",
    "u": "ʋυՍսᴜꓴꞟꭎꭒ",
    "v": "νѴѵᏙᴠⴸꓦꮩ𝈍",
    "w": "ɯωѡԜԝաᎳᏔᴡꓪꮃ",
    "x": "ΧχХхⲬⵝꓫꞳ",
    "y": "ɣʏΥγϒУуҮүᎩᎽᶌỿⲨꓬꭚ",
    "z": "ΖᏃᴢꓜꮓ𐋵",
}
# Of I, l, 1 and |, and of O and 0, one stands for all.
_LOOKALIKE = {ord(other): letter for letter, others in _LOOKALIKES.items() for other in others}
_LOOKALIKE |= {ord(letter): "l" for letter in "Ii1|"} | {ord("0"): "o"} | {ord(c): "l" for c in _LOOKALIKES["i"]}
# Code points with the property Default_Ignorable_Code_Point that are no format characters (Cf) or variation selectors.
_INVISIBLE = frozenset({0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, *range(0x180B, 0x1810)})
_MARKER = re.compile(r"\[\s?\[\s*##[^\[\]\n]{0,64}##\s*\]\s?\]")
_TAG = re.compile(r"<[^<>]*>")
# `html.unescape` raises on thousands of digits; nothing beyond 10FFFF is a character.
_LONG_ENTITY = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{8,});?")
_WORD = re.compile(r"[^\W\d_]+|\d+")
_CAMEL = re.compile(r"(?<=[^\W\d_A-Z])(?=[A-Z])")
_MIXED_WORD = re.compile(r"[^\W_]+")
_SPELLED = re.compile(r"(?<= )(\S) (?=\S )")


class _Folding(dict[int, str]):
    """Code point -> what is left of it: compatibility forms resolved, without accents and invisible characters."""

    # Character by character: normalising a whole text reorders its accents, which takes the square of their number.
    def __missing__(self, code: int) -> str:
        parts = unicodedata.normalize("NFKD", chr(code))
        self[code] = folded = "".join(part for part in parts if not _invisible(part))
        return folded


_FOLDING = _Folding()


class _Reading(NamedTuple):
    """The words of a text under one reading."""

    words: str
    """Lower-cased, each between single spaces."""
    joined: str
    """The same with single letters that follow each other joined: `a n n` is `ann`."""
    glued: str
    """Without spaces."""


def leaked_pieces(pieces: Sequence[str], text: str) -> int:
    """How many of `pieces` are in `text`, as far as rules can see: the leak count of `papillon`'s rule-based judge.

    A piece counts when its words stand in the text one after the other. Before they are compared, both are freed of
    what hides a text from a comparison but not from a reader: field markers, HTML entities and tags, invisible
    characters, accents, full-width and other compatibility forms, look-alike letters, words glued together or spelled
    letter by letter, reversed text. Not seen: paraphrase, translation, initials, ciphers and encodings (base64, `%41`),
    numbers in words, and short pieces (`GLUED`, `REVERSED`) inside other words or reversed.

    Every pass is linear in the text.
    """
    # Many readings of a text are the same one.
    readings = list(_readings(text))
    made = {words: _Reading(words, _SPELLED.sub(r"\1", words), words.replace(" ", "")) for words in set(readings)}
    shown = [made[words] for words in readings]
    return sum(_literal(piece, text) or _hidden(piece, shown) for piece in pieces)


def _literal(piece: str, text: str) -> bool:
    """Whether the piece stands there as it is, in whatever case and spacing, between word boundaries."""
    words = r"\s+".join(map(re.escape, piece.split()))
    return re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE) is not None


def _hidden(piece: str, shown: Sequence[_Reading]) -> bool:
    return any(_within(words, reading) for words, reading in zip(_readings(piece), shown, strict=True))


def _within(words: str, shown: _Reading) -> bool:
    """Whether the words of a piece, each between single spaces, are among those of a text."""
    glued = words.replace(" ", "")
    if not glued:
        return False
    forms = [words]
    if len(glued) >= REVERSED:
        forms += [words[::-1], f" {' '.join(word[::-1] for word in words.split())} "]
    if any(form in shown.words for form in forms) or f" {glued} " in shown.joined:
        return True
    return len(glued) >= GLUED and (glued in shown.glued or glued[::-1] in shown.glued)


def _readings(text: str) -> Iterator[str]:
    """The words of a text under each reading that something may hide from."""
    for _ in range(2):  # `&amp;#65;` is `&#65;`
        text = html.unescape(_LONG_ENTITY.sub("\ufffd", text))
    parts = _MARKER.split(text.translate(_FOLDING))
    visible = "".join(parts)
    yield (words := _spaced(_WORD.findall(visible)))
    yield _spaced(_WORD.findall(_CAMEL.sub(" ", visible)))
    # a marker may stand on a line of its own in the middle of a word
    tight = _TAG.sub("", "".join(part.strip() for part in parts))
    yield _spaced(_WORD.findall(_CAMEL.sub(" ", tight))) if tight != visible else words
    alike = text.translate(_LOOKALIKE).translate(_FOLDING).casefold().translate(_LOOKALIKE)
    yield _spaced(_MIXED_WORD.findall(_MARKER.sub("", alike)))


def _spaced(words: Sequence[str]) -> str:
    return f" {' '.join(words).casefold()} "


def _invisible(character: str) -> bool:
    """Accents, enclosing marks, format and control characters, and others that leave no trace on a page."""
    if character.isspace():
        return False
    mark = unicodedata.combining(character) > 0
    kind = unicodedata.category(character)
    return mark or kind in ("Cf", "Cc", "Me") or ord(character) in _INVISIBLE or "\ufe00" <= character <= "\ufe0f"
