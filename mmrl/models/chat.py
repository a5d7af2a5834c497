"""Chat rendering, messages to prompt token ids and token ids to text: one rendering for engines, trainer and stages.

Only the chat template writes special tokens; text of a message that looks like one stays text. Where a template has no
system role, the text of a system message opens the user's turn after it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""Descriptions of functions as OpenAI's protocol and chat templates have them."""
_Turn = tuple[str, str, str]
"""Role, content, and as JSON what else a message has: the tool calls of a reply, the id that a result belongs to."""

_TURN = "the turn before"
"""Stands for a completion of whose turn only the end is rendered."""
_PROBE = "what a system message says"
_THOUGHTS = ("<think>", "</think>")
_SPENT = [0.0]
RECENT = 1024
"""Prompts whose ids are remembered: those of a step; 40 kB each at a thousand tokens."""


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools = ()) -> tuple[int, ...]:
    """Return the prompt token ids of `messages`, generation prompt included.

    Args:
        tools: functions that the model may call, for templates that write them.

    Equal to `tokenizer.apply_chat_template(messages, add_generation_prompt=True)`, except that text in a message's
    content which looks like a special token (`<|im_end|>`) stays text: only the template writes special tokens; that
    the text of a system message opens the next user turn where the template has no system role; and that replies shown
    in the prompt are whole, also where the template would cut thoughts (`<think>`) out of them.
    """
    return _renderer(tokenizer)(messages, tools)


def render_observation(
    tokenizer: PreTrainedTokenizerBase, context: Sequence[int], observation: str | Messages, ended: bool = False
) -> tuple[int, ...]:
    """Render the next prompt of a growing context: `context`, exactly as sampled, and what tool or user add to it.

    Args:
        context: ids so far; the last of them end a completion.
        observation: text goes on inside the same assistant turn; messages end that turn and open the next one.
        ended: the last id is an end-of-turn token, which text takes back.

    Text in an observation that looks like a special token stays text.
    """
    # Never decoded and encoded again: the ids of the turns before are the sampled ones, whatever their text would give.
    ids = tuple(context)
    if isinstance(observation, str):
        return (ids[:-1] if ended else ids) + tuple(encode_text(tokenizer, observation))
    after = _renderer(tokenizer).after_turn(observation)
    return ids + (after[1:] if ended and after[:1] == ids[-1:] else after)


