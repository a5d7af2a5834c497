"""Tools of a request: whether a model's chat template writes them, and what the model called.

TRL knows the chat templates whose tool calls can be read; others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mmrl.errors import RequestFailure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.models.chat import Tools

_READERS: WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase] = WeakKeyDictionary()
"""Tokenizer -> a copy of it that parses replies; the original is saved with checkpoints."""


def callable_tools(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> Tools:
    """Return the tools of a request, none included.

    Raises:
        RequestFailure: the chat template writes none, or its calls cannot be read.
    """
    if tools:
        _reader(tokenizer)
    return tools


def read_message(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int], tools: Tools
) -> Mapping[str, Any]:
    """Return `content`, and where there are any `tool_calls` and `reasoning_content`, of a completion.

    A tool call that cannot be read is content.
    """
    from trl.chat_template_utils import parse_response

    if not ids:  # a reply exchanged for nothing (CCPO), which transformers takes for an empty batch
        return {"content": ""}
    return parse_response(_reader(tokenizer), list(ids), prefix=list(prompt), tools=[dict(tool) for tool in tools])


def _reader(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    from trl.chat_template_utils import add_response_schema, supports_tool_calling

    reader = _READERS.get(tokenizer)
    if reader is None:
        if not supports_tool_calling(tokenizer):
            raise RequestFailure("tools: the model's chat template does not write them; leave them out")
        reader = copy(tokenizer)
        if getattr(reader, "response_template", None) is None:
            try:
                add_response_schema(reader)
            except ValueError:
                raise RequestFailure(
                    "tools: nobody knows how to read the tool calls of the model's chat template; give the tokenizer a "
                    "response_template, or leave tools out"
                ) from None
        _READERS[tokenizer] = reader
    return reader
