"""Running programs: contexts that record and replay, plans that fork."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmrl.tasks.base import Task


def with_program(task: Task) -> Task:
    """Return the task with a program that rollouts can run.

    Called wherever tasks are built. A raw `dspy.Module` as its program is wrapped, all else stays.

    Raises:
        ConfigError: it is no `Task`; a `dspy.Module` that cannot be run (see `rollout.dspy.dspy_program.DspyProgram`).
    """
    # Here and not above: plans are read by `mmrl credit`, which is to start without the tasks and what they import.
    from mmrl.errors import ConfigError
    from mmrl.tasks.base import Task

    if not isinstance(task, Task):
        raise ConfigError(f"task: {type(task).__name__} does not derive from mmrl.tasks.base.Task")
    # Importing DSPy takes seconds, and a task whose program is a `dspy.Module` has imported it.
    dspy = sys.modules.get("dspy")
    if dspy is not None and isinstance(task.program, dspy.Module):
        from mmrl.rollout.dspy.dspy_program import DspyProgram

        task.program = DspyProgram(task.program, getattr(task, "prompt_layout", "dspy"))
    return task
