"""Output fields of a reply, parsed within bounds. Used by programs (`rollout.dspy`) and by PAPILLON's judges.

DSPy reads values that are not text with JSON repair and Python's parser: nesting and thousands of values in a row make
the one hang or overflow the stack, and the other run out of its own. Whoever wrote such a text has written no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import dspy

T = TypeVar("T")

MOST_NESTED, MOST_BRACKETS = 64, 2000
"""Brackets that may be open at once in a reply with values that are not text, and that it may have in all."""
_BRACKETS = re.compile(r"[\[\](){}]")
_CLOSES = {"]": "[", "}": "{", ")": "("}


def within_bounds(signature: type[dspy.Signature], text: str, parse: Callable[[type[dspy.Signature], str], T]) -> T:
    """What `parse` makes of `text` (`dspy.Adapter.parse`, or more of what DSPy does with a reply).

    Raises:
        AdapterParseError: what `parse` raises, and for a text that it cannot read in bounded time and depth.
    """
    from dspy.utils.exceptions import AdapterParseError

    def refused(reason: str) -> AdapterParseError:
        return AdapterParseError(adapter_name="mmrl", signature=signature, lm_response=text, message=reason)

    typed = any(field.annotation is not str for field in signature.output_fields.values())
    if typed and too_many_brackets(text):
        raise refused(f"more than {MOST_NESTED} brackets are open at once, or there are more than {MOST_BRACKETS}")
    try:
        return parse(signature, text)
    # Python's parser says MemoryError of thousands of signs in a row, as of any stack of its own that is full.
    except (RecursionError, MemoryError) as error:
        raise refused(f"a value that is too deep to be read ({type(error).__name__})") from None


def too_many_brackets(text: str) -> bool:
    """Whether more brackets are open at once, or more are there, than are read; one of another kind closes nothing."""
    opened: list[str] = []
    for number, match in enumerate(_BRACKETS.finditer(text)):
        bracket = match[0]
        if bracket not in _CLOSES:
            opened.append(bracket)
        elif opened and opened[-1] == _CLOSES[bracket]:
            opened.pop()
        if len(opened) > MOST_NESTED or number >= MOST_BRACKETS:
            return True
    return False