def takes_system_role(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template writes a system message; some refuse it, some leave it out without a word.

    Raises:
        Exception: the template's own, where it cannot write a prompt without a system message either.
    """
    user = {"role": "user", "content": "-"}
    system = {"role": "system", "content": _PROBE}
    try:
        text = tokenizer.apply_chat_template([system, user], tokenize=False, add_generation_prompt=True)
    except Exception:  # of Jinja, of a filter, of whatever a template calls
        tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        return False
    return _PROBE in str(text).lower()


def _merged(messages: Iterable[_Turn]) -> tuple[_Turn, ...]:
    """Return a conversation whose system texts open the user turn after them."""
    merged: list[_Turn] = []
    waiting: list[str] = []
    for role, content, extra in messages:
        if role == "system":
            waiting.append(content)
            continue
        if waiting and role != "user":
            merged.append(("user", "\n\n".join(waiting), ""))
        elif waiting:
            content = "\n\n".join([*waiting, content])
        waiting = []
        merged.append((role, content, extra))
    return (*merged, *([("user", "\n\n".join(waiting), "")] if waiting else []))


def _turns(messages: Messages) -> tuple[_Turn, ...]:
    return tuple(
        (message["role"], message["content"], _json(dict(message, role=None, content=None)) if len(message) > 2 else "")
        for message in messages
    )


def _json(value: object) -> str:
    # As people write it: escapes would hide what looks like a special token.
    return json.dumps(value, ensure_ascii=False)


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of completion `ids` without special tokens, byte for byte as the tokens spell it."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Renderer:
    """Renderer for one tokenizer; remembers the ids of recent prompts, which groups repeat.

    A prompt is rendered to text with every special-looking piece of content masked, cut at the special tokens that
    are then left (the template's own), unmasked, and each ordinary piece is encoded with special tokens off. A fast
    tokenizer cuts at special tokens before anything else, so the ids are those of the whole text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # A value must not refer to its weak key, or neither would ever be freed.
        self.tokenizer = ref(tokenizer)
        self.template: object = None
        self.merges = False
        """True if the template has no system role."""
        self.recent = lru_cache(RECENT)(self._render)
        # Only tokens flagged special can end a turn or start a role; others (<think>) are a model's ordinary words.
        self.special = {
            added.content: (token_id, added)
            for token_id, added in tokenizer.added_tokens_decoder.items()
            if added.special
        }
        # Longest first, since one special token may begin like another.
        longest_first = sorted(self.special, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # Templates of reasoning models drop all of an earlier reply up to its last `</think>`. A demonstration is sent
        # as it is written, so they must not see that mark.
        thoughts = [mark for mark in _THOUGHTS if mark not in self.special]
        self.in_reply = re.compile("|".join(map(re.escape, [*longest_first, *thoughts])))
        self.markers = [*longest_first, *thoughts]
        self.order = {marker: index for index, marker in enumerate(self.markers)}

    def __call__(self, messages: Messages, tools: Tools = ()) -> tuple[int, ...]:
        tokenizer = self.tokenizer()
        assert tokenizer is not None  # the caller holds it
        if tokenizer.chat_template != self.template:
            self.template = tokenizer.chat_template
            self.merges = not takes_system_role(tokenizer)
            self.recent.cache_clear()
        return self.recent(_json(tools) if tools else "", _turns(messages))

    def after_turn(self, messages: Messages) -> tuple[int, ...]:
        """Return the ids that follow an assistant turn's content: its end, `messages`, the next generation prompt."""
        turns = (("user", "-", ""), ("assistant", _TURN, ""), *_turns(messages))
        return self._render("", turns, after=_TURN)

    def _render(self, tools: str, turns: tuple[_Turn, ...], after: str | None = None) -> tuple[int, ...]:
        tokenizer = self.tokenizer()
        assert tokenizer is not None  # the caller holds it
        # Special-looking pieces of content become <mask><number><mask>, with a private-use character that no template
        # writes and no tokenizer knows, so that every special token in the rendered text is one of the template's own.
        written = set("".join([tools, *(part for _, content, extra in turns for part in (content, extra))]))
        mask = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in written)

        def masked(text: str, role: str = "") -> str:
            pattern = self.in_reply if role == "assistant" else self.pattern
            return pattern.sub(lambda match: f"{mask}{self.order[match[0]]}{mask}", text)

        messages = [
            {**(json.loads(masked(extra, role)) if extra else {}), "role": role, "content": masked(content, role)}
            for role, content, extra in (_merged(turns) if self.merges else turns)
        ]
        functions = {"tools": json.loads(masked(tools))} if tools else {}
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **functions))
        if after is not None:
            # A template cannot render from the middle of a conversation: what comes before is rendered and cut off.
            text = text.partition(after)[2]
        ids: list[int] = []
        position = 0
        strip_left = False
        for match in [*self.pattern.finditer(text), None]:
            piece = text[position : match.start() if match else len(text)]
            piece = re.sub(f"{mask}([0-9]+){mask}", lambda number: self.markers[int(number[1])], piece)
            token = self.special[match[0]] if match else None
            # A special token may take the white space beside it, as the tokenizer does when it reads the whole text.
            piece = piece.lstrip() if strip_left else piece
            piece = piece.rstrip() if token and token[1].lstrip else piece
            ids += encode_text(tokenizer, piece) if piece else []
            if match and token:
                ids.append(token[0])
                position, strip_left = match.end(), token[1].rstrip
        return tuple(ids)


def _renderer(tokenizer: PreTrainedTokenizerBase) -> _Renderer:
    renderer = _RENDERERS.get(tokenizer)
    if renderer is None:
        renderer = _RENDERERS[tokenizer] = _Renderer(tokenizer)
    return renderer


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of plain text: nothing added, and no piece of it becomes a special token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation is not None or backend.padding is not None:
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    started = time.perf_counter()
    # The same library without the offsets that nobody reads here: two thirds of the time.
    backend.encode_special_tokens = True
    ids = list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    _SPENT[0] += time.perf_counter() - started
    return ids


def tokenizer_seconds() -> float:
    """Return the seconds that this process has spent inside fast tokenizers, encoding prompts."""
    return _SPENT[0]


_RENDERERS: WeakKeyDictionary[PreTrainedTokenizerBase, _Renderer] = WeakKeyDictionary()
