"""Tools of a request: whether a model's chat template writes them, and what the model called.

TRL knows the chat templates whose tool calls can be read; others are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrl.errors import RequestFailure
from mmrl.models.replies import message_of as read_message
from mmrl.models.replies import tools_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.models.template import Tools

__all__ = ["callable_tools", "read_message"]


def callable_tools(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> Tools:
    """Return the tools of a request, none included.

    Raises:
        RequestFailure: the chat template writes none, or its calls cannot be read.
    """
    if tools and (problem := tools_problem(tokenizer)):
        raise RequestFailure(f"tools: {problem}; leave them out")
    return tools
