"""Replies read back: the message that a model's special tokens and tags spell, where that is known.

The tokenizer says how (`response_template`), or TRL, which knows published chat templates by their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mmrl.errors import RequestFailure
from mmrl.models.chat import decode_text, opens_thoughts, template_of
from mmrl.models.template import THOUGHTS, USER, Template, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READERS: WeakKeyDictionary[Template, PreTrainedTokenizerBase | None] = WeakKeyDictionary()
"""Copies of tokenizers that read replies; the originals are saved with checkpoints."""
_THOUGHTFUL: WeakKeyDictionary[Template, bool] = WeakKeyDictionary()
_READ: WeakKeyDictionary[Template, bool] = WeakKeyDictionary()
_PROBLEMS: WeakKeyDictionary[Template, str] = WeakKeyDictionary()
_TEXTS = ("content", *THOUGHTS)


def reader(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """Return a copy of the tokenizer that reads replies; None where nobody knows how."""
    template = template_of(tokenizer)
    if template not in _READERS:
        found = copy(tokenizer)
        known = getattr(found, "response_template", None) is not None
        if not known:
            from trl.chat_template_utils import add_response_schema

            with suppress(ValueError):
                add_response_schema(found)
                known = True
        if (written := getattr(found, "response_template", None)) is not None:
            # Of several texts, as before and after a tool call, transformers would keep the last.
            texts = {name: {**field, "repeats": True} for name, field in written["fields"].items() if name in _TEXTS}
            found.response_template = {**written, "fields": {**written["fields"], **texts}}
        _READERS[template] = found if known else None
    return _READERS[template]


def content(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str | None:
    """Return the content of a reply, without thoughts and tool calls; None where it cannot be read."""
    if (found := reader(tokenizer)) is None:
        return None
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    try:
        # Any prompt says what the template writes of the reply itself.
        message = found.parse_response(text, prefix=template_of(tokenizer).write([USER]))
    except (ValueError, TypeError, RecursionError):
        return None
    return _joined(message.get("content"))


def _joined(texts: object) -> str:
    """Return all texts of a field as one."""
    return "\n".join(filter(None, texts)) if isinstance(texts, list) else str(texts or "")


def begins_with_thoughts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the prompt opens thoughts that a special token ends: what comes before it is no content."""
    template = template_of(tokenizer)
    if template not in _THOUGHTFUL:
        replies = [tokenizer(f"a{mark}b", add_special_tokens=False).input_ids for mark in template.marks]
        read = [content(tokenizer, ids) for ids in replies]
        _THOUGHTFUL[template] = any(text is not None and not text.startswith("a") for text in read)
    return _THOUGHTFUL[template]


def reads_thoughts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if replies begin with thoughts that can be read: by a thinking mode, or since prompts open them."""
    template = template_of(tokenizer)
    if template not in _READ:
        asked = bool(template.arguments.get("enable_thinking")) or opens_thoughts(tokenizer)
        _READ[template] = asked and getattr(reader(tokenizer), "response_template", None) is not None
    return _READ[template]


def message_of(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], tools: Tools
) -> Mapping[str, Any]:
    """Return `content`, and where there are any `tool_calls` and `reasoning_content`, of a completion.

    Tool calls that cannot be read, or that JSON cannot say, are content as they were written, and `unread_call` is
    true. Without tools whatever is no thought is content.
    """
    from trl.chat_template_utils import parse_response

    if not ids:  # a reply exchanged for nothing (CCPO), which transformers takes for an empty batch
        return {"content": ""}
    if not tools and not reads_thoughts(tokenizer):
        return {"content": decode_text(tokenizer, ids)}
    found = reader(tokenizer)
    assert found is not None  # `tools_problem` or `reads_thoughts` was asked
    if not tools:
        found, written = copy(found), found.response_template
        fields = {name: field for name, field in written["fields"].items() if name != "tool_calls"}
        found.response_template = {**written, "fields": fields}
    try:
        read = parse_response(found, list(ids), prefix=list(prompt), tools=[dict(tool) for tool in tools])
        calls = read.get("tool_calls") or []
        # NaN, infinity, half a character
        json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()
        empty = [call["function"] for call in calls if not call["function"]["arguments"]]
        unread = any(call.keys() > {"name", "arguments"} for call in empty) or bool(empty and _wrote_more(found, ids))
    except (ValueError, RecursionError):
        unread = True
    # TRL returns all of it as content.
    if unread or (not calls and read["content"] == tokenizer.decode(list(ids), skip_special_tokens=True)):
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        if not unread and (field := _calls_field(found)) is not None:  # what begins a call is there
            unread = field.open_re.search(found.decode(list(ids))) is not None
        return {"content": text} | ({"unread_call": True} if unread else {})
    # TRL takes this token off a text, but not off the last of several, nor off thoughts.
    texts = [read["content"], next((read[name] for name in THOUGHTS if name in read), "")]
    content, thoughts = (_joined(text).removesuffix(str(tokenizer.eos_token)) for text in texts)
    message: dict[str, Any] = {"content": content} | ({"reasoning_content": thoughts} if thoughts else {})
    return message | ({"tool_calls": calls} if calls else {})


def _wrote_more(found: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
    """Return True if a tool call has no argument that is marked as one, and text in its place: JSON among XML tags."""
    field, text = _calls_field(found), found.decode(list(ids))
    if field is None or field.content != "xml-inline":
        return False
    bodies = [field.close_re.split(text[begin.end() :], 1)[0] for begin in field.open_re.finditer(text)]
    unmarked = [body for body in bodies if not re.search(field.content_args["tag_pattern"], body, re.DOTALL)]
    return any(re.sub(r"</\w+>", "", body).strip() for body in unmarked)


def _calls_field(found: PreTrainedTokenizerBase) -> Any:
    """Return how tool calls are read, of transformers' type; None where an older transformers reads them."""
    if (written := getattr(found, "response_template", None)) is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(written).fields.get("tool_calls")


def tools_problem(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the reason why a model cannot be given tools; empty where it can."""
    template = template_of(tokenizer)
    if template not in _PROBLEMS:
        from trl.chat_template_utils import supports_tool_calling

        problem = "the model's chat template does not write them"
        with suppress(Exception):  # a template calls what it likes
            problem = "" if supports_tool_calling(tokenizer) else problem
        if not problem and reader(tokenizer) is None:
            problem = "nobody knows how to read the tool calls of the model's chat template; give the tokenizer a "
            problem += "response_template"
        _PROBLEMS[template] = problem
    return _PROBLEMS[template]


def callable_tools(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> Tools:
    """Return the tools of a request, none included.

    Raises:
        RequestFailure: the chat template writes none, or its calls cannot be read.
    """
    if tools and (problem := tools_problem(tokenizer)):
        raise RequestFailure(f"tools: {problem}; leave them out")
    return tools
