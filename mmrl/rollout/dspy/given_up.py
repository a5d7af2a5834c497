"""Exceptions of DSPy's own that say what the model did: an agent ends without an answer, a tool call fits no tool.

Plain DSPy raises them like a bug of the program, and `dspy.Evaluate` scores them 0. Laid to the program, a policy that
does not yet know how to end would be a broken program, and never trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dspy

from mmrl.errors import LimitFailure, ParseFailure
from mmrl.rollout.dspy import host
from mmrl.system.user_code import user_failure

_FOLDERS = (str(Path(dspy.__file__).parent), host.__file__)
_NO_ANSWER = {
    "ReActV2._forced_submit": ValueError,
    "ReActV2._aforced_submit": ValueError,
    "ProgramOfThought.forward": RuntimeError,  # the last code has failed; that no interpreter runs is another error
}
_NO_TOOL: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    "ToolCalls.ToolCall.execute": (ValueError, TypeError),
    "Tool.__call__": TypeError,
    "RecordedTool.__call__": TypeError,
    "RecordedTool.acall": TypeError,
}
"""Methods, with what they raise themselves: neither what a tool raises nor what a user's subclass does."""
_ARGUMENTS = "Tool._validate_and_parse_args"


def raise_given_up(error: BaseException) -> None:
    """Raise the model's failure for an exception that ended a program, if it is one of these or was raised from one.

    Raises:
        LimitFailure: an agent's turns are used up, and it has no answer.
        ParseFailure: a tool call names no tool, or has arguments that the tool does not take.
    """
    cause: BaseException | None = error
    while cause is not None:
        methods = list(_methods(cause))
        if isinstance(cause, _NO_ANSWER.get(methods[-1], ())):
            raise user_failure(LimitFailure, error) from None
        if _ARGUMENTS in methods or isinstance(cause, _NO_TOOL.get(methods[-1], ())):
            raise user_failure(ParseFailure, error) from None
        cause = cause.__cause__


def _methods(error: BaseException) -> Iterator[str]:
    """Yield the functions that an exception went through, the one that raised it last; empty where not DSPy's."""
    yield ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_qualname if code.co_filename.startswith(_FOLDERS) else ""
        trace = trace.tb_next
