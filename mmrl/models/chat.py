"""Chat rendering, messages to prompt token ids and token ids to text: one rendering for engines, trainer and stages.

Only the chat template writes special tokens; text of a message that looks like one stays text. Where a template has no
system role, the text of a system message opens the user's turn after it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from string import punctuation
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary, ref

from mmrl.errors import RequestFailure
from mmrl.models.encode import Encoder
from mmrl.models.template import USER, Messages, Template, Tools
from mmrl.system.growing_text import GrowingText

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_Item = TypeVar("_Item")
_Turn = tuple[str, str, str]
"""Role, content, and as JSON what else a message has: the tool calls of a reply, the id that a result belongs to."""

ROLES = ("system", "user", "assistant", "tool")
OPENED_THOUGHTS, CLOSED_THOUGHTS = _THOUGHTS = ("<think>", "</think>")
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
    ids, renderer = tuple(context), _renderer(tokenizer)
    if isinstance(observation, str):
        return (ids[:-1] if ended else ids) + tuple(renderer.encoder.following([observation]))
    after = renderer.render("", _turns(observation), part="after")
    if not ended:
        return ids + after
    # The end is written once, also where a template puts white space before it.
    ends = template_ends(tokenizer)
    first = next((n for n, i in enumerate(after) if i in ends), 0)
    if not str(tokenizer.decode(list(after[:first]))).strip():
        after = after[first:]
    shared = renderer.overlap(ids, after)
    # Where the conversation goes on, a template may end the turn with another token than the sampled one (gpt-oss).
    other = not shared and after[:1] and after[0] in renderer.special
    return (ids[:-1] if other else ids) + after[shared:]


def render_reply(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools = ()) -> tuple[int, ...]:
    """Return the ids of the last message, a reply that may call tools, after the prompt of those before it.

    The end of the turn is the last id.

    Raises:
        RequestFailure: the template has no such message, or writes a reply that is shown otherwise.
    """
    renderer = _renderer(tokenizer)
    ids = renderer.render(_json(tools) if tools else "", _turns(messages), part="reply")
    ends = [renderer.encoder.special[token] for token in renderer.template.ends]
    last = next((number for number, token in enumerate(ids) if token in ends), len(ids))
    return (*ids[:last], ids[last] if last < len(ids) else end_of_turn(tokenizer))


def end_of_prompt(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids with which every prompt ends after the text of a user's message, generation prompt included."""
    return _renderer(tokenizer).end[0]


def added_to_message(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the ids of a further paragraph of a user's message, which stand right before `end_of_prompt`."""
    gap = _renderer(tokenizer).end[1]
    return tuple(encode_text(tokenizer, f"\n\n{text}".removeprefix(gap) + gap))


def thoughts_of_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the thoughts with which every prompt ends, from `OPENED_THOUGHTS` on; empty without any."""
    _, opened, thoughts = str(tokenizer.decode(list(end_of_prompt(tokenizer)))).rpartition(OPENED_THOUGHTS)
    return opened + thoughts if opened else ""


def opens_thoughts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if every prompt ends inside of thoughts, which the reply has to end with `CLOSED_THOUGHTS`."""
    thoughts = thoughts_of_prompt(tokenizer)
    return bool(thoughts) and CLOSED_THOUGHTS not in thoughts


def refuse_unended(tokenizer: PreTrainedTokenizerBase, text: str, where: str = "messages") -> None:
    """Refuse the text of a reply that would be trained as thoughts without an end.

    Raises:
        RequestFailure: the prompt ends inside of thoughts, and nothing in the reply ends them.
    """
    if CLOSED_THOUGHTS not in text and opens_thoughts(tokenizer):
        other = "model.thinking=false, or " if template_of(tokenizer).thinks else ""
        raise RequestFailure(
            f"{where}: prompts of the model's chat template end inside of thoughts, and the reply has no "
            f"{CLOSED_THOUGHTS}; use {other}replies that begin with thoughts and {CLOSED_THOUGHTS}"
        )


def reply_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, messages: Messages = (USER,), *, begins: bool = True
) -> tuple[int, ...]:
    """Return the ids of a reply that says `text`: what the chat template puts first, the text, the end of the turn.

    Without the first where that would be read otherwise than as the text.

    Args:
        messages: the prompt, as far as the first depends on it.
        begins: false for a text that goes on inside of a turn, where nothing is put first.
    """
    bare = (*encode_text(tokenizer, text), end_of_turn(tokenizer))
    if not begins:
        return bare
    try:
        reply = render_reply(tokenizer, [*messages, {"role": "assistant", "content": text}])
    except RequestFailure:
        return bare
    whole = str(tokenizer.decode(list(reply[:-1]), clean_up_tokenization_spaces=False))
    return reply if whole.endswith(text) and decode_text(tokenizer, reply).strip() == text.strip() else bare


