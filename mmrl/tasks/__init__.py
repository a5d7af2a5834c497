"""Tasks: data, program, tools, reward. `TASKS` is the plug point; a user's own package may add to it (`plugins=`)."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.tasks.agents.qa_direct import DirectQaTask
from mmrl.tasks.agents.r1_searcher import R1SearcherTask
from mmrl.tasks.agents.search_agent import SearchAgentTask
from mmrl.tasks.agents.search_o1 import SearchO1Task
from mmrl.tasks.agents.tool_agent import ToolAgentTask
from mmrl.tasks.base import Task
from mmrl.tasks.dspy.banking77 import Banking77Task
from mmrl.tasks.dspy.hover import HoverTask
from mmrl.tasks.dspy.own import ImportedTask
from mmrl.tasks.dspy.papillon import PapillonTask
from mmrl.tasks.environments.task import EnvironmentTask
from mmrl.tasks.gateway.task import AgentTask
from mmrl.tasks.gym.games import TextArenaTask
from mmrl.tasks.gym.problems import ReasoningGymTask
from mmrl.tasks.search_program import MultihopQaTask

TASKS: dict[str, Callable[..., Task]] = {
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
    "dspy": ImportedTask,
    "agent": AgentTask,
    "reasoning_gym": ReasoningGymTask,
    "textarena": TextArenaTask,
    "environment": EnvironmentTask,
}
"""`task.name` -> factory `(config, run seed) -> Task`; the config is of the task's own schema (`TASK_SCHEMAS`)."""
