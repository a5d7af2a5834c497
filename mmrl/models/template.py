"""Chat template of a tokenizer, as text: what it is rendered with, and what it writes where.

A template is a program. What it does is found out by rendering short conversations, never by reading its source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from inspect import signature
from string import ascii_letters
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""Descriptions of functions as OpenAI's protocol and chat templates have them."""

REPLY = "the turn before"
"""Stands for a reply of which only what is written around it matters."""
USER = {"role": "user", "content": "-"}
ASKED = "what a message says"
THOUGHTS = ("reasoning_content", "thinking")
"""Names that templates have for the thoughts of a reply."""
UNNAMED = "name_of_the_function"
"""Function of a tool result that does not say which."""
PROBE = {"type": "function", "function": {"name": UNNAMED, "description": "-", "parameters": {"type": "object"}}}
FIXED = re.compile(r"\{%- set enable_thinking = (true|false) -%\}")
"""Line that mmrl writes before the template of a saved tokenizer, so that whoever loads it renders as in training."""
SYSTEM_MERGED = (
    "{%- if messages | length > 1 and messages[0].role == 'system' and messages[1].role == 'user' -%}"
    "{%- set first = messages[0].content + '\\n\\n' + messages[1].content -%}"
    "{%- set messages = [{'role': 'user', 'content': first}] + messages[2:] -%}"
    "{%- endif -%}"
)
"""Goes before a template without a system role: the text of a system message opens the user's turn, as in training."""


def use(tokenizer: PreTrainedTokenizerBase, *, thinking: bool, date: str | None) -> None:
    """Fix what the chat template of a tokenizer is rendered with, here and wherever it is saved.

    The template keeps its text: libraries know it by that.

    Args:
        thinking: the thinking mode, where there is one.
        date: ISO date that stands for the time; None: today.
    """
    # What mmrl writes into saved templates is taken off again.
    text = str(tokenizer.chat_template).removeprefix(SYSTEM_MERGED)
    fixed = FIXED.match(text)
    tokenizer.chat_template = text[fixed.end() :] if fixed else text
    arguments: dict[str, Any] = {}
    if "enable_thinking" in text:
        arguments["enable_thinking"] = thinking or (fixed is not None and fixed[1] == "true")
    _ARGUMENTS[tokenizer] = arguments
    day = datetime.now() if date is None else datetime.fromisoformat(date)
    _DAYS[tokenizer] = day.replace(hour=0, minute=0, second=0, microsecond=0)