def text_behind_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text of a whole reply without the beginning of its thoughts that every prompt has already written."""
    opened, reply = thoughts_of_prompt(tokenizer), text.lstrip()
    if not opens_thoughts(tokenizer) or not reply.startswith(OPENED_THOUGHTS):
        return text
    return reply.removeprefix(opened if reply.startswith(opened) else OPENED_THOUGHTS)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that ends a turn of the model: what its template writes after a reply, else the tokenizer's own."""
    renderer = _renderer(tokenizer)
    ends = renderer.template.ends
    return renderer.encoder.special[ends[0]] if ends else int(tokenizer.eos_token_id)


def template_ends(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens with which the chat template ends a turn of the model; empty without one."""
    if not tokenizer.chat_template:
        return frozenset()
    renderer = _renderer(tokenizer)
    return frozenset(renderer.encoder.special[token] for token in renderer.template.ends)


def eos_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> frozenset[int]:
    """Return the end-of-turn ids: the tokenizer's, those of the model's generation config, and the chat template's."""
    # Chat models often end a turn with another token than the tokenizer's EOS, and name it in the generation config.
    ids: set[int] = set()
    for value in (tokenizer.eos_token_id, generation_config.eos_token_id if generation_config is not None else None):
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return frozenset(ids | template_ends(tokenizer))


def template_of(tokenizer: PreTrainedTokenizerBase) -> Template:
    """Return the chat template as prompts are rendered with it."""
    return _renderer(tokenizer).template


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
    return tuple(_turn(number, message) for number, message in enumerate(messages))


def _turn(number: int, message: Mapping[str, Any]) -> _Turn:
    """Return a message as it is rendered.

    Raises:
        RequestFailure: a role that templates leave out without a word, or a content that is no text.
    """
    role, content = message.get("role"), message.get("content")
    if role == "developer":  # OpenAI's newer name
        role = "system"
    if role not in ROLES:
        raise RequestFailure(f"messages.{number}.role: got {role!r:.60}, expected one of {', '.join(ROLES)}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RequestFailure(f"messages.{number}.content: got {content!r:.60}, expected a text")
    # Templates look whether a key is there: null, or an empty list, is what OpenAI's replies have for nothing.
    own = {k: v for k, v in message.items() if k in ("role", "content") or (v is not None and v != [])}
    more = own.keys() - {"role", "content"}
    return role, content, _json(dict(own, role=None, content=None)) if more else ""


def _json(value: object) -> str:
    # As people write it: escapes would hide what looks like a special token.
    return json.dumps(value, ensure_ascii=False)


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of completion `ids` without special tokens, byte for byte as the tokens spell it.

    Where special tokens mark parts of the reply (the channels of gpt-oss) and it is known how to read them, the text is
    the reply's content alone, without thoughts and tool calls.
    """
    if marked(tokenizer, ids):
        from mmrl.models.replies import content

        if (text := content(tokenizer, ids)) is not None:
            return text
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def marked(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Return True if special tokens mark parts of a reply, or end the thoughts with which each begins."""
    from mmrl.models.replies import begins_with_thoughts

    renderer = _renderer(tokenizer)
    # Most replies have one special token, their end; no template is looked at for them.
    inside = any(i in renderer.special and i != tokenizer.eos_token_id and i in renderer.marks for i in ids)
    return inside or begins_with_thoughts(tokenizer)


def growing_text(tokenizer: PreTrainedTokenizerBase) -> GrowingText:
    """Return what decodes a reply token by token, as `decode_text` does, as far as it has no marked parts."""
    return GrowingText(partial(decode_text, tokenizer), lambda token: marked(tokenizer, [token]))


class _Renderer:
    """Renderer for one tokenizer; remembers the ids of recent prompts, which groups repeat.

    A prompt is rendered to text with every special-looking piece of content masked, cut at the special tokens that
    are then left (the template's own), unmasked, and encoded as a whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # A value must not refer to its weak key, or neither would ever be freed.
        self.tokenizer = ref(tokenizer)
        self.encoder = Encoder(tokenizer)
        self.recent = lru_cache(RECENT)(self.render)
        self.special = frozenset(self.encoder.special.values())
        # Templates of reasoning models drop all of an earlier reply up to its last `</think>`. A demonstration is sent
        # as it is written, so they must not see that mark.
        thoughts = [mark for mark in _THOUGHTS if mark not in self.encoder.special]
        self.in_reply = re.compile("|".join([self.encoder.pattern.pattern, *map(re.escape, thoughts)]))
        self.markers = [*self.encoder.special, *thoughts]
        self.order = {marker: index for index, marker in enumerate(self.markers)}

    @property
    def template(self) -> Template:
        """The tokenizer's template as it is now."""
        tokenizer = self.encoder.tokenizer
        if self._template is None or self._template.source != tokenizer.chat_template:
            self._template = Template(tokenizer, self.encoder.pattern)
            self._end = None
            self.recent.cache_clear()
        return self._template

    _template: Template | None = None
    _end: tuple[tuple[int, ...], str] | None = None

    @property
    def end(self) -> tuple[tuple[int, ...], str]:
        """The ids with which every prompt ends, and text of the template's before them, behind the user's message.

        The text is white space that may be one token with the last character of a message ("?" and two line breaks).
        """
        assert self.template  # what was found of another one is forgotten
        if self._end is None:
            asked = ("a", "1", "a\n", "\u3002", *punctuation)
            prompts = [self.render("", (("user", text, ""),)) for text in asked]
            ids = _shared_end(prompts)
            texts = [str(self.encoder.tokenizer.decode(list(prompt[: len(prompt) - len(ids)]))) for prompt in prompts]
            self._end = ids, "".join(_shared_end(texts))
        return self._end

    @property
    def marks(self) -> frozenset[int]:
        """Ids of the special tokens that mark parts of a reply."""
        return frozenset(self.encoder.special[token] for token in self.template.marks)

    def __call__(self, messages: Messages, tools: Tools = ()) -> tuple[int, ...]:
        assert self.template  # what was remembered of another one is forgotten
        return self.recent(_json(tools) if tools else "", _turns(messages))

    def overlap(self, ids: Sequence[int], after: Sequence[int]) -> int:
        """Return how many special tokens that end a turn are also the first of what its template writes after it."""
        longest = next((n for n, i in enumerate(after) if i not in self.special), len(after))
        return next((n for n in range(min(longest, len(ids)), 0, -1) if ids[-n:] == after[:n]), 0)

    def render(
        self, tools: str, turns: tuple[_Turn, ...], part: Literal["prompt", "after", "reply"] = "prompt"
    ) -> tuple[int, ...]:
        """Return the ids of a prompt; of what follows an assistant's content, its end included; of the last message."""
        # Special-looking pieces of content become <mask><number><mask>, with a private-use character that no template
        # writes, so that every special token in the rendered text is one of the template's own.
        written = set("".join([tools, *(part for _, content, extra in turns for part in (content, extra))]))
        unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in written)
        # Whoever writes them all cannot guess this one.
        mask = next(unused, None) or secrets.token_hex(16)

        def masked(text: str, role: str = "") -> str:
            pattern = self.in_reply if role == "assistant" else self.encoder.pattern
            return pattern.sub(lambda match: f"{mask}{self.order[match[0]]}{mask}", text)

        template = self.template
        messages = [
            {**(json.loads(masked(extra, role)) if extra else {}), "role": role, "content": masked(content, role)}
            for role, content, extra in (_merged(turns) if template.merges else turns)
        ]
        if template.text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        try:
            shown = json.loads(masked(tools)) if tools else ()
            if part == "after":
                text = template.after_reply(messages)
            else:
                text = template.write(messages, shown) if part == "prompt" else template.reply(messages, shown)
        except Exception as error:  # a template calls what it likes
            raise RequestFailure(f"messages: the model's chat template refuses them: {first_line(error)}") from error
        parts = self.encoder.parts(text)
        for number in range(0, len(parts), 2):
            parts[number] = re.sub(f"{mask}([0-9]+){mask}", lambda match: self.markers[int(match[1])], parts[number])
        return tuple(self.encoder.encode(parts) if part == "prompt" else self.encoder.following(parts))


def _shared_end(values: Sequence[Sequence[_Item]]) -> tuple[_Item, ...]:
    ends = zip(*map(reversed, values), strict=False)
    return tuple(items[0] for items in takewhile(lambda items: len(set(items)) == 1, ends))[::-1]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    functions = [(call, call["function"]) for call in message["tool_calls"]]
    texts = [
        {**call, "function": {**function, "arguments": _json(function["arguments"])}}
        if not isinstance(function["arguments"], str)
        else call
        for call, function in functions
    ]
    return {**message, "tool_calls": texts}


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or its type where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _renderer(tokenizer: PreTrainedTokenizerBase) -> _Renderer:
    renderer = _RENDERERS.get(tokenizer)
    if renderer is None:
        renderer = _RENDERERS[tokenizer] = _Renderer(tokenizer)
    return renderer


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of plain text that goes on after other text; no piece of it becomes a special token."""
    return _renderer(tokenizer).encoder.following([text])


_RENDERERS: WeakKeyDictionary[PreTrainedTokenizerBase, _Renderer] = WeakKeyDictionary()
