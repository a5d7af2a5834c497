"""Tasks: data, program, tools, reward. `TASKS` is the plug point; a user's own package may add to it (`plugins=`)."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.config.task import TaskConfig
from mmrl.tasks.base import Task
from mmrl.tasks.multihop_qa import MultihopQaTask
from mmrl.tasks.search_agent import SearchAgentTask
from mmrl.tasks.tool_agent import ToolAgentTask

TASKS: dict[str, Callable[[TaskConfig, int], Task]] = {
    "hotpotqa": MultihopQaTask,
    "search_agent": SearchAgentTask,
    "tool_agent": ToolAgentTask,
}
"""`task.name` -> factory `(config, run seed) -> Task`."""
