"""From what a task calls its program to a program: a raw `dspy.Module` is wrapped, all else stays.

Called wherever tasks are built. It never imports DSPy, which takes seconds: a task with a DSPy program has done so.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from mmrl.tasks.base import Task, complete


def with_program(task: Any) -> Task:
    """The task with a program that rollouts can run, and with every member of the contract (`tasks.base.complete`).

    Raises:
        ConfigError: a `dspy.Module` that cannot be run (see `mmrl.rollout.dspy.DspyProgram`).
    """
    complete(task)
    dspy = sys.modules.get("dspy")
    if dspy is not None and isinstance(task.program, dspy.Module):
        from mmrl.rollout.dspy import DspyProgram

        task.program = DspyProgram(task.program)
    return cast(Task, task)