def as_saved(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer as checkpoints have it: its template renders with the same thinking mode by itself."""
    from copy import copy

    saved = copy(tokenizer)
    thinking = _ARGUMENTS.get(tokenizer, {}).get("enable_thinking")
    if thinking is not None:
        line = f"{{%- set enable_thinking = {str(thinking).lower()} -%}}"
        saved.chat_template = line + str(tokenizer.chat_template)
    return saved


class Template:
    """Chat template of a tokenizer, with the special tokens that it may write."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: re.Pattern[str]):
        # It is kept in a table by tokenizer, and must not keep its own key alive.
        self._tokenizer = ref(tokenizer)
        self._special = special
        self.source = tokenizer.chat_template
        self.arguments: Mapping[str, Any] = _ARGUMENTS.get(tokenizer, {})
        self.day = _DAYS.get(tokenizer, datetime.now())
        """What it takes for the time."""
        self._unchanged = lru_cache(64)(self._compared)

    def write(self, messages: Messages, tools: Tools = (), prompt: bool = True, **arguments: object) -> str:
        """Return the text of a conversation.

        Args:
            prompt: the generation prompt is its end.
            arguments: of the template, beside its own.

        Raises:
            Exception: the template's own, of any type.
        """
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # the caller holds it
        more: dict[str, Any] = {**self.arguments, **arguments, **({"tools": list(tools)} if tools else {})}
        return self.render(tokenizer, messages, add_generation_prompt=prompt, **more)

    def render(self, tokenizer: PreTrainedTokenizerBase, messages: Messages, **arguments: Any) -> str:
        """Return what a tokenizer itself writes of a conversation, with this template's time."""
        source, conversation = str(tokenizer.chat_template), cast("Any", list(messages))
        if "strftime_now" in source:
            source = _at(self.day) + source
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, chat_template=source, **arguments))

    def unchanged_by(self, arguments: Mapping[str, object]) -> bool:
        """Return True if the template writes the same with these arguments of a request, JSON values, as without."""
        return self._unchanged(json.dumps(arguments, sort_keys=True))

    def _compared(self, text: str) -> bool:
        arguments: dict[str, Any] = json.loads(text)
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        # Another template, say, is an argument of the method.
        if arguments.keys() & signature(tokenizer.apply_chat_template).parameters.keys():
            return False
        thought = {"role": "assistant", "content": "<think>\n-\n</think>\n\n-", "reasoning_content": "-"}
        found = {"role": "tool", "content": "-", "tool_call_id": "0", "name": UNNAMED}
        for messages in ([USER], [USER, thought, USER], [USER, _called(1, text=self.text_arguments), found]):
            for tools in ((), [PROBE]):
                written = []
                for more in (dict[str, Any](), arguments):
                    try:
                        written.append(self.write(messages, tools, **more))
                    except Exception as error:  # of Jinja, of a filter, of whatever a template calls
                        written.append(str(error))
                if written[0] != written[1]:
                    return False
        return True

    @cached_property
    def merges(self) -> bool:
        """True if there is no system role: some templates refuse it, some leave it out without a word.

        Raises:
            Exception: the template's own, where it cannot write a prompt without a system message either.
        """
        try:
            return ASKED not in self.write([{"role": "system", "content": ASKED}, USER]).lower()
        except Exception:  # of Jinja, of a filter, of whatever a template calls
            self.write([USER])
            return True

    @cached_property
    def thinks(self) -> bool:
        """True if there is a thinking mode."""
        return "enable_thinking" in str(self.source)

    @cached_property
    def thoughts(self) -> str:
        """Field of a reply from which it writes thoughts; empty where it writes none."""
        for name in THOUGHTS:
            for reply in ({"role": "assistant", "content": REPLY}, _called(1, text=self.text_arguments)):
                with suppress(Exception):
                    if ASKED in self.write([USER, {**reply, name: ASKED}], prompt=False):
                        return name
        return ""

    @cached_property
    def dated(self) -> bool:
        """True if it writes the time."""
        now, written = self.day, []
        try:
            for self.day in (datetime(2001, 2, 3), datetime(2018, 11, 29)):
                with suppress(Exception):
                    written.append(self.write([USER]))
        finally:
            self.day = now
        return len({*written}) > 1

    @cached_property
    def text_arguments(self) -> bool:
        """True if it takes the arguments of a call as text alone."""
        try:
            self.write([USER, _called(1, text=False)], prompt=False)
        except Exception:
            with suppress(Exception):
                self.write([USER, _called(1, text=True)], prompt=False)
                return True
        return False

    def after_reply(self, messages: Messages) -> str:
        """Return the text that follows a reply: its end, `messages`, the generation prompt.

        Tool results follow a reply that calls their functions.

        Raises:
            Exception: the template's own.
            ValueError: it writes the calls before a result otherwise than without one, or wants the name of a function.
        """
        results = 0
        while results < len(messages) and messages[results]["role"] == "tool":
            results += 1
        if results:
            call = _called(results, text=self.text_arguments, messages=messages)
            alone = self.write([USER, call], prompt=False)
            # A template may write fewer calls than there are.
            count = alone.count(REPLY)
            if count:
                text = self.write([USER, call, *messages]).split(REPLY, count)[-1]
                closing = self._closing(alone.split(REPLY, count)[-1])
                if not text.startswith(closing):
                    raise ValueError("it writes a tool call otherwise once its result is there")
                if UNNAMED in text and not any(UNNAMED in str(message) for message in messages):
                    raise ValueError("it writes the name of the function before a result; give it as `name`")
                return text[len(closing) :]
        # A template cannot render from the middle of a conversation: what comes before is rendered and cut off.
        return self.write([USER, {"role": "assistant", "content": REPLY}, *messages]).partition(REPLY)[2]

    def reply(self, messages: Messages, tools: Tools = ()) -> str:
        """Return the text of the last message, the model's, as it follows the prompt of those before it.

        Raises:
            Exception: the template's own.
            ValueError: it does not write it there.
        """
        prompt, whole = self.write(messages[:-1], tools), self.write(messages, tools, prompt=False)
        if not whole.startswith(prompt):
            raise ValueError("it writes a reply that is shown otherwise than one that follows a prompt")
        return whole[len(prompt) :]

    def _closing(self, tail: str) -> str:
        """Return what closes a tool call, of the text after its last argument in a conversation that it ends."""
        tokens = [match.start() for match in self._special.finditer(tail)]
        return tail[: tokens[-1]] if tokens else tail

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Special tokens that end a turn of the model, as far as the template writes them; that of plain replies first.

        The first token after a reply, or after its tool calls, if it is not a part of replies as well.
        """
        return tuple(dict.fromkeys(token for token in self._written_after() if token not in self.marks))

    @cached_property
    def marks(self) -> frozenset[str]:
        """Special tokens inside of replies, which mark their parts."""
        return frozenset(token for text in self._replies() for token in self._special.findall(text))

    def _written_after(self) -> Iterator[str]:
        reply = {"role": "assistant", "content": REPLY}
        result = {"role": "tool", "content": "-", "name": "f", "tool_call_id": "call00001"}
        for messages, prompt in (([USER, reply, USER], True), ([USER, reply], False)):
            with suppress(Exception):
                tail = self.write(messages, prompt=prompt).partition(REPLY)[2]
                if match := self._special.match(tail.lstrip()):
                    yield match[0]
        with suppress(Exception):
            if match := self._special.match(self.after_reply([result]).lstrip()):
                yield match[0]

    def _replies(self) -> Iterator[str]:
        """Yield the texts of several replies: with thoughts, with one and with two tool calls."""
        replies = [
            {"role": "assistant", "content": REPLY, **dict.fromkeys(THOUGHTS, "thoughts")},
            *(_called(count, text=self.text_arguments) for count in (1, 2)),
        ]
        for reply in replies:
            with suppress(Exception):
                prompt, whole = self.write([USER]), self.write([USER, reply], prompt=False)
                begin = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
                before, found, tail = whole[begin:].rpartition(REPLY)
                if found:
                    yield before + (self._closing(tail) if "tool_calls" in reply else "")


def _called(count: int, *, text: bool, messages: Messages = ()) -> dict[str, Any]:
    """Return a reply that calls functions.

    Args:
        text: arguments as text.
        messages: the results, which may name them.
    """
    arguments: object = json.dumps({"x": REPLY}) if text else {"x": REPLY}
    results = messages or [{"name": "f"}] * count
    calls = [
        {
            "id": result.get("tool_call_id") or f"call{number:05}",
            "type": "function",
            "function": {"name": result.get("name") or UNNAMED, "arguments": arguments},
        }
        for number, result in enumerate(results[:count])
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@lru_cache(8)
def _at(day: datetime) -> str:
    """Return a line of a template that fixes the time.

    As a macro, with the text of each code of strftime: arguments of a template are data, newer versions of transformers
    take no function.
    """
    codes = (f"%{flag}{letter}" for flag in ("-", "") for letter in ascii_letters)
    said = {"%%": "\0", **{code: day.strftime(code) for code in codes}, "\0": "%"}
    return (
        "{%- macro strftime_now(format) -%}{%- set now = namespace(text=format) -%}"
        f"{{%- for code, text in {json.dumps(said)}.items() -%}}"
        "{%- set now.text = now.text.replace(code, text) -%}"
        "{%- endfor -%}{{- now.text -}}{%- endmacro %}\n"
    )


_ARGUMENTS: WeakKeyDictionary[PreTrainedTokenizerBase, Mapping[str, Any]] = WeakKeyDictionary()
"""Tokenizer -> what its template is rendered with."""
_DAYS: WeakKeyDictionary[PreTrainedTokenizerBase, datetime] = WeakKeyDictionary()
"""Tokenizer -> what its template takes for the time."""
