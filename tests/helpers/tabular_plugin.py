"""Plugin of the enumerated programs: their tasks and the class of their model, for command lines.

In a module of its own, since tests go through all tasks.
"""

from functools import partial
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from mmrl.tasks import TASKS
from tests.helpers.tabular import TABLES, Table, TableTask
from tests.helpers.tabular_model import TabularConfig, TabularModel


def _task(table: Table, config: Any, seed: int) -> TableTask:
    return TableTask(table, config)


TASKS.update({f"tabular_{name}": partial(_task, table) for name, table in TABLES.items()})
AutoConfig.register(TabularConfig.model_type, TabularConfig)
AutoModelForCausalLM.register(TabularConfig, TabularModel)
