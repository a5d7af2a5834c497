"""DSPy's adapters: which one is in use, and replies parsed within bounds. Used by programs (`rollout.dspy`) and judges.

DSPy reads values that are not text with JSON repair and Python's parser: nesting and thousands of values in a row make
the one hang or overflow the stack, and the other run out of its own. Whoever wrote such a text has written no value.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    import dspy

T = TypeVar("T")

MOST_NESTED, MOST_BRACKETS = 64, 2000
"""Brackets that may be open at once in a reply with values that are not text, and that it may have in all."""
_BRACKETS = re.compile(r"[\[\](){}]")
_CLOSES = {"]": "[", "}": "{", ")": "("}


def adapter_in_use(layout: str) -> dspy.Adapter:
    """Return the user's adapter (`dspy.configure(adapter=...)`) or DSPy's chat adapter, in `task.prompt_layout`.

    It writes tool calls of a `dspy.History` as text: a policy is shown text alone, and parts of another kind would be
    lost.
    """
    import dspy

    adapter: dspy.Adapter = copy.copy(dspy.settings.adapter or dspy.ChatAdapter())
    adapter.use_native_function_calling = False
    return shared_first(adapter) if layout == "shared_first" else adapter


def shared_first(inner: dspy.Adapter) -> dspy.Adapter:
    """Copy an adapter; the copy lists the output fields at the end of the system message, not after the item.

    What follows the item is in no prefix that two prompts share. Of a classifier with many labels, whose reminder lists
    them all, that is half of every prompt.

    Raises:
        ConfigError: an adapter without such a reminder.
    """
    kind = type(inner)
    if not hasattr(kind, "user_message_output_requirements"):
        raise ConfigError(
            f"task.prompt_layout: got shared_first, which has no effect with {kind.__name__}, an adapter that "
            "reminds of no output fields; leave it out"
        )
    return recast(inner, _shared_first_class(cast("Hashable", kind)))


def recast(adapter: dspy.Adapter, kind: Any) -> dspy.Adapter:
    """Copy an adapter as one of another class, of `inheriting`."""
    copied: dspy.Adapter = kind.__new__(kind)
    copied.__dict__.update(adapter.__dict__)
    return copied


def inheriting(kind: Any) -> Any:
    """Let a subclass of an adapter's class have that one's `format` and `parse`, for which DSPy gives it new ones."""
    del kind.format, kind.parse
    return kind


@functools.cache
def _shared_first_class(kind: Any) -> Any:
    def format_system_message(self: Any, signature: type[dspy.Signature]) -> str:
        message, reminder = (
            kind.format_system_message(self, signature),
            kind.user_message_output_requirements(self, signature),
        )
        return f"{message}\n\n{reminder}" if reminder else str(message)  # none where the inner one has that layout

    def user_message_output_requirements(self: Any, signature: type[dspy.Signature]) -> str:
        return ""  # the user's message is stripped

    methods = (format_system_message, user_message_output_requirements)
    return inheriting(type(kind.__name__, (kind,), {method.__name__: method for method in methods}))


def within_bounds(signature: type[dspy.Signature], text: str, parse: Callable[[type[dspy.Signature], str], T]) -> T:
    """Run `parse` on `text` (`dspy.Adapter.parse`, or more of DSPy's handling of a reply).

    Raises:
        AdapterParseError: what `parse` raises, also where a value makes it stumble (an enum of a list, a validator that
            expects text), and for a text that it cannot read in bounded time and depth.
    """
    from dspy.utils.exceptions import AdapterParseError

    def refused(reason: str) -> AdapterParseError:
        return AdapterParseError(adapter_name="mmrl", signature=signature, lm_response=text, message=reason)

    structured = any(field.annotation is not str for field in signature.output_fields.values())
    if structured and too_many_brackets(text):
        raise refused(f"more than {MOST_NESTED} brackets are open at once, or there are more than {MOST_BRACKETS}")
    try:
        return parse(signature, text)
    # Python's parser says MemoryError of thousands of signs in a row, as of any stack of its own that is full.
    except (RecursionError, MemoryError) as error:
        raise refused(f"a value that is too deep to be read ({type(error).__name__})") from None
    except AdapterParseError:
        raise
    except Exception as error:
        raise refused(f"a value that cannot be read ({type(error).__name__}: {error})") from None


def too_many_brackets(text: str) -> bool:
    """Check if a text has too many brackets, open at once or in all; one of another kind closes nothing."""
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
