"""Tasks: data, program, tools, reward. `TASKS` is the plug point; a user's own package may add to it (`plugins=`)."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.config.task import TaskConfig
from mmrl.tasks.base import Task
from mmrl.tasks.multihop_qa import MultihopQaTask

TASKS: dict[str, Callable[[TaskConfig, int], Task]] = {
    "hotpotqa": MultihopQaTask,
}
"""`task.name` -> factory `(config, run seed) -> Task`."""
