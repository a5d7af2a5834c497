"""Tasks: data, program, tools, reward. `TASKS` is the plug point; a user's own package may add to it (`plugins=`)."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.config.task import TaskConfig
from mmrl.tasks.banking77 import Banking77Task
from mmrl.tasks.base import Task
from mmrl.tasks.custom import CustomTask
from mmrl.tasks.hover import HoverTask
from mmrl.tasks.multihop_qa import MultihopQaTask
from mmrl.tasks.papillon import PapillonTask
from mmrl.tasks.qa_direct import DirectQaTask
from mmrl.tasks.r1_searcher import R1SearcherTask
from mmrl.tasks.search_agent import SearchAgentTask
from mmrl.tasks.search_o1 import SearchO1Task
from mmrl.tasks.tool_agent import ToolAgentTask

TASKS: dict[str, Callable[[TaskConfig, int], Task]] = {
    "hotpotqa": MultihopQaTask,
    "2wiki": MultihopQaTask,
    "musique": MultihopQaTask,
    "search_agent": SearchAgentTask,
    "tool_agent": ToolAgentTask,
    "qa_direct": DirectQaTask,
    "search_o1": SearchO1Task,
    "r1_searcher": R1SearcherTask,
    "banking77": Banking77Task,
    "papillon": PapillonTask,
    "hover": HoverTask,
    "dspy": CustomTask,
}
"""`task.name` -> factory `(config, run seed) -> Task`."""
